"""What a page draws: runs, panels and marks as JSON, all columns packed (column_packing.py).

    {"panels": [...], "marks": {kind: ...}, "runs": [{"name", "heads": {key: ...}, "evals", "events", ...}]} + base64

Every step is in it, and every number as it was recorded, but for the time of a step, to a hundredth of a second.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.curves import (
    DASHES,
    PANELS,
    RUN_COLOURS,
    event_words,
    has,
    mark_of,
    marks,
    smoothing_window,
)
from analysis.load import Run, Sampled
from analysis.page.column_packing import Packer

IN_PAGE = (
    "step",
    "tokens",
    "step_ms",
    "minutes",
    "loss",
    "tokens_per_s",
    "mfu",
    "lr",
    "grad_norm",
    "energy_j",
)

VALIDATION = {
    "val_loss": "Validation loss (nats/token)",
    "val_bpb": "Validation, bits per byte",
    "core": "CORE (mean centered accuracy of 22 tasks)",
    "core_partial": "Mean centered accuracy of those tasks of CORE that there are",
}

# What samplers found, and the loss of evaluations and beside another run's: panels that only the page has.
SAMPLES = (
    (
        "Power of a GPU (W: mean, and lowest to highest of any)",
        [{"y": "power_w", "low": "power_low_w", "high": "power_high_w"}],
    ),
    ("Energy of all GPUs (kWh since the first sample)", [{"y": "energy_kwh"}]),
    (
        "Network of all nodes (MB/s)",
        [{"y": "in_mb_s", "name": "received"}, {"y": "out_mb_s", "name": "sent"}],
    ),
)


def page_data(runs: Sequence[Run], names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """(what the page knows, the packed columns as base64)."""
    packer = Packer()
    found = [
        run_data(i, run, name, packer)
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    kinds = dict.fromkeys(event["kind"] for run in found for event in run["events"])
    return {
        "panels": list(panels(runs)),
        "runs": found,
        "marks": {kind: dataclasses.asdict(mark_of(kind)) for kind in kinds},
    }, packer.text()


def panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Those that any run has something for."""
    made: list[dict[str, Any]] = []
    for panel in PANELS:
        if not has(panel, runs) or panel.y == "power_w":  # the page has it from the samples
            continue
        over = ""
        if panel.x == "minutes":
            over = "other"
        elif panel.evals:
            over = "chosen"
        made.append(
            {
                "title": panel.page_title,
                "y": panel.y,
                "smooth": panel.smooth,
                "evals": panel.evals,
                "log": panel.log,
                "zero": panel.from_zero,
                "loss": panel.y == "loss",
                "over": over,
            }
        )
    beside: list[dict[str, Any]] = []
    for key, title in VALIDATION.items():
        if any(
            sum(finite(e.get(key)) and not e.get("full") for e in run.evals) > 1 for run in runs
        ):
            beside.append(
                {
                    "title": title,
                    "kind": "evals",
                    "evals": True,
                    "loss": not key.startswith("core"),
                    "y": key,
                }
            )
    if len(runs) > 1:
        beside.append(
            {
                "title": "Loss less that of the first run shown, smoothed (nats/token)",
                "kind": "difference",
            }
        )
    sampled = [run.sampled for run in runs if run.sampled]
    for title, parts in SAMPLES:
        if any(getattr(found, parts[0]["y"]) is not None for found in sampled):
            beside.append({"title": title, "kind": "samples", "parts": parts, "zero": True})
    of_gpus = [panel for panel in beside if panel["kind"] == "samples"]
    return [*made[:2], *(panel for panel in beside if panel not in of_gpus), *made[2:], *of_gpus]


def run_data(i: int, run: Run, name: str, packer: Packer) -> dict[str, Any]:
    """A run in the page; its colour and dash are those of its place in the table."""
    colour, dash = line_of(i)
    columns = {key: run.columns[key] for key in IN_PAGE if key in run.columns}
    if (
        lost := run.not_finite & np.isnan(run.columns["loss"])
    ).any():  # a gap like that of a silent line otherwise
        columns["loss_nan"] = lost.astype(float)
    columns["time"] = np.round(run.columns["time"], 2)
    return {
        "id": i,
        "name": name,
        "colour": colour,
        "dash": dash,
        "loss_is": run.loss_is,
        "nan": run.nan_word,
        "started": run.started,
        "window": smoothing_window(len(run.columns["step"])),
        "heads": packer.columns(columns),
        "evals": [
            {"step": e["step"], "full": bool(e.get("full"))}
            | {key: e[key] if finite(e.get(key)) else None for key in VALIDATION}
            for e in run.evals
            if any(finite(e.get(key)) for key in VALIDATION)
        ],
        "events": [
            {"kind": kind, "step": event["step"], "words": event_words(event)}
            for kind, events in marks(run).items()
            for event in events
        ],
        "sampled": sampled_data(run.sampled, packer) if run.sampled else None,
    }


def sampled_data(sampled: Sampled, packer: Packer) -> dict[str, Any]:
    columns = {
        field.name: getattr(sampled, field.name)
        for field in dataclasses.fields(sampled)
        if isinstance(getattr(sampled, field.name), np.ndarray)
    }
    return {"gpus": sampled.gpus, "heads": packer.columns(columns)}


def finite(value: Any) -> bool:
    return value is not None and bool(np.isfinite(value))


def line_of(i: int) -> tuple[str, str]:
    """Colour, as a CSS variable, and dash of the run with this number: both differ, for print without colour."""
    count = len(RUN_COLOURS["light"])
    return f"--run{i % count}", DASHES[(i + i // count) % len(DASHES)]
