"""Models that are known without their files: what their publishers' config.json says, so that a fine-tuning of one can
be planned before hundreds of GB are fetched. Where the folder of MODEL is there, its own config.json counts.
"""

from typing import Any

# By the name that a hub has behind the owner, in small letters; a preset whose name begins so is of it.
PUBLISHED: dict[str, dict[str, Any]] = {
    # Of the layers behind the last, one that predicts more tokens, transformers' class has none.
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": False,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
}


def published(name: str) -> dict[str, Any] | None:
    """What is known of MODEL=name, by its last part; None where nothing is."""
    return PUBLISHED.get(name.partition("@")[0].rstrip("/").rpartition("/")[2].lower())


def of_preset(preset: str) -> str:
    """The model that a preset is for by its name, "" where it is for none of these."""
    return next((name for name in PUBLISHED if preset.startswith(name)), "")
