"""The producer of a run that streams: a process beside the first rank, which makes shards ahead of training.

    stdin   {"settings": as Config has them, "held_out": {source: validation shards that training begins with}}
            {"at": {source: windows taken}, "until": {source: those behind the next step}}, again and again
    stdout  {"source": name, "tokens": of it so far, "made": shards by this process, "pending": tokens of the next,
             "excess": bytes to be deleted for that one, "over": whether the disk holds more than DATA_CACHE_GB}
            {"error": words, "again": whether another try may help} before it ends because of one

It makes what make data makes, in the same order and to the byte, the source first of which training has the least
ahead. Where DATA_CACHE_GB is used up it waits for the first rank to delete (consumer.py); but the group that training is
in, and the one behind it, are always made. A shard that was deleted is made again when training comes round to it.
When stdin ends this process ends, whatever it is doing: the trainer is gone.
"""

import bisect
import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from record.locks import take_lock
from settings import SettingsError
from settings.config import Config
from train.data import data_paths
from train.data.data_paths import is_enough
from train.data.manifest import DataError, Seal
from train.data.mixture import SourceOrder
from train.data.prepare import data_dir, maker_of, token_limit, vocabulary
from train.data.shard_writer import Maker
from train.data.shards import token_bytes
from train.data.sources.hub import Unanswered
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError

log = logging.getLogger(__name__)

LOCK_S = 60.0  # for a producer before this one to end
TELL_S = 1.0  # between two words on stdout
IDLE_S = 0.5  # between two looks at what is to be done, where there is nothing
NICE = 10  # training's own processes come first


@dataclasses.dataclass
class Stream:
    """One source: what is made of it, and where training is in it, in windows."""

    name: str
    weight: int
    maker: Maker
    making: Iterator[Seal]
    seq_len: int
    group_shards: int
    held_out: int = 1
    at: int = 0
    until: int = 0

    def order(self) -> SourceOrder | None:
        """The order of its windows as far as they are made; None where the source turned out to have none."""
        windows = [seal.train.windows(self.seq_len) for seal in self.maker.seals if seal.train]
        if not sum(windows) and self.maker.end is not None:
            return None
        return SourceOrder(self.name, windows, self.group_shards, 0, self.maker.end is not None)

    def missing(self) -> list[int]:
        """Shards of the order, in the order of use, that were deleted and are needed: in the groups of the next step,
        and in the one behind them."""
        order = self.order()
        needed = order.needed(self.at, self.until) if order else []
        seals = self.seals()
        return [shard for shard in needed if not self.is_there(seals[shard])]

    def seals(self) -> list[int]:
        """Numbers of the seals that have a training shard: the order's shards."""
        return [k for k, seal in enumerate(self.maker.seals) if seal.train]

    def must_begin(self) -> bool:
        """Whether more must be made before training can begin."""
        return (
            self.maker.end is None
            and sum(seal.validation is not None for seal in self.maker.seals) < self.held_out
        )

    def must_go_on(self) -> bool:
        """Whether more must be made, whatever room it takes: the group behind the next step's is not whole."""
        order, last = self.order(), max(self.at, self.until - 1)
        return self.must_begin() or (
            self.maker.end is None
            and (order is None or order.group_of(last) + 1 >= len(order.group_ends))
        )

    def lead(self) -> float:
        """How far training can go with what there is, in tokens of the whole run; infinitely where all is there."""
        order, missing = self.order(), self.missing()
        if self.must_begin():
            return -math.inf
        if order and missing:
            group = bisect.bisect_right(order.group_shard_ends, missing[0])
            begin = int(order.group_ends[group - 1]) if group else 0
            windows = 0 if group == order.group_of(self.at) else (begin - self.at) % order.sealed
        elif order is None or order.ended:
            return math.inf
        else:
            windows = order.sealed - self.at
        return windows * self.seq_len / self.weight

    def is_there(self, k: int) -> bool:
        """Whether the file of a seal's training shard exists."""
        info = self.maker.seals[k].train
        return info is not None and (self.maker.folder / info.file).is_file()

    def disk_bytes(self) -> int:
        """Of its training shards that are there."""
        return sum(
            seal.train.bytes
            for k, seal in enumerate(self.maker.seals)
            if seal.train and self.is_there(k)
        )


class Producer:
    """Makes what is most urgent, one shard after another."""

    def __init__(self, c: Config, trainer: "Trainer"):
        self.trainer, v = trainer, vocabulary(c)
        self.cap, self.shard_bytes = int(c.data_cache_gb * 1e9), 0
        self.streams: list[Stream] = []
        self.said = time.monotonic()
        self.made, self.excess, self.over = 0, 0, False
        for name, weight in c.mixture.items():
            maker = maker_of(c, name, v)
            self.shard_bytes = max(self.shard_bytes, maker.shard_tokens * token_bytes(v.size))
            limit = token_limit(c, maker.pinned.source)
            if maker.end and not is_enough(c, maker.pinned.source, maker.end, maker.tokens()):
                maker.go_on()  # before anybody reads the shard that was cut short
            stream = Stream(
                name,
                weight,
                maker,
                maker.make(limit),
                c.seq_len,
                data_paths.GROUP_SHARDS,
                trainer.held_out[name],
            )
            maker.progress = lambda tokens, *_, stream=stream: self.tell(stream, tokens)
            self.streams.append(stream)

    def run(self) -> None:
        """Until this process is ended."""
        self.tell(self.streams[0], self.streams[0].maker.tokens(), now=True)
        while True:
            if not self.make_one():
                time.sleep(IDLE_S)

    def make_one(self) -> bool:
        """Make the shard that is wanted most; whether there was one."""
        heard = self.trainer.heard
        for stream in self.streams if heard else []:
            stream.at, stream.until = heard["at"][stream.name], heard["until"][stream.name]
        self.measure()
        for stream in sorted(self.streams, key=Stream.lead):
            missing = (
                stream.missing() if heard else []
            )  # a run that is taken up does not begin at the start
            if missing:
                log.info(
                    "%s: making training shard %d again, for another epoch", stream.name, missing[0]
                )
                stream.maker.remake(stream.seals()[missing[0]])
            elif stream.maker.end is None and (not self.excess or stream.must_go_on()):
                seal = next(stream.making, None)
                if seal and seal.train:
                    log.info(
                        "%s: sealed %s, %.1fM tokens so far",
                        stream.name,
                        seal.train.file,
                        stream.maker.tokens() / 1e6,
                    )
            else:
                continue
            self.made += 1
            self.measure()
            self.tell(stream, stream.maker.tokens(), now=True)
            return True
        self.tell(self.streams[0], self.streams[0].maker.tokens())
        return False

    def measure(self) -> None:
        """How the disk stands to DATA_CACHE_GB."""
        size = sum(stream.disk_bytes() for stream in self.streams)
        idle = all(stream.maker.end is not None and not stream.missing() for stream in self.streams)
        self.excess, self.over = (
            max(0, size + (0 if idle else self.shard_bytes) - self.cap),
            size > self.cap,
        )

    def tell(self, stream: Stream, tokens: int, now: bool = False) -> None:
        """A word to the trainer, now and then."""
        if now or time.monotonic() - self.said > TELL_S:
            self.said = time.monotonic()
            say(
                {
                    "source": stream.name,
                    "tokens": tokens,
                    "made": self.made,
                    "pending": stream.maker.pending["train"].tokens,
                    "excess": self.excess,
                    "over": self.over,
                }
            )


class Trainer:
    """What the trainer says: its settings at first, and then where it is. When it says no more, this process ends:
    what is written is written to other names first, so that nothing is left half made."""

    def __init__(self) -> None:
        self.heard: dict[str, dict[str, int]] = {}
        first, self.rest = b"", b""
        while b"\n" not in first:
            first += self.read()
        begin, _, self.rest = first.partition(b"\n")
        words = json.loads(begin)
        self.config, self.held_out = Config(**words["settings"]), words["held_out"]
        threading.Thread(target=self.listen, name="trainer", daemon=True).start()

    def read(self) -> bytes:
        """What has come; ends this process where nothing will. Not by sys.stdin, whose lock no other thread may hold
        when Python ends."""
        return os.read(0, 2**16) or os._exit(0)

    def listen(self) -> None:
        """The thread."""
        while True:
            *lines, self.rest = self.rest.split(b"\n")
            for line in lines:
                with contextlib.suppress(
                    ValueError
                ):  # half a line, where the pipe was full: the next is whole
                    self.heard = json.loads(line)
            self.rest += self.read()


def say(words: dict[str, Any]) -> None:
    """A line to the trainer."""
    with contextlib.suppress(BrokenPipeError):  # it is gone, and listen() ends this process
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def alone(c: Config) -> Iterator[None]:
    """Hold the folders of all sources. Raises DataError where somebody else does for long."""
    with contextlib.ExitStack() as held:
        for name in c.mixture:
            folder = data_dir(c) / name
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(folder / ".lock", "w"))
            if not take_lock(lock, LOCK_S):
                raise DataError(
                    f"{folder}: another process makes shards there (make data, or a run that streams); "
                    "wait for it, or give this run another DATA_DIR"
                )
        yield


def main() -> int:
    """Produce until the trainer is gone; exit code 78 where that cannot be, told on stdout too."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    os.nice(NICE)
    trainer = Trainer()
    c, again = trainer.config, False
    try:
        with alone(c):
            Producer(c, trainer).run()
    except OSError as error:
        again = True
        problem = (
            f"{error.filename or data_dir(c)}: cannot be written ({error.strerror}); make room, or choose "
            "another folder with DATA_DIR"
        )
    except (SettingsError, CorpusError, TokenizerError, DataError) as error:
        problem, again = str(error), isinstance(error, Unanswered)
    log.error("%s", problem)
    say({"error": problem, "again": again})
    return 78


if __name__ == "__main__":
    sys.exit(main())
