"""The shape of the model in INIT_FROM: the settings that its config.json stands for.

INIT_FROM/config.json -> N_LAYER, N_HEAD, ..., TOKENIZER    of a Llama or a Qwen3

A run takes these from the folder when it begins, and stores them: a resume needs no folder. Nobody
has to set them. A setting that is given and contradicts the folder is refused.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from settings.declare import ExpectedError, Values, format_value
from settings.json_file import read_object
from settings.sources import SourcedValue, SourcedValues, add_origin, parse

# Setting -> what config.json calls it.
KEYS = {
    "VOCAB_SIZE": "vocab_size",
    "N_LAYER": "num_hidden_layers",
    "N_HEAD": "num_attention_heads",
    "N_KV_HEAD": "num_key_value_heads",
    "N_EMBD": "hidden_size",
    "MLP_DIM": "intermediate_size",
    "TIE_EMBEDDINGS": "tie_word_embeddings",
    "ROPE_THETA": "rope_theta",
}
SHAPE = (*KEYS, "QK_NORM")

# Key -> the only value that this model computes, and why.
COMPUTED: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "its matrix products have no biases"),
    "mlp_bias": (False, "its matrix products have no biases"),
    "hidden_act": ("silu", "it has SwiGLU"),
    "use_sliding_window": (False, "every token attends to all tokens before it"),
    "quantization_config": (None, "its weights are plain numbers"),
    "partial_rotary_factor": (1, "it rotates whole heads"),
    "rope_type": ("default", "its rotary angles are not scaled"),
    "type": ("default", "its rotary angles are not scaled"),
}


class ForeignError(ExpectedError):
    """Files of a model that cannot be used. The message names one and says what to do."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ForeignError."""
    try:
        return read_object(path)
    except FileNotFoundError:
        fault = "is missing"
    except ValueError as error:
        fault = str(error)
    raise ForeignError(f"{path}: {fault}. Download it again: it comes with the weights.")


def parse_shape(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the shape of a model from its config.json.

    Returns:
        The values of SHAPE by name, and a sentence for each thing that this model cannot be.
    """
    kind = config.get("model_type")
    if kind is None and "settings" in config:
        return {}, [
            "This is a run, and not an export: run `make export`, and add /export to INIT_FROM."
        ]
    if kind not in ("llama", "qwen3"):
        return {}, [f"config.json has model_type={shorten(kind)}. It must be llama or qwen3."]
    facts: dict[str, Any] = {"tie_word_embeddings": False, "rope_theta": 10000.0}
    if kind == "qwen3":
        facts["head_dim"] = 128
    else:
        facts["num_key_value_heads"] = config.get("num_attention_heads")
    for key, value in {**config, **find_rope(config)}.items():
        if value is not None:
            facts[key] = value
    texts = {name: format_value(facts.get(key)) for name, key in KEYS.items()}
    texts["QK_NORM"] = format_value(kind == "qwen3")
    values, invalid = parse(add_origin(texts, "config.json"))
    missing = [f"config.json has no {key}." for name, key in KEYS.items() if not texts[name]]
    return values, [*find_unsupported(facts, values), *missing, *invalid.values()]


def find_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json says of rotary positions, which newer versions keep together."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        return rope
    return {"rope_type": rope}  # of each kind of layer, for example


def find_unsupported(facts: Values, values: Values) -> Iterator[str]:
    """Yield a sentence for each part of the model that this one does not have.

    Args:
        facts: of config.json.
        values: of settings, which are those facts.
    """
    width = values.get("N_EMBD", 0) / values.get("N_HEAD", 1)
    layers = ["full_attention"] * values.get("N_LAYER", 0)
    computed = COMPUTED | {
        "head_dim": (width, f"its heads are {width:g} wide"),
        "layer_types": (layers, "every token attends to all tokens before it"),
    }
    for key, (right, why) in computed.items():
        value = facts.get(key)
        if value not in (None, right):
            yield f"config.json has {key}={shorten(value)}, which this model does not compute: {why}."
    epsilon = facts.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, float) or not 0 < epsilon <= 0.1:
        yield f"config.json has rms_norm_eps={shorten(epsilon)}. It must be above 0 and at most 0.1."


def shorten(value: Any) -> str:
    """Return a value of JSON for a message, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def find_contradictions(folder: str, shape: Values, values: Values) -> dict[str, str]:
    """Return NAME -> a sentence for each value that is not the one of the folder."""
    refusals = {}
    for name, value in shape.items():
        if name in values and values[name] != value:
            refusals[name] = (
                f"INIT_FROM={folder} has {name}={format_value(value)}. "
                f"Leave {name} out, or choose other weights."
            )
    return refusals


def explain_missing(folder: str) -> str:
    """Say that INIT_FROM is not there, and how to get it."""
    return (
        f"INIT_FROM={folder}: There is no such folder. It must hold config.json and safetensors: "
        f"hf download OWNER/NAME --include '*.json' '*.safetensors' --local-dir {folder}"
    )


def read_folder(
    folder: SourcedValue, root: Path, explicit: SourcedValues, problems: list[str]
) -> SourcedValues:
    """Return what a folder sets: the shape of the model, and the tokenizer if there is one.

    Args:
        explicit: values that are set explicitly. Those of the shape must not contradict the folder.
        problems: gets a sentence for all that is wrong.
    """
    path = root / folder.text
    shape: dict[str, Any] = {}
    try:
        shape, complaints = parse_shape(read_json(path / "config.json"))
    except ForeignError as error:
        complaints = [str(error)]
    problems += [f"INIT_FROM={folder.text} ({folder.origin}): {text}" for text in complaints]
    values, _ = parse(explicit)
    for name, sentence in find_contradictions(folder.text, shape, values).items():
        problems.append(f"{name}={explicit[name].text} ({explicit[name].origin}): {sentence}")
    texts = {name: format_value(value) for name, value in shape.items()}
    if (path / "tokenizer.json").is_file():
        texts["TOKENIZER"] = f"{folder.text.rstrip('/')}/tokenizer.json"
    return add_origin(texts, f"{folder.text}/config.json")
