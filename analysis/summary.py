"""A run in numbers and words, the same for the terminal, the page, the figure and JSON.

Run -> summarize()    losses, speed, time and energy
Run -> list_marks()   what happened, and at which step
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.runs import Run, find_highest
from hardware.model_size import parameters
from record import number_formats
from record.metrics import duration, figures
from settings.config import SETTINGS, Config, is_default
from settings.declare import FREE, format_value

SPIKE_WINDOW = 128  # steps, as in train/faults/guard.py, but their mean and not their median
SPIKE_SIGMAS = 8
RELEVANT = [name for name, setting in SETTINGS.items() if setting.resume != FREE]  # to the result
EVALS = {"val_loss": "validation loss", "val_bpb": "bits per byte", "val_ppl": "perplexity"}
# The beginning, the ordinary work of DiLoCo, and what a skip says too
UNMARKED = ("start", "sync", "nonfinite")

# What a reader may ask about, in one sentence each.
WORDS = {
    "nats per token": "Cross-entropy loss with the natural logarithm, averaged over tokens; "
    "it is comparable only between runs with the same tokenizer.",
    "validation loss": "Loss on held-out text that the run is not trained on: a subset during "
    "training, and the full set at the end.",
    "bits per byte": "Validation loss in bits, divided by the bytes of the text; it compares "
    "between tokenizers and with compressors such as gzip and xz.",
    "perplexity": "exp(loss). A model with perplexity N is as unsure as one that chooses among N "
    "equally likely tokens.",
    "tokens/s": "Training tokens per second of the whole job, weighted by the time of each step.",
    "MFU": "Model FLOPs utilization: the FLOPs of the model per second, in percent of what the "
    "devices could do at most.",
    "training time": "The sum of the step times, without evaluations, checkpoints, waiting "
    "between attempts and lost work.",
    "goodput": "The share of the time since the first start that was spent on training steps "
    "that the run kept.",
    "lost work": "Training time whose result was discarded: skipped steps, and steps that were "
    "repeated after a restart or rollback.",
    "spike": f"A loss {SPIKE_SIGMAS} standard deviations above the mean of the {SPIKE_WINDOW} "
    "steps before it.",
    "smoothing": "Each point of the thick line is the mean of a window of steps around it.",
}


# ---------------------------------------------------------------------------------------------------
# ColumnBuilder
# ---------------------------------------------------------------------------------------------------


def summarize(run: Run) -> dict[str, str]:
    """Return heading -> what a run came to, in words, as far as it is known. Rates are means over the training time."""
    cells = {"state": find_state(run), "steps": f"{run.steps:,}"}
    step = run.columns["step"]
    loss = run.columns["loss"]
    finite = np.flatnonzero(np.isfinite(loss))
    if finite.size:
        last = finite[-1]
        cells["last loss"] = f"{loss[last]:.4f} (step {step[last]:,.0f})"
    for record in run.evals:
        full = ", full set" if record.get("full") else ""
        for key, heading in EVALS.items():
            value = record.get(key)
            if value is not None:
                cells[heading] = f"{value:.4f} (step {record['step']:,.0f}{full})"
        for name, bits in (record.get("compressed_bpb") or {}).items():
            cells[f"bits per byte, {name}"] = f"{bits:.4f}"
    tokens = run.columns["tokens"][-1]
    if math.isfinite(tokens):
        cells["tokens"] = number_formats.count(tokens)
    rates = {
        "tokens/s": (average_over_time(run, "tokens_per_s"), "{:,.0f}"),
        "MFU": (average_over_time(run, "mfu"), "{:.2f}%"),
    }
    for heading, (value, form) in rates.items():
        if math.isfinite(value):
            cells[heading] = form.format(value)
    minutes = find_highest(run.columns["minutes"])
    if math.isfinite(minutes):
        cells["training time"] = duration(60 * minutes)
    if run.energy:
        covered = f"{run.energy.coverage:.0%} of the GPUs' time sampled"
        cells["energy"] = f"{figures(run.energy.kwh)} kWh ({covered})"
    return cells


def average_over_time(run: Run, column: str) -> float:
    """Return the mean of a rate in which a slow step counts for as long as it took."""
    rate = run.columns[column]
    step_ms = run.columns["step_ms"]
    known = np.isfinite(rate * step_ms)
    if not step_ms[known].any():
        return math.nan
    return float(np.average(rate[known], weights=step_ms[known]))


def find_state(run: Run) -> str:
    """Say how far a run is and how its last attempt ended, as far as the record tells."""
    if run.state:
        return run.state
    state = "not finished"
    for event in run.events:
        if event["event"] in ("start", "resume", "end"):
            state = event.get("reason", "not finished")
    all_steps = f" of {run.last_step:,}" if run.last_step else ""
    return f"{state} at step {run.columns['step'][-1]:,.0f}{all_steps}"


def list_remarks(run: Run) -> list[str]:
    """Return what a reader of these numbers must know, in sentences."""
    remarks = [*run.remarks, *(run.energy.remarks if run.energy else ())]
    steps = run.columns["step"][run.is_not_finite("loss")]
    if steps.size:
        place = f", first at step {steps[0]:,.0f}" if steps[0] >= 0 else ""  # or not numbered
        remarks.append(f"the loss is not finite on {steps.size:,} steps{place}")
    if run.loss_is:
        remarks.append(f"the loss is {run.loss_is}, as its log has it")
    return remarks


def describe_run(run: Run) -> dict[str, str]:
    """Return what else there is to know of a run: when it was started, on what, model and settings.

    Settings are those that differ from their defaults, without those that cannot change the result.
    """
    facts = {"started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started))}
    if run.attempts:
        attempt = run.attempts[-1]
        changed = " and uncommitted changes" if attempt.get("git_dirty") else ""
        facts["hardware"] = f"{attempt.get('world_size')} x {attempt.get('device')}"
        facts["commit"] = f"{attempt.get('git')}{changed}"
    if run.settings:
        config = Config(**{name.lower(): value for name, value in run.settings.items()})
        size = f"{number_formats.count(parameters(config).total)} parameters"
        facts["model"] = config.model or f"{config.n_layer} layers x {config.n_embd}, {size}"
        settings = [f"PRESET={config.preset}"]
        for name in RELEVANT:
            if not is_default(name, run.settings):
                settings.append(f"{name}={format_value(run.settings[name])}")
        facts["settings that are not the default"] = " ".join(settings)
    return facts


def show_setting(run: Run, name: str) -> str:
    """Return the value of a setting for a list of differences, where an empty one would not be seen."""
    text = format_value(run.settings[name])
    if not text and name == "DATA":
        return str(run.settings["DATA_MIX"])
    return text or "none"


# ---------------------------------------------------------------------------------------------------
# Lines
# ---------------------------------------------------------------------------------------------------


def find_window(steps: int) -> int:
    """Return how many steps a smoothed point averages: a fiftieth of the run, odd, from 5 to 501.

    More than 501 would cut the corner where the loss first falls, and hide no more noise that matters.
    """
    return min(501, max(5, steps // 50 // 2 * 2 + 1))


def read_evals(run: Run, column: str, is_full: bool, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (points,) positions on an axis, a column of steps, and (points,) values of evaluations.

    Those of a subset and of the full set are lines of their own: they score different text. A log may
    print fewer steps than evaluations: between two steps the position is interpolated.
    """
    evals = [record for record in run.evals if bool(record.get("full")) is is_full]
    steps = np.array([record["step"] for record in evals], float)
    values = np.array([record.get(column) for record in evals], float)
    positions = steps
    if axis != "step":
        x, y = (np.append(0.0, run.columns[name]) for name in ("step", axis))
        positions = np.interp(steps, x, y, right=np.nan)
    known = np.isfinite(positions + values)
    return positions[known], values[known]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the finite values in the window around each; NaN where none is finite.

    The window is centered, so that the line does not lag. At the start, where a loss falls
    steeply, it is narrower on both sides; at the end only on the right, so that the line is calm.
    """
    known = np.isfinite(values)
    place = np.arange(len(values))
    reach = np.minimum(window // 2, place)
    ends = np.minimum(place + reach + 1, len(values))
    totals = sum_ranges(np.where(known, values, 0.0), place - reach, ends)
    counts = sum_ranges(known, place - reach, ends)
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)


def smooth_column(run: Run, column: str) -> np.ndarray:
    """Return a column smoothed. A loss that is a mean in its log stays as it is: twice would shift it."""
    if column == "loss" and run.loss_is:
        return run.columns[column]
    return smooth(run.columns[column], find_window(run.steps))


def sum_ranges(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the sum of the values from each start up to its end."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return sums[ends] - sums[starts]


def find_spikes(run: Run) -> list[int]:
    """Return the steps whose loss is SPIKE_SIGMAS standard deviations above the mean of those before.

    The first window is not searched. The mean of the squares cancels where the loss hardly varies, so a
    thousandth of the mean is the least deviation.
    """
    loss = run.columns["loss"]
    known = np.flatnonzero(np.isfinite(loss))
    ends = np.arange(SPIKE_WINDOW, len(known))
    values = loss[known]
    mean = sum_ranges(values, ends - SPIKE_WINDOW, ends) / SPIKE_WINDOW
    variance = sum_ranges(values**2, ends - SPIKE_WINDOW, ends) / SPIKE_WINDOW - mean**2
    deviation = np.sqrt(np.maximum(variance, (1e-3 * mean) ** 2))
    spikes = ends[values[ends] - mean > SPIKE_SIGMAS * deviation]
    return [int(step) for step in run.columns["step"][known[spikes]]]


# ---------------------------------------------------------------------------------------------------
# Marks
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MarkStyle:
    """How a kind of event is drawn at the lower edge. `color` is a variable of page.css.

    `is_upright`: with a dotted line through the whole panel.
    """

    name: str
    symbol: str
    color: str
    meaning: str
    is_upright: bool = False


MARKS = {
    "checkpoint": MarkStyle("checkpoint", "up", "--muted", "saved to disk"),
    "resume": MarkStyle("restart", "right", "--ink", "resumed from a checkpoint", True),
    "rollback": MarkStyle("rollback", "left", "--trouble", "went back to skip some text", True),
    "skip": MarkStyle("skipped step", "cross", "--trouble", "the update was not applied"),
    "spike": MarkStyle("spike", "diamond", "--spike", "loss far above the steps before"),
    "eval": MarkStyle("evaluation failed", "ring", "--trouble", "no result; training continued"),
    "signal": MarkStyle("stop", "square", "--muted", "asked to stop"),
    "end": MarkStyle("end", "square", "--ink", "the training process ended"),
}


def find_style(kind: str) -> MarkStyle:
    """Return how to draw a kind; one that is not known may be trouble."""
    return MARKS.get(kind, MarkStyle(kind, "cross", "--trouble", "as recorded"))


def list_marks(run: Run) -> list[dict[str, Any]]:
    """Return kind, step and words of what happened: events with a step, evaluations that failed, and spikes."""
    failed = [record for record in run.evals if record.get("val_loss", 0) is None]
    spikes = [{"event": "spike", "step": step} for step in find_spikes(run)]
    marks = []
    for event in [*run.events, *failed, *spikes]:
        kind = event["event"]
        step = event.get("step")
        if kind in UNMARKED or step is None:
            continue
        words = find_style(kind).name
        cause = event.get("reason") or event.get("error")
        if cause:
            words += f", {cause}"
        marks.append({"kind": kind, "step": step, "words": words})
    return marks
