"""Weights that somebody else trained, as a start: JSON and safetensors are read, a pickle never.

    INIT_FROM/config.json         Hugging Face's, of a Llama or a Qwen3
              model.safetensors   or model.safetensors.index.json and the shards that it names

`check` reads config.json and the headers of the files, and says every difference from the settings at once.
`load` copies into the weights where they lie, in pieces; of weights that are split over processes (FSDP2),
each process reads its own rows. Files may be float32, bfloat16, float16 or float64; our weights are float32.

A pickle (*.bin, *.pt, *.distcp) runs whatever code it holds when it is read; none is opened here. safetensors
has no checksum: a flipped bit shows only where it makes a weight infinite or no number. `hashes` gives what
the publisher's page can be compared with.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from settings import ROOT, SettingsError
from settings.config import SETTINGS, Config
from settings.declare import format_value
from train.distributed.world import together
from train.model.model import Transformer

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # types that are read, and what an element takes
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp")
LARGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it
PIECE = 2**24  # elements that are copied at once: 64 MiB

OF_ENTRIES = (
    "embed_tokens.weight",
    "lm_head.weight",
)  # with a row for each entry of the vocabulary

# What config.json calls a setting, and the value that a missing key stands for; None: it may not be missing.
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("VOCAB_SIZE", None),
    "num_hidden_layers": ("N_LAYER", None),
    "num_attention_heads": ("N_HEAD", None),
    "num_key_value_heads": ("N_KV_HEAD", None),
    "hidden_size": ("N_EMBD", None),
    "intermediate_size": ("MLP_DIM", None),
    "tie_word_embeddings": ("TIE_EMBEDDINGS", False),
    "rope_theta": ("ROPE_THETA", 10000.0),
}


class ForeignError(Exception):
    """Files that are not what they should be; the message names one and says what to do."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def check(folder: Path | str, c: Config) -> None:
    """Raises SettingsError with all that the folder and the settings disagree on, and ForeignError where a file
    is missing or damaged. Reads config.json and the headers of the files, no weight."""
    place = ROOT / folder
    if not place.is_dir():
        raise SettingsError(
            [
                f"INIT_FROM={folder}: no such folder; it must hold config.json and safetensors; for "
                f"example hf download REPOSITORY --include '*.json' '*.safetensors' --local-dir {folder}"
            ]
        )
    stored = tensors(place)
    values, complaints = settings_in(read_json(place / "config.json"))
    problems = []
    for name, (key, value) in values.items():
        ours = getattr(c, name.lower())
        if ours != value and not (
            isinstance(value, float) and math.isclose(ours, value, rel_tol=1e-6)
        ):
            problems.append(
                f"{name}={format_value(ours)}: INIT_FROM={folder} has {key}; "
                f"set {name}={format_value(value)}"
            )
    if not complaints:
        theirs = dataclasses.replace(
            c, **{name.lower(): value for name, (_, value) in values.items()}
        )
        complaints = differences(stored, theirs)
    if problems := [*problems, *(f"INIT_FROM={folder}: {complaint}" for complaint in complaints)]:
        raise SettingsError(problems)


def load(folder: Path | str, model: Transformer) -> None:
    """Copy the weights of a folder that `check` found good into the model, on all processes together. Rows that pad
    the vocabulary stay as they are: they compute nothing.

    The model is bare or split by FSDP2, under its own names, not on the meta device, and has not been run yet: after
    a forward pass FSDP2 shows whole weights that it throws away. Raises ForeignError, on all processes alike; the
    model is of no use then.
    """
    with together(ForeignError):
        try:
            stored = tensors(ROOT / folder)
            for name, weight in model.named_parameters():
                rows = model.vocab_size if name in OF_ENTRIES else len(weight)
                copy(stored, their_name(name), weight, rows)
                if name == "embed_tokens.weight" and "lm_head.weight" in stored and is_tied(model):
                    compare(stored, "lm_head.weight", weight, rows)
        except (OSError, SafetensorError) as error:
            raise ForeignError(f"{ROOT / folder}: cannot be read ({error})") from error


def hashes(folder: Path | str) -> dict[str, str]:
    """sha256 of config.json and of each file of weights, by name, as the hub shows it beside a file. Reads all of
    them: for one process, a second or so a GB."""
    place = ROOT / folder
    found = {}
    for path in [place / "config.json", *weight_files(place)]:
        try:
            with open(path, "rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ForeignError(f"{path}: cannot be read ({error.strerror})") from None
    return found


# ---------------------------------------------------------------------------------------------------
# What config.json says
# ---------------------------------------------------------------------------------------------------


def settings_in(config: dict[str, Any]) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Setting -> (what config.json says, its value here), and complaints about what this model does not have."""
    kind = config.get("model_type")
    if kind not in ("llama", "qwen3"):
        return {}, [
            f"config.json has model_type={kind}; only llama and qwen3 are what this model computes"
        ]
    values, problems = (
        {"QK_NORM": (f"model_type={kind}", kind == "qwen3")},
        missing_here(config, kind),
    )
    rope = config.get("rope_parameters") or {}
    given = {key: default for key, (_, default) in KEYS.items()} | {
        k: v for k, v in config.items() if v is not None
    }
    given["rope_theta"] = (
        rope.get("rope_theta", given["rope_theta"]) if isinstance(rope, dict) else None
    )
    if kind == "llama" or "num_key_value_heads" in config:
        given["num_key_value_heads"] = given["num_key_value_heads"] or given["num_attention_heads"]
    for key, (name, _) in KEYS.items():
        try:
            values[name] = (f"{key}={said(given[key])}", as_setting(name, given[key]))
        except ValueError:
            field = SETTINGS[name]
            problems.append(
                f"config.json has {key}={said(given[key])}, and {name} must be {field.rule()}"
            )
    try:
        norm_eps_of(config)
    except ForeignError as error:
        problems.append(str(error))
    return values, problems


def norm_eps_of(config: dict[str, Any]) -> float:
    """Return the epsilon of RMSNorm that config.json gives. Raises ForeignError."""
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 0.1:
        raise ForeignError(
            f"config.json has rms_norm_eps={said(value)}, which must be a number above 0, at most 0.1"
        )
    return float(value)


def read_norm_eps(folder: Path | str) -> float:
    """Return the epsilon of RMSNorm of a folder. Raises ForeignError."""
    return norm_eps_of(read_json(ROOT / folder / "config.json"))


def missing_here(config: dict[str, Any], kind: str) -> list[str]:
    """Complaints about parts that this model has not: weights that were trained with them compute something else
    without."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim", 128 if kind == "qwen3" else None)
    fits = head_dim is None or (
        isinstance(head_dim, int) and isinstance(heads, int) and head_dim * heads == hidden
    )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(
        isinstance(value, dict) for value in rope.values()
    ):  # one for each layer type
        rope = {"rope_type": rope}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    turned = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    seen = config.get("layer_types") or []
    parts = [
        (
            "attention_bias",
            bool(config.get("attention_bias")),
            False,
            "its products have no biases",
        ),
        ("mlp_bias", bool(config.get("mlp_bias")), False, "its products have no biases"),
        ("hidden_act", config.get("hidden_act", "silu"), "silu", "it has SwiGLU"),
        (
            "use_sliding_window",
            bool(config.get("use_sliding_window")),
            False,
            "a token sees all before it",
        ),
        (
            "layer_types",
            seen,
            ["full_attention"] * len(seen) if isinstance(seen, list) else [],
            "a token sees all before it",
        ),
        (
            "quantization_config",
            config.get("quantization_config"),
            None,
            "its weights are plain numbers",
        ),
        ("partial_rotary_factor", turned or 1, 1, "it turns whole heads"),
        ("rope_type", rope_type, "default", "its angles are not scaled"),
        (
            "head_dim",
            head_dim if not fits else None,
            None,
            f"its heads share the width: {hidden} over {heads}",
        ),
    ]
    return [
        f"config.json has {key}={said(value)}, which this model does not compute ({why}); choose other weights"
        for key, value, good, why in parts
        if value != good
    ]


def as_setting(name: str, value: Any) -> Any:
    """A value of JSON as one of the setting of that name. Raises ValueError where it cannot be one."""
    field = SETTINGS[name]
    if isinstance(value, bool) != (field.kind is bool) or not isinstance(value, (bool, int, float)):
        raise ValueError
    return field.parse(format_value(value))


def said(value: Any) -> str:
    """A value of JSON in a message, cut short."""
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---------------------------------------------------------------------------------------------------
# What the files hold
# ---------------------------------------------------------------------------------------------------


def differences(stored: dict[str, Stored], c: Config) -> list[str]:
    """How the tensors in the files differ from those of a model with these settings, a line each kind."""
    wanted = expected(c)
    unknown = [
        name for name in stored.keys() - wanted.keys() if not name.endswith(".rotary_emb.inv_freq")
    ]
    if c.tie_embeddings and stored.get("lm_head.weight", Stored(Path(), "", ())).shape == (
        c.vocab_size,
        c.n_embd,
    ):
        unknown.remove("lm_head.weight")  # the same table once more; `load` compares the two
    shapes = [
        f"{name} is {list(stored[name].shape)} and not {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    types = [
        f"{name} in {stored[name].path.name} is {stored[name].dtype}"
        for name in wanted.keys() & stored.keys()
        if stored[name].dtype not in BYTES
    ]
    found = {
        "the files lack": sorted(wanted.keys() - stored.keys()),
        "the files hold what no such model has:": sorted(unknown),
        "by its own config.json this is wrong:": shapes,
        f"of types that are not read ({', '.join(BYTES)} are):": sorted(types),
    }
    return [f"{what} {some(names)}" for what, names in found.items() if names]


def some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def expected(c: Config) -> dict[str, tuple[int, ...]]:
    """Their name -> shape of each weight of a model with these settings."""
    with torch.device("meta"):
        one = Transformer(c.replace(n_layer=1, seq_len=2))
    names = {
        name: (c.vocab_size, c.n_embd) if name in OF_ENTRIES else tuple(weight.shape)
        for name, weight in one.named_parameters()
    }
    return {
        their_name(name.replace("layers.0.", f"layers.{layer}.")): shape
        for name, shape in names.items()
        for layer in range(c.n_layer if name.startswith("layers.") else 1)
    }


def their_name(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def tensors(folder: Path) -> dict[str, Stored]:
    """Their name -> tensor, from the headers of all files. Raises ForeignError."""
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        part = header(path)
        if twice := found.keys() & part.keys():
            raise ForeignError(
                f"{path}: holds {some(sorted(twice), 2)}, which another file of the folder holds too; "
                "download the folder again, into an empty one"
            )
        found |= part
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, all of them there. Raises ForeignError."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or (single.is_symlink() and not index.is_file()):
        return [single]
    if not index.is_file():
        raise ForeignError(no_weights(folder))
    places = read_json(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(
        isinstance(n, str) and n == Path(n).name and n.endswith(".safetensors") for n in names
    ):
        raise ForeignError(
            f"{index}: has no weight_map that names safetensors files beside it; download it again"
        )
    if absent := [name for name in sorted(set(names)) if not (folder / name).exists()]:
        raise ForeignError(
            f"{folder}: lacks {some(absent)}, which {index.name} names; download the rest"
        )
    return [folder / name for name in sorted(set(names))]


def no_weights(folder: Path) -> str:
    """Why a folder has no weights to read."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLES)]
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return (
            f"{folder}: holds {some(others, 3)}, but no model.safetensors and no model.safetensors.index.json; "
            "download the index too, or rename the one file"
        )
    if pickles:
        return (
            f"{folder}: holds weights as pickles only ({some(pickles, 3)}); those run whatever code is in them "
            "when they are read, so they are not. Take the safetensors files of the model (most repositories have "
            "both), or convert them where nothing can be harmed: load with transformers' from_pretrained and "
            "weights_only=True, then save_pretrained"
        )
    return f"{folder}: holds no model.safetensors; there are: {some(names) or 'no files at all'}"


def header(path: Path) -> dict[str, Stored]:
    """The tensors that a safetensors file says it holds, once it is known to hold their bytes. Raises ForeignError."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(64)
            length = int.from_bytes(start[:8], "little")
            file.seek(8)
            content = file.read(length) if length <= min(size - 8, LARGEST_HEADER) else b""
    except OSError as error:
        raise ForeignError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        entries = json.loads(content)
        entries.pop("__metadata__", None)
        found = {
            name: Stored(path, str(e["dtype"]), tuple(map(int, e["shape"])))
            for name, e in entries.items()
        }
        places = {
            name: (int(begin), int(end))
            for name, (begin, end) in ((name, e["data_offsets"]) for name, e in entries.items())
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ForeignError(f"{path}: {what_it_is(start, size)}") from None
    held = size - 8 - length
    if (told := max((end for _, end in places.values()), default=0)) != held:
        raise ForeignError(
            f"{path}: has {held} bytes of weights and its header tells of {told}: an incomplete or "
            "damaged download; fetch it again"
        )
    position = 0
    for name, (begin, end) in sorted(
        places.items(), key=lambda item: item[1]
    ):  # one behind the other, without a gap
        dtype, shape = found[name].dtype, found[name].shape
        if (
            begin != position
            or end < begin
            or (dtype in BYTES and end - begin != BYTES[dtype] * math.prod(shape))
        ):
            raise ForeignError(
                f"{path}: its header gives {name}, {dtype} {list(shape)}, the bytes {begin} to {end}: "
                "damaged; fetch it again"
            )
        position = end
    return found


def what_it_is(start: bytes, size: int) -> str:
    """What a file of this beginning is, if it is not what it should be."""
    if size == 0:
        return "is empty; fetch it again"
    if start.startswith(b"version https://git-lfs"):
        return f"is a Git LFS pointer of {size} bytes and not the file itself; fetch that with: git lfs pull"
    if start.lstrip().startswith(b"<"):
        return (
            f"is an HTML or XML page of {size} bytes ({start[:24]!r}...), as servers send with an error; look at "
            "it, and fetch the file again"
        )
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "is a pickle under a wrong name; it is not read, since a pickle runs code. Take safetensors"
    return f"is damaged or cut short ({size} bytes, starts with {start[:12]!r}); fetch it again"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ForeignError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ForeignError(
            f"{path}: cannot be read ({error.strerror}); it comes with the weights"
        ) from None
    try:
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise ForeignError(f"{path}: {what_it_is(content[:64], len(content))}") from None
    return found


# ---------------------------------------------------------------------------------------------------
# Copying
# ---------------------------------------------------------------------------------------------------


def is_tied(model: nn.Module) -> bool:
    return "lm_head.weight" not in dict(model.named_parameters())


def pieces(
    stored: dict[str, Stored], name: str, weight: Any, rows: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(a part of what this process holds of the weight, the same part of the stored tensor in float32). The stored
    one has the first `rows` rows of the weight."""
    shape = (rows, *weight.shape[1:])
    if name not in stored or stored[name].shape != shape:
        raise ForeignError(
            f"the folder has no {name} of shape {list(shape)}; it has changed since it was checked"
        )
    local, begin, sizes = weight, [0] * weight.ndim, weight.shape
    if hasattr(
        weight, "__create_chunk_list__"
    ):  # a DTensor, which tells so where its part lies in the whole
        (chunk,) = weight.__create_chunk_list__()
        local, begin, sizes = weight.to_local(), chunk.offsets, chunk.sizes
    count = min(sizes[0], rows - begin[0])
    if count <= 0:  # more processes than rows
        return
    step = max(1, PIECE // math.prod(sizes[1:]))
    columns = [slice(b, b + n) for b, n in zip(begin[1:], sizes[1:], strict=True)]
    try:
        opened = safe_open(stored[name].path, framework="pt")
    except SafetensorError as error:
        raise ForeignError(f"{stored[name].path}: is damaged ({error}); fetch it again") from None
    with opened as file:
        whole = file.get_slice(name)
        for first in range(0, count, step):
            last = min(first + step, count)
            values = whole[(slice(begin[0] + first, begin[0] + last), *columns)].float()
            if not values.isfinite().all():
                raise ForeignError(
                    f"{stored[name].path}: {name} holds values that are infinite or no numbers; fetch "
                    "the file again, or choose other weights"
                )
            yield local[first:last], values


@torch.no_grad()
def copy(stored: dict[str, Stored], name: str, weight: Any, rows: int) -> None:
    for ours, values in pieces(stored, name, weight, rows):
        ours.copy_(values)


@torch.no_grad()
def compare(stored: dict[str, Stored], name: str, weight: Any, rows: int) -> None:
    """Raises ForeignError where the file holds other values under this name than the weight has."""
    if not all(
        torch.equal(ours.cpu(), values) for ours, values in pieces(stored, name, weight, rows)
    ):
        raise ForeignError(
            f"{stored[name].path}: config.json ties the head to the embedding table, and {name} is "
            "another; set tie_word_embeddings there to false if the head is right, and TIE_EMBEDDINGS=0"
        )
