"""Data for nodes that do not see the first one's DATA_DIR: its files, sent over the job's own network.

    first rank -> the first process of each such node:   pins and tokenizer, manifests and validation shards at the
                                                         start; training shards, by a thread, as long as the run trains

So one process of the whole job speaks to the hub, and a node's disk has the same files in the same places as if it
had prepared them. What training needs soonest is sent first; what the first node deletes, the others delete.
"""

import dataclasses
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from record.durable import write_whole
from settings.config import Config
from train.data import data_paths, prepare
from train.data.manifest import DataError, parse_manifest
from train.data.mixture import SourceOrder
from train.data.tokenizer import Vocabulary
from train.distributed.world import (
    World,
    broadcast,
    from_all,
    from_first,
    group_of,
    together,
    who_sees,
)

log = logging.getLogger(__name__)

PIECE_BYTES = 2**24  # sent at once
IDLE_S = 0.5  # between two looks for something to send
PATIENCE_S = 600.0  # for one piece, or for the word that there is none


@dataclasses.dataclass
class Relay:
    """One end of it: on the first rank, on those that receive, and on all others idle."""

    c: Config
    world: World
    folder: Path  # DATA_DIR
    ranks: list[int]  # the first, and those that receive
    group: Any
    problem: str = ""  # why nothing more is sent or received
    moved: float = dataclasses.field(default_factory=time.monotonic)  # when something was, last
    at: dict[str, int] = dataclasses.field(default_factory=dict)  # windows taken of each source
    closing: bool = False
    thread: threading.Thread | None = None

    @classmethod
    def begin(cls, c: Config, world: World) -> "Relay | None":
        """Find the nodes that have another DATA_DIR than the first, and send them pins and tokenizer; None if all
        nodes have the same. Raises DataError, on all ranks."""
        folder = prepare.data_dir(c)
        ranks = [0, *receivers(folder, world)]
        if len(ranks) == 1:
            return None
        relay = cls(c, world, folder, ranks, group_of(ranks, PATIENCE_S))
        with together(DataError):
            try:
                if world.is_first:
                    relay.tell_whole(relay.small_files())
                elif world.rank in ranks:
                    relay.receive()
            except OSError as error:
                raise DataError(
                    f"{error.filename}: cannot be written on {world.host} ({error.strerror})"
                ) from error
        hosts = ", ".join(world.hosts[rank] for rank in ranks[1:])
        log.info(
            "data: %s has a DATA_DIR of its own, and gets from %s what it lacks",
            hosts,
            world.hosts[0],
        )
        return relay

    def start(self, v: Vocabulary) -> None:
        """Have manifests and shards sent, by a thread."""
        if self.world.rank in self.ranks:
            self.thread = threading.Thread(target=self.run, args=(v,), name="relay", daemon=True)
            self.thread.start()

    def close(self) -> None:
        """End the thread, on all ranks together."""
        self.closing = True
        if self.thread:
            self.thread.join(2 * IDLE_S + 10)

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def run(self, v: Vocabulary) -> None:
        try:
            if self.world.is_first:
                return self.send_all(v)
            while self.receive():
                pass
        except Exception as error:  # the next wait for data says it
            self.problem = (
                f"data no longer come from {self.world.hosts[0]} to {self.world.host}: {error}"
            )
            log.warning("%s", self.problem)

    # ---- On the first rank

    def small_files(self) -> dict[str, bytes]:
        """What a node needs to know of the data before it can open them: name in DATA_DIR -> content."""
        target = prepare.tokenizer_path(self.c)
        pins = [path for name in self.c.mixture for path in (self.folder / name).glob("pin-*.json")]
        paths = [*pins, *([target] if target.is_relative_to(self.folder) else [])]
        return {self.name_of(path): path.read_bytes() for path in paths}

    def send_all(self, v: Vocabulary) -> None:
        """Manifests when they have changed, and the shards that they name, until the end."""
        queues = [
            Queue(self.c, name, weight, prepare.source_folder(self.c, name, v))
            for name, weight in self.c.mixture.items()
        ]
        while not self.closing:
            if gone := [self.name_of(path) for queue in queues for path in queue.gone()]:
                self.tell({"delete": gone})
            for queue in queues:
                shards, manifest = queue.news()
                for shard in shards:
                    self.send(shard)
                if manifest:  # behind the validation shards that it names
                    self.tell_whole({self.name_of(queue.manifest): manifest})
            lag = sorted(queues, key=lambda queue: queue.lead(self.at.get(queue.name, 0)))
            path = next(
                (path for queue in lag if (path := queue.following(self.at.get(queue.name, 0)))),
                None,
            )
            if path:
                self.send(path)
            else:
                self.tell({})
                time.sleep(IDLE_S)
        self.tell({"end": True})

    def send(self, path: Path) -> None:
        """A shard, unless it has been deleted meanwhile or all others have it."""
        try:
            file = open(path, "rb")  # noqa: SIM115 (it may be gone)
        except FileNotFoundError:
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            self.tell({"shard": self.name_of(path), "bytes": size})
            if not all(from_all(True, self.group)):
                for length in lengths(size):
                    broadcast(
                        torch.from_numpy(np.frombuffer(file.read(length), np.uint8).copy()),
                        self.group,
                    )
                    self.moved = time.monotonic()

    def tell_whole(self, files: dict[str, bytes]) -> None:
        """Small files, as they were when they were read."""
        self.tell({"whole": files})

    def tell(self, words: dict[str, Any]) -> dict[str, Any]:
        """The first rank's words, on all."""
        told: dict[str, Any] = from_first(words, self.group)
        return told

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    # ---- On those that receive

    def receive(self) -> bool:
        """Do what the first rank says next; whether there will be more."""
        words = self.tell({})
        for name in words.get("delete", []):
            (self.folder / name).unlink(missing_ok=True)
        for name, content in words.get("whole", {}).items():
            write_whole(self.folder / name, content)
        if "shard" in words:
            self.receive_shard(self.folder / words["shard"], words["bytes"])
        return "end" not in words

    def receive_shard(self, path: Path, size: int) -> None:
        """Write a shard, unless all have it already. Its hash is checked when it is opened."""
        if all(from_all(path.is_file() and path.stat().st_size == size, self.group)):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "wb") as file:
            for length in lengths(size):
                piece = torch.empty(length, dtype=torch.uint8)
                broadcast(piece, self.group)
                self.moved = time.monotonic()
                file.write(piece.numpy().tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def lengths(size: int) -> list[int]:
    """In which pieces so many bytes are sent."""
    return [min(PIECE_BYTES, size - begin) for begin in range(0, size, PIECE_BYTES)]


def receivers(folder: Path, world: World) -> list[int]:
    """The first rank of each node that does not see the first node's DATA_DIR."""
    if world.nodes == 1:
        return []
    try:
        return [
            rank
            for rank, sees in enumerate(who_sees(folder, world))
            if not sees and rank % world.local_size == 0
        ]
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error.strerror or error}); choose another folder with DATA_DIR"
        ) from None


class Queue:
    """What of one source has been sent, and what comes next."""

    def __init__(self, c: Config, name: str, weight: int, folder: Path):
        self.c, self.name, self.weight, self.folder = c, name, weight, folder
        self.manifest, self.seen = (
            folder / "manifest.json",
            b"",
        )  # where it is, and as it was when it was read last
        self.shard_tokens = 0
        self.order: SourceOrder | None = None
        self.train: list[Path] = []
        self.sent: set[Path] = set()

    def news(self) -> tuple[list[Path], bytes]:
        """Where the manifest has changed, the validation shards that are new in it, and its content."""
        if not self.manifest.is_file() or (content := self.manifest.read_bytes()) == self.seen:
            return [], b""
        self.seen = content
        manifest, seals = parse_manifest(self.manifest, content)
        self.shard_tokens = manifest["shard_tokens"]
        windows = [seal.train.windows(self.c.seq_len) for seal in seals if seal.train]
        if sum(windows) or manifest["end"] is None:
            self.order = SourceOrder(
                self.name, windows, data_paths.GROUP_SHARDS, 0, manifest["end"] is not None
            )
        self.train = [self.folder / seal.train.file for seal in seals if seal.train]
        new = [self.folder / seal.validation.file for seal in seals if seal.validation]
        new = [shard for shard in new if shard not in self.sent]
        self.sent.update(new)
        return new, content

    def following(self, at: int) -> Path | None:
        """The next training shard to send, that of the open group first; None where all that are there were sent."""
        if self.order is None or not self.train:
            return None
        needed = self.order.needed(at, at)
        begin = needed[0] if needed else 0
        for path in [*self.train[begin:], *self.train[:begin]]:
            if path not in self.sent and path.is_file():
                self.sent.add(path)
                return path
        return None

    def lead(self, at: int) -> float:
        """How many tokens of the whole run the shards that were sent last, from here on."""
        ahead = sum(path in self.sent for path in self.train) * self.shard_tokens
        return (ahead - at * self.c.seq_len) / self.weight

    def gone(self) -> list[Path]:
        """Training shards that were sent and that the first node has deleted since."""
        deleted = [path for path in self.train if path in self.sent and not path.is_file()]
        self.sent.difference_update(deleted)
        return deleted
