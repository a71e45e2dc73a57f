"""The files next to the weights: config.json, generation_config.json and the tokenizer's.

    settings    -> config.json             LlamaForCausalLM, or with QK_NORM Qwen3ForCausalLM
    vocabulary  -> tokenizer.json          the run's own, byte for byte if possible; tokenizer_config.json

Every key that changes what is computed is written, because the defaults of readers differ: Qwen3's
head_dim is 128 in transformers, and rope_theta is at one of two places, depending on its version.
"""

import json
from typing import Any

from tokenizers import Tokenizer

from settings.config import Config
from train.data.tokenizer import TokenizerError, Vocabulary
from train.generate import chat_format

PAD = "<|pad|>"  # of tokenizers that are trained here
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
    "pretraining_tp": 1,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "use_sliding_window": False,
    "sliding_window": None,
}


def json_files(
    config: Config, vocabulary: Vocabulary, dtype: str, norm_eps: float
) -> dict[str, dict[str, Any]]:
    """Return name -> content of all JSON files of a model, but the tokenizer itself."""
    template, ends = chat_of(vocabulary)
    return {
        "config.json": config_json(config, vocabulary, dtype, norm_eps),
        "generation_config.json": generation_config(vocabulary, ends),
        "tokenizer_config.json": tokenizer_config(config, vocabulary, template),
    }


def config_json(
    config: Config, vocabulary: Vocabulary, dtype: str, norm_eps: float
) -> dict[str, Any]:
    """Return config.json of a model with these settings and this epsilon of RMSNorm."""
    kind = LLAMA
    if config.qk_norm:
        kind = QWEN3 | {"max_window_layers": config.n_layer}
    return kind | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
        "bos_token_id": vocabulary.end_of_text,
        "eos_token_id": vocabulary.end_of_text,
        "pad_token_id": special_tokens(vocabulary).get(PAD),
    }


def generation_config(vocabulary: Vocabulary, ends: list[int]) -> dict[str, Any]:
    """Return where generate() begins and stops.

    Args:
        ends: ids that end a reply, besides the token that ends a document.
    """
    end_of_text = vocabulary.end_of_text
    return {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, *ends] if ends else end_of_text,
        "pad_token_id": special_tokens(vocabulary).get(PAD),
    }


def chat_of(vocabulary: Vocabulary) -> tuple[str | None, list[int]]:
    """Return the chat template and the ids that end a reply; (None, []) without tokens for chats."""
    try:
        form = chat_format.format_of(vocabulary)
    except TokenizerError:
        return None, []
    return form.template, [special_tokens(vocabulary)[form.end]]


def special_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Return special token -> id."""
    added = vocabulary.tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}


def tokenizer_json(content: bytes) -> bytes:
    """Return the run's tokenizer.json, changed so that others encode as the trainer did.

    The trainer never let it truncate, pad, or add tokens around a text. If it does none of that, the
    bytes stay the same.
    """
    tokenizer = Tokenizer.from_str(content.decode())
    adds = tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids
    if tokenizer.truncation is None and tokenizer.padding is None and not adds:
        return content
    changed = json.loads(content) | {"truncation": None, "padding": None}
    if adds:
        changed["post_processor"] = None
    return json.dumps(changed, indent=2, ensure_ascii=False).encode()


def tokenizer_config(
    config: Config, vocabulary: Vocabulary, template: str | None
) -> dict[str, Any]:
    """Return tokenizer_config.json.

    add_bos_token is for llama.cpp: every document of the training data begins with that token.
    transformers ignores it if there is a tokenizer.json.

    Args:
        template: chat template, or None.
    """
    ids = special_tokens(vocabulary)
    names = {number: token for token, number in ids.items()}
    separator = names[vocabulary.end_of_text]
    roles = {"bos_token": separator, "eos_token": separator}
    if PAD in ids:
        roles["pad_token"] = PAD
    others = [names[number] for number in sorted(names) if names[number] not in roles.values()]
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "additional_special_tokens": others,
        "model_max_length": config.seq_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": True,
        "add_eos_token": False,
    }
    if template:
        content["chat_template"] = template
    return content
