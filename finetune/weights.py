"""The weights of a model of transformers', from the safetensors of its folder to where they are used.

    headers -> names, types, sizes -> slices, not yet read -> transformers' own conversion -> each process's part

Nothing is read before it is asked for: transformers' loader takes slices of memory-mapped files, renames them, packs a
mixture's experts into one tensor of three dimensions, and puts each result into its place. Where the weights are split
over processes (FSDP2) it reads the rows of this process alone, so that no process and no host ever holds the model
twice. The folder's own code is never run, and a pickle is never opened.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from record.durable import make_printable
from settings.resolve import show_path
from train.model import hf_import
from train.model.hf_import import ForeignError

NUMBERS = re.compile(r"\d+")
NO_MEMORY = (
    "allocate memory",
    "not enough memory",
    "out of memory",
)  # as torch says it, on CPU and GPU
SPLITS_ALONG_ROWS = (
    "MergeModulelist",
    "Concatenate",
)  # conversions that a process can make of its own rows


def plain(name: str) -> str:
    """The name that a weight has without adapters round it."""
    return name.replace("base_layer.", "")


def load(
    folder: Path, model: nn.Module, skeleton: Any, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Fill the weights of a model, which are on the meta device, whole or split; returns the names in the files that
    the model does not take, as patterns with their number.

    skeleton: a model of transformers' on the meta device of the same configuration, without adapters, whose own weights
    are of no account; it lends its names and its conversion. Adapters of the model stay on the meta device. Raises
    ForeignError where the files are not those of this model, MemoryError where it does not fit; it is of no use then.
    """
    hf_import.check_types(folder)
    own = {plain(name): weight for name, weight in model.named_parameters(remove_duplicate=False)}
    for name in list(skeleton.state_dict()):
        if name in own:
            put(skeleton, name, own[name])
    with opened(folder) as slices:
        report = convert(folder, skeleton, slices, dtype, device)
    missing = sorted(report.missing_keys)
    for name, why in report.conversion_errors.items():
        if any(words in why for words in NO_MEMORY):  # the files are as they should be
            raise MemoryError(f"{name}: {reason(why)}")
    if missing or report.mismatched_keys or report.conversion_errors:
        raise ForeignError(
            f"{show_path(folder)}: "
            + "; ".join(
                [
                    *([f"its files lack {hf_import.some(missing)}"] if missing else []),
                    *(
                        f"{name} has the shape {tuple(theirs)}, and config.json asks for {tuple(ours)}"
                        for name, theirs, ours in sorted(report.mismatched_keys, key=str)[:3]
                    ),
                    *(
                        f"{name} cannot be made of what is in its files ({reason(why)})"
                        for name, why in sorted(report.conversion_errors.items())[:3]
                    ),
                ]
            )
            + "; get the folder again, or take config.json and weights of the same model"
        )
    tensors = dict(skeleton.named_parameters(remove_duplicate=False)) | dict(
        skeleton.named_buffers()
    )
    adopted: dict[int, nn.Parameter] = {}  # tied weights stay one
    for name, weight in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if plain(name) in tensors:
            value = tensors[plain(name)]
            if isinstance(weight, nn.Parameter):
                value = adopted.setdefault(
                    id(value), nn.Parameter(value.detach(), weight.requires_grad)
                )
            put(model, name, value)
    return patterns(report.unexpected_keys)


def convert(
    folder: Path, skeleton: Any, slices: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Any:
    """transformers' report of what it made of the slices in the skeleton. Raises ForeignError."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(skeleton, None, None)
    if any(hasattr(weight, "placements") for weight in skeleton.parameters()):
        refuse_unsplittable(folder, mapping, slices)
    how = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        device_map={"": device},
        dtype=dtype,
        dtype_plan=skeleton._get_dtype_plan(dtype),
        weight_mapping=mapping,
    )
    try:
        report, _ = convert_and_load_state_dict_in_model(skeleton, slices, how)
    except (SafetensorError, OSError) as error:
        raise ForeignError(
            f"{show_path(folder)}: cannot be read ({error}); get it again"
        ) from error
    for name in without_rows(skeleton) & (report.missing_keys | report.conversion_errors.keys()):
        nothing: Any = nn.Parameter(torch.empty_like(skeleton.get_parameter(name), device=device))
        nothing._is_hf_initialized = (
            True  # else it draws its first values, together with others that do not
        )
        put(skeleton, name, nothing)
        report.missing_keys.discard(name)
        report.conversion_errors.pop(name, None)
    missing = set(report.missing_keys)
    skeleton.mark_tied_weights_as_initialized(report)
    report.missing_keys = missing - {
        name for name, target in skeleton.all_tied_weights_keys.items() if target not in missing
    }
    if (
        not report.missing_keys
    ):  # what is in no file is computed: angles of rotary embeddings, and tied weights
        skeleton._move_missing_keys_from_meta_to_device(set(), how.device_map, None, None)
        skeleton._initialize_missing_keys(False)
        skeleton.tie_weights(missing_keys=missing, recompute_mapping=False)
    return report


def without_rows(skeleton: Any) -> set[str]:
    """Weights of which this process has nothing, since there are more processes than experts. transformers cannot make
    nothing of nothing; whether the files have them, the others see."""
    return {
        name
        for name, weight in skeleton.named_parameters()
        if hasattr(weight, "placements") and not weight.to_local().numel()
    }


def refuse_unsplittable(folder: Path, mapping: list[Any], slices: dict[str, Any]) -> None:
    """Raises ForeignError where a process could not make its rows of a weight of its rows of the stored ones."""
    for one in mapping:
        operations = [
            (type(step).__name__, getattr(step, "dim", 0))
            for step in getattr(one, "operations", [])
        ]
        fits = all(
            name in SPLITS_ALONG_ROWS and (name == "MergeModulelist") == (dim == 0)
            for name, dim in operations
        )
        if not fits and any(one.rename_source_key(name)[1] is not None for name in slices):
            names = ", ".join(name for name, _ in operations)
            raise ForeignError(
                f"{show_path(folder)}: its weights are converted by {names}, which a process cannot do to a "
                "part of them; set PARALLEL=ddp"
            )


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Name -> a slice of each tensor in the files of a folder, read when it is asked for. Raises ForeignError."""
    with contextlib.ExitStack() as stack:
        slices: dict[str, Any] = {}
        for path in hf_import.weight_files(folder):
            file = stack.enter_context(hf_import.open_file(path))
            slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        yield slices


def put(model: nn.Module, name: str, value: Tensor) -> None:
    """Set a weight or buffer of a model by its name."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    (module._buffers if leaf in module._buffers else module._parameters)[leaf] = value  # type: ignore[assignment]


def reason(why: str) -> str:
    """The error's own words, of a traceback as transformers notes it."""
    lines = why.partition("\nError")[0].strip().splitlines()
    return lines[-1][:200] if lines else "no reason is known"


def patterns(names: Any) -> list[str]:
    """Names with their layer's parts counted, as `model.layers.46 (10 tensors)`."""
    counted: dict[str, int] = {}
    for name in sorted(names):
        match = NUMBERS.search(name)
        part = make_printable(name[: match.end()] if match else name)
        counted[part] = counted.get(part, 0) + 1
    return [
        f"{part} ({number} tensor{'s' if number > 1 else ''})" for part, number in counted.items()
    ]
