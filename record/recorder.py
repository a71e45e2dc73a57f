"""The one writer of metrics.jsonl (record/metrics.py). Standard library only."""

import collections
import contextlib
import errno
import logging
import os
import socket
import time
from typing import Any

from record.locks import RunFolderError
from record.metrics import (
    GOES_BACK,
    SCHEMA,
    Record,
    RecordReader,
    describe_minutes,
    duration,
    to_console,
    to_json,
)
from record.regular_file import only_regular
from record.run_paths import RunPaths

log = logging.getLogger(__name__)

PACE_STEPS = 100  # the time left follows from the pace of the last steps: a machine may slow down


class Recorder:
    """Append records to metrics.jsonl, and print some of them. Only the recorder of rank 0 is `active`.

    Records that a full disk does not take wait in memory for the next one: none is lost or torn.

    Attributes:
        waiting: records that are not in the file yet.
        written: bytes of the file, which ends with a line.
        recent: when the last steps of this attempt were made, in monotonic seconds.
        recorded_step: the largest in the record when it was opened.
        saved_step: of its last checkpoint then; 0 without one.
    """

    def __init__(self, paths: RunPaths, active: bool, attempt: int, last_step: int, log_every: int):
        self.path = paths.metrics
        self.active = active
        self.attempt = attempt
        self.last_step = last_step
        self.log_every = log_every
        self.file: Any = None  # open as long as the run
        self.waiting: list[Record] = []
        self.failed = False
        self.recent: collections.deque[float] = collections.deque(maxlen=PACE_STEPS)
        self.recorded_step = 0
        self.saved_step = 0
        if active:
            try:
                self.open()
            except OSError as error:
                raise RunFolderError(
                    f"{self.path}: cannot be read and written ({error.strerror}). Move it away to "
                    "begin a new record."
                ) from error

    def open(self) -> None:
        """Open the record to go on with it, and warn of damaged lines.

        A last line that a kill left without an end is cut off: the next record starts on its own.
        """
        reader = RecordReader(self.path)
        for record in reader.read_all():
            step = record.get("step") or 0
            self.recorded_step = max(self.recorded_step, step)
            if record["event"] == "checkpoint":
                self.saved_step = step
            elif record["event"] in GOES_BACK:
                self.saved_step = min(self.saved_step, step)
        self.file = open(self.path, "ab", buffering=0, opener=only_regular)  # noqa: SIM115
        self.file.truncate(reader.position)
        self.written = reader.position

    def note_gap(self, step: int, tokens: int) -> None:
        """Record, before what waits, that somebody has removed, replaced or cut the record."""
        self.waiting.insert(0, self.entry("gap", step, tokens, reason="record removed"))
        self.say(
            f"{self.path}: was removed, replaced or cut, and what it had is gone. It continues at step {step}"
        )

    def entry(self, name: str, step: int, tokens: int, /, **values: Any) -> Record:
        """Return a record of this moment."""
        return {
            "schema": SCHEMA,
            "event": name,
            "time": time.time(),
            "mono_s": time.monotonic(),
            "host": socket.gethostname(),
            "attempt": self.attempt,
            "step": step,
            "tokens": tokens,
            **values,
        }

    def event(self, name: str, step: int, tokens: int, /, **values: Any) -> Record:
        """Write one record, and return it."""
        entry = self.entry(name, step, tokens, **values)
        if self.file:
            self.waiting.append(entry)
            self.write_waiting()
        return entry

    def write_waiting(self) -> None:
        try:
            if self.waiting and not self.is_intact():
                before = self.file
                self.open()
                before.close()
                self.note_gap(self.waiting[0]["step"], self.waiting[0]["tokens"])
            while self.waiting:
                self.write_line(to_json(self.waiting[0]).encode() + b"\n")
                del self.waiting[0]
            self.failed = False
        except OSError as error:
            if not self.failed:
                self.say(
                    f"metrics.jsonl: cannot be written ({error.strerror}). Its lines wait in memory; "
                    "free some space or repair the folder"
                )
            self.failed = True

    def write_line(self, line: bytes) -> None:
        """Write all of a line, or nothing where it raises OSError."""
        if self.file.write(line) < len(line):
            self.file.truncate(self.written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written += len(line)

    def is_intact(self) -> bool:
        """Return whether the path still leads to what was written."""
        if not self.path.exists():
            return False
        there = self.path.stat()
        is_same = os.path.samestat(there, os.fstat(self.file.fileno()))
        return is_same and there.st_size >= self.written

    def sync(self) -> None:
        """Flush the record to disk, so that no checkpoint knows more than the record."""
        if self.file:
            self.write_waiting()
            with contextlib.suppress(OSError):  # the next write reports it
                os.fsync(self.file.fileno())

    def step(self, step: int, tokens: int, **values: Any) -> None:
        """Record a step; print it every LOG_EVERY steps, and the first and last of an attempt, with the time left."""
        entry = self.event("step", step, tokens, **values)
        is_first = not self.recent
        self.recent.append(entry["mono_s"])
        left = ""
        if not is_first:
            step_s = (self.recent[-1] - self.recent[0]) / (len(self.recent) - 1)
            left_s = (self.last_step - step) * step_s
            left = f" left={duration(left_s)}"
            # The first step waits for kernels and data, so the second is the first that tells.
            if self.active and len(self.recent) == 2 and left_s >= 120:
                self.say(f"about {describe_minutes(left_s)} left")
        if is_first or step % self.log_every == 0 or step == self.last_step:
            self.show(entry, left)

    def evaluation(self, step: int, tokens: int, **values: Any) -> None:
        """Record an evaluation and print it."""
        entry = self.event("eval", step, tokens, **values)
        self.show(entry)

    def show(self, entry: Record, left: str = "") -> None:
        """Print a step or an evaluation, in short on a terminal."""
        if self.active:
            short = to_console(entry, self.last_step, is_short=True)
            self.say(to_console(entry, self.last_step) + left, short + left)

    def say(self, line: str, terminal: str | None = None) -> None:
        """Print a line, to train.log too. `terminal`: what a terminal shows instead, if anything."""
        log.info("%s", line, extra={"terminal": terminal})

    def close(self) -> None:
        if self.file:
            self.sync()
            with contextlib.suppress(OSError):  # a network disk reports here what it could not keep
                self.file.close()
            self.file = None
