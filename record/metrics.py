"""metrics.jsonl, the record of a run: its format and its one reader. record/recorder.py writes it.

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
                    since the first start (goodput.py), shares: of each source, plan: name -> [predicted,
                    actual] (account.py), {} without a plan.json
"""

import io
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from record.regular_file import open_regular
from settings.json_file import parse_object

log = logging.getLogger(__name__)

Record = dict[str, Any]

SCHEMA = 1
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
LATEST_S = 253402300799  # the last second of the year 9999
# What every reader counts with, where a record has it.
FORM = {"step": int, "tokens": int, "attempt": int, "startup_s": dict, "world_size": int}
LARGEST_NUMBER = 1e300  # sums of such numbers stay finite

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
LONGEST_LINE = 2**22  # bytes; with the texts of a rollback a line has some 10,000


# ---------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of metrics.jsonl in order; without the file, there are none.

    A last line that a kill cut short is left out. So are damaged lines, with a warning that names
    the first one. Raises OSError where the file exists but cannot be read.
    """
    return RecordReader(path).read_all()


def keep_final_steps(records: Iterable[Record]) -> list[Record]:
    """Return the records of steps in order, without those that the run went back past."""
    by_step: dict[int, Record] = {}
    for record in records:
        if record["event"] == "step":
            by_step[record["step"]] = record
        elif record["event"] in GOES_BACK:
            by_step = {step: final for step, final in by_step.items() if step <= record["step"]}
    return [by_step[step] for step in sorted(by_step)]


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

    def read_new(self, most_bytes: float = math.inf) -> list[Record]:
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
            return self.read_lines(file, min(self.size, self.position + most_bytes))

    def open(self) -> BinaryIO:
        """Open the file; one that does not exist is empty."""
        try:
            return open_regular(self.path)
        except FileNotFoundError:
            return io.BytesIO()

    def read_lines(self, file: BinaryIO, end: float) -> list[Record]:
        """Return the records of the complete lines that begin before `end`."""
        records = []
        file.seek(self.position)
        while self.position < end:
            line = file.readline(LONGEST_LINE)
            is_complete = line.endswith(b"\n")
            is_long = len(line) == LONGEST_LINE and not is_complete
            if is_long:
                is_complete = skip_line(file)
            if not is_complete:
                break
            self.position = file.tell()
            self.lines += 1
            try:
                if is_long:
                    raise ValueError(f"is longer than {LONGEST_LINE} bytes")
                records.append(parse_record(line))
            except ValueError as fault:
                self.damaged_lines += 1
                self.first_damage = self.first_damage or f"line {self.lines} {fault}"
        return records


def skip_line(file: BinaryIO) -> bool:
    """Go on to the end of a line. Returns whether it has one."""
    while not file.readline(CHUNK_BYTES).endswith(b"\n"):
        try:
            # Bytes that were never written, of which a file may have terabytes, have no line end.
            file.seek(file.tell(), os.SEEK_DATA)
        except OSError:  # there is nothing more
            return False
    return True


def parse_record(line: bytes) -> Record:
    """Return the record of a line. Raises ValueError, which says what is wrong with the line."""
    record = parse_object(line)
    schema = record.get("schema")
    if schema != SCHEMA:
        raise ValueError(f"has schema {repr(schema)[:20]}; this version reads {SCHEMA}")
    event = record.get("event")
    if not isinstance(event, str) or not is_number(record.get("time")):
        raise ValueError("is a record without event and time")
    if not 0 <= record["time"] <= LATEST_S:
        raise ValueError(f"has time={record['time']}, which is no date")
    if event in NEEDS_STEP and not isinstance(record.get("step"), int):
        raise ValueError(f"is a record of event {event!r} without a step")
    for name, kind in FORM.items():
        value = record.get(name)
        if value is not None and not is_of_kind(value, kind):
            raise ValueError(f"has {name}={ascii(value)[:20]}, which is no {kind.__name__}")
    return record


def is_of_kind(value: Any, kind: type) -> bool:
    """Return whether a value has this type: an integer of 64 bits, which a bool is not, or an object."""
    if kind is int:
        return type(value) is int and abs(value) < 2**63
    return isinstance(value, kind)


def is_number(value: Any) -> bool:
    """Return whether a value is a number that is not too large to be summed."""
    return isinstance(value, float | int) and abs(value) <= LARGEST_NUMBER


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
