"""All that training needs, in one place: put together by main.py, passed to what trains, saves and recovers."""

import dataclasses
import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from record.metrics import Recorder
from record.run_paths import RunPaths
from record.status import Status
from record.trackers.processes import TrackerProcess
from settings.config import Config
from train.checkpoint.saver import Saver
from train.data.batch import Loader
from train.data.mixture import Gap
from train.data.streaming.consumer import Feed
from train.data.tokenizer import Vocabulary
from train.distributed.parallel import groups_of
from train.distributed.signals import Interrupt
from train.distributed.world import World, set_timeout
from train.evaluate.core.score import Core
from train.evaluate.validation import Evaluator
from train.faults.guard import Guard
from train.faults.watchdog import Watchdog
from train.optim import Optimizer

if TYPE_CHECKING:  # it loads torchft, which takes seconds
    from train.diloco.outer_step import Site
    from train.diloco.site_registry import Desk

TO_STOP_S = 20.0  # told to stop, a process may need so long, and some steps, to the end of its step


class Pace:
    """How long a step may take, from how long steps took: what is slow by nature does not hang."""

    def __init__(self, c: Config, model: nn.Module, watch: Watchdog):
        self.c, self.groups, self.watch = c, groups_of(model), watch
        self.times, self.collective_s = deque[float](maxlen=50), 0.0

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which a step hangs: half of what a collective is given."""
        return (
            max(self.c.train_timeout_s / 2, 10 * median(self.times))
            if self.times
            else self.c.start_timeout_s
        )

    def begin(self, step: int) -> None:
        """This step begins."""
        self.watch.expect(f"step {step}", self.limit_s, "TRAIN_TIMEOUT_S", impatient=True)

    def end(self, seconds: float) -> None:
        """A step has ended."""
        self.times.append(seconds)
        self.watch.patience_s = TO_STOP_S + 3 * max(self.times)
        if not self.collective_s / 1.5 < 2 * self.limit_s < self.collective_s * 1.5:
            self.restore()

    def restore(self) -> None:
        """Collectives have the time of training's again."""
        self.collective_s = 2 * self.limit_s
        set_timeout(self.collective_s, self.groups)

    def allow(self, doing: str, limit_s: float, setting: str = "") -> None:
        """Something else than a step begins, for which others may wait so long; setting: the one
        that decides how long, if one does."""
        self.watch.expect(doing, limit_s, setting)
        set_timeout(2 * limit_s, self.groups)


@dataclasses.dataclass
class Job:
    """`step` counts committed optimizer steps."""

    config: Config
    paths: RunPaths
    world: World
    model: nn.Module
    optimizer: Optimizer
    loader: Loader
    evaluator: Evaluator
    recorder: Recorder
    status: Status
    interrupt: Interrupt
    watch: Watchdog
    pace: Pace
    saver: Saver
    guard: Guard
    data_fingerprint: str
    vocabulary: Vocabulary
    compressed_bpb: dict[str, float]
    shared: bool = True  # whether all nodes see the run's folder
    feed: Feed | None = None  # where shards are made while the run trains
    flops: tuple[float, float] | None = (
        None  # of a token, with full and causal attention, where no rule knows them
    )
    starved: bool = False  # whether some rank has not the data of the next step
    opened: dict[str, Any] | None = (
        None  # what of the data the checkpoint has seen, until that is compared
    )
    step: int = 0
    gaps: tuple[Gap, ...] = ()
    evaluated_at: int = 0  # the last step with a validation loss
    validated: tuple[int, float] | None = (
        None  # the last one's step and loss, where it did not fail
    )
    core: Core | None = None  # where CORE_EVERY asks for that metric
    core_at: int = 0  # the last step that has it
    shares_said: set[str] = dataclasses.field(
        default_factory=set
    )  # settings by which evaluation takes much time
    saved_at: float = dataclasses.field(default_factory=time.monotonic)
    save_soon: bool = False  # the first rank wants a checkpoint behind the next step
    last_stall_s: float = 0.0  # of a save that no step has reported yet
    site: "Site | None" = None  # of SYNC=diloco, on all ranks; desk: on the first
    desk: "Desk | None" = None
    late: bool = False  # whether the other sites are further than this one
    away: tuple[tuple[int, int], ...] = ()  # steps that this site took no part in, as (from, to)
    exchange_stall_s: float = 0.0  # of exchanges that no step has reported yet
    exchanged_with: int = 0  # sites that took part in the last one
    kept_outer: tuple[dict[str, Any], dict[str, Any]] | None = (
        None  # a checkpoint's, until the site stands there
    )
    trackers: list[TrackerProcess] = dataclasses.field(default_factory=list)

    @property
    def outer(self) -> dict[str, Tensor] | None:
        """What this site has in common with others, for a checkpoint; None where there are no others."""
        return self.site.states() if self.site else None

    @property
    def tokens(self) -> int:
        return self.step * self.config.batch_tokens

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """What of each source the weights have seen (batch.Loader.shares)."""
        return self.loader.shares(self.step, self.gaps)
