"""Which lines of a log `make logs ONLY=...` shows: numbers of training, NCCL's, who takes part, or complaints.

A pod's log is what its processes wrote to the terminal, several mixed; logs/node_N.log has a clock in front of it. Pure
functions of text: nothing here knows where it comes from. What pods tell of their nodes for make monitor is never
shown.
"""

import re
from collections.abc import Iterable, Iterator

from record.complaints import HEAD, Complaints
from record.pod_line import POD_LINE

METRICS = re.compile(
    r"step=\d+/\d+ |train/loss|\bloss[:=] ?\S+.*\btok(?:ens)?(?:/|_per_)s|\btokens/s(?:ec)?\b|"
    r"step:? +\d+(?:/\d+)?\b.*\bloss\b"
)
NCCL = re.compile(
    r"nccl|NET/(?:Socket|IB|OFI)\b|(?:nodes|of one node) talk (?:over|through) |"
    r"between nodes: each sends |gathers the weights of each block from",
    re.IGNORECASE,
)
RANKS = re.compile(
    r"roll call: |\b\d+ of \d+ (?:nodes|processes)\b.*\bjoined|all nodes have joined|"
    r"waiting for peers|node \d+(?: \([^)]*\))?(?:: host=| has left| was told to stop| has ended)|"
    r"\b(?:the|all \d+) nodes (?:do not )?share |launch: processes=|run=\S+ device=|rank=\d+ host=|"
    r"\bsites?(?:=|:| differ)|\bpods? at\b|\bMEMBER\b|\b[Nn]ode[ _][Rr]ank\b|\[rank \d+\]"
)
FILE = re.compile(r"==> \S+ <==$")
FACTS = POD_LINE + '{"schema":'  # what a pod tells of its node, for make monitor


def chosen(lines: Iterable[str], only: str) -> Iterator[str]:
    """Those of the lines that ONLY asks for, as they come; "" takes all but what nodes tell of themselves."""
    lines = own(lines)
    if only == "errors":
        yield from complaints_of(lines)
        return
    pattern = {"metrics": METRICS, "nccl": NCCL, "ranks": RANKS}.get(only)
    indented_is_sample = False
    for line in lines:
        head = HEAD.match(line)
        words = line[head.end() :] if head else line
        if pattern is None:
            yield line
            continue
        indented_is_sample = words.startswith("sample, step ") or (
            indented_is_sample and line[:1].isspace()
        )
        if not indented_is_sample and (
            pattern.search(words) or (only == "ranks" and RANKS.search(line))
        ):
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
