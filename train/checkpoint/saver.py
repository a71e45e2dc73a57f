"""When a checkpoint is written: copied aside in a moment, and written by a thread while training goes on.

    start: wait for the save before -> copy weights and moments to host memory -> thread: write, commit, prune
    poll:  has it ended?             wait: until it has

What training loses is the copy. The thread's ranks agree among themselves over a group of their own, so that it
never touches training's collectives, and no rank has to ask another whether a save has ended. A failed save leaves
the last good checkpoint whole and training running; it is tried once more, then at the next turn.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from settings.config import Config
from train import timeouts
from train.checkpoint import checkpoint
from train.checkpoint.checkpoint import CheckpointError
from train.distributed.parallel import is_split, writers
from train.distributed.world import World, from_first, group_of, report_progress, use_device
from train.optim import Optimizer

log = logging.getLogger(__name__)

SLOW_DISK = 20e6  # bytes/s that any disk writes
MISSES = 5  # failed saves in a row that end the run: what it would lose grows with each


@dataclasses.dataclass(frozen=True)
class Saved:
    """How a save ended. `problem` is None where it is committed."""

    step: int
    folder: Path
    size: int  # bytes
    seconds: float  # from the start, the copy included
    problem: str | None = None


class Lite(Protocol):
    """Checkpoints of less than all that training needs: fine-tuning's adapters (finetune/lite.py)."""

    def due(self, step: int) -> bool:
        """Whether the checkpoint of this step is one."""

    def copied(self, model: nn.Module) -> dict[str, Any]:
        """What this process writes, in host memory."""

    def write(self, states: dict[str, Any], folder: Path, group: Any) -> None:
        """Write it, on the ranks of a group together. Raises Exception where that fails, on one or all."""

    def load(self, folder: Path, model: nn.Module, optimizer: Optimizer, shared: bool) -> None:
        """Read it back in place, on all ranks together; the optimizer starts anew. Raises CheckpointError, on all."""


class Saver:
    """Writes the checkpoints of a run. Created, started and waited for by all ranks; some of them write."""

    def __init__(self, root: Path, c: Config, world: World, need: int):
        """need: bytes of a checkpoint, at most."""
        self.root, self.c, self.world, self.need = root, c, world, need
        self.ranks = writers(c, world)
        self.writes = world.rank in self.ranks
        write_s = need / len(self.ranks) / SLOW_DISK
        self.group_s = (
            timeouts.CHECKPOINT_TIMEOUT_S + write_s
        )  # for one of the ranks to wait for another
        self.limit_s = 2 * timeouts.CHECKPOINT_TIMEOUT_S + write_s  # for all of a save
        self.group = group_of(self.ranks, self.group_s)
        self.thread: threading.Thread | None = None
        self.ended: Saved | None = None  # not yet asked for
        self.stager: Any = None
        self.misses = 0
        self.sound: set[int] = set()  # checkpoints that this process verified or wrote
        self.began = time.perf_counter()  # the last save, or this attempt
        self.stall_s = 0.0  # for which training waited, and no step has reported yet
        self.is_shared = True  # whether all nodes see the folder
        self.lite: Lite | None = None

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def warm_up(
        self, model: nn.Module, optimizer: Optimizer, outer: dict[str, Tensor] | None = None
    ) -> None:
        """Import what the first save will need, and make room for its copy, beside the training that goes on.

        What is copied here is torn, and written nowhere.
        """
        states = (
            self.share(checkpoint.tensor_states(model, optimizer, outer)) if self.writes else {}
        )

        def prepare() -> None:
            use_device(self.world)
            with contextlib.suppress(Exception):  # the first save will say it
                self.copied(states)

        self.thread = threading.Thread(target=prepare, name="saver", daemon=True)
        self.thread.start()

    def start(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        small: dict[str, Any],
        outer: dict[str, Tensor] | None = None,
    ) -> None:
        """Begin to save. Returns once weights and moments are copied, and training may change them.

        outer: what several sites have in common.

        Raises CheckpointError, on all ranks, after too many failures in a row.
        """
        self.wait()
        message, misses, newest = from_first(
            (self.too_many_misses(), self.misses, max(self.sound, default=0))
        )
        if message:
            raise CheckpointError(message)
        if misses:
            self.group = group_of(
                self.ranks, self.group_s
            )  # one that has timed out once works no more
        if newest and not self.writes:  # each node's launcher counts checkpoints
            report_progress(self.world, newest)
        self.began = time.perf_counter()
        if not self.writes:
            return
        lite = self.lite if self.lite and self.lite.due(step) else None
        if lite:
            small = small | {"mode": "lite"}
        states = {} if lite else self.share(checkpoint.tensor_states(model, optimizer, outer))
        try:
            states = lite.copied(model) if lite else self.copied(states)
        except (
            Exception
        ) as error:  # most likely host memory: without the copy it can still be written, if slowly
            log.warning(
                "checkpoint: no copy could be made aside (%s); training waits for this save",
                checkpoint.cause(error),
            )
            self.write(step, states, small)
            return
        self.thread = threading.Thread(
            target=self.write,
            args=(step, states, small, lite and lite.write),
            name="saver",
            daemon=True,
        )
        self.thread.start()

    def share(self, states: dict[str, Any]) -> dict[str, Any]:
        """What of the states this process writes: where each has all of them, a part as large as the others'."""
        if is_split(self.c, self.world) or len(self.ranks) == 1:
            return states
        named = [
            (part, name, tensor)
            for part, tensors in states.items()
            for name, tensor in tensors.items()
        ]
        named.sort(key=lambda entry: (-entry[2].nbytes, entry[0], entry[1]))
        load = dict.fromkeys(self.ranks, 0)
        mine: dict[str, dict[str, Any]] = {part: {} for part in states}
        for part, name, tensor in named:
            rank = min(load, key=load.__getitem__)
            load[rank] += tensor.nbytes
            if rank == self.world.rank:
                mine[part][name] = tensor
        return mine

    def copied(self, states: dict[str, Any]) -> dict[str, Any]:
        """The states in host memory, which is kept for the next save."""
        if self.stager is None:
            self.stager = checkpoint.stager(on_gpu=self.world.device.type == "cuda")
        staged: dict[str, Any] = self.stager.stage(states)
        return staged

    def write(
        self, step: int, states: dict[str, Any], small: dict[str, Any], save: Any = None
    ) -> None:
        """The thread: to the commit, and the deletion of what is no longer to be kept. save: in the place of DCP's."""
        use_device(self.world)
        folder = checkpoint.folder_of(self.root, step)
        try:
            folder, size = checkpoint.write(
                self.root, step, states, self.need, small, self.world, self.group, save
            )
            self.sound.add(step)
            self.misses = 0
            report_progress(self.world, step)
            if self.world.is_first:
                found = best(self.root) if self.c.keep_best else None
                checkpoint.prune(
                    self.root,
                    self.c.keep_last,
                    self.c.keep_every,
                    self.sound,
                    always=[found[1]] if found else [],
                )
            self.ended = Saved(step, folder, size, time.perf_counter() - self.began)
        except BaseException as error:
            self.misses += 1
            self.ended = Saved(
                step, folder, 0, time.perf_counter() - self.began, checkpoint.cause(error)
            )

    def poll(self) -> Saved | None:
        """How the last save ended, once; None as long as it goes on, and where there was none. Never waits."""
        if self.ended is None:
            return None
        ended, self.ended = self.ended, None
        return ended

    def wait(self) -> None:
        """Until no save goes on; `poll` then has how it ended. A peer that is gone ends it by its time-out."""
        if self.thread:
            self.thread.join()

    def too_many_misses(self) -> str | None:
        if self.misses < MISSES:
            return None
        return (
            f"{self.misses} checkpoints in a row could not be written, so that too much would be lost: see above "
            "for the reason of each"
        )


def best(root: Path) -> tuple[float, int] | None:
    """(validation loss, step) of the checkpoint with the lowest, of equal ones the earliest; None where none has one.

    Saved in the checkpoint itself, so that a resumed run knows it. No file is verified.
    """
    losses = (
        (checkpoint.manifest_of(checkpoint.folder_of(root, step)).get("val_loss"), step)
        for step in checkpoint.committed(root)
    )
    return min(((float(loss), step) for loss, step in losses if loss is not None), default=None)
