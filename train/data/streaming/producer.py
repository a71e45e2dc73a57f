"""The producer of a run that streams: a process next to the first rank, which makes shards ahead of training.

    stdin   {"settings": as Config has them, "held_out": {source: validation shards that training begins with}}
            {"at": {source: windows taken}, "until": {source: windows taken after the next step}}, repeatedly
    stdout  {"source": name, "tokens": of it so far, "made": shards by this process, "pending": tokens of the next,
             "over_budget_bytes": bytes to be deleted for that one}
            {"error": text, "again": whether another try may help} before it ends because of one

It makes what make data makes, in the same order and to the byte, first of the source of which training
has the least ahead. If DATA_CACHE_GB is used up, it waits until the first rank deletes (consumer.py).
But the group that training is in, and the next one, are always made. Those that were deleted are made
again: for another epoch, and for another run with the same DATA_DIR. When stdin ends, the trainer is
gone, and this process ends at once.
"""

import contextlib
import dataclasses
import io
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from settings import SettingsError, explain_error
from settings.config import Config
from train.data import data_paths
from train.data.data_paths import is_enough, token_bytes
from train.data.manifest import DataError, Seal, ShardInfo
from train.data.mixture import SourceOrder
from train.data.prepare import (
    data_dir,
    maker_of,
    one_at_a_time,
    token_limit,
    unwritable,
    vocabulary,
)
from train.data.shard_writer import ShardWriter
from train.data.sources.hub import Unanswered
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError

log = logging.getLogger(__name__)

LOCK_S = 60.0  # for a producer before this one to end
REPORT_S = 1.0  # between two lines on stdout
IDLE_S = 0.5  # between two looks at what is to be done, while there is nothing
STDIN = 0
NICE = 10  # training's own processes come first


@dataclasses.dataclass
class Stream:
    """A source: what is made of it, and where training is in it.

    Attributes:
        held_out: validation shards that training begins with.
        at, until: windows that training has taken, and will have after the next step; 0 until it says where it is.
    """

    name: str
    weight: int
    writer: ShardWriter
    making: Iterator[Seal]
    seq_len: int
    held_out: int = 1
    at: int = 0
    until: int = 0

    def order(self) -> SourceOrder:
        """Return the order of its windows so far."""
        windows = [info.windows(self.seq_len) for info in self.writer.manifest.train()]
        has_ended = self.writer.manifest.end is not None
        return SourceOrder(self.name, windows, data_paths.GROUP_SHARDS, 0, has_ended)

    def is_there(self, info: ShardInfo) -> bool:
        return (self.writer.folder / info.file).is_file()

    def disk_bytes(self) -> int:
        """Return the bytes of its training shards that are there."""
        return sum(info.bytes for info in self.writer.manifest.train() if self.is_there(info))

    def find_deleted(self) -> tuple[int, ShardInfo] | None:
        """Find the first shard that is needed and was deleted, and its turn."""
        if not self.until:
            return None
        order = self.order()
        infos = self.writer.manifest.train()
        for turn in order.turns(self.at, self.until):
            for shard in order.shards_of(turn):
                if not self.is_there(infos[shard]):
                    return turn, infos[shard]
        return None

    def must_begin(self) -> bool:
        """Whether more must be made before training can begin."""
        held_out = sum(seal.validation is not None for seal in self.writer.manifest.seals)
        return self.writer.manifest.end is None and held_out < self.held_out

    def must_continue(self) -> bool:
        """Whether more must be made, whatever room it takes: the group after the next step's is not whole."""
        if self.writer.manifest.end is not None:
            return False
        order = self.order()
        next_turn = order.turn_of(max(self.at, self.until - 1)) + 1
        return self.must_begin() or next_turn >= len(order.group_ends)

    def lead(self) -> float:
        """Return how far training can go with what there is, in tokens of the whole run."""
        if self.must_begin():
            return -math.inf
        order = self.order()
        deleted = self.find_deleted()
        if deleted:
            end = order.first_sample(deleted[0])
        elif order.ended:
            return math.inf
        else:
            end = order.sealed
        return max(0, end - self.at) * self.seq_len / self.weight

    def make_shard(self, has_room: bool) -> bool:
        """Make the shard that is needed first. Returns whether there was one to make."""
        deleted = self.find_deleted()
        if deleted:
            _, info = deleted
            log.info("%s: making %s again, which was deleted", self.name, info.file)
            for sealed in self.writer.manifest.seals:
                if sealed.train == info:
                    self.writer.remake(sealed)
            return True
        if self.writer.manifest.end is not None or not (has_room or self.must_continue()):
            return False
        seal = next(self.making, None)
        if seal and seal.train:
            millions = self.writer.tokens() / 1e6
            log.info("%s: sealed %s, %.1fM tokens so far", self.name, seal.train.file, millions)
        return True


class Producer:
    """Makes the most urgent shard, one after another."""

    def __init__(self, config: Config, trainer: "Trainer"):
        self.trainer = trainer
        self.cap = int(config.data_cache_gb * 1e9)
        self.shard_bytes = 0
        self.streams: list[Stream] = []
        self.reported_s = time.monotonic()
        self.made = 0
        self.over_budget_bytes = 0
        v = vocabulary(config)
        for name, weight in config.mixture.items():
            writer = maker_of(config, name, v)
            source = writer.pinned.source
            self.shard_bytes = max(
                self.shard_bytes, writer.manifest.shard_tokens * token_bytes(v.size)
            )
            end = writer.manifest.end
            if end and not is_enough(config, source, end, writer.tokens()):
                writer.go_on()  # before anybody reads the shard that was cut short
            making = writer.make(token_limit(config, source))
            held_out = trainer.held_out[name]
            stream = Stream(name, weight, writer, making, config.seq_len, held_out)
            writer.progress = lambda tokens, *_, stream=stream: self.report(stream)
            self.streams.append(stream)

    def run(self) -> None:
        """Make shards until this process is ended."""
        self.report(self.streams[0], now=True)
        while True:
            if not self.make_one():
                time.sleep(IDLE_S)

    def make_one(self) -> bool:
        """Make the shard that is wanted most. Returns whether there was one to make."""
        position = self.trainer.position
        for stream in self.streams:
            if position:
                stream.at = position["at"][stream.name]
                stream.until = position["until"][stream.name]
        self.measure()
        for stream in sorted(self.streams, key=Stream.lead):
            if stream.make_shard(has_room=not self.over_budget_bytes):
                self.made += 1
                self.measure()
                self.report(stream, now=True)
                return True
        self.report(self.streams[0])
        return False

    def measure(self) -> None:
        """Compare the disk with DATA_CACHE_GB."""
        size = sum(stream.disk_bytes() for stream in self.streams)
        for stream in self.streams:
            if stream.writer.manifest.end is None or stream.find_deleted():
                size += self.shard_bytes  # one more will be made
                break
        self.over_budget_bytes = max(0, size - self.cap)

    def report(self, stream: Stream, now: bool = False) -> None:
        """Tell the trainer how far a source has come, once in a while."""
        if not now and time.monotonic() - self.reported_s <= REPORT_S:
            return
        self.reported_s = time.monotonic()
        write_line(
            {
                "source": stream.name,
                "tokens": stream.writer.tokens(),
                "made": self.made,
                "pending": stream.writer.pending["train"].tokens,
                "over_budget_bytes": self.over_budget_bytes,
            }
        )


class Trainer:
    """What the trainer writes: its settings first, then where it is, again and again.

    When it writes no more, this process ends. Whatever it writes goes to another name first, so that
    nothing is left half made.

    Attributes:
        position: the last one; {} before the first.
    """

    def __init__(self) -> None:
        self.position: dict[str, dict[str, int]] = {}
        # Without a buffer: no thread may hold the lock of one when Python ends.
        self.lines = io.FileIO(STDIN, closefd=False)
        begin = json.loads(self.lines.readline() or os._exit(0))
        self.config = Config(**begin["settings"])
        self.held_out: dict[str, int] = begin["held_out"]
        threading.Thread(target=self.listen, name="trainer", daemon=True).start()

    def listen(self) -> None:
        """Read positions until the end; in a thread."""
        for line in self.lines:
            # Half a line, if the pipe was full: the next is whole.
            with contextlib.suppress(ValueError):
                self.position = json.loads(line)
        os._exit(0)


def write_line(content: dict[str, Any]) -> None:
    """Write a line to the trainer."""
    with contextlib.suppress(BrokenPipeError):  # it is gone, and listen() ends this process
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()


def main() -> int:
    """Produce until the trainer is gone. Returns 78 if that cannot be, and says why on stdout too."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    os.nice(NICE)
    trainer = Trainer()
    config = trainer.config
    may_help = False
    try:
        with contextlib.ExitStack() as stack:
            for name in config.mixture:
                stack.enter_context(one_at_a_time(data_dir(config) / name, LOCK_S))
            Producer(config, trainer).run()
    except OSError as error:
        may_help = True
        problem = str(unwritable(data_dir(config), error))
    except (SettingsError, CorpusError, TokenizerError, DataError) as error:
        may_help = isinstance(error, Unanswered)
        problem = explain_error(error)
    log.error("%s", problem)
    write_line({"error": problem, "again": may_help})
    return 78


if __name__ == "__main__":
    sys.exit(main())
