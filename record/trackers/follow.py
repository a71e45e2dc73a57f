"""Follow the record of a run and send it to a tracker, in a process of its own that processes.py starts.

    metrics.jsonl -> records -> rows -> tracker

A row is one record as it was written. Trackers show every LOG_EVERY-th step, the first and last of an attempt, and all
evaluations. Rows have positions, and a tracker knows the last one that it has: so each step and each evaluation is sent
once, also where the trainer went back to an older checkpoint. When standard input ends, the trainer is gone: what it
left is sent, and the tracker ends as the record does. Standard output has one line for the user on each thing that
happens; logs/TRACKER.log has the details.
"""

import contextlib
import fcntl
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from record.metrics import GOES_BACK, Record, RecordReader, is_number
from record.run_paths import RunPaths
from record.trackers.processes import REPORTED, UPLOAD_S, describe_later
from settings import ROOT, load_config
from settings.resolve import show_path

# What trackers show, by the keys of a record. Of numbers by source or task, the source or task follows the name.
NAMES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "step_ms": "perf/step_ms",
    "tokens_per_s": "perf/tokens_per_s",
    "mfu": "perf/mfu",
    "val_loss": "val/loss",
    "val_bpb": "val/bpb",
    "val_ppl": "val/perplexity",
    "core": "core/core",
    "core_partial": "core/partial",
    "core_margin": "core/margin",
    "core_tasks": "core/tasks",
    "val_loss_by_source": "val/loss/",
    "val_bpb_by_source": "val/bpb/",
    "core_centred": "core/",
}
# The records of one step, in the order in which a run writes them.
STEP, VALIDATION, FINAL_VALIDATION, CORE = range(4)

POLL_S = 1.0  # between two looks at the record
READ_BYTES = 2**24  # at a time
RETRY_S = 30.0  # between two tries of what failed


@dataclass(frozen=True)
class Row:
    """Values of one record by the names that trackers show; time in Unix seconds."""

    position: int
    step: int
    time: float
    values: dict[str, float]


def find_position(step: int, kind: int) -> int:
    """Number the rows of a run in the order in which it writes them."""
    return 4 * step + kind


def make_row(record: Record) -> Row:
    """Return the row of a step or evaluation, with the values that are known."""
    step = record["step"]
    kind = VALIDATION
    if record["event"] == "step":
        kind = STEP
    elif "core" in record:
        kind = CORE
    elif record.get("full"):
        kind = FINAL_VALIDATION
    values = {}
    for key in NAMES.keys() & record.keys():
        value = record[key]
        parts = value if isinstance(value, dict) else {"": value}
        for part, number in parts.items():
            if is_number(number):
                values[NAMES[key] + part] = number
    with contextlib.suppress(KeyError, OverflowError):
        values["train/perplexity"] = math.exp(values["train/loss"])
    return Row(find_position(step, kind), step, record["time"], values)


class Tracker:
    """A tracker, in the process that processes.py starts. Subclasses know where the rows go.

    Attributes:
        last_sent: position of the last row that the tracker has.
        outcome: done, stopped or crashed, as the record ends; killed without an end.
    """

    name: str

    def __init__(self) -> None:
        self.config = load_config()
        self.paths = RunPaths.of_node(self.config, ROOT)
        self.last_sent = -1
        self.outcome = "killed"
        self.is_first = False  # whether the next step is the first one of an attempt
        self.gone = threading.Event()  # the trainer is

    def open(self) -> int:
        """Connect, and return the position of the last row that is there; -1 without rows."""
        raise NotImplementedError

    def send(self, rows: list[Row]) -> None:
        """Take all of these rows, or none where it raises OSError."""
        raise NotImplementedError

    def close(self) -> None:
        """End as the record did."""

    def run(self) -> None:
        """Send the record until the trainer is gone and all of it is sent."""
        os.nice(10)  # training comes first
        self.voice = os.dup(1)  # the pipe to the trainer; what a tracker starts does not get it
        os.dup2(2, 1)
        threading.Thread(target=self.watch, daemon=True).start()
        try:
            with open(self.paths.folder / f".{self.name}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier process may still upload this run
                self.last_sent = self.retry(self.open)
                self.follow()
                self.close()
        except Exception as error:  # whatever a package raises: what is left is to report it
            traceback.print_exc()
            log_path = show_path(self.paths.tracker_log(self.name))
            self.give_up(f"failed ({type(error).__name__} {error}), see {log_path}")

    def watch(self) -> None:
        """Wait for the end of the trainer, and after it only as long as is reasonable. Runs in a thread."""
        os.read(0, 1)
        self.gone.set()
        time.sleep(UPLOAD_S)
        self.give_up("did not take everything in time")

    def follow(self) -> None:
        """Send what is due, until the trainer is gone."""
        reader = RecordReader(self.paths.metrics)
        while True:
            is_last = self.gone.is_set()  # before reading: all that the trainer wrote is there then
            while records := self.retry(reader.read_new, READ_BYTES):
                if rows := self.select(records):
                    self.retry(self.send, rows)
            if is_last:
                return
            self.gone.wait(POLL_S)

    def select(self, records: Iterable[Record]) -> list[Row]:
        """Return the rows of new records that are due, without those that the tracker has."""
        rows = []
        for record in records:
            event = record["event"]
            if event == "end":
                self.outcome = record.get("reason", "done")
            elif event in GOES_BACK:
                self.is_first = True
                self.outcome = "killed"
            elif self.is_due(record):
                row = make_row(record)
                if row.values and row.position > self.last_sent:
                    rows.append(row)
                    self.last_sent = row.position
        return rows

    def is_due(self, record: Record) -> bool:
        """Return whether trackers show this record."""
        if record["event"] != "step":
            return record["event"] == "eval"
        is_first = self.is_first
        self.is_first = False
        step = record["step"]
        return is_first or step % self.config.log_every == 0 or step == self.config.last_step

    def retry(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function until it raises no OSError. Meanwhile the record waits in its file."""
        is_reported = False
        while True:
            try:
                return function(*arguments)
            except OSError as error:
                if not is_reported:
                    self.say(f"not sent yet ({error}). It tries again; the run goes on")
            is_reported = True
            time.sleep(RETRY_S)

    def say(self, text: str) -> None:
        """Print a line for the user, and log it."""
        line = " ".join(text.split()) + "\n"
        for descriptor in (2, self.voice):
            with contextlib.suppress(OSError):  # the trainer may be gone
                os.write(descriptor, line.encode())

    def give_up(self, reason: str) -> None:
        """End the process at once: a thread may be deep in a tracker, whose own process ends with this one."""
        self.say(f"{reason}. {describe_later(self.config.run_name)}")
        os._exit(REPORTED)
