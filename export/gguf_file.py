"""model.gguf: weights, shape and tokenizer of an export in one file, for llama.cpp and what is built on it.

llama.cpp's converter knows a tokenizer by the ids that it gives to one text. They depend on the vocabulary, so it
refuses every tokenizer that was trained here. This writes, by the same library, what the converter would.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from torch import Tensor

from export.place import read_facts
from export.weight_files import as_bytes
from settings import SettingsError
from settings.init_from import parse_shape
from train.data.tokenizer import SPLIT
from train.model import hf_import
from train.model.hf_import import read_json

NAME = "model.gguf"
# The pre-tokenizer of llama.cpp that is nearest to SPLIT: docs/export.md says where it differs. llama-bpe splits alike,
# but takes a word that is a token as that token, whatever the merges say.
TRAINED_HERE = "smaug-bpe"
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
SHAPE = {  # key of GGUF -> key of config.json
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
}
TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
FILE_TYPES = {
    "float32": LlamaFileType.ALL_F32,
    "bfloat16": LlamaFileType.MOSTLY_BF16,
}


def find_pre_tokenizer(tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer.json splits text. Raises SettingsError if it has none."""
    split = tokenizer.get("pre_tokenizer") or {}
    patterns = [part.get("pattern") for part in split.get("pretokenizers", [])]
    if {"Regex": SPLIT} in patterns:
        return TRAINED_HERE
    is_gpt2 = split.get("type") == "ByteLevel" and split["use_regex"]
    if is_gpt2 and not split["add_prefix_space"] and not tokenizer.get("normalizer"):
        return "gpt-2"
    raise SettingsError(
        [
            "GGUF=1: The tokenizer is neither GPT-2's nor trained here. Leave GGUF out, and convert "
            "the export with llama.cpp's convert_hf_to_gguf.py, which knows published tokenizers."
        ]
    )


def check_model(config: dict[str, Any]) -> None:
    """Raise SettingsError for the config.json of a model that was not trained here."""
    _, problems = parse_shape(config)
    if problems or not {*SHAPE.values(), "rope_theta", "torch_dtype"} <= config.keys():
        raise SettingsError(
            [
                "GGUF=1: MODEL was not trained here. Leave GGUF out, and convert the export with "
                "llama.cpp's convert_hf_to_gguf.py."
            ]
        )


def write(folder: Path, name: str) -> None:
    """Write model.gguf from the other files of an export, one weight in memory at a time.

    Args:
        name: of the model, for people.
    """
    config = read_json(folder / "config.json")
    kind = config["model_type"]
    writer = GGUFWriter(folder / NAME, kind)
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[config["torch_dtype"]])
    for key, source in SHAPE.items():
        writer.add_uint32(f"{kind}.{key}", config[source])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    add_tokenizer(writer, folder, config["vocab_size"])

    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config["num_hidden_layers"])
    for weight, tensor in read_weights(folder, config):
        writer.add_tensor_info(
            names[weight.removesuffix(".weight")] + ".weight",
            tensor.shape,
            np.dtype("float32"),  # TYPES overrides it
            tensor.nbytes,
            TYPES[tensor.dtype],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in read_weights(folder, config):
        writer.write_tensor_data(as_bytes(tensor))
    writer.close()


def read_weights(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each weight, and the weight as llama.cpp wants it."""
    for path in hf_import.weight_files(folder):
        with hf_import.open_file(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                yield name, arrange(file.get_tensor(name), name, config)


def add_tokenizer(writer: GGUFWriter, folder: Path, size: int) -> None:
    """Add tokens, merges, special tokens and the template of a chat. A row without a token is unused."""
    tokenizer = read_json(folder / "tokenizer.json")
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [TokenType.UNUSED] * size
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i] = token
        kinds[i] = TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        i = added["id"]
        tokens[i] = added["content"]
        kinds[i] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")  # a byte-level BPE
    writer.add_tokenizer_pre(find_pre_tokenizer(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = gguf.SpecialVocab(folder, load_merges=True)
    special.add_special_token["bos"] = True  # every document of the training data begins with it
    stop_token = read_facts(folder).get("stop_token")
    if stop_token:
        special.special_token_ids["eot"] = tokens.index(stop_token)
    special.add_to_gguf(writer)


def arrange(weight: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    """Return a weight as llama.cpp wants it: norms in float32, and queries and keys of a Llama in another order.

    It rotates neighboring channels of a head, and Hugging Face channels that are half a head apart.
    """
    if weight.ndim == 1:
        return weight.float()
    if config["model_type"] != "llama":
        return weight
    if name.endswith("q_proj.weight"):
        heads = config["num_attention_heads"]
    elif name.endswith("k_proj.weight"):
        heads = config["num_key_value_heads"]
    else:
        return weight
    halves = weight.view(heads, 2, config["head_dim"] // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)
