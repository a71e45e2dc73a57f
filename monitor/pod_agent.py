"""A process in each pod that says now and then, in a line of the pod's log, what its node is and does.

    python -m monitor.pod_agent

So that make monitor, which may only list pods and read their logs, knows all that a look at the machine would tell.
A line comes every TELL_S, and every QUIET_S once a phase has lasted for SETTLED_S; it is shorter than what a pipe takes
in one piece, so that no other process writes into it. The process waits for nothing of the run, and ends with the
script that started it. Exit codes: 0 ended, 64 bad setting.
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from monitor import local
from monitor.facts import Node, to_line
from monitor.tail import Tail
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from settings.finding import complain

TELL_S, QUIET_S = 10.0, 30.0
SETTLED_S = 300.0
MOST_BYTES = 4096  # PIPE_BUF of Linux: what is not longer is written in one piece (pipe(7))
LONGEST_WORDS = 300
LOOK_S = 1.0  # how often it is seen that the script has gone

# In this order parts are left out of a line that would be too long: what it is called, and how.
SHORTER: list[tuple[str, Callable[[Node], Node]]] = [
    ("names of GPUs but the first", lambda node: of_gpus(node, 1, name="")),
    ("links without much traffic", lambda node: dataclasses.replace(node, links=busiest(node, 2))),
    (
        "goodput",
        lambda node: dataclasses.replace(
            node, progress=node.progress and dataclasses.replace(node.progress, goodput={})
        ),
    ),
    (
        "limits of GPUs but the first",
        lambda node: of_gpus(
            node, 1, memory_total_gib=None, power_limit_w=None, clock_max_mhz=None
        ),
    ),
    (
        "most of the complaint",
        lambda node: dataclasses.replace(node, complaint=node.complaint[:80]),
    ),
    ("clocks of GPUs", lambda node: of_gpus(node, 0, clock_mhz=None, clock_max_mhz=None)),
    (
        "the power of GPUs in training, but of the first",
        lambda node: of_gpus(node, 1, training_w=None),
    ),
    (
        "status but for its phase",
        lambda node: dataclasses.replace(
            node,
            status={
                key: node.status[key]
                for key in ("phase", "since", "heartbeat", "host", "step")
                if key in node.status
            },
        ),
    ),
    ("complaint", lambda node: dataclasses.replace(node, complaint="")),
    (
        "GPUs",
        lambda node: dataclasses.replace(node, gpus=(), gpus_why="they do not fit into a line"),
    ),
    ("links", lambda node: dataclasses.replace(node, links=())),
]


def line_of(node: Node) -> str:
    """What is told of a node: of those behind the first no status and no progress, which the first tells."""
    if node.node:
        node = dataclasses.replace(node, status={}, progress=None)
    line, left_out = to_line(rounded(node)), tuple[str, ...]()
    for name, without in SHORTER:
        if len(line.encode()) < MOST_BYTES:
            break
        shorter = without(node)
        if shorter != node:
            node, left_out = shorter, (*left_out, name)
        line = to_line(rounded(dataclasses.replace(node, left_out=left_out)))
    return line


def of_gpus(node: Node, first: int, **values: Any) -> Node:
    """The node with other values for the GPUs from one on."""
    return dataclasses.replace(
        node,
        gpus=node.gpus[:first]
        + tuple(dataclasses.replace(gpu, **values) for gpu in node.gpus[first:]),
    )


def busiest(node: Node, most: int) -> Any:
    """The links through which most goes."""
    return tuple(
        sorted(
            node.links, key=lambda link: -(link.in_bytes_per_s or 0) - (link.out_bytes_per_s or 0)
        )[:most]
    )


def rounded(node: Node) -> Node:
    """To five digits, and to a tenth of what is larger than 10,000, as times are; None for what is not finite."""

    def of(value: Any) -> Any:
        if isinstance(value, float):
            if not math.isfinite(value):
                return None
            value = round(value, 1) if abs(value) >= 1e4 else float(f"{value:.5g}")
            return int(value) if value.is_integer() else value
        if dataclasses.is_dataclass(value):
            return dataclasses.replace(
                value,
                **{
                    field.name: of(getattr(value, field.name))  # type: ignore[type-var]
                    for field in dataclasses.fields(value)
                },
            )
        if isinstance(value, dict):
            return {key: of(each) for key, each in value.items()}
        return tuple(map(of, value)) if isinstance(value, tuple | list) else value

    found: Node = of(node)
    return found


def pause_s(node: Node) -> float:
    """Until the next line."""
    since = node.status.get("since")
    settled = isinstance(since, int | float) and node.time - since > SETTLED_S
    return QUIET_S if settled and node.at_work and not node.stage else TELL_S


class Teller:
    """Looks, and tells. The locks and the record are on a disk that may keep it waiting: that harms nobody else."""

    def __init__(self, c: Config, paths: RunPaths, descriptor: int):
        self.c, self.paths, self.descriptor = c, paths, descriptor
        self.tail = None if paths.node else Tail(paths.metrics)
        self.between = local.Between(paths)
        self.failed = ""  # what was said of a look that failed

    def tell(self) -> float | None:
        """Seconds until the next line; None where nobody reads any more."""
        try:
            node = local.look(self.c, self.paths, self.tail, self.between)
            line = line_of(node)
        except Exception as error:  # whatever it is, the next look may find it gone
            self.fail(error)
            return TELL_S
        self.failed = ""
        try:
            os.write(self.descriptor, line.encode() + b"\n")
        except OSError:
            return None
        return pause_s(node)

    def fail(self, error: Exception) -> None:
        """Say in a line what went wrong and where, and no second time as long as it does."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_WORDS]
        said = (
            f"teller: nothing is told of this node as long as looking at it fails: {words} "
            f"({os.path.basename(where.filename)}:{where.lineno})\n"
        )
        if said != self.failed:
            self.failed = said
            with contextlib.suppress(OSError):
                os.write(2, said.encode(errors="replace"))


class Told(BaseException):
    """To end; nothing that catches exceptions keeps it from that."""


def told_to_end(number: int, _: FrameType | None) -> None:
    raise Told


def main() -> int:
    parent = os.getppid()
    signal.signal(signal.SIGTERM, told_to_end)
    try:
        c = Config.load()
        paths = RunPaths.of_node(c, ROOT)
        teller = Teller(c, paths, sys.stdout.fileno())
        os.nice(10)
        while os.getppid() == parent and (pause := teller.tell()) is not None:
            until = time.monotonic() + pause
            while os.getppid() == parent and time.monotonic() < until:
                time.sleep(LOOK_S)
    except SettingsError as error:
        complain(error)
        return 64
    except Told:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # of a pod that failed the last lines are its termination message: nothing is to come behind those
        if local.state_of(paths).get("phase") == "done":
            teller.tell()
    return 0


if __name__ == "__main__":
    sys.exit(main())
