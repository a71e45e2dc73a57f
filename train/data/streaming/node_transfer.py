"""Data for nodes that do not see the first one's DATA_DIR: its files, sent over the job's own network.

    first rank -> the first process of each such node:   pins, tokenizer, manifests and validation shards at the
                                                         start; training shards, by a thread, while the run trains

So one process of the whole job speaks to the Hub, and a node's disk has the same files in the same places
as if it had prepared them. What training needs first is sent first. What the first node deletes, the
others delete.
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

from record.durable import open_whole, write_whole
from settings.config import Config
from settings.json_file import read_small
from train.data import data_paths, prepare
from train.data.manifest import DataError, parse_manifest
from train.data.mixture import SourceOrder
from train.data.tokenizer import Vocabulary
from train.distributed.world import (
    World,
    all_gather_object,
    broadcast,
    broadcast_object,
    group_of,
    raise_on_all_ranks,
    who_sees,
)

log = logging.getLogger(__name__)

PIECE_BYTES = 2**24  # sent at once
IDLE_S = 0.5  # between two looks for something to send
PATIENCE_S = 600.0  # for one piece, or for the message that there is none


@dataclasses.dataclass
class Relay:
    """One end of the transfer: on the first rank, on those that receive, and on all others idle.

    Attributes:
        folder: DATA_DIR.
        ranks: the first, and those that receive.
        problem: why nothing more is sent or received; "" if it is.
        moved_s: when something was sent or received.
        at: windows taken of each source.
    """

    config: Config
    world: World
    folder: Path
    ranks: list[int]
    group: Any
    problem: str = ""
    moved_s: float = dataclasses.field(default_factory=time.monotonic)
    at: dict[str, int] = dataclasses.field(default_factory=dict)
    is_closing: bool = False
    thread: threading.Thread | None = None

    @classmethod
    def begin(cls, config: Config, world: World) -> "Relay | None":
        """Find the nodes that have another DATA_DIR than the first, and send them pins and tokenizer.

        Returns None if all nodes have the same. Raises DataError, on all ranks.
        """
        folder = prepare.data_dir(config)
        ranks = [0, *find_receivers(folder, world)]
        if len(ranks) == 1:
            return None
        relay = cls(config, world, folder, ranks, group_of(ranks, PATIENCE_S))
        with raise_on_all_ranks(DataError):
            try:
                if world.is_first:
                    relay.tell({"whole": relay.read_small_files()})
                elif world.rank in ranks:
                    relay.receive()
            except OSError as error:
                raise DataError(
                    f"{error.filename}: cannot be written on {world.host} ({error.strerror})"
                ) from error
        log.info(
            "data: %s has a DATA_DIR of its own, and gets from %s what it lacks",
            ", ".join(world.hosts[rank] for rank in ranks[1:]),
            world.hosts[0],
        )
        return relay

    def start(self, v: Vocabulary) -> None:
        """Send and receive manifests and shards in a thread."""
        if self.world.rank in self.ranks:
            self.thread = threading.Thread(target=self.run, args=(v,), name="relay", daemon=True)
            self.thread.start()

    def close(self) -> None:
        """End the thread, on all ranks together."""
        self.is_closing = True
        if self.thread:
            self.thread.join(2 * IDLE_S + 10)

    def run(self, v: Vocabulary) -> None:
        try:
            if self.world.is_first:
                self.send_all(v)
            else:
                while self.receive():
                    pass
        except Exception as error:  # the next wait for data ends with it
            self.problem = (
                f"data no longer come from {self.world.hosts[0]} to {self.world.host}: {error}"
            )
            log.warning("%s", self.problem)

    # ---- On the first rank

    def read_small_files(self) -> dict[str, bytes]:
        """Return what a node needs before it can open the data: name in DATA_DIR -> content."""
        paths: list[Path] = []
        for name in self.config.mixture:
            paths += (self.folder / name).glob("pin-*.json")
        tokenizer = prepare.tokenizer_path(self.config)
        if tokenizer.is_relative_to(self.folder):
            paths.append(tokenizer)
        return {self.name_of(path): read_small(path) for path in paths}

    def send_all(self, v: Vocabulary) -> None:
        """Send manifests when they have changed, and the shards that they name, until the end."""
        sources = []
        for name, weight in self.config.mixture.items():
            folder = prepare.source_folder(self.config, name, v)
            sources.append(SentSource(name, weight, folder, self.config.seq_len))
        while not self.is_closing:
            for source in sources:
                self.send_news(source)
            # Of the source of which the others have got the least, by its share of the mixture.
            sources.sort(key=lambda source: source.count / source.weight)
            paths = (source.find_next(self.at.get(source.name, 0)) for source in sources)
            path = next((path for path in paths if path), None)
            if path:
                self.send(path)
            else:
                self.tell({})
                time.sleep(IDLE_S)
        self.tell({"end": True})

    def send_news(self, source: "SentSource") -> None:
        """Send a source's manifest if it has changed, and what is new or gone."""
        deleted = source.take_deleted()
        if deleted:
            self.tell({"delete": [self.name_of(path) for path in deleted]})
        content = source.read_manifest()
        if content:
            for path in source.held_out:
                if path not in source.sent:
                    source.sent.add(path)
                    self.send(path)
            # After the validation shards that it names.
            self.tell({"whole": {self.name_of(source.manifest): content}})

    def send(self, path: Path) -> None:
        """Send a shard, unless it has been deleted meanwhile or all others have it."""
        try:
            file = open(path, "rb")  # noqa: SIM115 (it may be gone)
        except FileNotFoundError:
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            self.tell({"shard": self.name_of(path), "bytes": size})
            if all(all_gather_object(True, self.group)):
                return
            for length in piece_lengths(size):
                piece = np.frombuffer(file.read(length), np.uint8).copy()
                broadcast(torch.from_numpy(piece), self.group)
                self.moved_s = time.monotonic()

    def tell(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the first rank's message, on all."""
        from_rank_0: dict[str, Any] = broadcast_object(message, self.group)
        return from_rank_0

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    # ---- On those that receive

    def receive(self) -> bool:
        """Do what the first rank says next. Returns whether there will be more."""
        message = self.tell({})
        for name in message.get("delete", []):
            (self.folder / name).unlink(missing_ok=True)
        for name, content in message.get("whole", {}).items():
            write_whole(self.folder / name, content)
        if "shard" in message:
            self.receive_shard(self.folder / message["shard"], message["bytes"])
        return "end" not in message

    def receive_shard(self, path: Path, size: int) -> None:
        """Write a shard, unless all have it already. Its hash is checked when it is opened."""
        is_here = path.is_file() and path.stat().st_size == size
        if all(all_gather_object(is_here, self.group)):
            return
        for leftover in path.parent.glob(f"{path.name}.tmp-*"):  # of a transfer that was killed
            leftover.unlink(missing_ok=True)
        with open_whole(path) as file:
            for length in piece_lengths(size):
                piece = torch.empty(length, dtype=torch.uint8)
                broadcast(piece, self.group)
                self.moved_s = time.monotonic()
                file.write(piece.numpy().tobytes())


def piece_lengths(size: int) -> list[int]:
    """Return in which pieces so many bytes are sent."""
    return [min(PIECE_BYTES, size - begin) for begin in range(0, size, PIECE_BYTES)]


def find_receivers(folder: Path, world: World) -> list[int]:
    """Return the first rank of each node that does not see the first node's DATA_DIR."""
    if world.nodes == 1:
        return []
    try:
        sees = who_sees(folder, world)
    except OSError as error:
        raise prepare.unwritable(folder, error) from None
    return [rank for rank in range(0, len(sees), world.local_size) if not sees[rank]]


class SentSource:
    """What of one source has been sent, and what comes next.

    Attributes:
        held_out, train: its shards, by the manifest that was read last.
        count: of training shards sent, from the group on that training was in.
    """

    def __init__(self, name: str, weight: int, folder: Path, seq_len: int):
        self.name = name
        self.weight = weight
        self.folder = folder
        self.seq_len = seq_len
        self.manifest = folder / "manifest.json"
        self.content = b""
        self.order = SourceOrder(name, [], data_paths.GROUP_SHARDS, 0, ended=False)
        self.held_out: list[Path] = []
        self.train: list[Path] = []
        self.sent: set[Path] = set()
        self.count = 0

    def read_manifest(self) -> bytes:
        """Read the manifest. Returns its content, or b"" if that is as before."""
        if not self.manifest.is_file():
            return b""
        content = read_small(self.manifest)
        if content == self.content:
            return b""
        self.content = content
        manifest = parse_manifest(self.manifest, content)
        infos = manifest.train()
        windows = [info.windows(self.seq_len) for info in infos]
        has_ended = manifest.end is not None
        self.order = SourceOrder(self.name, windows, data_paths.GROUP_SHARDS, 0, has_ended)
        self.train = [self.folder / info.file for info in infos]
        self.held_out = [
            self.folder / seal.validation.file for seal in manifest.seals if seal.validation
        ]
        return content

    def find_next(self, at: int) -> Path | None:
        """Take the next training shard to send, first those of the open group; None if all were sent."""
        needed = self.order.needed(at, at)
        first = needed[0] if needed else 0
        for path in [*self.train[first:], *self.train[:first]]:
            if path not in self.sent and path.is_file():
                self.sent.add(path)
                self.count += 1
                return path
        return None

    def take_deleted(self) -> list[Path]:
        """Return the training shards that were sent and that the first node has deleted since."""
        deleted = [path for path in self.train if path in self.sent and not path.is_file()]
        self.sent.difference_update(deleted)
        return deleted
