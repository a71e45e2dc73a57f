"""When a checkpoint is written: copied to host memory at once, and written by a thread while training goes on.

    start: wait for the save before -> copy weights and moments to host memory -> thread: write, prune
    poll:  has it ended?             wait: until it has

What training loses is the copy. The thread's ranks agree among themselves over a group of their own, so it
never touches training's collectives, and no rank has to ask another whether a save has ended. A failed
save leaves the last good checkpoint whole and training running. It is tried once more, then at the next
turn.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from settings.config import Config
from train import timeouts
from train.checkpoint import checkpoint, find
from train.checkpoint.manifest import CheckpointError
from train.distributed.parallel import is_split, writers
from train.distributed.world import World, broadcast_object, group_of, report_progress, use_device
from train.optim import Optimizer

log = logging.getLogger(__name__)

SLOW_DISK = 20e6  # bytes/s that any disk writes
MOST_FAILURES = 5  # failed saves in a row that end the run: what it would lose grows with each


@dataclasses.dataclass(frozen=True)
class Saved:
    """How a save ended. `problem` is None if it is committed."""

    step: int
    size: int  # bytes; 0 if it was there already
    seconds: float  # from the start, the copy included
    problem: str | None = None


class Saver:
    """Writes the checkpoints of a run. Created, started and waited for by all ranks; some of them write."""

    def __init__(self, root: Path, config: Config, world: World, need: int, is_shared: bool = True):
        """need: the most bytes that a checkpoint can take. is_shared: all nodes see the folder."""
        self.root = root
        self.config = config
        self.world = world
        self.need = need
        self.ranks = writers(config, world)
        self.writes = world.rank in self.ranks
        write_s = need / len(self.ranks) / SLOW_DISK
        # For one of the ranks to wait for another, and for all of a save.
        self.group_s = timeouts.CHECKPOINT_TIMEOUT_S + write_s
        self.limit_s = timeouts.CHECKPOINT_TIMEOUT_S + self.group_s
        self.group = group_of(self.ranks, self.group_s)
        self.thread = threading.Thread()
        self.ended: Saved | None = None  # for `poll`
        self.stager: Any = None
        self.failures = 0
        self.verified: set[int] = set()  # steps whose checkpoints this process verified or wrote
        self.began = time.perf_counter()  # the last save, or this attempt
        self.stall_s = 0.0  # for which training waited, and no step has reported yet
        self.is_shared = is_shared
        self.lite: Any = None  # fine-tuning's checkpoints of adapters alone (finetune/lite.py)

    @property
    def busy(self) -> bool:
        return self.thread.is_alive()

    def warm_up(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Import what the first save needs, and make room for its copy, while training goes on.

        What is copied here is torn, and written nowhere.
        """
        if not self.writes:
            return
        states = self.share(checkpoint.tensor_states(model, optimizer))

        def prepare() -> None:
            use_device(self.world)
            with contextlib.suppress(Exception):  # the first save will say it
                self.copy(states)

        self.run(prepare)

    def start(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        facts: dict[str, Any],
        outer: dict[str, Tensor] | None = None,
    ) -> None:
        """Begin to save. Returns once weights and moments are copied, and training may change them.

        Args:
            facts: states for the manifest, as JSON.
            outer: what several sites have in common.

        Raises CheckpointError, on all ranks, after too many failures in a row.
        """
        self.wait()
        failures, newest = broadcast_object((self.failures, max(self.verified, default=0)))
        if failures >= MOST_FAILURES:
            raise CheckpointError(
                f"{failures} checkpoints in a row could not be saved, for the reasons above. "
                f"{broadcast_object(self.describe_loss(step))}"
            )
        if failures:  # a group in which one has timed out works no more
            self.group = group_of(self.ranks, self.group_s)
        if newest and not self.writes:  # each node's launcher counts checkpoints
            report_progress(self.world, newest)
        self.began = time.perf_counter()
        if not self.writes:
            return
        if self.lite and self.lite.due(step):
            adapters = self.lite.copied(model)
            self.run(self.write, step, adapters, facts | {"mode": "lite"}, self.lite.write)
            return
        states = checkpoint.tensor_states(model, optimizer, outer)
        facts = facts | {
            "tensors": sum(map(len, states.values())),
            "moments": len(states["optimizer"]),
        }
        states = self.share(states)
        try:
            copy = self.copy(states)
        except Exception as error:  # most likely host memory: it can still be written, if slowly
            log.warning(
                "checkpoint: no copy could be made aside (%s); training waits for this save",
                checkpoint.cause(error),
            )
            self.write(step, states, facts)
        else:
            self.run(self.write, step, copy, facts)

    def describe_loss(self, step: int) -> str:
        """Say what is lost of a run that ends at this step because it cannot be saved, and how to go on."""
        newest = max(self.verified, default=0)
        lost = f"the {step} steps of this run are lost"
        if newest:
            lost = f"the steps after {newest} are lost"
        return f"Training stopped at step {step}, and {lost}. Fix that. Run the same command to resume."

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        self.thread = threading.Thread(target=function, args=arguments, name="saver", daemon=True)
        self.thread.start()

    def share(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank writes: of replicated weights, a part about as large as the others'."""
        if is_split(self.config, self.world):
            return states
        entries = [(kind, name) for kind, tensors in states.items() for name in tensors]
        entries.sort(key=lambda entry: (states[entry[0]][entry[1]].nbytes, *entry))
        mine: dict[str, dict[str, Any]] = {kind: {} for kind in states}
        for kind, name in entries[self.world.rank :: len(self.ranks)]:
            mine[kind][name] = states[kind][name]
        return mine

    def copy(self, states: dict[str, Any]) -> Any:
        """Copy states to host memory, which is kept for the next save."""
        if self.stager is None:
            self.stager = checkpoint.build_stager(on_gpu=self.world.device.type == "cuda")
        return self.stager.stage(states)

    def write(
        self, step: int, states: dict[str, Any], facts: dict[str, Any], save: Any = None
    ) -> None:
        """Write a checkpoint, and delete those that are no longer to be kept. Runs in the thread."""
        use_device(self.world)
        size, problem = 0, None
        try:
            size = checkpoint.write(
                self.root, step, states, self.need, facts, self.world, self.group, save
            )
            self.verified.add(step)
            self.failures = 0
            report_progress(self.world, step)
            if self.world.is_first:
                lowest = find.best(self.root) if self.config.keep_best else None
                always = [lowest[1]] if lowest else []
                find.prune(
                    self.root, self.config.keep_last, self.config.keep_every, self.verified, always
                )
        except BaseException as error:
            self.failures += 1
            problem = checkpoint.cause(error)
        self.ended = Saved(step, size, time.perf_counter() - self.began, problem)

    def poll(self) -> Saved | None:
        """Return how the last save ended, once; None while it goes on, or if there was none. Never waits."""
        ended = self.ended
        if ended:  # the thread may be about to set it
            self.ended = None
        return ended

    def wait(self) -> None:
        """Wait until no save goes on; `poll` then has how it ended. A peer that is gone ends it by its time-out."""
        if self.thread.ident:
            self.thread.join()
