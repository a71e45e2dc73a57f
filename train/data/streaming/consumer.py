"""The trainer's side of streaming: what it has of the data, and the producer that makes more (producer.py).

    first rank:  starts the producer, tells it where training is, hears how far it has come, starts it again when it
                 has died; deletes shards that training is through with, where DATA_CACHE_GB is used up
    all ranks:   read the manifests that the producer writes; a step begins when the groups of its samples are whole

The first rank deletes, between two steps and nothing that lies in them, so that no rank looks for a shard, and finds
it gone when it reads. A producer that has died costs nothing as long as there is data ahead. When training has to
wait for one that is refused, or makes no progress for 15 minutes, the run ends with what it said last.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from train import timeouts
from train.data.mixture import SourceOrder
from train.data.shards import ShardSet
from train.data.streaming.node_transfer import Relay

log = logging.getLogger(__name__)

AGAIN_S = (
    0.0,
    2.0,
    10.0,
    60.0,
)  # before a producer that has died is started again; the last from then on
TELL_S = 5.0  # between two words to it, where nothing is urgent
URGENT_S = 1.0  # where the disk is full


class Feed:
    """The producer as the first rank knows it, and the relay to nodes with a DATA_DIR of their own."""

    def __init__(
        self,
        c: Config,
        paths: RunPaths,
        first: bool,
        held_out: Mapping[str, int],
        produces: bool = True,
        relay: Relay | None = None,
    ):
        """held_out: validation shards of each source that training begins with; produces: shards are still made."""
        self.c, self.paths, self.first, self.held_out, self.relay = (
            c,
            paths,
            first,
            dict(held_out),
            relay,
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.died: float | None = None  # when
        self.deaths = 0  # in a row, without a shard in between
        self.problem, self.refused = "", False  # why it died, and whether trying again is of no use
        self.said = ""  # of that, last
        self.ready = not (
            first and produces
        )  # whether it has the folders, and has changed what it will there
        self.over = False  # whether the disk holds more than DATA_CACHE_GB
        self.excess = 0  # bytes to be deleted
        self.made: dict[str, int] = {}  # source -> training tokens
        self.earlier = self.now = 0  # shards made by producers before this one, and by this one
        self.furthest = (0, 0)  # shards, and tokens of the next
        self.moved = self.seen = self.told = (
            time.monotonic()
        )  # when it was further, this rank lacked, it was told
        self.message = b""
        if first and produces:
            self.start()

    def start(self) -> None:
        """Start the producer, with the settings that this process has."""
        self.paths.producer_log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.paths.producer_log, "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "train.data.streaming.producer"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )  # Ctrl-C is for the trainer
        assert self.process.stdin and self.process.stdout
        os.set_blocking(self.process.stdin.fileno(), False)
        self.died, self.problem, self.refused, self.now = None, "", False, 0
        self.listener = threading.Thread(
            target=self.listen, args=(self.process.stdout,), name="producer", daemon=True
        )
        self.listener.start()
        settings = {name.lower(): value for name, value in self.c.values().items()}
        begin = {"settings": settings, "held_out": self.held_out}
        self.write(
            json.dumps(begin).encode() + b"\n"
        )  # an env file may have changed since the trainer read it
        self.write(self.message)

    def listen(self, lines: IO[bytes]) -> None:
        """Take what the producer says until it ends."""
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # what a library has printed
                self.hear(json.loads(line))

    def hear(self, words: dict[str, Any]) -> None:
        if "error" in words:
            self.problem, self.refused = words["error"], not words["again"]
            return
        self.made[words["source"]] = words["tokens"]
        self.excess, self.over, self.now = words["excess"], words["over"], words["made"]
        self.ready = True
        if self.now:
            self.deaths, self.said = 0, ""
        if (position := (self.earlier + self.now, words["pending"])) > self.furthest:
            self.furthest, self.moved = position, time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the producer should be told again where training is."""
        return self.first and time.monotonic() - self.told > (
            URGENT_S if self.excess > 0 else TELL_S
        )

    def tell(self, at: dict[str, int], until: dict[str, int]) -> None:
        """Let the producer know which windows of each source are taken, and which the next step takes."""
        self.told = time.monotonic()
        if self.relay:
            self.relay.at = dict(at)
        self.message = json.dumps({"at": at, "until": until}).encode() + b"\n"
        self.write(self.message)
        self.look_after()

    def write(self, line: bytes) -> None:
        if self.process and self.process.stdin:
            with contextlib.suppress(
                OSError
            ):  # full: it will be told again; gone: look_after sees it
                os.write(self.process.stdin.fileno(), line)

    def look_after(self) -> None:
        """Start the producer again if it has died, said once for each reason."""
        if not self.process or self.process.poll() is None:
            return
        pause_s = AGAIN_S[-1 if self.refused else min(self.deaths, len(AGAIN_S) - 1)]
        if self.died is None:
            self.listener.join(1.0)  # its last words
            self.died, self.earlier, self.now = time.monotonic(), self.earlier + self.now, 0
            code = self.process.returncode
            self.problem = (
                self.problem or f"it ended with code {code}, see {self.paths.producer_log}"
            )
            if self.problem != self.said:
                log.warning(
                    "the producer of data has stopped: %s. Training goes on with what there is, and it is "
                    "started again",
                    self.problem,
                )
            self.said = self.problem
        elif time.monotonic() - self.died >= pause_s:
            self.deaths += 1
            self.start()

    def progress(self) -> str:
        """How far the producer has come, to be said behind something else."""
        made = [f"{name} {tokens / 1e6:.1f}M tokens" for name, tokens in sorted(self.made.items())]
        return f"; made so far: {', '.join(made)}" if made else ""

    def make_room(
        self,
        sources: Sequence[ShardSet],
        orders: Sequence[SourceOrder],
        at: Mapping[str, int],
        until: Mapping[str, int],
        behind: Mapping[str, int],
    ) -> None:
        """Delete shards that training is through with, as far as DATA_CACHE_GB asks for it. What any rank may look
        for before this is called again lies between `at` and `until`."""
        for shards, order in zip(sources, orders, strict=True):
            name = order.name
            for shard in order.passed(at[name], until[name], behind[name]):
                if self.excess > 0 and shards.is_there(shard):
                    info = shards.shards["train"][shard]
                    log.info("%s: deleted %s, which the run is through with", name, info.file)
                    (shards.folder / info.file).unlink(missing_ok=True)
                    self.excess -= info.bytes

    @property
    def broken(self) -> str:
        """Why this rank will get no more data from the first node; "" where it does, or sees that one's disk."""
        return self.relay.problem if self.relay else ""

    def why_not(self, waited_s: float, lacking: Sequence[str]) -> str:
        """Why there is no use in waiting any longer; "" as long as there is, and on other ranks.

        waited_s: what training has waited; lacking: the source that each rank lacks, or "".
        """
        if not self.first:
            return ""
        self.look_after()
        now, timeout_s = time.monotonic(), timeouts.DATA_TIMEOUT_S
        if not lacking[0]:
            unseen_s = min(waited_s, now - max(self.seen, self.relay.moved if self.relay else 0.0))
            if unseen_s <= timeout_s:
                return ""
            rank, name = next((rank, name) for rank, name in enumerate(lacking) if name)
            return (
                f"rank {rank} has not seen the shards of {name} that are made on the first node for "
                f"{unseen_s:.0f} s: put DATA_DIR={self.c.data_dir} on a disk "
                "that all nodes share, or run make data on each"
            )
        self.seen = now
        if self.refused:
            return f"the producer of data was refused: {self.problem}"
        idle_s = now - self.moved
        if min(idle_s, waited_s) > timeout_s:
            why = self.problem or self.said or f"see {self.paths.producer_log}"
            return (
                f"training has waited {waited_s:.0f} s for data, and their producer has come no further for "
                f"{idle_s:.0f} s: {why}"
            )
        return ""

    def close(self) -> None:
        """Let the producer end, which goes on another time behind what it has sealed, and the relay."""
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
