"""Checkpoints of adapters alone, in peft's format: checkpoints/step_N/adapter_model.safetensors, adapter_config.json.

    each process's rows of each adapter -> host memory -> thread: to the first over gloo, some MB at a time -> one file
                                                          -> each process reads its rows back and compares them

No base weight is touched, and nothing is allocated on a GPU: a copy to the host is all that training waits for. What is
gathered is on the host, and adapters are small beside what they adapt. A run that goes on from one has its adapters and
its step; the optimizer's moments are in full checkpoints only, so it starts anew. peft reads the folder as it is.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from finetune.adapter import Adapters, adapters_of, in_file
from settings.config import Config
from train.checkpoint.checkpoint import cause, describe_read_failure, fail_together
from train.checkpoint.manifest import LITE
from train.distributed.parallel import local, part_of, replicate, unwrap, weights_of
from train.distributed.world import broadcast_object, to_first
from train.optim import Optimizer

FILE, CONFIG = LITE
AT_ONCE = 2**26  # bytes that are sent to the first process at a time


class Lite:
    """Written where CHECKPOINT_MODE=lite says so, and read wherever one is found. `due`, `copied` and `write`
    are for train/checkpoint/saver.py."""

    def __init__(self, c: Config, description: dict[str, Any]):
        """description: peft's, as adapter_config.json has it."""
        self.c, self.description = c, description

    def due(self, step: int) -> bool:
        """Whether the checkpoint of this step holds adapters alone."""
        return self.c.checkpoint_mode == "lite" and not (
            self.c.keep_every and step % self.c.keep_every == 0
        )

    def copied(self, model: nn.Module) -> dict[str, Any]:
        """Name in the file -> (rows of this process, shape of the whole), on the host."""
        weights_of(model)  # FSDP2's are split again
        return {
            in_file(name): (local(weight).detach().to("cpu", copy=True), tuple(weight.shape))
            for name, weight in adapters_of(unwrap(model)).items()
        }

    def write(self, states: dict[str, Any], folder: Path, group: Any) -> None:
        """Gather, write and compare, on the processes of a group together. Raises OSError and its like."""
        whole: dict[str, Tensor] = {}
        begins: dict[str, list[int]] = {}
        rank = rank_in(group)
        for names in portions(states):
            # where each has all of an adapter, the first's will do
            sent = {
                name: rows
                for name in names
                for rows, shape in [states[name]]
                if not rank or rows.shape != shape
            }
            parts = to_first(sent, group)
            for name in names if parts else ():
                rows = [part[name] for part in parts if name in part]
                begins[name] = [
                    sum(map(len, rows[:r])) if len(rows) > 1 else 0 for r in range(len(parts))
                ]
                whole[name] = torch.cat(rows)
        problem = None
        if not rank:
            try:
                for name, values in whole.items():
                    refuse(name, values, states[name][1])
                save_file(whole, folder / FILE, metadata={"format": "pt"})
                with open(folder / CONFIG, "x", encoding="utf-8") as file:
                    json.dump(self.description, file, indent=1)
                for name in (FILE, CONFIG):
                    with open(folder / name, "rb") as written:
                        os.fsync(written.fileno())
            except (OSError, SafetensorError, ValueError) as error:
                problem = cause(error)
        problem, begins = broadcast_object((problem, begins), group)
        if problem:
            raise OSError(problem)
        compare(folder / FILE, states, begins, rank)

    def load(self, folder: Path, model: nn.Module, optimizer: Optimizer, shared: bool) -> None:
        """Read the adapters in place, each process its own rows. shared: all see the folder; else those of the first
        node read it, and the others get what they hold copies of. Raises CheckpointError, on all processes."""
        weights = adapters_of(unwrap(model))
        weights_of(model)
        with fail_together(describe_read_failure(folder)):
            if shared or folder.exists():
                read(folder / FILE, weights)
        if not shared:
            replicate([weight.detach() for weight in weights.values()])
        for weight in weights.values():
            optimizer.set_moments(weight, {})


def of(c: Config, adapters: Adapters, lm: Any) -> Lite:
    """For a model of transformers' without adapters, on the meta device."""
    description = adapters.config(lm, c.model).to_dict()
    return Lite(
        c,
        {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in description.items()
        },
    )


def portions(states: dict[str, Any]) -> Iterator[list[str]]:
    """The names in order, so many at once that each process sends at most AT_ONCE or a single adapter."""
    names: list[str] = []
    size = 0
    for name in sorted(states):
        bytes_of = states[name][0].element_size() * torch.Size(states[name][1]).numel()
        if names and size + bytes_of > AT_ONCE:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_of
    if names:
        yield names


def rank_in(group: Any) -> int:
    """Which of a group's processes this is."""
    return group.rank() if group is not None else 0


def compare(path: Path, states: dict[str, Any], begins: dict[str, list[int]], rank: int) -> None:
    """Raises OSError where the file does not hold the rows of this process."""
    with safe_open(path, framework="pt") as file:
        for name, (rows, _) in states.items():
            begin = begins[name][rank]
            if not torch.equal(file.get_slice(name)[begin : begin + len(rows)], rows):
                raise OSError(f"{path.name}: read back, {name} is not what was written")


def read(path: Path, weights: dict[str, nn.Parameter]) -> None:
    """Raises ValueError where the file is not of these adapters."""
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        if stored != (wanted := {in_file(name) for name in weights}):
            raise ValueError(
                f"{path.name} holds other adapters than LORA_TARGETS asks for: "
                f"{min(stored ^ wanted)} is in one of them only"
            )
        for name, weight in weights.items():  # all of it, before anything is changed
            refuse(in_file(name), file.get_tensor(in_file(name)), weight.shape)
        for name, weight in weights.items():
            with torch.no_grad():
                weight.copy_(part_of(file.get_tensor(in_file(name)).to(weight.device), weight))


def refuse(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError where an adapter has another shape, as one process's rows have, or is no adapter at all."""
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"{name} is {tuple(values.shape)}, not {tuple(shape)}")
    if values.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} has the type {values.dtype}, not float32 or bfloat16")
    if not values.isfinite().all():
        raise ValueError(f"{name} holds numbers that are not finite")
