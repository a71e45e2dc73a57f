"""Shards that are made while the run trains: training waits for them, and the producer hears what it has used."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from train.checkpoint import find, resume
from train.data.manifest import DataError
from train.data.streaming.consumer import FIRST_LINE_S, StreamingClient
from train.distributed.world import all_gather_object
from train.hooks.hook import STOP, Hook, Requests
from train.step import StepNumbers
from train.when_to_save import save

if TYPE_CHECKING:
    from train.job import Job


class Interrupted(Exception):
    """A rank was told to stop while all wait for data. Raised on all ranks."""


class StreamedData(Hook):
    """Has training wait where a rank lacks the data of the next step.

    Attributes:
        is_starved: whether any rank may lack them.
        needs_room: whether a checkpoint would let shards be deleted.
    """

    def __init__(self, client: StreamingClient):
        self.client = client
        self.is_starved = True
        self.needs_room = False
        self.opened: Any = None  # what of the data the checkpoint has seen, until it is compared

    def at_start(self, job: "Job") -> Requests | None:
        requests = self.wait(job)
        if self.opened and not requests:
            resume.check_data(job, self.opened)
            self.opened = None
        return requests

    def before_step(self, job: "Job") -> Requests | None:
        if self.is_starved and self.wait(job):
            return STOP
        self.tell_producer(job)
        requests = set()
        if self.needs_room:
            requests.add("save")
        if job.step + 1 < job.config.last_step and job.loader.missing(job.step + 1, job.gaps):
            requests.add("data")
        return frozenset(requests)

    def after_step(self, job: "Job", numbers: StepNumbers) -> dict[str, Any]:
        self.is_starved = "data" in numbers.requests
        return {}

    def before_save(self, job: "Job", manifest: dict[str, Any]) -> None:
        self.needs_room = False

    def after_load(
        self, job: "Job", manifest: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        self.opened = manifest["data"]["opened"]

    def after_jump(self, job: "Job") -> None:
        self.is_starved = True  # until all ranks are known to have the next batch

    def close(self, job: "Job", code: int, is_hurried: bool) -> None:
        self.client.close()

    def wait(self, job: "Job") -> Requests | None:
        """Wait, all ranks together, until each has the data of the next step, or one was told to stop.

        Raises DataError, after saving, where waiting is of no use.
        """
        limit_s = job.config.start_timeout_s

        def find_lacking() -> str:
            self.tell_producer(job, now=True)
            job.deadlines.progress(limit_s)
            if any(all_gather_object(job.interrupt.asked is not None)):
                raise Interrupted
            return job.loader.missing(job.step, job.gaps)

        def say(line: str) -> None:
            job.status.phase("data")
            job.recorder.say(line)

        with job.activity("waiting for data", limit_s, "START_TIMEOUT_S"):
            try:
                waited_s = self.client.wait(find_lacking, say)
            except Interrupted:
                return STOP
            except DataError as error:
                self.give_up(job, error)
        self.is_starved = False
        job.waited_s += waited_s
        if waited_s > FIRST_LINE_S:
            job.recorder.say(
                f"waited {waited_s:.1f} s for data at step {job.step}: their producer is slower than training"
            )
            job.status.phase("training")
        return None

    def give_up(self, job: "Job", problem: DataError) -> NoReturn:
        """Save what there is, and raise DataError on all ranks."""
        saved = ""
        if job.step and job.config.save_every != 0:
            saved = ", saved"
            save(job, wait=True)
        raise DataError(
            f"{problem}. The run stands at step {job.step}{saved}. Run the same command to resume"
        )

    def tell_producer(self, job: "Job", now: bool = False) -> None:
        """Tell the producer now and then where training is, and delete what training is through with.

        Where too much is left that no checkpoint is past, ask for a checkpoint.
        """
        if not job.world.is_first or not (now or self.client.due):
            return
        saved = find.committed(job.paths.checkpoints)
        # Not the newest, in case that one turns out to be damaged.
        behind = saved[-2] if len(saved) > 1 else 0
        at, until, after_next = (
            job.loader.consumed(step, job.gaps) for step in range(job.step, job.step + 3)
        )
        through = at
        if job.config.save_every != 0:
            through = job.loader.consumed(min(behind, job.step), job.gaps)
        self.client.tell(at, until)
        # Other ranks may be looking already whether they have the step after the one that begins.
        self.client.make_room(job.loader.sources, job.loader.mixture.orders, through, after_next)
        if self.client.over_budget_bytes > 0 and job.loader.open_groups(
            at
        ) != job.loader.open_groups(through):
            self.needs_room = True
