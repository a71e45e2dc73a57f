"""metrics.jsonl, the record of a run: its format, its one writer and its one reader.

    {"schema": 1, "event": "step", "time": ..., "mono_s": ..., "host": ..., "attempt": 0, "step": 1200, ...}

One JSON object per line. Values are raw; smoothing is for plots. What cannot be known is null. JSON has no NaN: a value
that is not finite is written as null. New optional keys do not change `schema`, and
readers keep keys that they do not know. After a resume the steps past the checkpoint are written again, so the last
record of a step counts. Standard library only.

Keys of every record: `time` (Unix seconds), `mono_s` (the monotonic clock of the machine), `host`, `attempt` (0, 1, ...),
`step`, `tokens` (trained on so far). Those of steps stand below; other events add:

    eval            val_loss: nats per token on validation text, null where the evaluation failed; val_bpb: bits per
                    byte on the same; val_loss_by_source, val_bpb_by_source: the same for each source; scored_tokens;
                    compressed_bpb: name of a compressor -> bits per byte that it needs for the same text, at the end;
                    val_ppl: in fine-tuning, perplexity of the scored tokens; eval_s: seconds of the whole evaluation;
                    full: true for the final, larger set; error: in words, why it failed or ran out of time.
                    core: the DCLM CORE metric, mean of 22 centered accuracies, null where a task is missing;
                    core_partial: then the mean of those that are there; core_margin: half of the 95% interval of
                    either; core_tasks: how many tasks it is the mean of; core_centred: task -> centered accuracy,
                    0 for guessing and 1 for all right; core_error: in words, why there is none; core_s: seconds

    step            straggler: rank and host of a rank that is slower than the others, and how many times
    start, resume   startup_s: seconds by phase from its launch, changes: settings that differ from the
                    last attempt's, world_size: processes
    checkpoint      seconds: until it was safe on disk (training goes on meanwhile), bytes: its size
    signal          name: of the signal, or the rank that received it
    skip            step: whose update was not taken, reason: loss, grad_norm or nonfinite, loss, grad_norm and step_ms
                    of that step, samples: [first, last], names: where they come from, texts: of the first 32
                    sample, source, shard and text: the first 200 characters, with escapes
    rollback        step: to which the run goes back, from: where it was, passed_over: sequences that are left out from
                    here on, texts: of the first of these, seconds: until training went on, stall_s: waited before for
                    a synchronization that failed
    sync            replica: the site that records it, outer_step: synchronizations so far, fragment, sites: how many
                    took part, committed: true, seconds, stall_s: of these training waited, bytes: sent by this process,
                    hash: xxh3 of the fragment afterward, equal at all sites
    gap             reason: `away` (the site `replica` missed the steps from `from` to `to`) or `record removed`
                    (metrics.jsonl was removed, replaced or cut; this is the first record since then)
    end             reason: done, stopped or crashed, stall_s: seconds of the last save, goodput: seconds by category
                    since the first start (goodput.py), shares: of each source
"""

import collections
import contextlib
import errno
import io
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from record.locks import RunFolderError
from record.run_paths import RunPaths
from settings.json_file import parse_object

log = logging.getLogger(__name__)

Record = dict[str, Any]

SCHEMA = 1
PACE_STEPS = 100  # the time left follows from the pace of the last steps: a machine may slow down
# These set the run to the step that they name: what was recorded past it is lost.
GOES_BACK = ("start", "resume", "rollback")
# Records that mean nothing without the number of a step.
NEEDS_STEP = frozenset({"step", "eval", "skip", *GOES_BACK})

STEP_KEYS = (
    "loss",  # nats per token, mean over all scored tokens of the global batch
    "lr",  # learning rate of this update
    "grad_norm",  # L2 norm of the whole gradient before clipping
    "step_ms",  # milliseconds of the whole step, data included
    "tokens_per_s",  # tokens per second of the whole job
    "mfu",  # percent of the devices' peak in DTYPE (hardware/): 6 N + 12 L d T (hardware/flops.py)
    "mfu_causal",  # percent, counting only the causal half of attention
    "mem_gib",  # GiB, peak of the largest rank: allocated on a GPU, resident on a CPU
    "data_wait_s",  # seconds that this step waited for its batch
    "checkpoint_stall_s",  # seconds that saving took from training before this step
    "exchange_stall_s",  # seconds that synchronizations between sites took from training before this step
    "replica",  # the site of this step, under SYNC=diloco: loss and grad_norm are of its part of the batch
)
# Anything but an object or null under one of these keys is damage,
OBJECTS = frozenset(
    {"startup_s", "val_loss_by_source", "val_bpb_by_source", "compressed_bpb", "core_centred"}
)
# and anything but a number or null, not larger than this, under one of these.
LARGEST_NUMBER = 1e300
OTHER_NUMBERS = (
    "mono_s",
    "attempt",
    "tokens",
    "val_loss",
    "eval_s",
    "bytes",
    "world_size",
    "seconds",
    "stall_s",
)
LARGEST = dict.fromkeys((*STEP_KEYS, *OTHER_NUMBERS), LARGEST_NUMBER) | {"time": 1e11, "step": 1e15}

# What the console shows of an event, and how.
FORMATS = {
    "step": {
        "loss": ".4f",
        "lr": ".3e",
        "grad_norm": ".3f",
        "step_ms": ".1f",
        "tokens_per_s": ".0f",
        "mfu": ".1f",
        "mem_gib": ".2f",
        "tokens": "",
    },
    "eval": {
        "val_loss": ".4f",
        "val_bpb": ".4f",
        "val_ppl": ".4g",
        "scored_tokens": "",
        "core": ".4f",
        "core_partial": ".4f",
        "eval_s": ".1f",
    },
}
ON_TERMINAL = ("loss", "tokens_per_s", "val_loss", "val_bpb", "core")

CHUNK_BYTES = 2**18


# ---------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of metrics.jsonl in order; without the file, there are none.

    A last line that a kill cut short is left out. So are damaged lines, with a warning that names
    the first one. Raises OSError where the file exists but cannot be read.
    """
    return RecordReader(path).read_all()


class RecordReader:
    """Follow a record that grows, and survive whatever is in it.

    Attributes:
        position: bytes read so far.
        size: of the file at the last look; 0 without a file.
        restarted: the last read_new() found the file removed, replaced or cut, and began anew.
        damaged_lines: complete lines so far that are not records; they are passed over.
        first_damage: number of the first of these lines, and why it is not a record.
    """

    def __init__(self, path: Path, last_bytes: int | None = None):
        """Begin at the start of the file, or at the first line within its last bytes."""
        self.path = path
        self.last_bytes = last_bytes
        self.restarted = False
        self.size = 0
        self.begin(b"")

    def begin(self, first_line: bytes) -> None:
        """Begin anew with another file, or with none."""
        self.first_line = first_line  # which is like no other: it has host and time
        self.position = 0
        self.lines = 0
        self.damaged_lines = 0
        self.first_damage = ""

    def read_all(self) -> Iterator[Record]:
        """Yield the records up to the end of the file, and warn of damaged lines. Raises OSError."""
        position = -1
        while self.position > position:
            position = self.position
            yield from self.read_new(CHUNK_BYTES)
        if self.damaged_lines:
            log.warning(
                "%s %s. Damaged lines that are left out: %d",
                self.path,
                self.first_damage,
                self.damaged_lines,
            )

    def read_new(self, most_bytes: int = -1) -> list[Record]:
        """Return the records of the lines that were completed since, about `most_bytes` of them at most.

        Raises OSError where the file exists but cannot be read.
        """
        with self.open() as file:
            first_line = file.readline(CHUNK_BYTES)
            self.size = file.seek(0, os.SEEK_END)
            is_another = first_line != self.first_line or self.size < self.position
            self.restarted = is_another and self.position > 0
            if is_another:
                self.begin(first_line)
                if self.last_bytes and self.last_bytes < self.size:
                    file.seek(self.size - self.last_bytes - 1)
                    file.readline()
                    self.position = file.tell()
            file.seek(self.position)
            text = file.read(most_bytes) + file.readline()
        *lines, rest = text.split(b"\n")
        self.position += len(text) - len(rest)
        return self.parse(lines)

    def open(self) -> BinaryIO:
        """Open the file; one that does not exist is empty."""
        if not self.path.exists():
            return io.BytesIO()
        if not self.path.is_file():  # opening a pipe would wait for a writer
            raise OSError(errno.EINVAL, "is not a file", str(self.path))
        return open(self.path, "rb")

    def parse(self, lines: Iterable[bytes]) -> list[Record]:
        records = []
        for line in lines:
            self.lines += 1
            try:
                records.append(parse_record(line))
            except ValueError as fault:
                self.damaged_lines += 1
                self.first_damage = self.first_damage or f"line {self.lines} {fault}"
        return records


def parse_record(line: bytes) -> Record:
    """Return the record of a line. Raises ValueError, which says what is wrong with the line."""
    record = parse_object(line)
    schema = record.get("schema")
    if schema != SCHEMA:
        raise ValueError(f"has schema {repr(schema)[:20]}; this version reads {SCHEMA}")
    if fault := find_fault(record):
        raise ValueError(f"is a record without a valid {fault!r}")
    return record


def find_fault(record: Record) -> str:
    """Return the key of a value that cannot be right; "" without one."""
    event = record.get("event")
    if not isinstance(event, str):
        return "event"
    if record.get("time") is None:
        return "time"
    step = record.get("step")
    if not isinstance(step, int) and (event in NEEDS_STEP or step is not None):
        return "step"
    for key, value in record.items():
        if value is None:
            continue
        if key in OBJECTS and not isinstance(value, dict):
            return key
        if key in LARGEST and not is_number(value, LARGEST[key]):
            return key
    return ""


def is_number(value: Any, largest: float = LARGEST_NUMBER) -> bool:
    """Return whether a value is a number that is not too large, by default for sums to stay finite."""
    return isinstance(value, float | int) and abs(value) <= largest


# ---------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------


def to_json(record: Mapping[str, Any]) -> str:
    """Return one line of metrics.jsonl, without its end."""
    return json.dumps(replace_nonfinite(record))


def replace_nonfinite(value: Any) -> Any:
    """Return a value of JSON with null for every number, at any depth, that is NaN or infinite."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def to_console(record: Mapping[str, Any], last_step: int, is_short: bool = False) -> str:
    """Return the console line of a step or evaluation, in fewer digits than the record has."""
    words = [f"step={record['step']}/{last_step}"]
    for key, style in FORMATS[record["event"]].items():
        if key in record and (key in ON_TERMINAL or not is_short):
            value = record[key]
            text = "n/a" if value is None else format(value, style)
            words.append(f"{key}={text}")
    return " ".join(words)


def duration(seconds: float) -> str:
    """Return 1:02:03, or 2:03 below an hour."""
    hours, rest = divmod(round(seconds), 3600)
    minutes = rest // 60
    if hours:
        return f"{hours}:{minutes:02}:{rest % 60:02}"
    return f"{minutes}:{rest % 60:02}"


def describe_minutes(seconds: float) -> str:
    """Return "12 minutes", or "3.5 hours" from two hours on."""
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def figures(value: float, digits: int = 4) -> str:
    """Return a number with that many significant digits, and from 1000 on as an integer: '0.01234', '11,200'."""
    if round(value, digits - 3) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


# ---------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------


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
                ) from None

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
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self.file.truncate(reader.position)
        self.written = reader.position

    def note_gap(self, step: int, tokens: int) -> None:
        """Record, before what waits, that somebody has removed, replaced or cut the record."""
        self.waiting.insert(0, self.entry("gap", step, tokens, reason="record removed"))
        self.say(
            f"{self.path}: was removed, replaced or cut, and what it had is gone. It goes on at step {step}"
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
        there = os.stat(self.path)
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
