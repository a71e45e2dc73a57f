"""The trainer's side of streaming: what it has of the data, and the producer that makes more (producer.py).

    first rank:  starts the producer, tells it where training is, reads how far it has come, and starts
                 it again when it has died; deletes shards that training is through with, if
                 DATA_CACHE_GB is used up
    all ranks:   read the manifests that the producer writes; a step begins when the groups of its
                 samples are whole

The first rank deletes between two steps, and nothing that lies in them, so that no rank looks for a
shard and finds it gone when it reads. A producer that has died costs nothing as long as there is data
ahead. When training has to wait for one that is refused, or comes no further for 15 minutes, the run
ends with what it said last.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from record import number_formats
from record.regular_file import only_regular
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from train import timeouts
from train.data.manifest import DataError
from train.data.mixture import SourceOrder
from train.data.shards import ShardSet
from train.data.streaming.node_transfer import Relay
from train.distributed.world import all_gather_object, raise_together

log = logging.getLogger(__name__)

RESTART_S = 2.0  # before a producer that has died is started again
REFUSED_S = 60.0  # before one that was refused is
TELL_S = 5.0  # between two messages to it, if nothing is urgent
URGENT_S = 1.0  # if the disk is full
LOOK_S = 0.2  # between two looks at whether data have come
FIRST_LINE_S = 2.0  # of waiting, after which it is said; then at growing distances up to:
LINE_S = 60.0


class StreamingClient:
    """The producer as the first rank knows it, and the relay to nodes with a DATA_DIR of their own.

    Args:
        held_out: validation shards of each source that training begins with.
        produces: whether shards are still made.

    Attributes:
        ready: whether the producer holds the folders, and has changed there what it will.
        excess: bytes to be deleted, so that the next shard fits into DATA_CACHE_GB.
    """

    def __init__(
        self,
        config: Config,
        paths: RunPaths,
        first: bool,
        held_out: Mapping[str, int],
        produces: bool = True,
        relay: Relay | None = None,
    ):
        self.config = config
        self.paths = paths
        self.first = first
        self.held_out = dict(held_out)
        self.relay = relay
        self.process: subprocess.Popen[bytes] | None = None
        self.died_s: float | None = None
        self.problem = ""  # why it died
        self.is_refused = False  # trying again is of no use
        self.logged = ""  # the problem that was logged last
        self.ready = not (first and produces)
        self.over_budget_bytes = 0
        self.tokens: dict[str, int] = {}  # made of each source
        self.made_before = 0  # shards, by earlier producers
        self.made = 0  # by this one
        self.furthest = (0, 0)  # shards, and tokens of the next
        now = time.monotonic()
        self.moved_s = now  # when it came further
        self.told_s = now  # when it was told where training is
        self.position = b""
        if first and produces:
            self.start()

    def start(self) -> None:
        """Start the producer, with the settings that this process has."""
        self.paths.producer_log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.paths.producer_log, "ab", opener=only_regular) as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "train.data.streaming.producer"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        assert self.process.stdin and self.process.stdout
        os.set_blocking(self.process.stdin.fileno(), False)
        self.died_s = None
        self.problem = ""
        self.is_refused = False
        self.made = 0
        lines = self.process.stdout
        self.listener = threading.Thread(target=self.listen, args=(lines,), daemon=True)
        self.listener.start()
        # An env file may have changed since the trainer read it.
        settings = {name.lower(): value for name, value in self.config.values().items()}
        begin = {"settings": settings, "held_out": self.held_out}
        self.write(json.dumps(begin).encode() + b"\n")
        self.write(self.position)

    def listen(self, lines: IO[bytes]) -> None:
        """Read what the producer writes, until it ends."""
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # what a library has printed
                self.take(json.loads(line))

    def take(self, report: dict[str, Any]) -> None:
        """Take in a line of the producer."""
        if "error" in report:
            self.problem = report["error"]
            self.is_refused = not report["again"]
            return
        self.tokens[report["source"]] = report["tokens"]
        self.over_budget_bytes = report["over_budget_bytes"]
        self.made = report["made"]
        self.ready = True
        if self.made:
            self.logged = ""
        reached = (self.made_before + self.made, report["pending"])
        if reached > self.furthest:
            self.furthest = reached
            self.moved_s = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the producer should be told again where training is."""
        interval_s = URGENT_S if self.over_budget_bytes > 0 else TELL_S
        return self.first and time.monotonic() - self.told_s > interval_s

    def tell(self, at: dict[str, int], until: dict[str, int]) -> None:
        """Tell the producer which windows of each source are taken, and which are after the next step."""
        self.told_s = time.monotonic()
        if self.relay:
            self.relay.at = dict(at)
        self.position = json.dumps({"at": at, "until": until}).encode() + b"\n"
        self.write(self.position)
        self.look_after()

    def write(self, line: bytes) -> None:
        if self.process and self.process.stdin:
            # Full: it is told again later. Gone: look_after notices.
            with contextlib.suppress(OSError):
                os.write(self.process.stdin.fileno(), line)

    def look_after(self) -> None:
        """Start the producer again if it has died. Each reason is logged once."""
        if not self.process or self.process.poll() is None:
            return
        if self.died_s is None:
            self.listener.join(1.0)  # its last lines
            self.died_s = time.monotonic()
            self.made_before += self.made
            self.made = 0
            if not self.problem:
                code = self.process.returncode
                self.problem = f"it ended with code {code}, see {self.paths.producer_log}"
            if self.problem != self.logged:
                log.warning(
                    "the producer of data has stopped: %s. Training continues with what there is, and it is "
                    "started again",
                    self.problem,
                )
            self.logged = self.problem
            return
        pause_s = REFUSED_S if self.is_refused else RESTART_S
        if time.monotonic() - self.died_s >= pause_s:
            self.start()

    def progress(self) -> str:
        """Return how far the producer has come, as the end of a message."""
        made = [
            f"{name} {number_formats.count(count)} tokens"
            for name, count in sorted(self.tokens.items())
        ]
        return f"; made so far: {', '.join(made)}" if made else ""

    def make_room(
        self,
        sources: Sequence[ShardSet],
        orders: Sequence[SourceOrder],
        begin: Mapping[str, int],
        end: Mapping[str, int],
    ) -> None:
        """Delete shards that training is through with, as far as DATA_CACHE_GB asks for it.

        What any rank may look for before this is called again lies between `begin` and `end`, and what
        the run may go back to.
        """
        for shards, order in zip(sources, orders, strict=True):
            for shard in order.passed(begin[order.name], end[order.name]):
                if self.over_budget_bytes > 0 and shards.is_there(shard):
                    info = shards.shards["train"][shard]
                    log.info("%s: deleted %s, which the run is through with", order.name, info.file)
                    (shards.folder / info.file).unlink(missing_ok=True)
                    self.over_budget_bytes -= info.bytes

    def wait(
        self, find_lacking: Callable[[], str], say: Callable[[str], None], what: str = "data"
    ) -> float:
        """Wait, all ranks together, until none lacks data. Returns the seconds.

        Args:
            find_lacking: returns the source that this rank lacks, or ""; called on all ranks at each look.
            say: takes a line about the wait.
            what: what is waited for, in that line.

        Raises DataError, on all ranks, where waiting is of no use.
        """
        began = time.perf_counter()
        waited_s = 0.0
        next_line_s = FIRST_LINE_S
        while True:
            broken = self.relay.problem if self.relay else ""
            missing, problems = zip(*all_gather_object((find_lacking(), broken)), strict=True)
            if not any(missing):
                return waited_s
            if problem := max(problems):
                raise DataError(problem)
            raise_together(self.why_not(waited_s, missing))
            time.sleep(LOOK_S)
            waited_s = time.perf_counter() - began
            if waited_s > next_line_s:
                names = ", ".join(sorted(set(missing) - {""}))
                say(f"waiting for {what}: {names}, for {waited_s:.0f} s so far{self.progress()}")
                next_line_s = waited_s + min(max(waited_s, 5.0), LINE_S)

    def why_not(self, waited_s: float, missing: Sequence[str]) -> DataError | None:
        """Say why there is no use in waiting any longer; None as long as there is, and on other ranks.

        Args:
            waited_s: how long training has waited.
            missing: the source that each rank lacks, or "".
        """
        if not self.first:
            return None
        self.look_after()
        if missing[0] and self.is_refused:
            return DataError(f"the producer of data was refused: {self.problem}")
        sent_s = self.relay.moved_s if self.relay else 0.0
        idle_s = time.monotonic() - max(self.moved_s, sent_s)
        if min(idle_s, waited_s) <= timeouts.DATA_TIMEOUT_S:
            return None
        if not missing[0]:
            rank = next(rank for rank, name in enumerate(missing) if name)
            return DataError(
                f"rank {rank} has not seen the shards of {missing[rank]} that are made on the first node for "
                f"{min(idle_s, waited_s):.0f} s: put DATA_DIR={self.config.data_dir} on a disk that all nodes "
                "share, or run make data on each"
            )
        why = self.problem or self.logged or f"see {self.paths.producer_log}"
        error = DataError(
            f"training has waited {waited_s:.0f} s for data, and their producer has come no further for "
            f"{idle_s:.0f} s: {why}"
        )
        error.machine_fault = "hub"  # which may answer another machine
        return error

    def close(self) -> None:
        """End the relay, and the producer, which another time goes on after what it has sealed."""
        if self.relay:
            self.relay.close()
        if self.process and self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
