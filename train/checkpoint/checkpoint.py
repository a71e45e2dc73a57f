"""Checkpoints: written whole or not at all, verified before they are read, never overwritten.

    checkpoints/step_0001000/MANIFEST.json   sizes and hashes of all files, and the small states
                             .metadata, __0_0.distcp ...   torch.distributed.checkpoint: weights and moments

A checkpoint is written into a fresh temporary folder, flushed to disk, hashed, described by its manifest
and then renamed: the rename is the commit. `latest` is not stored; it is the highest step whose manifest
and hashes hold. (DCP itself notices no flipped bit, and overwriting a folder destroys what was there.)
A trainer that resumes sets aside what it finds damaged, as .damaged-step_N-..., and never deletes it.

Tensors are keyed by the model's own names, without any wrapper's prefix, so that a checkpoint loads into
any number of ranks and any way of spreading the model over them. States are named and may grow. The ranks of
one copy of the weights write it, so that it is whole on their disk; saver.py says when, and does it beside training.

torch.distributed.checkpoint takes 2 s to import. A new run's first step does not wait for it (Saver.warm_up).
"""

import contextlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from record.durable import flush_file, flush_folder
from record.run_paths import list_checkpoints as committed
from record.run_paths import name_checkpoint
from train.distributed.parallel import replicate, weights_of
from train.distributed.world import World, from_all, from_first
from train.optim import Optimizer

log = logging.getLogger(__name__)

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)  # says what we say better
SCHEMA = 1


class CheckpointError(Exception):
    """A checkpoint that cannot be written, or none that can be read; the message says what to do."""


class OtherFormat(CheckpointError):
    """A checkpoint of another version of this code: nothing is wrong with it."""


def folder_of(root: Path, step: int) -> Path:
    return root / name_checkpoint(step)


# ---------------------------------------------------------------------------------------------------
# States
# ---------------------------------------------------------------------------------------------------


def tensor_states(
    model: nn.Module, optimizer: Optimizer, outer: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """What goes through DCP: {"model": name -> weight, "optimizer": state.name.moment -> tensor}, and where there are
    several sites "outer", what they have in common (diloco/outer_step.py).

    The settings say what the optimizer's groups hold, so that its moments are all there is to keep.
    """
    weights = weights_of(model)
    moments = {
        f"state.{name}.{key}": value
        for name, weight in weights.items()
        for key, value in optimizer.moments(weight).items()
    }
    states = {"model": weights_state(model), "optimizer": moments}
    return states | {"outer": outer} if outer else states


def weights_state(model: nn.Module) -> dict[str, Tensor]:
    """Name -> weight, or this rank's part of it."""
    return {name: weight.detach() for name, weight in weights_of(model).items()}


def stager(on_gpu: bool) -> Any:
    """DCP's copier of states into host memory, which it keeps for the next time: `stage(states)` returns the copy."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
    )


def load_into(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    shared: bool = True,
    outer: dict[str, Tensor] | None = None,
) -> None:
    """Read weights and moments of a verified checkpoint in place, on all ranks together.

    Each rank reads its own part. shared: all see the folder; else those of the first node read it, and the others
    get what they hold copies of. outer: is filled with what the sites had in common, if the checkpoint has it; None: it
    is not read. Raises CheckpointError, on all ranks.
    """
    import torch.distributed.checkpoint as dcp

    from train.checkpoint import metadata

    problem, stored = None, {}
    try:
        if (folder / ".metadata").exists():
            stored = {
                key: (facts.size, facts.properties.dtype)
                for key, facts in metadata.tensors(metadata.read(folder)).items()
            }
    except (Exception, dcp.api.CheckpointException) as error:
        problem = cause(error)
    stored = from_first(stored)
    try:
        for name, weight in weights_of(model).items():
            prefix = f"optimizer.state.{name}."
            optimizer.set_moments(
                weight,
                {
                    key.removeprefix(prefix): blank(weight, *stored[key])
                    for key in stored
                    if key.startswith(prefix)
                },
            )
            for key in (f"weights.{name}", f"momentum.{name}"):
                if outer is not None and f"outer.{key}" in stored:
                    outer[key] = blank(weight, *stored[f"outer.{key}"])
        if shared or folder.exists():
            reader = metadata.Reader(folder)
            dcp.load(tensor_states(model, optimizer, outer), storage_reader=reader, no_dist=True)
    except (Exception, dcp.api.CheckpointException) as error:
        problem = problem or cause(error)
    refuse_misfit(folder, problem)
    if not shared:
        states = tensor_states(model, optimizer, outer)
        replicate([tensor for part in states.values() for tensor in part.values()])


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read the weights of a verified checkpoint in place, on all ranks together, each its own part; no moment is read,
    and a tensor at a time is twice in memory. Raises CheckpointError, on all ranks."""
    import torch.distributed.checkpoint as dcp

    from train.checkpoint import metadata

    problem = None
    try:
        reader = metadata.Reader(folder)
        dcp.load({"model": weights_state(model)}, storage_reader=reader, no_dist=True)
    except (Exception, dcp.api.CheckpointException) as error:
        problem = cause(error)
    refuse_misfit(folder, problem)


def refuse_misfit(folder: Path, problem: str | None) -> None:
    """Raises CheckpointError, on all ranks, where one of them has a problem with what it read."""
    if failed := [problem for problem in from_all(problem) if problem]:
        if failed[0].startswith(".metadata"):
            raise CheckpointError(
                f"{folder}: {failed[0]}. Delete it, or restore it from its origin"
            )
        raise CheckpointError(
            f"{folder}: does not fit this model: {failed[0]}; go on with the settings that "
            "config.json holds"
        )


def blank(weight: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor to read a moment of this weight into: of the weight's shape, spread as it is, or a counter."""
    if size == weight.shape:
        return torch.zeros_like(weight, dtype=dtype)
    return torch.zeros(size, dtype=dtype, device=weight.device)


def cause(error: BaseException) -> str:
    """What went wrong, in a line. DCP wraps the errors of all ranks in one, which is no Exception."""
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    return (str(error).strip() or repr(error)).splitlines()[0]


def needed_bytes(model: nn.Module, sites: int = 1) -> int:
    """Size of a checkpoint, at most: weights, two moments and a counter, and DCP's 3 KiB beside each tensor; of several
    sites also the weights that they have in common, and the momentum of those."""
    weights, copies = [w for w in model.parameters() if w.requires_grad], 5 if sites > 1 else 3
    return (
        copies * sum(w.numel() * w.element_size() for w in weights)
        + (copies + 1) * len(weights) * 3072
        + 2**16
    )


# ---------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------


def write(
    root: Path,
    step: int,
    states: dict[str, Any],
    need: int,
    small: dict[str, Any],
    world: World,
    group: Any = None,
    save: Callable[[dict[str, Any], Path, Any], None] | None = None,
) -> tuple[Path, int]:
    """Write checkpoints/step_N, on the ranks of a group together. Returns (folder, bytes).

    states: as tensor_states has them, or as save(states, folder, group) writes them; need: the bytes they take at most.
    small: states for the manifest, as JSON. A committed folder is replaced only where sites have exchanged something
    since, or it was evaluated. Raises CheckpointError, on all ranks of the group, leaving nothing behind; whatever else
    is raised, a rank is gone."""
    import torch.distributed.checkpoint as dcp

    target = folder_of(root, step)
    temporary = from_first(root / f"{target.name}.tmp-{uuid.uuid4().hex[:8]}", group)
    old = manifest_of(target)
    if from_first(
        target.exists()
        and old.get("sites") == small.get("sites")
        and small.get("val_loss") in (None, old.get("val_loss")),
        group,
    ):
        return target, 0
    problem = None
    try:
        check_space(root, need)
        temporary.mkdir(parents=True, exist_ok=True)
    except (OSError, CheckpointError) as error:
        problem = cause(error)
    refuse_if_any(
        from_all(problem, group), target, temporary, world
    )  # before its collectives: all must enter them
    try:
        if save:
            save(states, temporary, group)
        else:
            writer = dcp.FileSystemWriter(temporary, sync_files=True, single_file_per_rank=True)
            dcp.save(states, storage_writer=writer, no_dist=group is None, process_group=group)
            if world.is_first:
                # torch fsyncs it before the last of its buffer is written (2.11 to 2.13).
                flush_file(temporary / ".metadata")
        files = {
            path.name: describe(path)
            for path in temporary.iterdir()  # .metadata is the first's
            if path.name.startswith(f"__{world.rank}_")
            or (world.is_first and path.name[:2] != "__")
        }
    except (
        Exception,
        dcp.api.CheckpointException,
    ) as error:  # whatever it is, training must be able to go on
        problem, files = cause(error), {}
    gathered = from_all((problem, files), group)
    refuse_if_any([problem for problem, _ in gathered], target, temporary, world)
    all_files = {name: facts for _, part in gathered for name, facts in part.items()}
    if world.is_first:
        try:
            commit(
                temporary,
                target,
                {
                    "schema": SCHEMA,
                    "step": step,
                    **small,
                    "torch": torch.__version__,
                    "world_size": world.size,
                    "files": all_files,
                },
            )
        except Exception as error:  # the others wait to hear of it
            problem = cause(error)
    refuse_if_any(
        [from_first(problem, group)], target, temporary, world
    )  # nobody goes on before the commit
    return target, sum(size for size, _ in all_files.values())


def refuse_if_any(problems: list[str | None], target: Path, temporary: Path, world: World) -> None:
    """Raises CheckpointError with the first of the ranks' problems, the same on all of them."""
    if failed := [(rank, problem) for rank, problem in enumerate(problems) if problem]:
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(existing_parent(target)).free / 2**30
        raise CheckpointError(
            f"{target}: rank {failed[0][0]} could not write it: {failed[0][1]}. The disk has "
            f"{free:.2f} GiB free. Free some space, or keep fewer checkpoints with KEEP_LAST"
        )


def commit(temporary: Path, target: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, make everything durable, and rename."""
    with open(temporary / "MANIFEST.json", "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(temporary)
    old = target.parent / f".trash-{target.name}-{uuid.uuid4().hex[:8]}"
    if target.exists():
        os.rename(target, old)
    os.rename(temporary, target)
    flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint, whose files nobody has looked at; {} where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8")))
    return {}


def describe(path: Path) -> tuple[int, str]:
    """(size, xxh3) of a file."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while piece := file.read(2**24):
            digest.update(piece)
    return path.stat().st_size, digest.hexdigest()


def check_space(root: Path, need: int) -> None:
    """Raises CheckpointError if the disk has no room for one more checkpoint."""
    free = shutil.disk_usage(existing_parent(root)).free
    if free < need:
        raise CheckpointError(
            f"{root}: a checkpoint takes {need / 2**30:.2f} GiB and the disk has "
            f"{free / 2**30:.2f} GiB free; make room, or put RUNS_DIR on another disk"
        )


def existing_parent(path: Path) -> Path:
    return path if path.exists() else existing_parent(path.parent)


def prune(
    root: Path,
    keep_last: int,
    keep_every: int,
    sound: Collection[int] = (),
    always: Collection[int] = (),
) -> list[int]:
    """Delete old checkpoints and leftovers of killed saves; returns the steps deleted.

    Kept are those of `always`, the newest keep_last, the multiples of keep_every, and the two newest that verify: steps
    in `sound` are known to, others are hashed. Renamed first: a kill in between leaves no half a one under its name."""
    clear_leftovers(root)
    steps, deleted = committed(root), []
    kept = set(newest_valid(root, steps, 2, sound)) if len(steps) > keep_last else set(steps)
    for step in steps[:-keep_last]:
        if step in kept or step in always or (keep_every and step % keep_every == 0):
            continue
        trash = root / f".trash-{step}-{uuid.uuid4().hex[:8]}"
        try:
            os.rename(folder_of(root, step), trash)
        except OSError as error:  # as a network disk does for a folder that is being read
            log.warning(
                "checkpoint step_%07d could not be deleted (%s); training goes on",
                step,
                error.strerror,
            )
            continue
        shutil.rmtree(trash, ignore_errors=True)
        deleted.append(step)
    return deleted


def clear_leftovers(root: Path) -> None:
    """Delete what killed saves and deletions have left."""
    for leftover in [*root.glob("step_*.tmp-*"), *root.glob(".trash-*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def newest_valid(root: Path, steps: list[int], count: int, sound: Collection[int]) -> list[int]:
    """The `count` newest of these steps whose checkpoints are in `sound` or verify."""
    found: list[int] = []
    for step in reversed(steps):
        if len(found) == count:
            break
        try:
            if step not in sound:
                read_manifest(folder_of(root, step))
            found.append(step)
        except CheckpointError as error:
            log.warning("checkpoint %s; an older one is kept in its place", error)
    return found


# ---------------------------------------------------------------------------------------------------
# Finding and reading
# ---------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint after every file was found whole. Raises CheckpointError."""
    try:
        manifest = json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))
        files = manifest["files"]
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder.name}: MANIFEST.json is missing or damaged ({error!r})"
        ) from None
    if schema != SCHEMA:
        raise OtherFormat(
            f"{folder}: has format {schema}; this version reads {SCHEMA}. Go on with the version that "
            "wrote it, or choose another RUN_NAME"
        )
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder.name}: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{folder.name}: {name} has {path.stat().st_size} bytes, not {size}"
            )
        try:
            found = describe(path)[1]
        except OSError as error:
            raise CheckpointError(
                f"{folder.name}: {name} cannot be read ({error.strerror})"
            ) from None
        if found != digest:
            raise CheckpointError(f"{folder.name}: {name} is damaged (its hash differs)")
    return manifest


def find_latest(root: Path, before: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that verifies, of those below the step `before` if given, and its manifest.

    None if there has never been one, or with `before` none that verifies. Falls back to older ones with a warning
    each. Raises CheckpointError if none of several verifies: starting over silently would throw a run away; and
    OtherFormat: nothing is damaged there."""
    reasons = []
    for step in reversed(committed(root)):
        if before is not None and step >= before:
            continue
        folder = folder_of(root, step)
        try:
            manifest = read_manifest(folder)
        except OtherFormat:
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            log.warning("checkpoint %s; falling back to %s", reason, folder.name)
        return folder, manifest
    if reasons and before is None:
        raise CheckpointError(
            f"no valid checkpoint in {root} ({len(reasons)} found: {'; '.join(reasons)}). "
            "To start over, choose another RUN_NAME or move that folder away"
        )
    return None


def set_aside(root: Path, after: int, what: str = "damaged") -> None:
    """Take the checkpoints past a step, which are of no use, out of the way of those that training will write."""
    for step in committed(root):
        if step > after:
            folder = folder_of(root, step)
            aside = root / f".{what}-{folder.name}-{uuid.uuid4().hex[:8]}"
            try:
                os.rename(folder, aside)
            except OSError as error:
                raise CheckpointError(
                    f"{folder}: is {what} and cannot be renamed ({error.strerror}); move it "
                    "away, so that training can write that step again"
                ) from None
            log.warning(
                "checkpoint %s was set aside as %s; delete it when you have no more use for it",
                folder.name,
                aside,
            )


def latest_for_all(
    root: Path, world: World, before: int | None = None, what: str = "damaged"
) -> tuple[Path, dict[str, Any]] | None:
    """`find_latest` by the first rank, the same answer on all. Those past it are set aside."""
    answer: Any = None
    if world.is_first:
        try:
            answer = find_latest(root, before)
            if answer:
                set_aside(root, answer[1]["step"], what)
        except CheckpointError as error:
            answer = error
    answer = from_first(answer)
    if isinstance(answer, CheckpointError):
        raise answer
    return answer
