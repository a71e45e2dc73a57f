"""What the page and the picture both show: the panels, the smoothed line, marks of events, the summary.

columns -> (points drawn) + (mean over a window round each step)        evals, events -> markers
"""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.load import Run
from record.metrics import figures

FAILED = "evaluation failed"  # a kind of mark: an evaluation without a result
REASONS = {
    "loss": "loss out of bounds",
    "grad_norm": "gradient norm out of bounds",
    "nonfinite": "not finite",
}

POINTS_DRAWN = (
    20_000  # at most, of a run or of all that share a picture, which has far fewer pixels
)
FEW = 60  # points, up to which each is marked: the line of a single step cannot be seen


LOSS_TITLE = "Loss (nats/token)"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One diagram: column `y` over column `x` of every run."""

    title: str
    x: str  # "step" or "minutes"
    y: str  # a column of the step records
    smooth: bool = True  # with a mean line over the raw one
    evals: bool = False  # with val_loss marked
    log: bool = False  # logarithmic y axis
    from_zero: bool = False  # the y axis begins at 0, so that a dip looks as deep as it is

    @property
    def page_title(self) -> str:
        """The page says itself what a panel of the loss is drawn over, since that can be chosen there."""
        return LOSS_TITLE if self.y == "loss" else self.title


PANELS = (
    Panel("Loss by step (nats/token)", "step", "loss", evals=True),
    Panel("Loss by training time (nats/token)", "minutes", "loss", evals=True),
    Panel("Throughput (tokens/s, whole job)", "step", "tokens_per_s", from_zero=True),
    Panel("MFU (% of peak)", "step", "mfu", from_zero=True),
    Panel("Learning rate", "step", "lr", smooth=False, from_zero=True),
    Panel("Gradient norm before clipping", "step", "grad_norm", log=True),
    Panel("Power of all GPUs (W, mean of each step)", "step", "power_w", from_zero=True),
)


@dataclasses.dataclass(frozen=True)
class Mark:
    """How a kind of event is marked on the lower edge, and what it is. colour: a variable of page.css."""

    name: str
    symbol: str
    colour: str
    means: str
    upright: bool = False  # with a dotted line through the whole panel


MARKS = {
    "checkpoint": Mark("checkpoint", "up", "--muted", "saved to disk"),
    "resume": Mark("restart", "right", "--ink", "taken up again from a checkpoint", upright=True),
    "rollback": Mark(
        "rollback",
        "left",
        "--trouble",
        "gone back by itself, to another stretch of text",
        upright=True,
    ),
    "skip": Mark("skipped step", "cross", "--trouble", "an update that was not taken"),
    "spike": Mark(
        "spike", "diamond", "--spike", "found here: loss far above that of the steps before"
    ),
    FAILED: Mark(FAILED, "ring", "--trouble", "without a result; training went on"),
    "end": Mark("end", "square", "--ink", "an attempt's own end"),
}
TROUBLE = Mark("", "cross", "--trouble", "as the record has it")


def mark_of(kind: str) -> Mark:
    return MARKS.get(kind) or dataclasses.replace(TROUBLE, name=kind)


def has(panel: Panel, runs: Sequence[Run]) -> bool:
    """Whether any run has something to draw there; of a panel that is left out nothing is known."""
    return any(
        (panel.y in run.columns and np.isfinite(run.columns[panel.y]).any())
        or (panel.evals and run.evals)
        for run in runs
    )


X_TITLES = {"step": "step", "minutes": "training time (minutes)"}

# Blue, vermilion, green and purple of Okabe and Ito (2008), which the colour-blind can tell apart too; a
# little darker or lighter where the ground asks for it. Past four runs the line is dashed.
RUN_COLOURS = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#b3568d"),
    "dark": ("#56b4e9", "#e8743b", "#1fb58a", "#cc79a7"),
}
SPIKE_WINDOW, SPIKE_SIGMAS = (
    128,
    8,
)  # as train/faults/guard.py has them, but of the mean and not of the median
DASHES = ("solid", "dash", "dot", "dashdot")


def smoothing_window(steps: int) -> int:
    """Steps that a smoothed point is the mean of: a fiftieth of the run, odd, from 5 to 501.

    More than 501 would cut the corner where the loss first falls, and hides no more noise that matters.
    """
    return min(501, max(5, steps // 50 // 2 * 2 + 1))


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite values in the window centred on each; NaN where none is finite.

    Centred, so that the line lies in the raw one and does not lag behind it. Where the values begin, and
    fall steeply, the window is narrower on both sides; where they end only on the right, so that the line
    stays calm.
    """
    known = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(known, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(known)))
    place = np.arange(len(values))
    reach = np.minimum(window // 2, place)
    left, right = place - reach, np.minimum(place + reach, len(values) - 1) + 1
    count = counts[right] - counts[left]
    return np.where(count > 0, (sums[right] - sums[left]) / np.maximum(count, 1), np.nan)


def mean_line(run: Run, key: str) -> np.ndarray:
    """A column smoothed; the loss as it is where the log has a mean already, which to smooth again would shift it."""
    values = run.columns[key]
    return (
        values if key == "loss" and run.loss_is else smoothed(values, smoothing_window(len(values)))
    )


def drawn_points(run: Run, limit: int = POINTS_DRAWN) -> np.ndarray:
    """Indices of the steps to draw: all, or past `limit` each panel's lowest and highest in every bucket."""
    n = len(run.columns["step"])
    if n <= limit:
        return np.arange(n)
    keys = dict.fromkeys(panel.y for panel in PANELS if panel.y in run.columns)
    size = -(-n // max(1, (limit - 2) // (2 * len(keys))))
    chosen = [np.array([0, n - 1])]
    for key in keys:
        chosen += [extremes(sign * run.columns[key], size) for sign in (1, -1)]
    return np.unique(np.concatenate(chosen))


def extremes(values: np.ndarray, size: int) -> np.ndarray:
    """The index of the lowest finite value in each bucket of `size`; the bucket's first where none is."""
    padded = np.full(-(-len(values) // size) * size, np.inf)
    padded[: len(values)] = np.where(np.isfinite(values), values, np.inf)
    return padded.reshape(-1, size).argmin(axis=1) + np.arange(0, len(padded), size)


def spikes(run: Run) -> list[int]:
    """Steps whose loss lies by SPIKE_SIGMAS standard deviations above the mean of the SPIKE_WINDOW steps before.

    Of those that follow each other within a window the first. Nothing is looked for in the first window. The mean of
    the squares cancels where the loss hardly varies; a thousandth of the mean is the least deviation that counts.
    """
    loss, step = run.columns["loss"], run.columns["step"]
    known = np.flatnonzero(np.isfinite(loss))
    values, window = loss[known], SPIKE_WINDOW
    if len(values) <= window:
        return []
    shifted = values - values.mean()
    sums, squares = (np.concatenate(([0.0], np.cumsum(part))) for part in (shifted, shifted**2))
    mean = (sums[window:-1] - sums[: -window - 1]) / window
    variance = (squares[window:-1] - squares[: -window - 1]) / window - mean**2
    least = 1e-3 * np.abs(mean + values.mean())
    above = shifted[window:] - mean > SPIKE_SIGMAS * np.maximum(
        np.sqrt(np.maximum(variance, 0)), least
    )
    found: list[int] = []
    last = -window
    for i in np.flatnonzero(above).tolist():
        if i - last > window:
            found.append(int(step[known[i + window]]))
        last = i
    return found


def marks(run: Run) -> dict[str, list[Mapping[str, Any]]]:
    """Kind -> what happened to the run at a step, to be marked there: events, and evaluations that failed."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for i, event in enumerate(run.events):
        if event["event"] == "start" or event.get("step") is None:
            continue
        if event["event"] == "nonfinite" and [e["event"] for e in run.events[i + 1 : i + 2]] == [
            "skip"
        ]:
            continue  # the skip says it too
        kinds.setdefault(event["event"], []).append(event)
    if failed := [
        e for e in run.evals if "val_loss" in e and e["val_loss"] is None
    ]:  # a log may have bpb alone
        kinds[FAILED] = failed
    if found := spikes(run):
        kinds["spike"] = [{"event": "spike", "step": step} for step in found]
    return kinds


# ---------------------------------------------------------------------------------------------------
# In words and numbers
# ---------------------------------------------------------------------------------------------------


def state(run: Run) -> str:
    """complete, stopped or running, as far as the record says."""
    if run.state:
        return run.state
    step = int(run.columns["step"][-1])
    if run.last_step:
        progress = f"{100 * step / run.last_step:.1f}% (step {step:,} of {run.last_step:,})"
    else:
        progress = f"step {step:,}"
    reason = None
    for event in run.events:
        if event["event"] in ("start", "resume"):
            reason = None
        elif event["event"] == "end":
            reason = event.get("reason")
    if reason == "done":
        return f"complete at step {step:,}"
    if reason is not None:
        return f"{reason} at {progress}"
    seen = datetime.datetime.fromtimestamp(run.columns["time"][-1], datetime.UTC)
    return (
        f"running as far as the record says, at {progress}; "
        f"last step recorded {seen:%Y-%m-%d %H:%M:%S} UTC"
    )


def summary(run: Run) -> dict[str, str]:
    """Heading -> value, the row of a run in the table; n/a where the record is silent."""
    loss, step = run.columns["loss"], run.columns["step"]
    known = np.flatnonzero(np.isfinite(loss))
    evals = [e for e in run.evals if e.get("val_loss") is not None]
    last_eval: Mapping[str, Any] = evals[-1] if evals else {}
    bpb = next((e["val_bpb"] for e in reversed(run.evals) if e.get("val_bpb") is not None), None)
    where = ""
    if evals:
        full = ", full set" if last_eval.get("full") else ""
        where = f" (step {last_eval['step']:,}{full})"
    best = known[loss[known].argmin()] if known.size else None
    found = {
        "steps": f"{len(step):,}"
        + (f" ({run.lost_steps:,} more taken and lost)" if run.lost_steps else ""),
        "first loss": number(loss[known[0]], ".4f") if known.size else "n/a",
        "last loss": last_loss(run),
        "lowest loss": "n/a" if best is None else f"{loss[best]:.4f} (step {step[best]:,.0f})",
        "reduction": "n/a" if ends_not_finite(run) else reduction(loss[known]),
        "validation loss": number(last_eval.get("val_loss"), ".4f") + where,
        "validation bpb": number(bpb, ".4f"),
        "tokens": number(run.columns["tokens"][-1], ",.0f"),
        "mean tokens/s": number(mean_in_time(run, "tokens_per_s"), ",.0f"),
        "mean MFU": number(mean_in_time(run, "mfu"), ".2f")
        + ("%" if np.isfinite(run.columns["mfu"]).any() else ""),
        "training time": duration(run.minutes_at(int(step[-1]))),
    }
    if (ppl := last_eval.get("val_ppl")) is not None:  # of fine-tuning
        found["validation ppl"] = number(ppl, ".4g")
    if energy := run.energy:
        part = (
            ""
            if energy.coverage > 0.995
            else f" ({100 * energy.coverage:.0f}% of the time sampled)"
        )
        found["energy"] = f"{figures(energy.kwh)} kWh{part}"
        found["cost"] = number(energy.cost, ",.2f")
    return found


def ends_not_finite(run: Run) -> bool:
    """Whether the last loss that was recorded is no finite number; lines that name none do not count."""
    bad = run.not_finite
    said = np.flatnonzero(bad | np.isfinite(run.columns["loss"]))
    return bool(said.size and bad[said[-1]])


def last_loss(run: Run) -> str:
    """The last loss as recorded, and of a run that diverged the last finite one before."""
    loss, step = run.columns["loss"], run.columns["step"]
    known = np.flatnonzero(np.isfinite(loss))
    if not ends_not_finite(run):
        return number(loss[known[-1]], ".4f") if known.size else "n/a"
    last = loss[np.flatnonzero(run.not_finite)[-1]]
    word = run.nan_word if np.isnan(last) else str(last)
    return word + (
        f" ({loss[known[-1]]:.4f} at step {step[known[-1]]:,.0f} before)" if known.size else ""
    )


def not_finite_words(bad: np.ndarray, step: np.ndarray) -> str:
    """On how many steps the loss is not finite, and where first; nothing where it always is."""
    if not bad.any():
        return ""
    first = step[np.flatnonzero(bad)[0]]
    place = f", first at step {first:,.0f}" if first >= 0 else ""  # a log may number no steps
    return f"the loss is not finite on {bad.sum():,} steps{place}"


def number(value: float | None, form: str) -> str:
    return "n/a" if value is None or not np.isfinite(value) else format(value, form)


def duration(minutes: float) -> str:
    """Minutes as a person says them; n/a for none."""
    if not minutes:
        return "n/a"
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def reduction(loss: np.ndarray) -> str:
    """From the first to the last loss, in nats and per cent of the first."""
    if not loss.size or not loss[0]:
        return "n/a"
    return f"{loss[0] - loss[-1]:.4f} ({100 * (1 - loss[-1] / loss[0]):.1f}%)"


def mean_in_time(run: Run, key: str) -> float | None:
    """The mean of tokens/s or MFU over the training time, so that a slow step counts for as long as it took."""
    rate, took = run.columns[key], run.columns["step_ms"]
    known = np.isfinite(rate) & np.isfinite(took)
    total = took[known].sum()
    return float((rate[known] * took[known]).sum() / total) if total > 0 else None


def event_words(event: Mapping[str, Any]) -> str:
    """One event in a few words, for the hover text."""
    kind = event["event"]
    if kind == "checkpoint":
        size, took = event.get("bytes"), event.get("seconds")
        return ", ".join(
            [
                "checkpoint",
                *([f"{size / 2**20:,.1f} MiB"] if size is not None else []),
                *([f"{took:.2f} s"] if took is not None else []),
            ]
        )
    if kind == "skip":
        reason = event.get("reason") or "reason n/a"
        values = [
            f"{name} {event[key]:.5g}"
            for key, name in (("loss", "loss"), ("grad_norm", "gradient norm"))
            if event.get(key) is not None
        ]
        return "; ".join([f"skipped, {REASONS.get(reason, reason)}", *values])
    if kind == "rollback":
        passed = event.get("passed_over")
        return f"rolled back from step {number(event.get('from'), ',d')}" + (
            f"; {passed:,} windows of text passed over" if passed is not None else ""
        )
    words = {
        "resume": f"resumed, attempt {event['attempt'] + 1 if 'attempt' in event else 'n/a'}",
        "eval": f"evaluation failed: {event.get('error', 'no result')}",
        "end": f"end: {event.get('reason', 'n/a')}",
        "signal": f"signal {event.get('name', 'n/a')}",
        "nonfinite": "loss or gradient not finite",
        "spike": f"spike: loss {SPIKE_SIGMAS} standard deviations above the {SPIKE_WINDOW} steps before",
    }
    return words.get(kind, kind)
