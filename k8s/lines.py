"""Which lines of a log `make logs ONLY=...` shows: numbers of training, NCCL's, who takes part, or complaints.

A pod's log is what its processes wrote to the terminal, several mixed; logs/node_N.log has a clock in front of it. Pure
functions of text: nothing here knows where it comes from. A line that might be a complaint is shown rather than left
out: who asks for errors has trouble, and no level stands in front of a line.
"""

import re
from collections.abc import Iterable, Iterator

# What may stand before the words: the clock of a log file, and who speaks.
CLOCK = r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})? )"
HEAD = re.compile(rf"{CLOCK}?(?P<who>\[(?:rank|default)\d+\]:|rank=\d+(?= )(?! host=))? ?")

METRICS = re.compile(r"step=\d+/\d+ |train/loss|\bloss[:=] ?\S+.*\btok(?:ens)?(?:/|_per_)s|\btokens/s(?:ec)?\b|"
                     r"step:? +\d+(?:/\d+)?\b.*\bloss\b")
NCCL = re.compile(r"nccl|NET/(?:Socket|IB|OFI)\b|(?:nodes|of one node) talk (?:over|through) ", re.IGNORECASE)
RANKS = re.compile(r"roll call: |\b\d+ of \d+ (?:nodes|processes)\b.*\bjoined|all nodes have joined|"
                   r"waiting for peers|node \d+(?: \([^)]*\))?(?:: host=| has left| was told to stop| has ended)|"
                   r"\b(?:the|all \d+) nodes (?:do not )?share |launch: processes=|run=\S+ device=|rank=\d+ host=|"
                   r"\bsites?(?:=|:| differ)|\bpods? at\b|\bMEMBER\b|\b[Nn]ode[ _][Rr]ank\b|\[rank \d+\]")
QUIET = re.compile(r"step=\d+/\d+ (?!.*\b(?:val_)?loss=(?:n/a|nan|inf))|.*\bNCCL INFO\b|sample, step \d+:$")
COMPLAINT = re.compile(
    r"\w*error\w*|\w*exception\b|\bfail(?:ed|s|ure|ures|ing)?\b|\bfatal\b|\w*warn(?:ing)?s?\b|\bcannot\b|\bcould not\b|"
    r"\bdamaged\b|\bcorrupt\w*|\brefuse[sd]?\b|\bkilled\b|\bcrash\w*|\babort\w*|\bout of memory\b|\boom\b|oomkilled|"
    r"\bno (?:space|room|progress|setting|sample)\b|\btime[ds]?[ -]?outs?\b|\bhangs?\b|\bhung\b|\bstuck\b|"
    r"\bstraggler\b|\bmissing\b|\blost\b|\bdenied\b|\bdiffers?\b|\bwent back to\b|\bfalling back\b|\bset aside\b|"
    r"\bnot reached\b|\bhas left\b|\bhas (?:stopped|ended with)\b|\bstill in\b|\bslower than\b|"
    r"\battempts? \d+ ended\b|\bthe attempt before\b|\bdoes not (?:resolve|answer)\b|\bcalls no roll\b|"
    r"\bwaiting for data\b|\d problems?\b|\bloss=(?:n/a|nan|inf)\b|\bweights were not\b|^[EWFC]\d{4} \d\d:|"
    r"segmentation fault|core dumped|\bare at \d+ sites\b|(?:nodes|of one node) talk (?:over|through) |_DISABLE is set|"
    r"NCCL took .* instead", re.IGNORECASE)

TRACEBACK = re.compile(r"(?:  ?[|+] ?)*(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\)")
LINKS = ("During handling of the above exception", "The above exception was the direct cause")
RULER = re.compile(r"={20,}$")  # torchrun's table of what failed stands between two
ORDINARY = re.compile(rf"{CLOCK}|step=\d|launch: |roll call: |checkpoint |goodput |run=|data=|node \d|stopped by |"
                      r"[EWIF]\d{4} \d\d:|\S+:\d+:\d+ \[\d+\] NCCL ")
FILE = re.compile(r"==> \S+ <==$")
LONGEST_MESSAGE = 25  # lines of an exception's own words, behind its frames
LONGEST_TABLE = 80    # lines between torchrun's rulers


class Complaints:
    """Takes tracebacks whole, tables of torchrun, and every line that may be a complaint with what is below it."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}  # who speaks -> lines that its exception's message may still have; 0: frames
        self.below: dict[str, bool] = {}
        self.table = 0

    def takes(self, line: str) -> bool:
        head = HEAD.match(line)
        assert head  # all of it is optional
        who, words = head["who"] or "", line[head.end():]
        if RULER.match(words):
            self.table = 0 if self.table else LONGEST_TABLE
            return True
        if self.table:
            self.table -= 1
            return True
        taken = self.in_traceback(who, line, words) or (
            self.below.get(who, False) if words[:1].isspace() and words.strip()
            else bool(COMPLAINT.search(words) and not QUIET.match(words)))
        self.below[who] = taken
        return taken

    def in_traceback(self, who: str, line: str, words: str) -> bool:
        """Whether this is a part of a traceback: its head, a frame, the exception with its message, or a link."""
        if TRACEBACK.match(words):
            self.open[who] = 0
            return True
        left = self.open.get(who)
        if left is None:
            return False
        if left == 0:  # among the frames
            if words.strip() and not words[:1].isspace():
                self.open[who] = LONGEST_MESSAGE
            return True
        if words.startswith(LINKS):
            self.open[who] = LONGEST_MESSAGE
            return True
        if left == 1 or ORDINARY.match(line) or ORDINARY.match(words):
            del self.open[who]
            return False
        self.open[who] = left - 1
        return True


def chosen(lines: Iterable[str], only: str) -> Iterator[str]:
    """Those of the lines that ONLY asks for, as they come; "" takes all."""
    if only == "errors":
        yield from complaints_of(lines)
        return
    pattern = {"metrics": METRICS, "nccl": NCCL, "ranks": RANKS}.get(only)
    indented_is_sample = False
    for line in lines:
        head = HEAD.match(line)
        words = line[head.end():] if head else line
        if pattern is None:
            yield line
            continue
        indented_is_sample = words.startswith("sample, step ") or (indented_is_sample and line[:1].isspace())
        if not indented_is_sample and (pattern.search(words) or (only == "ranks" and RANKS.search(line))):
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
