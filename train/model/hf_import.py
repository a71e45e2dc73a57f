"""Import the weights of a Llama or Qwen3 model: JSON and safetensors are read, a pickle never.

    INIT_FROM/config.json         in Hugging Face format (settings/init_from.py)
              model.safetensors   or model.safetensors.index.json and the shards that it names

`check` compares config.json and the headers of the files with the settings, and reports every
difference at once. `load` copies the weights, one at a time, to where they lie. Of weights that are split
over processes (FSDP2), each process reads its own rows. Files may be float32, bfloat16, float16 or
float64; our weights are float32.

A pickle (*.bin, *.pt, *.distcp) runs whatever code it holds when it is read, so none is opened. The
safetensors library refuses a file whose header does not cover its bytes exactly. There is no
checksum: a flipped bit shows only where it makes a weight infinite or NaN. `hashes` gives what the
publisher's page can be compared with.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from record.durable import make_printable
from record.regular_file import open_regular
from settings import ROOT, SettingsError
from settings.config import Config
from settings.init_from import (
    ForeignError,
    explain_missing,
    find_contradictions,
    parse_shape,
    read_json,
)
from train.data.sources.content import digest_of, looks_like
from train.distributed.world import raise_on_all_ranks
from train.model.model import Transformer

__all__ = ["ForeignError", "read_json"]  # also those of settings/init_from.py

READABLE = ("F64", "F32", "BF16", "F16")
OF_ENTRIES = ("embed_tokens.weight", "lm_head.weight")  # with a row for each vocabulary entry


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file. dtype is safetensors' name of it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def check(folder: Path | str, config: Config) -> None:
    """Compare a folder with the settings, without reading weights.

    Raises:
        SettingsError: with all that they disagree on.
        ForeignError: a file is missing or damaged.
    """
    path = ROOT / folder
    if not path.is_dir():
        raise SettingsError([explain_missing(str(folder))])
    stored = tensors(path)
    shape, complaints = parse_shape(read_json(path / "config.json"))
    values = config.values()
    problems = []
    for name, sentence in find_contradictions(str(folder), shape, values).items():
        problems.append(f"{name}={values[name]}: {sentence}")
    if not complaints:
        theirs = config.replace(**{name.lower(): value for name, value in shape.items()})
        complaints = list(find_differences(stored, theirs))
    problems += [f"INIT_FROM={folder}: {complaint}" for complaint in complaints]
    if problems:
        raise SettingsError(problems)


def find_differences(stored: dict[str, Stored], config: Config) -> Iterator[str]:
    """Yield how the tensors in the files differ from those of a model with these settings."""
    wanted = expected(config)
    missing = wanted.keys() - stored.keys()
    unknown = [name for name in stored if name not in wanted and not is_redundant(name, config)]
    shapes = []
    types = []
    for name in sorted(wanted.keys() & stored.keys()):
        tensor = stored[name]
        if tensor.shape != wanted[name]:
            shapes.append(f"{name} is {list(tensor.shape)} and not {list(wanted[name])}")
        if tensor.dtype not in READABLE:
            types.append(f"{name} in {tensor.path.name} is {tensor.dtype}")
    complaints = {
        "The files lack": sorted(missing),
        "The files hold what no such model has:": unknown,
        "By its own config.json, this is wrong:": shapes,
        f"Of the types that are read ({', '.join(READABLE)}), these are not:": types,
    }
    for words, names in complaints.items():
        if names:
            yield f"{words} {some(names)}."


def is_redundant(name: str, config: Config) -> bool:
    """Tell whether older files also hold this tensor: rotary angles, or a tied table once more."""
    is_tied_head = name == "lm_head.weight" and config.tie_embeddings
    return is_tied_head or name.endswith(".rotary_emb.inv_freq")


def some(names: Sequence[str], most: int = 8) -> str:
    """List names that others wrote, the first few of many, fit for a terminal."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(make_printable, names[:most])) + more


def expected(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a model with these settings, by Hugging Face's name."""
    with torch.device("meta"):
        model = Transformer(config.replace(seq_len=2))
    weights = model.named_parameters()
    return {their_name(name): their_shape(model, name, weight) for name, weight in weights}


def their_shape(model: Transformer, name: str, weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a weight without the rows that pad the vocabulary."""
    rows = model.vocab_size if name in OF_ENTRIES else len(weight)
    return (rows, *weight.shape[1:])


def their_name(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def read_norm_eps(folder: Path | str) -> float:
    """Return the epsilon of RMSNorm of a folder that `check` accepts. Raises ForeignError."""
    config = read_json(ROOT / folder / "config.json")
    return float(config.get("rms_norm_eps") or 1e-6)


# ---------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------


def tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder by Hugging Face's name, from the headers. Raises ForeignError."""
    stored: dict[str, Stored] = {}
    for path in weight_files(folder):
        with open_file(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dictionary)
                if name in stored:
                    raise ForeignError(
                        f"{path}: holds {name}, and so does {stored[name].path.name}. "
                        "Download the folder again, into an empty one."
                    )
                part = file.get_slice(name)
                stored[name] = Stored(path, part.get_dtype(), tuple(part.get_shape()))
    return stored


def check_types(folder: Path) -> None:
    """Raise ForeignError if a weight has a type whose values mean nothing without scales, as int8."""
    odd = []
    for name, one in tensors(folder).items():
        if name.endswith("weight") and one.dtype not in READABLE:
            odd.append(f"{name} ({one.dtype})")
    if odd:
        raise ForeignError(
            f"{folder}: Weights are read in {', '.join(READABLE)}, and these have another type: {some(odd)}. "
            "Choose the same model in bfloat16."
        )


def open_file(path: Path) -> Any:
    """Open a safetensors file, whose header the library checks. Raises ForeignError."""
    try:
        open_regular(path).close()  # the library would wait at a pipe
        return safe_open(path, framework="pt")
    except OSError as error:
        raise ForeignError(f"{path}: cannot be read ({error.strerror or error}).") from None
    except SafetensorError as error:
        raise ForeignError(
            f"{path}: is damaged or incomplete: {error}{looks_like(path)}. Download it again."
        ) from None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, all of them there. Raises ForeignError.

    An adapter is refused: transformers would add it to the weights, and others would not.
    """
    adapter = folder / "adapter_config.json"
    if os.path.lexists(adapter):
        raise ForeignError(
            f"{adapter}: An adapter next to the weights changes what some programs read. Merge it with "
            "peft's merge_and_unload, or remove its files."
        )
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file() or (single.is_symlink() and not index.is_file()):
        return [single]
    if not index.is_file():
        names = sorted(path.name for path in folder.iterdir())
        raise ForeignError(
            f"{folder}: holds neither model.safetensors nor model.safetensors.index.json, but "
            f"{some(names) or 'nothing'}. Download the safetensors files of the model. Pickles "
            "(.bin, .pt) are not read, because reading one runs the code in it."
        )
    places = read_json(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(map(is_beside, names)):
        raise ForeignError(
            f"{index}: has no weight_map that names safetensors files next to it. Download it again."
        )
    paths = [folder / name for name in sorted(set(names))]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ForeignError(
            f"{folder}: lacks {some(missing)}, which {index.name} names. Download the rest."
        )
    return paths


def is_beside(name: Any) -> bool:
    """Tell whether this names a safetensors file in the folder itself."""
    return isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors")


def hashes(folder: Path | str) -> dict[str, str]:
    """Return the sha256 of config.json and of each file of weights, as the Hub shows it.

    Reads all of them, at about a second per GB. Raises ForeignError.
    """
    path = ROOT / folder
    parts = [path / "config.json", *weight_files(path)]
    return {part.name: digest_of(part, "sha256").removeprefix("sha256:") for part in parts}


# ---------------------------------------------------------------------------------------------------
# Copying
# ---------------------------------------------------------------------------------------------------


def load(folder: Path | str, model: Transformer) -> None:
    """Copy the weights of a folder that `check` accepts into the model, on all processes together.

    Rows that pad the vocabulary stay as they are: they compute nothing. Raises ForeignError on all
    processes; the model is of no use then.

    Args:
        model: bare or split by FSDP2, not on the meta device, and not run yet: after a forward pass,
            FSDP2 shows whole weights that it throws away.
    """
    with raise_on_all_ranks(ForeignError):
        stored = tensors(ROOT / folder)
        for name, weight in model.named_parameters():
            try:
                copy(stored, their_name(name), weight, their_shape(model, name, weight))
            except (OSError, SafetensorError) as error:
                raise ForeignError(f"{ROOT / folder}: cannot be read ({error}).") from error


@torch.no_grad()
def copy(stored: dict[str, Stored], name: str, weight: Any, shape: tuple[int, ...]) -> None:
    """Copy the rows of a weight, as far as this process holds them. Raises ForeignError.

    shape: in the file, which has no rows that pad the vocabulary.
    """
    if name not in stored or stored[name].shape != shape:
        raise ForeignError(
            f"The folder has no {name} of shape {list(shape)}: it has changed since it was checked."
        )
    path = stored[name].path
    local, first = find_part(weight)
    end = min(first + len(local), shape[0])
    if end <= first:  # this process holds only rows that pad the vocabulary
        return
    with open_file(path) as file:
        values = file.get_slice(name)[first:end].float()
    if not values.isfinite().all():
        raise ForeignError(
            f"{path}: {name} holds values that are infinite or NaN. Download the file again, or choose "
            "other weights."
        )
    local[: end - first] = values


def find_part(weight: Any) -> tuple[Tensor, int]:
    """Return the rows of a weight that this process holds, and the number of the first."""
    if not hasattr(weight, "__create_chunk_list__"):
        return weight, 0
    (chunk,) = weight.__create_chunk_list__()  # a DTensor's, which FSDP2 splits by rows
    return weight.to_local(), chunk.offsets[0]
