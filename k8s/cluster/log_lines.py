"""Which lines of a log `make logs ONLY=...` shows: numbers of training, or complaints.

A pod's log is what its processes wrote to the terminal, several mixed; logs/node_N.log has a clock in front of it. Pure
functions of text: nothing here knows where it comes from. What pods tell of their nodes for make monitor is never
shown.
"""

import re
from collections.abc import Iterable, Iterator

from k8s.cluster.log_errors import HEAD, Complaints

METRICS = re.compile(
    r"step=\d+/\d+ |train/loss|\bloss[:=] ?\S+.*\btok(?:ens)?(?:/|_per_)s|\btokens/s(?:ec)?\b|"
    r"step:? +\d+(?:/\d+)?\b.*\bloss\b"
)
FILE = re.compile(r"==> \S+ <==$")
POD_LINE = "node-facts "  # begins a line in which a pod tells of its node, for make monitor
FACTS = POD_LINE + '{"schema":'


def chosen(lines: Iterable[str], only: str) -> Iterator[str]:
    """Yield the lines that ONLY asks for, as they come; "" takes all but what nodes tell of themselves."""
    lines = own(lines)
    if only == "errors":
        yield from complaints_of(lines)
    elif only == "metrics":
        yield from metrics_of(lines)
    else:
        yield from lines


def metrics_of(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of steps and evaluations; a text sample, whose lines are indented, has none."""
    is_in_sample = False
    for line in lines:
        head = HEAD.match(line)
        words = line[head.end() :] if head else line
        if words.startswith("sample, step "):
            is_in_sample = True
        elif not line[:1].isspace():
            is_in_sample = False
        if not is_in_sample and METRICS.search(words):
            yield line


def complaints_of(lines: Iterable[str]) -> Iterator[str]:
    """Complaints; of several files behind each other each with its name, where it has any."""
    complaints, heading = Complaints(), ""
    for line in lines:
        if FILE.match(line):
            complaints, heading = Complaints(), line
        elif complaints.takes(line.rstrip("\n")):
            if heading:
                yield heading
            heading = ""
            yield line


def own(lines: Iterable[str]) -> Iterator[str]:
    """Lines of a pod's log without what it tells of its node. Where that came in the middle of another line, as of a
    process that writes in pieces, the pieces are joined."""
    piece = ""
    for line in lines:
        before, told, _ = line.partition(FACTS)
        if told:
            piece += before
        else:
            yield piece + line
            piece = ""
    if piece:
        yield piece
