"""This machine, and the run on it, at one moment: look() -> Node, of what the run has written and the system tells.

Nothing is guessed: what cannot be read is None, and says so where there is a place for it. An attempt that was killed
is one whose STATUS.json has a phase that is not an end, with at_work False.
"""

import contextlib
import dataclasses
import math
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from hardware.host_memory import read_memory
from k8s.cluster.log_errors import HEAD, Complaints, tells_more
from monitor.facts import Link, Node, Progress
from monitor.gpu_sampler.interfaces import Network
from monitor.local_gpus import Found, GpusHere
from monitor.tail import Tail
from monitor.usual import Usual
from record import locks, status
from record.regular_file import open_regular
from record.run_paths import RunPaths
from settings.config import Config

BEGINS = re.compile(r"node \d+: host=")  # the first words of a trainer in its node's log
LOG_BYTES = 2**17  # of a log's end, at the first look: a tenth of a second
LONGEST_COMPLAINT = 300
SETTLED_S = 1800.0  # of a node that does not know the phase: until then it may begin


class Between:
    """What is kept between two looks: rates need two, and files are read on from where they were."""

    def __init__(self, paths: RunPaths):
        self.gpus, self.links, self.log = GpusHere(paths), Links(), Log(paths.node_log(paths.node))
        self.usual = Usual()


def look(
    c: Config, paths: RunPaths, tail: Tail | None = None, between: Between | None = None
) -> Node:
    """What this machine is and does. tail: of the record, where there is one here; between: of the look before."""
    between = between or Between(paths)
    state = state_of(paths)
    works = at_work(paths, state)
    if works is False:  # it may have ended, and said how, after its status was read
        state = state_of(paths)
    gpus, gpus_time, gpus_why = without_gpus() if c.device == "cpu" else between.gpus.look()
    energy_j, energy_since = between.gpus.energy or (None, None)
    used, limit = memory()
    node = Node(
        node=paths.node,
        host=socket.gethostname(),
        time=time.time(),
        status=state,
        stage=stage_of(paths),
        at_work=works,
        progress=progress_of(tail, state),
        gpus=gpus,
        gpus_time=gpus_time,
        gpus_why=gpus_why,
        links=between.links.look(),
        disk_free_bytes=disk_free(paths.folder),
        memory_bytes=used,
        memory_limit_bytes=limit,
        complaint=between.log.look(),
        energy_j=energy_j,
        energy_since=energy_since,
        disk_passing_bytes=passing(paths.checkpoints),
    )
    return between.usual.of((node,))[0]


# ---------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------


def state_of(paths: RunPaths) -> dict[str, Any]:
    """STATUS.json as it is, null for a number that is not finite; {} where it cannot be read."""
    try:
        state = status.read(paths.status)
    except OSError:
        return {}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in state.items()
    }


def stage_of(paths: RunPaths) -> str:
    """What train/start_node.py is at, where no trainer speaks for itself."""
    try:
        return locks.read_stage(paths)
    except OSError:
        return ""


def at_work(paths: RunPaths, state: dict[str, Any]) -> bool | None:
    """Whether this node is at work on the run, by the locks; None where another machine was, whose locks are not seen
    here, or where they cannot be asked for."""
    try:
        if locks.is_at_work(paths):
            return True
        holder = locks.HOLDER.match(locks.read_holder(paths.job)) if paths.job.exists() else None
    except OSError:
        return None
    if state.get("phase") in status.OVER:
        return False
    others = {holder[2] if holder else None, state.get("host") if paths.node == 0 else None}
    return None if others - {None, socket.gethostname()} else False


def progress_of(tail: Tail | None, state: dict[str, Any]) -> Progress | None:
    """The record has no last step: that is known from STATUS.json."""
    try:
        progress = tail.look() if tail else None
    except OSError:
        progress = tail.progress if tail else None
    last = state.get("last_step")
    if tail is None or progress is None or not isinstance(last, int):
        return progress
    return dataclasses.replace(progress, last_step=last)


class Log:
    """The last complaint of an attempt in a log, of which each look reads what has been added."""

    def __init__(self, path: Path):
        self.path, self.position = path, -1
        self.rest, self.complaint, self.complaints = b"", "", Complaints()

    def look(self) -> str:
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if self.position < 0 or size < self.position:
                    self.rest, self.complaint, self.complaints = b"", "", Complaints()
                    self.position = max(0, size - LOG_BYTES)
                    file.seek(self.position)
                    if self.position:
                        self.position += len(file.readline())
                file.seek(self.position)
                data = file.read(max(0, size - self.position))
        except OSError:
            return self.complaint
        self.position += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.take(line.decode(errors="replace"))
        return self.complaint

    def take(self, line: str) -> None:
        head = HEAD.match(line)
        words = line[head.end() :] if head else line
        if BEGINS.match(re.sub(r"^rank=\d+ ", "", words)):
            self.complaint, self.complaints = "", Complaints()
        # what stands below a complaint, and frames, explain it
        if (
            self.complaints.takes(line)
            and words.strip()
            and not words[0].isspace()
            and tells_more(words, self.complaint)
        ):
            self.complaint = words.strip()[:LONGEST_COMPLAINT].rstrip()


# ---------------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------------


def without_gpus() -> Found:
    return (), None, "DEVICE=cpu: this run uses none"


class Links:
    """Bytes a second of each interface since the look before."""

    def __init__(self, root: Path = Path("/")):
        self.root = root
        self.network = Network(root / "proc/net/dev", root / "sys/class/infiniband")
        self.before: tuple[float, dict[str, tuple[int, int]]] = (0.0, {})

    def look(self) -> tuple[Link, ...]:
        """Those through which anything went at all."""
        now, totals = time.monotonic(), self.network.totals()
        (then, before), self.before = self.before, (now, totals)
        found = []
        for name, moved in totals.items():
            if any(moved):
                deltas = [
                    new - old
                    for new, old in zip(moved, before.get(name, (math.inf, math.inf)), strict=True)
                ]
                received, sent = (
                    delta / (now - then) if delta >= 0 and now > then else None for delta in deltas
                )
                found.append(Link(name, received, sent, self.speed(name)))
        return tuple(found)

    def speed(self, name: str) -> float | None:
        """Bytes a second of one direction, as the system says; None where it does not, as of many virtual ones."""
        adapter, _, port = name.partition(":")
        try:
            if port:  # "200 Gb/sec (4X HDR)"
                text = (
                    self.root / "sys/class/infiniband" / adapter / "ports" / port / "rate"
                ).read_text()
                return float(text.split()[0]) * 1e9 / 8
            megabits = int((self.root / "sys/class/net" / name / "speed").read_text())
        except (OSError, ValueError, IndexError):
            return None
        return megabits * 1e6 / 8 if megabits > 0 else None  # -1: not known


def disk_free(folder: Path) -> float | None:
    """Bytes that are free where a folder is, or will be."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        return float(shutil.disk_usage(there).free)
    except (OSError, StopIteration):
        return None


def passing(checkpoints: Path) -> float | None:
    """Bytes of disk that a checkpoint takes which is being written or deleted (train/checkpoint/checkpoint.py); None of none."""
    total = 0
    for pattern in ("step_*.tmp-*/**/*", ".trash-*/**/*"):
        for path in checkpoints.glob(pattern):
            with contextlib.suppress(OSError):  # it has gone meanwhile
                total += 512 * path.lstat().st_blocks
    return float(total) or None


def memory(root: Path = Path("/")) -> tuple[float | None, float | None]:
    """(bytes in use, bytes that may be) of the control group with the least room that this process is in, without what
    can be given back at once; of the machine where none has a limit."""
    found = read_memory(root)
    return found.limit - found.limit_free, found.limit
