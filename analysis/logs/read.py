"""A log to rows: for each process that printed steps their numbers, evaluations, and marks between them.

    file -> lines -> the dialect that reads them (dialect.py) -> ProcessLog        trainer_state.json -> ProcessLog

Memory is bounded by the numbers, 16 bytes each, and not by the file.
"""

import contextlib
import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from analysis.logs.dialect import Dialect, Line, Values
from analysis.runs import COLUMNS, ColumnBuilder, is_number

UNKNOWN = sys.maxsize  # higher than any rank
SEARCHED = 500  # characters of a line that was not understood
SHOWN = 3  # lines that were not understood
LONGEST_STEP = 4_000  # characters of a line that may be a step
BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16, which PowerShell writes
# Colors, also of a logger or a paste that lost the escape character.
COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[[0-9]{1,3}(?:;[0-9]{1,3})*m")

HIGHER_RANK = "lines of higher ranks were left out: the lowest rank counts"
POD = re.compile(r"\[(pod/[^\]]*)\]")
RANK = re.compile(r"(?:\[rank *|\[default|\brank[ =]|^ *(?=\d+: ))(\d+)")
GLUED = re.compile(r"[^\s:\])|>-]$")  # a logger writes one of these before a message
CLOCKS = (  # and their format; "" is that of ISO 8601
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"), ""),
    (re.compile(r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d"), "%m/%d/%Y %H:%M:%S"),
    (
        re.compile(r"[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \d{4}"),
        "%a %b %d %H:%M:%S %Y",
    ),
)
LOOKS_LIKE_STEP = re.compile(
    r"(?i)\b(?:step|iter(?:ation)?)s?\b[ \t:=#]*[0-9].*\bloss\b(?:[ \t]+[(a-z)]+){0,2}[^a-z0-9]*[-+]?(?:[0-9]|nan|inf)"
)
ERROR = re.compile(r"(?:Error|Exception|Interrupt)\b|\b(?:error|ERROR|FATAL|Killed|CANCELLED)\b")
BAR = re.compile(r"(?:^|(?<=[\s:\]]))[0-9]{1,3}%\|[^|]*\| ([0-9]+)/([0-9]+) \[")


class ProcessLog:
    """What one process printed.

    Attributes:
        rank: the lowest that printed a step; UNKNOWN until a line names one.
        rows: how many steps.
        numbers: of these.
        evals: evaluations, each with the number of rows before it.
        dialects: (row, dialect): from that row on.
        marks: (row, kind) -> what stands before this row. The kinds are clock, end, error, and late error: one after
            the end of a run. The last of a kind counts.
        bars: (row, total) -> the first number that a progress bar of so many shows before this row.
        bar_total: of the bar that was drawn last before the first row.
    """

    def __init__(self) -> None:
        self.rank = UNKNOWN
        self.rows = 0
        self.texts = ("", "")  # of the last step lines
        self.numbers = ColumnBuilder()
        self.evals: list[tuple[int, Values]] = []
        self.dialects: list[tuple[int, Dialect]] = []
        self.marks: dict[tuple[int, str], Any] = {}
        self.bars: dict[tuple[int, int], int] = {}
        self.bar_total = 0

    def to_columns(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return (rows,) float64 for each column, NaN where nothing is said, and where a NaN or infinity is.

        A row of a dictionary has the first step that the bar of the steps shows after it.
        """
        if "step" not in self.numbers.by_name:
            for (row, total), step in self.bars.items():
                if row and total == self.bar_total:
                    self.numbers.add(row - 1, {"step": step, "last_step": total})
        not_finite = {}
        for name, (rows, numbers) in self.numbers.by_name.items():
            is_not_finite = ~np.isfinite(numbers)
            if is_not_finite.any():
                not_finite[name] = np.zeros(self.rows, bool)
                not_finite[name][rows] = is_not_finite
        return self.numbers.to_columns(self.rows, [*COLUMNS, "last_step", "epoch"]), not_finite


class Reader:
    """Reads one log. Its result are `streams`, by pod, and `notes`."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self.dialects = [*dialects]  # the last used first
        self.streams: dict[str, ProcessLog] = {}
        self.stream = ProcessLog()  # of the last line
        self.detailed = self.stream  # of the last step
        self.counts: Counter[str] = Counter()  # what lines were -> how many were so
        self.not_understood: list[str] = []  # the first of these lines
        self.notes: list[str] = []
        self.ends = [text for dialect in dialects for text in dialect.ends]

    def read(self, path: Path) -> "Reader":
        """Read a log or a trainer_state.json. Raises OSError if that is not possible."""
        try:
            if path.suffix == ".json":
                self.read_state(path)
            else:
                with open_log(path) as file:
                    for line in file:
                        if len(line) > LONGEST_STEP:
                            self.read_other_line(line[:LONGEST_STEP])
                        else:
                            self.read_line(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.notes.append(
                f"the packed file ends early or is damaged ({error}); what could be unpacked was read"
            )
        self.notes += [f"{count:,} {words}" for words, count in self.counts.items()]
        self.notes += [f"not understood: {line}" for line in self.not_understood]
        return self

    def read_state(self, path: Path) -> None:
        """Read a trainer_state.json, whose log_history has the same dictionaries, with steps. Raises OSError."""
        try:
            content = json.loads(path.read_bytes())
            entries = [*content["log_history"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            self.notes.append("no trainer_state.json of Hugging Face: it has no log_history")
            return
        for entry in entries:
            if isinstance(entry, dict) and is_number(entry.get("step")):
                entry["max_steps"] = content.get("max_steps")
                numbers = {
                    key: entry[key] for key in sorted(entry, reverse=True) if is_number(entry[key])
                }
                self.read_line(f"{numbers}\n")
        left_out = len(entries) - self.stream.rows - len(self.stream.evals) - len(self.stream.marks)
        if left_out:
            self.notes.append(f"{left_out:,} entries without a step or a loss were left out")

    def read_line(self, text: str) -> None:
        """Take a line. Without a line end it is the last, and may be cut short."""
        line = text.removesuffix("\n")
        if "[" in line:
            line = COLOR.sub("", line)
        for dialect in self.dialects:
            parts = dialect.read(line)
            if parts:
                break
        if not text.endswith("\n") and (parts or LOOKS_LIKE_STEP.search(line[:SEARCHED])):
            self.notes.append(
                f"the last line has no line end and may be cut short; it was left out: {line.strip()}"
            )
            return
        if not parts:
            self.read_other_line(line)
            return
        self.dialects.remove(dialect)
        self.dialects.insert(0, dialect)
        for part in parts:
            self.add(dialect, part)
        rest = line[part.end :]
        if rest[:1] not in dialect.separators + " \t":
            self.read_other_line(rest)

    def add(self, dialect: Dialect, line: Line) -> None:
        """Add what a line says to the stream of its process."""
        if line.kind == "detail":
            if self.detailed.rows:
                self.detailed.numbers.add(self.detailed.rows - 1, line.values)
            return
        stream = self.find_stream(line.prefix)
        if GLUED.search(line.prefix):
            self.read_other_line(line.prefix)
        elif line.prefix:
            line.values["time"] = read_clock(line.prefix)
        if line.kind == "eval":
            stream.evals.append((stream.rows, line.values))
        elif line.text in stream.texts:  # it was just printed
            self.counts["lines were there twice"] += 1
        else:
            stream.texts = (stream.texts[1], line.text)
            if not stream.dialects or stream.dialects[-1][1] is not dialect:
                stream.dialects.append((stream.rows, dialect))
            stream.numbers.add(stream.rows, line.values)
            stream.rows += 1
            self.detailed = stream

    def find_stream(self, prefix: str) -> ProcessLog:
        """Return the stream of the pod that printed a line, by the text before it; a new one for a higher rank."""
        if not prefix and self.streams:
            return self.stream
        pod = "".join(POD.findall(prefix))
        if pod not in self.streams:
            self.streams[pod] = ProcessLog() if self.streams else self.stream
        self.stream = self.streams[pod]
        ranks = RANK.findall(prefix)
        if not ranks or GLUED.search(prefix):  # then the rank is of another process
            return self.stream
        rank = int(ranks[-1])
        if rank > self.stream.rank:
            self.counts[HIGHER_RANK] += 1
            return ProcessLog()
        if rank < self.stream.rank < UNKNOWN and self.stream.rows:
            self.counts[HIGHER_RANK] += self.stream.rows
            self.stream = self.streams[pod] = ProcessLog()
        self.stream.rank = rank
        return self.stream

    def read_other_line(self, line: str) -> None:
        """Take a line that is no step: a bar, a mark, or one that should have been understood."""
        stream = self.stream
        bar = BAR.search(line)
        if bar:
            total = int(bar[2])
            stream.bars.setdefault((stream.rows, total), int(bar[1]))
            if not stream.rows or not stream.bar_total:
                stream.bar_total = total
            return
        if any(text in line for text in self.ends):
            stream.marks[stream.rows, "end"] = line
            return
        if LOOKS_LIKE_STEP.search(line[:SEARCHED]):
            self.counts["lines that look like steps were not understood"] += 1
            if len(self.not_understood) < SHOWN:
                self.not_understood.append(line.strip()[:160])
        if ERROR.search(line):
            kind = "late error" if (stream.rows, "end") in stream.marks else "error"
            stream.marks[stream.rows, kind] = line.strip()[:300]
        clock = read_clock(line)
        if clock:
            stream.marks[stream.rows, "clock"] = clock


def open_log(path: Path) -> Any:
    """Open a log as text with one kind of line end; one that gzip packed is unpacked."""
    opener: Any = open
    with open(path, "rb") as file:
        if file.read(2) == b"\x1f\x8b":
            opener = gzip.open
    with opener(path, "rb") as file:
        encoding = "utf-16" if file.read(2) in BYTE_ORDER_MARKS else "utf-8"
    return opener(path, "rt", encoding=encoding, errors="replace")


def read_clock(text: str) -> float | None:
    """Return Unix seconds of the first clock in a text, which counts as UTC; None without one."""
    for pattern, form in CLOCKS:
        match = pattern.search(text)
        if match:
            with contextlib.suppress(ValueError):  # a 31st of February, or the like
                if form:
                    clock = datetime.strptime(match[0], form)
                else:
                    clock = datetime.fromisoformat(match[0])
                return clock.replace(tzinfo=UTC).timestamp()
    return None
