"""Which checkpoints of a run are sound: the newest to resume from, and those to keep.

`latest` is stored nowhere. It is the highest step whose manifest and files verify, so a bad checkpoint
is passed over. A trainer that resumes renames what it passed over, and never deletes it:
.damaged-step_N-..., or .rolled-back-step_N-... for steps that the run has given up.
"""

import logging
import math
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from record.run_paths import list_checkpoints as committed
from record.run_paths import name_checkpoint
from train.checkpoint.manifest import CheckpointError, OtherFormat, load_manifest, verify
from train.distributed.world import World, broadcast_object, raise_on_all_ranks

log = logging.getLogger(__name__)


def folder_of(root: Path, step: int) -> Path:
    return root / name_checkpoint(step)


def find_verified(
    root: Path, count: int, verified: Collection[int] = (), before: float = math.inf
) -> tuple[list[int], list[CheckpointError]]:
    """Find the newest checkpoints that verify.

    Args:
        root: the run's folder of checkpoints.
        count: how many to find.
        verified: steps that are known to verify; their files are not read.
        before: only steps below this one.

    Returns:
        Their steps, newest first, and what is wrong with those that were passed over.
    """
    steps: list[int] = []
    problems: list[CheckpointError] = []
    for step in reversed(committed(root)):
        if len(steps) == count:
            break
        if step >= before:
            continue
        try:
            if step not in verified:
                verify(folder_of(root, step))
            steps.append(step)
        except CheckpointError as error:
            problems.append(error)
    return steps, problems


def find_latest(root: Path, before: float = math.inf) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint that verifies, of those below the step `before`, and its manifest.

    Returns:
        None if there has never been one, or with `before` if none verifies.

    Raises:
        CheckpointError: none of several verifies. Starting over silently would throw a run away.
        OtherFormat: a later version wrote a newer one, which is not damaged.
    """
    steps, problems = find_verified(root, 1, before=before)
    for problem in problems:
        if isinstance(problem, OtherFormat):
            raise problem
    if steps:
        folder = folder_of(root, steps[0])
        for problem in problems:
            log.warning("checkpoint %s; falling back to %s", problem, folder.name)
        return folder, load_manifest(folder)
    if problems and before == math.inf:
        reasons = "; ".join(map(str, problems))
        raise CheckpointError(
            f"no valid checkpoint in {root} ({len(problems)} found: {reasons}). "
            "To start over, choose another RUN_NAME or move that folder away"
        )
    return None


def latest_for_all(
    root: Path, world: World, before: float = math.inf, reason: str = "damaged"
) -> tuple[Path, dict[str, Any]] | None:
    """Return what `find_latest` finds on the first rank, on all ranks. Newer ones are set aside.

    Raises CheckpointError, on all ranks.
    """
    latest = None
    with raise_on_all_ranks(CheckpointError):
        if world.is_first:
            latest = find_latest(root, before)
    latest = broadcast_object(latest)
    if latest:
        quarantine_later(root, world, latest[1]["step"], reason)
    return latest


def quarantine_later(root: Path, world: World, after: int, reason: str) -> None:
    """Set aside the checkpoints after a step, whose names training will need.

    Raises CheckpointError, on all ranks.
    """
    with raise_on_all_ranks(CheckpointError):
        if not world.is_first:
            return
        for step in committed(root):
            if step <= after:
                continue
            folder = folder_of(root, step)
            try:
                aside = quarantine(folder, reason)
            except OSError as error:
                raise CheckpointError(
                    f"{folder}: is {reason} and cannot be renamed ({error.strerror}); move it "
                    "away, so that training can write that step again"
                ) from None
            log.warning(
                "checkpoint %s was set aside as %s; delete it when you have no more use for it",
                folder.name,
                aside,
            )


def quarantine(folder: Path, reason: str) -> Path:
    """Rename a checkpoint to .REASON-step_N-..., at once, and return its path. Raises OSError."""
    return folder.rename(folder.parent / f".{reason}-{folder.name}-{uuid.uuid4().hex[:8]}")


def prune(
    root: Path,
    keep_last: int,
    keep_every: int,
    verified: Collection[int] = (),
    always: Collection[int] = (),
) -> None:
    """Delete old checkpoints and leftovers of killed saves.

    Those of `always`, the newest `keep_last`, the multiples of `keep_every` and the two newest that verify
    stay. Steps in `verified` are known to verify.
    """
    clear_leftovers(root)
    old = committed(root)[:-keep_last]
    if not old:  # nothing to delete, so nothing to hash
        return
    newest_verified, problems = find_verified(root, 2, verified)
    for problem in problems:
        log.warning("checkpoint %s; an older one is kept in its place", problem)
    for step in old:
        if step in newest_verified or step in always or (keep_every and step % keep_every == 0):
            continue
        folder = folder_of(root, step)
        try:
            # Renamed first: a kill in between leaves no half a checkpoint under its name.
            discard(quarantine(folder, "trash"))
        except OSError as error:  # as a network disk does for a folder that is being read
            log.warning(
                "checkpoint %s could not be deleted (%s); training continues",
                folder.name,
                error.strerror,
            )


def clear_leftovers(root: Path) -> None:
    """Delete what killed saves and deletions have left."""
    for leftover in [*root.glob("step_*.tmp-*"), *root.glob(".trash-*")]:
        discard(leftover)


def discard(folder: Path) -> None:
    """Delete a folder as far as it can be. Of a link to one, the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def best(root: Path) -> tuple[float, int] | None:
    """Return the lowest validation loss of all checkpoints and its step, of equal ones the earliest.

    None if no checkpoint has a loss. It is kept in the manifest, so that a resumed run knows it.
    """
    losses = []
    for step in committed(root):
        try:
            loss = load_manifest(folder_of(root, step)).get("val_loss")
        except CheckpointError:
            continue
        if loss is not None and not math.isnan(loss):
            losses.append((float(loss), step))
    return min(losses, default=None)
