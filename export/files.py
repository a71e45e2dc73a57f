"""What stands beside the weights: config.json, generation_config.json and the tokenizer's files.

    settings    -> config.json             LlamaForCausalLM, or with QK_NORM Qwen3ForCausalLM; nothing left to defaults
    vocabulary  -> tokenizer.json          the run's own, to the byte where it may be; tokenizer_config.json

Every key that changes what is computed is written, since the defaults of readers differ: Qwen3's head_dim is 128 there
and rope_theta stands at two places, by the version of transformers. Rows that pad the vocabulary are not exported.
"""

import json
from typing import Any

from tokenizers import Tokenizer

from settings.config import Config
from train.data.tokenizer import Vocabulary

PAD = "<|pad|>"  # of tokenizers that are trained here


def config_json(c: Config, v: Vocabulary, dtype: str, norm_eps: float) -> dict[str, Any]:
    """What config.json says of a model with these settings, and that epsilon of RMSNorm."""
    kind = (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": c.n_layer,
        }
        if c.qk_norm
        else {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "mlp_bias": False,
            "pretraining_tp": 1,
        }
    )
    return kind | {
        "vocab_size": c.vocab_size,
        "hidden_size": c.n_embd,
        "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": c.seq_len,
        "rms_norm_eps": norm_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
        "bos_token_id": v.end_of_text,
        "eos_token_id": v.end_of_text,
        "pad_token_id": pad_of(v),
    }


def generation_config(v: Vocabulary, ends: list[int]) -> dict[str, Any]:
    """How generate() begins and ends; ends: ids that end an answer of a chat, besides."""
    eos: int | list[int] = [v.end_of_text, *ends] if ends else v.end_of_text
    return {"bos_token_id": v.end_of_text, "eos_token_id": eos, "pad_token_id": pad_of(v)}


def pad_of(v: Vocabulary) -> int | None:
    """The token that fills rows of a batch; None where the vocabulary has none for it."""
    return special_tokens(v).get(PAD)


def special_tokens(v: Vocabulary) -> dict[str, int]:
    """Special token -> its id."""
    return {
        token.content: i
        for i, token in v.tokenizer.get_added_tokens_decoder().items()
        if token.special
    }


def tokenizer_json(content: bytes) -> bytes:
    """The tokenizer.json of a run, as others must have it to encode text alike. The same bytes, unless it cuts texts
    off, pads them or puts tokens round them, which the trainer never let it do; that is taken out then."""
    tokenizer = Tokenizer.from_str(content.decode())
    adds = tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids
    if tokenizer.truncation is None and tokenizer.padding is None and not adds:
        return content
    changed = (
        json.loads(content)
        | {"truncation": None, "padding": None}
        | ({"post_processor": None} if adds else {})
    )
    return json.dumps(changed, indent=2, ensure_ascii=False).encode()


def tokenizer_config(c: Config, v: Vocabulary, template: str | None) -> dict[str, Any]:
    """What tokenizer_config.json says; template: how a chat becomes text, or None.

    add_bos_token is for llama.cpp: every document that was trained on begins with that token. transformers does not
    read it beside a tokenizer.json.
    """
    names = {i: token for token, i in special_tokens(v).items()}
    separator = names[v.end_of_text]
    pad = pad_of(v)
    roles = {"bos_token": separator, "eos_token": separator} | (
        {} if pad is None else {"pad_token": names[pad]}
    )
    others = [token for _, token in sorted(names.items()) if token not in roles.values()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "additional_special_tokens": others,
        "model_max_length": c.seq_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": True,
        "add_eos_token": False,
    } | ({"chat_template": template} if template else {})
