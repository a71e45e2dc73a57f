"""Where the numbers of a run go: metrics.jsonl always, the console now and then."""

import contextlib
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from record import reader
from record.run_paths import RunPaths

log = logging.getLogger(__name__)


class Recorder:
    """Appends records to metrics.jsonl and says some of them aloud. Only the first rank has one that is `active`.

    What a full disk does not take is kept, and written before the next record: no line is lost or torn in the middle.
    """

    def __init__(self, paths: RunPaths, active: bool, attempt: int, last_step: int, log_every: int):
        self.active, self.attempt, self.last_step, self.log_every = (
            active,
            attempt,
            last_step,
            log_every,
        )
        self.file: BinaryIO | None = None
        self.waiting, self.failed = b"", False  # bytes not yet in the file; whether that was said
        if active:
            drop_partial_line(paths.metrics)
            self.file = open(paths.metrics, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)
        self.progress = Progress(last_step) if active and sys.stdout.isatty() else None

    def entry(self, name: str, step: int, tokens: int, /, **values: Any) -> dict[str, Any]:
        """A record of now."""
        assert name in reader.EVENTS, name
        return {
            "schema": reader.SCHEMA,
            "event": name,
            "time": time.time(),
            "mono_s": time.monotonic(),
            "host": socket.gethostname(),
            "attempt": self.attempt,
            "step": step,
            "tokens": tokens,
            **values,
        }

    def event(self, name: str, step: int, tokens: int, /, **values: Any) -> dict[str, Any]:
        """Write one record; returns it."""
        entry = self.entry(name, step, tokens, **values)
        if self.file:
            self.waiting += reader.to_json(entry).encode() + b"\n"
            self.write_waiting()
        return entry

    def write_waiting(self) -> None:
        try:
            while self.file and self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
            self.failed = False
        except OSError as error:
            if not self.failed:
                self.say(
                    f"metrics.jsonl: cannot be written ({error.strerror}); its lines wait in memory. Make room"
                )
            self.failed = True

    def sync(self) -> None:
        """Make the record durable, as a checkpoint is that must not know more than the record."""
        if self.file:
            self.write_waiting()
            with contextlib.suppress(OSError):  # said by the next write
                os.fsync(self.file.fileno())

    def step(self, step: int, tokens: int, first: bool, **values: Any) -> None:
        """Record a step; on the console every LOG_EVERY steps, and the first and last of an attempt."""
        entry = self.event("step", step, tokens, **values)
        if not self.active:
            return
        if step % self.log_every == 0 or first or step == self.last_step:
            self.say(reader.to_console(entry, self.last_step))
        if self.progress:
            self.progress.show(entry)

    def evaluation(self, step: int, tokens: int, **values: Any) -> None:
        """Record an evaluation and say it."""
        entry = self.event("eval", step, tokens, **values)
        if self.active:
            self.say(
                reader.to_console(
                    entry,
                    self.last_step,
                    (
                        "val_loss",
                        "val_bpb",
                        "val_ppl",
                        "scored_tokens",
                        "core",
                        "core_partial",
                        "eval_s",
                    ),
                )
            )

    def say(self, line: str) -> None:
        """A line for the console and train.log, above the progress line if there is one."""
        if self.progress:
            self.progress.clear()
        log.info("%s", line)

    def close(self) -> None:
        if self.progress:
            self.progress.clear()
        if self.file:
            self.sync()
            with contextlib.suppress(OSError):  # a network disk reports here what it could not keep
                self.file.close()
            self.file = None


class Progress:
    """One line on a terminal that is written over, with the time that is left."""

    WIDTH = 30

    def __init__(self, last_step: int):
        self.last_step = last_step
        self.began: tuple[int, float] | None = None  # (step, time) at the first step shown
        self.shown_at = 0.0

    def show(self, entry: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.began is None:
            self.began = (entry["step"], now)
        if now - self.shown_at < 0.2:
            return
        self.shown_at = now
        done = int(self.WIDTH * entry["step"] / self.last_step)
        steps = entry["step"] - self.began[0]
        seconds = (self.last_step - entry["step"]) * (now - self.began[1]) / steps if steps else 0.0
        left = f"{reader.duration(seconds)} left" if steps else ""
        bar = "#" * done + "-" * (self.WIDTH - done)
        self.write(
            f"\r\033[K[{bar}] {entry['step']}/{self.last_step} loss {entry['loss']:.3f} {left}"
        )

    def clear(self) -> None:
        self.write("\r\033[K")

    def write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:  # the terminal was closed: no reason to end a run
            pass


def drop_partial_line(path: Path) -> None:
    """Cut a last line that a kill left without its end, so that what follows starts on a line of its own."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())
