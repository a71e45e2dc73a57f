"""Checkpoints: written whole or not at all, and never overwritten.

    checkpoints/step_0001000/MANIFEST.json            sizes and hashes of all files, and other states
                             .metadata, __0_0.distcp  torch.distributed.checkpoint (DCP): weights, moments

A checkpoint is written into a fresh temporary folder, flushed to disk, hashed, described by its manifest
and then renamed: the rename is the commit. (DCP itself notices no flipped bit, and overwriting a folder
destroys what was there.) find.py says which one is the newest, saver.py when one is written.

Tensors have the model's own names, without any wrapper's prefix, so a checkpoint loads into any number of
ranks and any way of sharding. States are named and may grow. The ranks of one copy of the weights write
it, so it is whole on their disk.

torch.distributed.checkpoint takes 2 s to import. A new run's first step does not wait for it.
"""

import contextlib
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from record import number_formats
from record.durable import flush_file, flush_folder, write_whole
from train.checkpoint.find import discard, folder_of, quarantine
from train.checkpoint.manifest import (
    FILE,
    CheckpointError,
    describe,
    load_manifest,
    seal_manifest,
)
from train.distributed.parallel import replicate, weights_of
from train.distributed.world import World, all_gather_object, broadcast_object, raise_on_all_ranks
from train.optim import Optimizer

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)  # says what we say better


def tensor_states(
    model: nn.Module, optimizer: Optimizer | None, outer: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return what goes through DCP: a group's name -> a tensor's name -> the tensor, or this rank's part.

    The settings say what the optimizer's groups hold, so its moments are all there is to keep. `outer` is
    what several sites have in common (diloco/site.py).
    """
    weights = weights_of(model)
    states = {"model": {name: weight.detach() for name, weight in weights.items()}}
    if optimizer:
        states["optimizer"] = {
            f"state.{name}.{key}": moment
            for name, weight in weights.items()
            for key, moment in optimizer.moments(weight).items()
        }
    if outer:
        states["outer"] = outer
    return states


def build_stager(on_gpu: bool) -> Any:
    """Return DCP's copier of states into host memory, which it keeps for the next time."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    options = StagingOptions(
        use_pinned_memory=on_gpu,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=on_gpu,
    )
    return DefaultStager(options)


# ---------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------


def write(
    root: Path,
    step: int,
    states: dict[str, Any],
    need: int,
    facts: dict[str, Any],
    world: World,
    group: Any = None,
    save: Callable[[dict[str, Any], Path, Any], None] | None = None,
) -> int:
    """Write checkpoints/step_N, on the ranks of a group together.

    A committed folder is replaced only if sites have synced something since, or it was evaluated.

    Args:
        states: what `save` writes.
        need: the bytes they take at most.
        facts: states for the manifest, as JSON.
        save: `save(states, folder, group)` in the place of DCP.

    Returns:
        Its bytes; 0 if it was there.

    Raises:
        CheckpointError: on all ranks of the group; nothing is left behind. Any other error means that a
            rank is gone.
    """
    target = folder_of(root, step)
    temporary = root / f"{target.name}.tmp-{uuid.uuid4().hex[:8]}"
    temporary, is_there = broadcast_object((temporary, is_written(target, facts)), group)
    if is_there:
        return 0
    content = {"step": step, **facts, "torch": torch.__version__, "world_size": world.size}
    files: dict[str, tuple[int, str]] = {}
    failure = f"{target}: could not write it"
    try:
        with fail_together(failure, group):  # all must enter the collectives of `save`
            root.mkdir(parents=True, exist_ok=True)
            check_space(root, need)
            temporary.mkdir(exist_ok=True)
        with fail_together(failure, group):
            (save or save_tensors)(states, temporary, group)
            described = flush_and_describe(temporary, world.rank)
        for part in all_gather_object(described, group):
            files |= part
        with fail_together(failure, group):  # nobody goes on before the commit
            if world.is_first:
                commit(temporary, target, content | {"files": files})
    except CheckpointError as error:
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        advice = ""
        if os.strerror(errno.ENOSPC) in str(error):
            free = number_formats.size(shutil.disk_usage(root.parent).free)
            advice = f". The disk has {free} free: make room, or keep fewer with KEEP_LAST"
        raise CheckpointError(f"{error}{advice}") from None
    return sum(size for size, _ in files.values())


def is_written(folder: Path, facts: dict[str, Any]) -> bool:
    """Say whether a checkpoint is committed, with these states of sites and this validation loss."""
    try:
        old = load_manifest(folder)
    except CheckpointError:
        return False
    is_same = old.get("sites") == facts.get("sites")
    return is_same and facts.get("val_loss") in (None, old.get("val_loss"))


@contextlib.contextmanager
def fail_together(failure: str, group: Any = None) -> Iterator[None]:
    """Have all ranks of a group fail if one does. `failure` says with what: the cause is added.

    Raises CheckpointError, whatever the error is: training must be able to go on. One that a collective
    raises here means that a rank is gone, and passes.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with raise_on_all_ranks(CheckpointError, group=group):
        try:
            yield
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{failure}: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """Return what went wrong, in a line. DCP wraps the errors of all ranks in one, which is no Exception."""
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    return (str(error).strip() or repr(error)).splitlines()[0]


def save_tensors(states: dict[str, Any], folder: Path, group: Any) -> None:
    import torch.distributed.checkpoint as dcp

    from train.checkpoint.metadata import Writer

    # flush_and_describe syncs: torch (2.11 to 2.13) syncs .metadata before the last of its buffer is written.
    writer = Writer(folder, sync_files=False, single_file_per_rank=True)
    dcp.save(states, storage_writer=writer, no_dist=group is None, process_group=group)


def flush_and_describe(folder: Path, rank: int) -> dict[str, tuple[int, str]]:
    """Flush to disk what this rank has written: __RANK_0.distcp, and of the first all else.

    Returns:
        A file's name -> its size in bytes and its hash.
    """
    described = {}
    for path in folder.iterdir():
        writer = int(path.name.split("_")[2]) if path.name.startswith("__") else 0
        if writer == rank:
            flush_file(path)
            described[path.name] = describe(folder, path.name)
    return described


def commit(temporary: Path, target: Path, content: dict[str, Any]) -> None:
    """Write the manifest, make all names durable, and rename."""
    write_whole(temporary / FILE, seal_manifest(content))
    flush_folder(temporary)
    replaced = quarantine(target, "trash") if os.path.lexists(target) else None
    os.rename(temporary, target)
    flush_folder(target.parent)
    flush_folder(target.parent.parent)  # which may have got its folder of checkpoints just now
    if replaced:
        discard(replaced)


def check_space(root: Path, need: int) -> None:
    """Raise CheckpointError if the disk of a run, whose folder exists, has no room for one more checkpoint."""
    free = shutil.disk_usage(root.parent).free
    if free < need:
        raise CheckpointError(
            f"{root}: a checkpoint takes {number_formats.size(need)} and the disk has "
            f"{number_formats.size(free)} free; make room, keep fewer with KEEP_LAST, or put RUNS_DIR on another disk"
        )


def needed_bytes(model: nn.Module, sites: int = 1) -> int:
    """Return the most bytes that a checkpoint can take.

    These are weights and two moments, of several sites also the common weights and their momentum, and
    DCP's 3 KiB beside each of these tensors and beside a counter.
    """
    copies = 5 if sites > 1 else 3
    weights = weights_of(model).values()
    return 2**16 + sum(copies * (weight.nbytes + 4096) for weight in weights)


# ---------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------


def load_into(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    shared: bool = True,
    outer: dict[str, Tensor] | None = None,
    may_be_unused: bool = False,
    has_moments: bool = True,
) -> None:
    """Read weights and moments of a verified checkpoint in place, on all ranks together, each its own part.

    One tensor at a time is in memory twice.

    Args:
        optimizer: None if no moments are to be read.
        shared: all ranks see the folder. Otherwise those of the first node read it, and the others get
            what they hold copies of.
        outer: filled with what the sites had in common, if the checkpoint has that; None: not read.
        may_be_unused: whether there may be weights that no step has used, and without moments.
        has_moments: False if the optimizer had made no step when the checkpoint was written.

    Raises CheckpointError, on all ranks.
    """
    import torch.distributed.checkpoint as dcp

    from train.checkpoint.metadata import Reader

    failure = describe_read_failure(folder)
    sees = shared or folder.exists()
    reader = Reader(folder)
    stored = {}
    with fail_together(failure):
        if sees:
            stored = reader.tensors()
    stored = broadcast_object(stored)
    with fail_together(failure):
        if optimizer:
            make_moments(model, optimizer, outer, stored)
            if has_moments:
                check_moments(model, optimizer, may_be_unused)
            if outer:
                check_outer(model, outer)
        states = tensor_states(model, optimizer, outer)
        if sees:
            dcp.load(states, storage_reader=reader, no_dist=True)
    if not shared:
        for tensors in states.values():
            replicate(list(tensors.values()))


def describe_read_failure(folder: Path) -> str:
    """Say what to do about a checkpoint that cannot be read, for `fail_together`."""
    return (
        f"{folder}: could not read it. Resume with the settings of config.json, or choose another "
        "checkpoint. The cause"
    )


def make_moments(
    model: nn.Module,
    optimizer: Optimizer,
    outer: dict[str, Tensor] | None,
    stored: dict[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Give the optimizer and `outer` the tensors that a checkpoint has of them, filled with zeros."""
    for name, weight in weights_of(model).items():
        prefix = f"optimizer.state.{name}."
        moments = {
            key.removeprefix(prefix): blank(weight, *facts)
            for key, facts in stored.items()
            if key.startswith(prefix)
        }
        optimizer.set_moments(weight, moments)
        for key in (f"weights.{name}", f"momentum.{name}"):
            if outer is not None and f"outer.{key}" in stored:
                outer[key] = blank(weight, *stored[f"outer.{key}"])


def check_moments(model: nn.Module, optimizer: Optimizer, may_be_unused: bool) -> None:
    """Raise ValueError if a checkpoint lacks moments that the next step needs."""
    used = 0
    for name, weight in weights_of(model).items():
        moments = optimizer.moments(weight)
        used += bool(moments)
        if may_be_unused and not moments:
            continue
        for key in optimizer.state_names(weight):
            if key not in moments:
                raise ValueError(f"it has no optimizer.state.{name}.{key}")
            if key != "step" and moments[key].shape != weight.shape:
                raise ValueError(f"optimizer.state.{name}.{key} has another shape than {name}")
    if not used:
        raise ValueError("it has no optimizer state")


def check_outer(model: nn.Module, outer: dict[str, Tensor]) -> None:
    """Raise ValueError if a checkpoint lacks something of what sites have in common."""
    for name in weights_of(model):
        for key in (f"weights.{name}", f"momentum.{name}"):
            if key not in outer:
                raise ValueError(f"it has no outer.{key}")


def blank(weight: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor to read a moment of a weight into: of the weight's shape and sharding, or a counter."""
    if size == weight.shape:
        return torch.zeros_like(weight, dtype=dtype)
    return torch.zeros(size, dtype=dtype, device=weight.device)
