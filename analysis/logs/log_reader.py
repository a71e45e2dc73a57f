"""A log to tables, one for each process that printed steps: rows of numbers, and marks between them.

    block -> split at lines of the shape seen last -> rows            what lies between -> line by line (dialect.py)

Memory is bounded by the rows, eight bytes a number, and not by the file.
"""

import array
import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis.logs.dialect import Dialect, Line, wraps
from analysis.logs.log_file import Blocks
from analysis.logs.shape import CLOCK, NO_TAG, SILENT, Shape, row, seconds, shape_of, tag_of

SHAPES_KEPT = 8  # of lines that are not of the last shape
AHEAD = 4096  # bytes in which a new shape must be seen again, to be the one to split at
DEEPEST = 50  # such changes of shape within one text
LONGEST_STEP = 2000  # bytes of a line that may be a step
SHOWN = 3  # lines that were not understood
LOOKS_LIKE = re.compile(
    rb"(?i)\b(?:step|iter(?:ation)?)s?\b[ \t:=#]*[0-9].*\bloss\b[^a-z0-9]*[-+]?(?:[0-9]|nan|inf)"
)
ERROR = re.compile(rb"(?:Error|Exception|Interrupt)\b|\b(?:error|ERROR|FATAL|Killed|CANCELLED)\b")
ERROR_WORDS = (
    b"rror",
    b"xception",
    b"nterrupt",
    b"ERROR",
    b"FATAL",
    b"Killed",
    b"CANCELLED",
)  # one is in each
WITH_REASON = re.compile(rb"(?:Error|Exception|error|Interrupt): *\S")
BAR = re.compile(rb"(?:^|(?<=[\s:\]]))[0-9]{1,3}%\|[^|]*\| ([0-9]+)/([0-9]+) \[")
MAIN_LOG = re.compile(rb"s:[0-9]")  # a head that is too short to be a word
TIME = re.compile(rb"[0-9]:[0-9]{2}:[0-9]{2}")
WEEKDAY_CLOCK = re.compile(
    rb"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) ([A-Z][a-z][a-z]) +(\d\d?) (\d\d:\d\d:\d\d) (\d{4})\b"
)
MONTHS = b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()


class Table:
    """Columns of float64 that grow; SILENT where a row is: a NaN is one that was printed."""

    def __init__(self) -> None:
        self.columns: dict[str, array.array[float]] = {}
        self.rows = 0

    def add(self, columns: Mapping[str, np.ndarray], count: int) -> None:
        for name in columns:
            if name not in self.columns:
                self.columns[name] = array.array("d", np.full(self.rows, SILENT).tobytes())
        for name, column in self.columns.items():
            found = columns.get(name)
            column.frombytes((np.full(count, SILENT) if found is None else found).tobytes())
        self.rows += count

    def add_row(self, numbers: Mapping[str, float]) -> None:
        for name in numbers:
            if name not in self.columns:
                self.columns[name] = array.array("d", np.full(self.rows, SILENT).tobytes())
        for name, column in self.columns.items():
            column.append(numbers.get(name, SILENT))
        self.rows += 1

    def amend(self, numbers: Mapping[str, float]) -> None:
        """Add to the last row what another line says of it."""
        for name, number in numbers.items():
            if name not in self.columns:
                self.columns[name] = array.array("d", np.full(self.rows, SILENT).tobytes())
            self.columns[name][-1] = number

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            name: np.frombuffer(column, np.float64).copy() for name, column in self.columns.items()
        }


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that a log says between two steps."""

    row: int  # of the step behind it
    kind: str  # clock, end, resume or error
    text: bytes


class Stream:
    """What one process printed."""

    def __init__(self, tag: bytes):
        self.tag = tag
        self.steps = Table()
        self.evals = Table()  # with `row`, of the step behind it
        self.dialects: list[tuple[int, Dialect]] = []  # from that row on
        self.marks: list[Mark] = []

    def is_in(self, dialect: Dialect) -> None:
        if not self.dialects or self.dialects[-1][1] is not dialect:
            self.dialects.append((self.steps.rows, dialect))

    def mark(self, kind: str, text: bytes) -> None:
        """Of errors and clocks the last between two steps is kept; of errors rather one that gives a reason.

        An error behind the end of a run is none of that run's, so the one before it stays.
        """
        here = self.steps.rows
        for i in range(len(self.marks) - 1, -1, -1):
            if self.marks[i].row != here or (kind, self.marks[i].kind) == ("error", "end"):
                break
            if self.marks[i].kind == kind:
                if (
                    kind != "error"
                    or WITH_REASON.search(text)
                    or not WITH_REASON.search(self.marks[i].text)
                ):
                    self.marks[i] = Mark(here, kind, text)
                return
        self.marks.append(Mark(here, kind, text))


class Reader:
    """Reads one log. `streams`, `not_understood`, `examples` and `notes` are its result."""

    def __init__(self, dialects: Sequence[Dialect]):
        self.dialects = list(dialects)  # that of the last line first
        self.shape: Shape | None = None
        self.shapes: list[Shape] = []
        self.streams: dict[bytes, Stream] = {}
        self.stream = Stream(
            NO_TAG
        )  # that of the last line; before the first, one that holds marks only
        self.not_understood = 0
        self.examples: list[bytes] = []
        self.notes: list[str] = []
        self.bar_total = self.last_total = (
            b""  # of the bar that counts the steps, once known; of the last one drawn
        )
        self.waiting = False  # the last row came from a dictionary and waits for its step
        self.expected = b""  # the total of the bar that it waits for
        self.since: dict[bytes, bytes] = {}  # total -> step of each bar as it was first drawn anew
        self.marks = [
            (kind, text)
            for d in dialects
            for kind, texts in (("end", d.ends), ("resume", d.resumes))
            for text in texts
        ]
        self.words = words_of(dialects, [text for _, text in self.marks])

    def read(self, path: Path) -> "Reader":
        blocks = Blocks(path)
        for block in blocks:
            self.feed(block)
        if blocks.cut.strip() and (self.understood(blocks.cut) or LOOKS_LIKE.search(blocks.cut)):
            self.notes.append(
                "the last line has no line end and may be cut short; it was left out: "
                + shown(blocks.cut)
            )
        elif blocks.cut:
            self.line(blocks.cut)  # no step, but it may say why the run ended
        if blocks.too_long:
            self.notes.append(f"{blocks.too_long} lines of more than 4 MiB were left out")
        if blocks.damage:
            self.notes.append(blocks.damage)
        return self

    # ---- the quick way

    def feed(self, text: bytes, depth: int = 0) -> None:
        """Take whole lines."""
        if self.shape is None:
            self.lines(text, depth)
            return
        shape = self.shape
        pieces = shape.regex.split(text)
        between = pieces[:: len(shape.numbers) + 1]
        if len(between) == 1:
            self.lines(text, depth)
            return
        columns, done = shape.columns(pieces), 0
        for i, noise in enumerate(between):
            if noise and not noise.isspace():
                self.add(shape, columns, done, i)
                done = i
                self.lines(noise, depth)
        self.add(shape, columns, done, len(between) - 1)

    def add(self, shape: Shape, columns: Mapping[str, np.ndarray], start: int, stop: int) -> None:
        """Take rows of a shape."""
        if start == stop:
            return
        stream = (
            self.stream if shape.kind == "eval" and shape.tag == NO_TAG else self.go_to(shape.tag)
        )
        table = stream.evals if shape.kind == "eval" else stream.steps
        found = {name: column[start:stop] for name, column in columns.items()}
        if shape.kind == "eval":
            found["row"] = np.full(stop - start, float(stream.steps.rows))
        else:
            stream.is_in(shape.dialect)
        table.add(found, stop - start)

    # ---- line by line

    def lines(self, text: bytes, depth: int) -> None:
        present = [word for word in self.words if word in text]
        main_log = MAIN_LOG.search(text) is not None
        if not present and not main_log:  # so it is with nearly all that stands between two steps
            self.remark(text)
            return
        place = plain = (
            0  # where the line begins, and where lines begin in which nothing is to be found
        )
        while place < len(text):
            end = text.find(b"\n", place)
            end = len(text) if end < 0 else end
            line = text[place:end]
            for word in (
                present
            ):  # a loop, twice as fast as any(): this is asked of every line that is no step
                if word in line:
                    break
            else:
                if not (main_log and MAIN_LOG.search(line)):
                    place = end + 1
                    continue
            if plain < place:
                self.remark(text[plain:place])
            found = self.line(line)
            place = plain = end + 1
            if found and depth < DEEPEST and len(text) - place > AHEAD:
                shape = self.shape.or_wider(found) if self.shape else found
                if shape.regex.search(text, place, place + AHEAD):
                    self.shape = shape
                    self.feed(text[place:], depth + 1)
                    return
        if plain < len(text):
            self.remark(text[plain:])

    def line(self, line: bytes) -> Shape | None:
        """Take one line; its shape where it is that of a step which was understood the slow way."""
        if len(line) > LONGEST_STEP:
            self.remark(line)
            return None
        for shape in self.shapes:
            if found := shape.regex.match(line):
                self.add(shape, shape.columns((b"", *found.groups())), 0, 1)
                return None
        read = self.understood(line)
        if read is None:
            self.other_line(line)
            return None
        self.dialects.sort(key=lambda d: d is not read.dialect)
        numbers = row(line, read)
        if read.kind == "detail":
            if self.stream.steps.rows:
                self.stream.steps.amend(numbers)
            return None
        tag = tag_of(line[: read.start])
        stream = self.stream if read.kind == "eval" and tag == NO_TAG else self.go_to(tag)
        shape = shape_of(line, read)
        self.shapes = [shape, *self.shapes[: SHAPES_KEPT - 1]]
        if read.kind == "eval":
            stream.evals.add_row({**numbers, "row": float(stream.steps.rows)})
            return None
        stream.is_in(read.dialect)
        stream.steps.add_row(numbers)
        return shape

    def understood(self, line: bytes) -> Line | None:
        return next(
            (read for d in self.dialects if (d.head or d.evals) and (read := d.read(line))), None
        )

    def other_line(self, line: bytes) -> None:
        """Take a line that is no step: a dictionary, a bar, a mark, or one that should have been understood."""
        if b"{'" in line and any(d.keys and self.dictionary(d, line) for d in self.dialects):
            return
        if (bar := BAR.search(line)) and wraps(line[: bar.start()]):
            self.bar(bar)
            return
        for kind, text in self.marks:
            if text in line:
                self.stream.mark(kind, line.strip())
                return
        if LOOKS_LIKE.search(line):
            self.not_understood += 1
            if len(self.examples) < SHOWN:
                self.examples.append(line.strip()[:200])
        self.remark(line)

    def remark(self, text: bytes) -> None:
        """Note what text without a step has of errors and clocks."""
        if error := last_error(text):
            self.stream.mark("error", error)
        if TIME.search(text, 0, AHEAD) and (
            clock := CLOCK.search(text, 0, AHEAD) or WEEKDAY_CLOCK.search(text, 0, AHEAD)
        ):
            self.stream.mark("clock", clock[0])

    def dictionary(self, dialect: Dialect, line: bytes) -> bool:
        """Take a Python dictionary as Hugging Face's Trainer prints it; whether it is one."""
        start = line.find(b"{'")
        try:
            content = ast.literal_eval(
                re.sub(rb"\b(nan|inf)\b(?=[,}])", rb"'\1'", line[start:].strip()).decode()
            )
            numbers = {
                column: float(content[key])
                for key, column in dialect.keys.items()
                if key in content
            }
        except (ValueError, SyntaxError, TypeError, UnicodeDecodeError):
            return False
        stream = self.go_to(tag_of(line[:start]))
        if "train_runtime" in content:
            stream.mark("end", line.strip()[:200])
            self.bar_total, self.waiting = b"", False  # another training has another bar
        elif "loss" in content:
            stream.is_in(dialect)
            if self.waiting:  # the row before found no step: the bar is another one by now
                self.bar_total = b""
                if self.last_total in self.since:
                    self.number(self.since[self.last_total], self.last_total)
            stream.steps.add_row({"step": SILENT, **numbers})
            self.waiting, self.expected, self.since = True, self.bar_total or self.last_total, {}
        elif "val_loss" in numbers:
            stream.evals.add_row({**numbers, "row": float(stream.steps.rows)})
        return "epoch" in content

    def bar(self, bar: re.Match[bytes]) -> None:
        """Take a progress bar: the first one drawn anew behind a dictionary has its step.

        The bar of the steps is that which was drawn last in front of the first dictionary; an evaluation has its own.
        """
        self.last_total = bar[2]
        self.since.setdefault(bar[2], bar[1])
        if self.waiting and bar[2] == self.expected:
            self.number(bar[1], bar[2])
        elif self.waiting and not self.bar_total:
            self.expected = b""  # which bar it is will be seen at the next dictionary

    def number(self, step: bytes, total: bytes) -> None:
        self.stream.steps.amend({"step": float(step), "last_step": float(total)})
        self.bar_total, self.waiting = total, False

    def go_to(self, tag: bytes) -> Stream:
        """The stream of a process; what was marked before the first step belongs to it."""
        if tag not in self.streams:
            self.streams[tag] = Stream(tag)
            if self.stream.tag == NO_TAG and not self.stream.steps.rows:
                self.streams[tag].marks, self.streams[tag].evals = (
                    self.stream.marks,
                    self.stream.evals,
                )
        self.stream = self.streams[tag]
        return self.stream


def words_of(dialects: Sequence[Dialect], marks: Sequence[bytes]) -> tuple[bytes, ...]:
    """Texts of which one is in every line that can be understood, or that looks like a step; frequent ones first."""
    usual = [
        b"step",
        b"Step",
        b"iter",
        b"Iter",
        b"STEP",
        b"%|",
        *([b"{'"] if any(d.keys for d in dialects) else []),
    ]
    fields = [
        field for d in dialects for field in (*([d.head] if d.head else []), *d.evals, *d.details)
    ]
    others = {
        f.literal for f in fields if not any(word in f.regex.pattern for word in usual)
    } | set(marks)
    others = {word for word in others - {b"", b"s:"} if not any(word_ in word for word_ in usual)}
    return (
        *usual,
        *sorted(word for word in others if not any(other in word for other in others - {word})),
    )


def last_error(text: bytes) -> bytes:
    """The last line that tells of an error, one that gives a reason rather than one that does not; or nothing."""
    best = b""
    if not any(word in text for word in ERROR_WORDS):
        return best
    for found in ERROR.finditer(text):
        start, end = text.rfind(b"\n", 0, found.start()) + 1, text.find(b"\n", found.end())
        line = text[start : end if end >= 0 else len(text)].strip()[:300]
        if WITH_REASON.search(line) or not WITH_REASON.search(best):
            best = line
    return best


def clock_seconds(mark: Mark) -> float:
    """Unix seconds of a mark that is a clock; NaN where it names no day."""
    if found := WEEKDAY_CLOCK.search(mark.text):
        month = MONTHS.index(found[1]) + 1 if found[1] in MONTHS else 0
        return float(seconds([b"%s-%02d-%02d %s" % (found[4], month, int(found[2]), found[3])])[0])
    return float(seconds([mark.text])[0])


def shown(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip()[:160]
