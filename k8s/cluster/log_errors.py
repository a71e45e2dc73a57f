"""Which lines of a log are errors: `make logs ONLY=errors` shows them, and `make monitor` the last one of each node.

A log is what several processes wrote, mixed; logs/node_N.log has a clock in front. Lines have no level, so one that
might be an error is taken rather than left out. Pure functions of text, standard library only.
"""

import re

# What may stand before the words: the clock of a log file, and who speaks.
CLOCK = r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})? )"
HEAD = re.compile(rf"{CLOCK}?(?P<who>\[(?:rank|default)\d+\]:|rank=\d+(?= )(?! host=))? ?")
QUIET = re.compile(
    r"step=\d+/\d+ (?!.*\b(?:val_)?loss=(?:n/a|nan|inf))|.*\bNCCL INFO\b|sample, step \d+:$|goodput \d"
)
COMPLAINT = re.compile(
    r"\w*error\w*|\w*exception\b|\bfail(?:ed|s|ure|ures|ing)?\b|\bfatal\b|\w*warn(?:ing)?s?\b|\bcannot\b|\bcould not\b|"
    r"\bdamaged\b|\bcorrupt\w*|\brefuse[sd]?\b|\bkilled\b|\bcrash\w*|\babort\w*|\bout of memory\b|\boom\b|oomkilled|"
    r"\bno (?:space|room|progress|setting|sample)\b|\btime[ds]?[ -]?outs?\b|\bhangs?\b|\bhung\b|\bstuck\b|"
    r"\bstraggler\b|\bmissing\b|\blost\b|\bdenied\b|\bdiffers?\b|\bwent back to\b|\bfalling back\b|\bset aside\b|"
    r"\bnot reached\b|\bhas left\b|\bhas (?:stopped|ended with)\b|\bstill in\b|\bslower than\b|"
    r"\battempts? \d+ ended\b|\bthe attempt before\b|\bdoes not (?:resolve|answer)\b|\bcalls no roll\b|"
    r"\bwaiting for data\b|\d problems?\b|\bloss=(?:n/a|nan|inf)\b|\bweights were not\b|^[EWFC]\d{4} \d\d:|"
    r"segmentation fault|core dumped|\bare at \d+ sites\b|(?:nodes|of one node) talk (?:over|through) |_DISABLE is set|"
    r"NCCL took .* instead",
    re.IGNORECASE,
)

TRACEBACK = re.compile(
    r"(?:  ?[|+] ?)*(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\)"
)
LINKS = ("During handling of the above exception", "The above exception was the direct cause")
RULER = re.compile(r"={20,}$")  # torchrun's table of what failed stands between two
ORDINARY = re.compile(
    rf"{CLOCK}|step=\d|launch: |rendezvous: |checkpoint |goodput |run=|data=|node \d|stopped by |"
    r"[EWIF]\d{4} \d\d:|\S+:\d+:\d+ \[\d+\] NCCL "
)
LONGEST_MESSAGE = 25  # lines of an exception's own words, after its frames
LONGEST_TABLE = 80  # lines between torchrun's rulers

# What the watchdog says of a process that hangs, and of all that wait for it; the next attempt repeats it.
HANGS = re.compile(r"(the attempt before: )?HANGS: ")
WAITS = re.compile(r"(?:the attempt before: )?waits for others: ")


def tells_more(words: str, before: str) -> bool:
    """Return whether a line says more than the error before it.

    It does as a rule. But who hangs is the cause of all other errors of this attempt; in what an
    earlier attempt left, it is only the cause for those who waited.
    """
    hangs = HANGS.match(before)
    if not hangs or HANGS.match(words):
        return True
    is_of_earlier_attempt = hangs[1] is not None
    return is_of_earlier_attempt and not WAITS.match(words)


class Complaints:
    """Take whole tracebacks, tables of torchrun, and each line that may be an error with what is indented below it.

    Attributes:
        open: who speaks -> lines that its exception's message may still have; 0 within its frames.
        taken: who speaks -> whether its last line was taken.
        table: lines that a table of torchrun may still have.
    """

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.taken: dict[str, bool] = {}
        self.table = 0

    def takes(self, line: str) -> bool:
        """Return whether the next line of the log belongs to an error."""
        head = HEAD.match(line)
        assert head  # all of it is optional
        who = head["who"] or ""
        words = line[head.end() :]
        if RULER.match(words):
            self.table = 0 if self.table else LONGEST_TABLE
            return True
        if self.table:
            self.table -= 1
            return True
        if self.in_traceback(who, line, words):
            taken = True
        elif words[:1].isspace() and words.strip():
            taken = self.taken.get(who, False)
        else:
            taken = bool(COMPLAINT.search(words)) and not QUIET.match(words)
        self.taken[who] = taken
        return taken

    def in_traceback(self, who: str, line: str, words: str) -> bool:
        """Return whether this is a part of a traceback: its head, a frame, the message, or a link to the next."""
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
