"""The record of a run: one JSON object a line in metrics.jsonl, and the console line made from the same values.

    {"schema": 1, "event": "step", "time": ..., "mono_s": ..., "host": ..., "attempt": 0, "step": 1200, ...}
    step=1200/18865 loss=3.4127 lr=6.000e-04 grad_norm=0.410 step_ms=353.4 tokens_per_s=1483200 ...

New optional keys do not change `schema`, and readers keep the keys they do not know. After a resume the
steps past the checkpoint are written again: readers keep the last record of a step. Values are raw;
smoothing is for plots. What cannot be known is null (n/a on the console). JSON has no NaN: a value that
is not finite is written as null, and named in a `nonfinite` event. Standard library only.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1

EVENTS = (
    "start",
    "step",
    "eval",
    "checkpoint",
    "resume",
    "signal",
    "skip",
    "rollback",
    "nonfinite",
    "sync",
    "gap",
    "end",
)
GOES_BACK = (
    "start",
    "resume",
    "rollback",
)  # to the step they name; what was recorded past it is lost

# Key -> unit, of a step record beside the common ones.
STEP_UNITS = {
    "loss": "nats/token, mean over all scored tokens of the global batch",
    "lr": "learning rate of this update",
    "grad_norm": "L2 norm of the whole gradient before clipping",
    "step_ms": "milliseconds, whole step, data included",
    "tokens_per_s": "tokens/s of the whole job",
    "mfu": "per cent of the devices' peak in DTYPE (gpu_specs.py), 6 N + 12 L d T (flops.py)",
    "mfu_causal": "per cent, counting only the causal half of attention",
    "mem_gib": "GiB, the largest rank's peak: allocated on a GPU, resident on CPU",
    "data_wait_s": "seconds this step waited for its batch",
    "checkpoint_stall_s": "seconds that saving took from training before this step",
    "exchange_stall_s": "seconds that exchanges between sites took from training before this step",
    "replica": "the site whose step it is, under SYNC=diloco: loss and grad_norm are of its part of the batch",
}

EVAL_UNITS = {
    "val_loss": "nats/token on validation text; null where the evaluation failed",
    "val_bpb": "bits per byte on the same",
    "val_ppl": "of fine-tuning: perplexity of the scored tokens, exp of val_loss",
    "val_loss_by_source": "source -> nats/token on its validation text",
    "val_bpb_by_source": "source -> bits per byte on the same",
    "scored_tokens": "validation tokens scored",
    "core": "the DCLM CORE metric, mean of 22 centred accuracies; null where a task is missing",
    "core_partial": "then: the mean of those that are there",
    "core_margin": "half of the 95 % interval of either",
    "core_tasks": "how many tasks it is the mean of",
    "core_centred": "task -> centred accuracy, 0 for guessing and 1 for all right",
    "core_error": "in words, why there is none; training went on",
    "core_s": "seconds of these that it took",
    "eval_s": "seconds",
    "full": "true where the set was the final, larger one",
    "error": "in words, why an evaluation failed or ran out of time; training went on",
}

# Event -> key -> unit, beside the common ones; of `nonfinite`, just before its `skip`, the same as there.
BEGINNING = {
    "startup_s": "phase -> seconds, from the process's start until it could train: by this it began before the record",
    "changes": "settings that differ from the last attempt's",
    "world_size": "processes",
}
EVENT_UNITS: dict[str, dict[str, str]] = {
    "start": BEGINNING,
    "resume": BEGINNING,
    "checkpoint": {
        "seconds": "until it was safe on disk, training going on meanwhile",
        "bytes": "its size",
    },
    "signal": {"name": "of the signal, or which rank it came to"},
    "skip": {
        "step": "the step whose update was not taken",
        "reason": "loss, grad_norm or nonfinite: what was out of bounds",
        "loss": "nats/token, of that step",
        "grad_norm": "L2 norm, of that step",
        "samples": "[first, last] sample of it",
        "names": "where these samples come from",
        "step_ms": "milliseconds, the whole step, all of it lost",
    },
    "rollback": {
        "step": "the step gone back to",
        "from": "the step it was at; those between are lost",
        "passed_over": "windows of text that are left out from here on",
        "seconds": "until training went on",
        "stall_s": "seconds that it waited before for an exchange between sites that failed, if that is why",
    },
    "sync": {
        "replica": "the site whose record it is",
        "outer_step": "exchanges between sites so far",
        "fragment": "which part of the model it was about",
        "sites": "that took part",
        "committed": "true; where an exchange fails there is a rollback",
        "seconds": "from its begin to its end",
        "stall_s": "seconds of these that training waited",
        "bytes": "that this process sent, without those of TCP",
        "hash": "xxh3 of the part behind it, the same at all sites",
    },
    "gap": {
        "replica": "the site whose record it is",
        "step": "the step that the site goes on from, with the weights of another",
        "reason": "away",
        "from": "the step it was at; it took no part in those between",
        "to": "the same as step",
    },
    "end": {
        "reason": "done, stopped or crashed",
        "stall_s": "seconds that the last save took, where no step follows to tell it",
        "goodput": "category -> seconds since the first start (goodput.py)",
    },
}

# How a value looks on the console; anything else as str() has it.
FORMATS = {
    "loss": ".4f",
    "lr": ".3e",
    "grad_norm": ".3f",
    "step_ms": ".1f",
    "tokens_per_s": ".0f",
    "mfu": ".1f",
    "mem_gib": ".2f",
    "val_loss": ".4f",
    "val_bpb": ".4f",
    "val_ppl": ".4g",
    "data_wait_s": ".3f",
    "eval_s": ".1f",
    "core": ".4f",
    "core_partial": ".4f",
    "checkpoint_stall_s": ".2f",
}

CONSOLE_KEYS = ("loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "mem_gib", "tokens")


def to_json(record: Mapping[str, Any]) -> str:
    """One line of metrics.jsonl, without its line end."""
    return json.dumps(finite(record), allow_nan=False)


def finite(value: Any) -> Any:
    """The same with None for each number that is infinite or none, also within: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_console(
    record: Mapping[str, Any], last_step: int, keys: Iterable[str] = CONSOLE_KEYS
) -> str:
    """The console line of a step or evaluation: the record's keys and values, fewer digits."""
    words = [f"step={record['step']}/{last_step}"]
    for key in keys:
        if key in record:
            value = record[key]
            words.append(
                f"{key}=n/a" if value is None else f"{key}={format(value, FORMATS.get(key, ''))}"
            )
    return " ".join(words)


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def figures(value: float, digits: int = 4) -> str:
    """So many digits, and from 1000 on all before the point: '0.01234', '567.8', '11,200'."""
    return f"{value:,.0f}" if round(value, digits - 3) >= 1000 else f"{value:.{digits}g}"


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl in order. A last line that a kill cut short is left out.

    Raises ValueError naming file and line for anything else that is not a record, and for a newer schema.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            yield of_line(path, number, line)


def of_line(path: Path, number: int, line: str) -> dict[str, Any]:
    """The record that stands in a line of a file. Raises ValueError as read() does."""
    try:
        record: dict[str, Any] = json.loads(line)
        schema = record["schema"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} line {number} is not a record of a run: {line[:60]!r}") from None
    if schema != SCHEMA:
        raise ValueError(f"{path} line {number} has schema {schema}; this version reads {SCHEMA}")
    return record


def last_of_each_step(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Step records in step order, without those that a resume went back behind."""
    by_step: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if record["event"] == "step":
            by_step[record["step"]] = record
        elif record["event"] in GOES_BACK:
            by_step = {step: r for step, r in by_step.items() if step <= record["step"]}
    return [by_step[step] for step in sorted(by_step)]
