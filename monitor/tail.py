"""How far a run is, from its record: metrics.jsonl, of which each look reads only what has been added since.

    look -> the lines that are whole -> Timeline of all records, a window of the last RECENT steps -> Progress

A last line without its end waits for the next look. A file that is another one, or shorter than what was read of it,
begins anew. A line that is no record is counted (`bad`), and passed over. A long record is read from its beginning, a
slice each look, and beside that from near its end: until both meet `behind` is true, and where the time went is not
known. Standard library only.
"""

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from monitor.facts import Progress
from record.goodput import Timeline, number, phases_of
from record.metrics import GOES_BACK, RecordReader

RECENT = 100  # steps of this attempt, without its first, over which rates and medians go
SLICE_BYTES = 2**23  # of a long record, in a look
LAST_BYTES = 2**23  # of its end, at once: 20,000 steps


class Tail:
    """Reads a record. behind: whether some of it is still to be read."""

    def __init__(self, path: Path):
        self.path = path
        self.reader = RecordReader(path)
        self.begin()

    def begin(self) -> None:
        self.whole = Known()
        # the reader of the end and what it knows, as long as the other is not there yet
        self.recent: tuple[RecordReader, Known] | None = None
        self.progress: Progress | None = None

    @property
    def bad(self) -> int:
        return self.reader.damaged_lines

    @property
    def behind(self) -> bool:
        return self.recent is not None

    def look(self) -> Progress | None:
        """How far the run is now; None where there is no record yet. Raises OSError where it cannot be read."""
        before = self.reader.position
        self.read(SLICE_BYTES)
        reader, known = self.reader, self.whole
        if reader.size - reader.position > LAST_BYTES:
            if self.recent is None:
                self.recent = RecordReader(self.path, LAST_BYTES), Known(from_beginning=False)
                if self.whole.first:
                    self.recent[1].take(self.whole.first)  # which says when the run began
            reader, known = self.recent
            for record in reader.read_new():
                known.take(record)
        else:  # it is at the end, or will be at once
            self.recent = None
            self.read()
        if known.last and (self.reader.position != before or self.progress is None):
            self.progress = known.told(reader.damaged_lines)
        return self.progress

    def read(self, most_bytes: float = math.inf) -> None:
        records = self.reader.read_new(most_bytes)
        if self.reader.restarted:
            self.begin()
        for record in records:
            self.whole.take(record)


class Known:
    """What is known after some records."""

    def __init__(self, from_beginning: bool = True) -> None:
        self.from_beginning = from_beginning
        self.timeline = Timeline()
        self.window = Window()
        self.first: dict[str, Any] = {}
        self.last: Mapping[str, Any] = {}  # the last record
        self.rested_s = 0.0
        self.facts = dict[str, Any]()  # those of Progress that single records tell

    def take(self, record: dict[str, Any]) -> None:
        event = record["event"]
        before = self.last.get("attempt")
        if event in ("start", "resume") or not self.last or record.get("attempt", before) != before:
            began = record["time"] - sum(phases_of(record).values())
            self.facts = (
                {"started": began}
                | self.facts
                | {
                    "attempt_started": began,
                    "ready": record["time"],
                    "rollbacks": 0,
                    "processes": record.get("world_size"),
                    "straggler": {},
                }
            )
            self.window.begin()
        attempts = len(self.timeline.attempts)
        self.timeline.add(record)
        begins = len(self.timeline.attempts) > attempts
        if begins and self.last.get("event") == "end" and self.last.get("reason") == "stopped":
            self.rested_s += self.timeline.attempts[-1].down_s
        self.first = self.first or record
        self.last = record
        if event == "step":
            self.window.step(record)
            if slow := straggler_of(record):
                self.facts["straggler"] = slow
        elif event == "skip":
            self.window.skip(record)
        elif event in GOES_BACK:
            self.window.go_back(record)
            self.facts["rollbacks"] += event == "rollback"
        elif event == "eval":
            self.facts["eval_s"] = record.get("eval_s")
            if record.get("val_loss") is not None:
                self.facts |= {"val_loss": record["val_loss"], "val_step": record.get("step")}
        elif event == "checkpoint":
            self.facts |= {
                "checkpoint_step": record.get("step"),
                "checkpoint_time": record["time"],
                "checkpoint_bytes": record.get("bytes"),
            }

    def told(self, damaged_lines: int) -> Progress:
        """What is known after the last record."""
        attempt = self.last.get("attempt")
        attempt = attempt if isinstance(attempt, int) else 0
        return Progress(
            attempt=attempt,
            damaged_lines=damaged_lines or None,
            goodput=self.timeline.as_dict() if self.from_beginning else {},
            rested_s=self.rested_s or None if self.from_beginning else None,
            end_reason=str(self.last.get("reason", "")) if self.last["event"] == "end" else "",
            **self.facts,
            **self.window.told(),
        )


class Window:
    """Where the run is, and the last RECENT steps of an attempt without its first, skipped ones among them."""

    def __init__(self) -> None:
        self.at: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """An attempt begins."""
        self.steps = deque[dict[str, Any]](maxlen=RECENT)
        self.first = True
        self.mem_gib: float | None = None

    def step(self, record: dict[str, Any]) -> None:
        self.add(record)
        self.stand(record)
        self.at["step_time"] = record["time"]
        if record.get("loss") is not None:
            self.at["loss"] = record["loss"]
        self.mem_gib = record.get("mem_gib")

    def skip(self, record: dict[str, Any]) -> None:
        self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        if not self.first:
            self.steps.append(record)
        self.first = False

    def go_back(self, record: dict[str, Any]) -> None:
        """What was trained past it is no longer the run's; that steps were skipped stays known."""
        self.stand(record)
        kept = [r for r in self.steps if r["event"] == "skip" or r["step"] <= record["step"]]
        self.steps = deque(kept, maxlen=RECENT)

    def stand(self, record: dict[str, Any]) -> None:
        self.at |= {"step": record["step"], "tokens": record.get("tokens") or 0}

    def told(self) -> dict[str, Any]:
        taken = [
            (r, number(r, "step_ms") / 1000)
            for r in self.steps
            if r["event"] == "step" and number(r, "step_ms")
        ]
        skips = [r for r in self.steps if r["event"] == "skip"]
        losses = [r["loss"] for r, _ in taken if r.get("loss") is not None]
        return self.at | {
            "skipped_steps": len(skips),
            "nonfinite_steps": sum(r.get("reason") == "nonfinite" for r in skips),
            "recent_steps": len(taken),
            "median_loss": median(losses) if losses else None,
            "step_s": median(s for _, s in taken) if taken else None,
            "tokens_per_s": mean_of("tokens_per_s", taken),
            "mfu_percent": mean_of("mfu", taken),
            "data_wait_fraction": mean_of("data_wait_s", taken, per_second=False),
            "mem_gib": self.mem_gib,
        }


def mean_of(
    key: str, steps: list[tuple[dict[str, Any], float]], per_second: bool = True
) -> float | None:
    """Of a rate its mean over the time of the steps that have one; of what is not per second, its sum by their time."""
    known = [(r[key], seconds) for r, seconds in steps if r.get(key) is not None]
    total = sum(value * seconds if per_second else value for value, seconds in known)
    return total / sum(seconds for _, seconds in known) if known else None


def straggler_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Who a step names as slow (train/hooks/stragglers.py), with "step"; {} where it names none."""
    slow = record.get("straggler")
    if (
        isinstance(slow, dict)
        and isinstance(slow.get("rank"), int)
        and isinstance(slow.get("host"), str)
        and isinstance(slow.get("times"), int | float)
    ):
        return {**slow, "step": record["step"]}
    return {}
