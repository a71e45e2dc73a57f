"""Groups of runs, and whether a difference between them is more than noise.

    runs -> group_runs() -> compare() -> a table, verdicts and what differs, for terminal, page and JSON

Runs whose names differ only in the ending -seedN are one group. Groups are compared by the first
of CURVES that all their runs have, at the last position that all of them reach, interpolated
between two evaluations of the same kind. For each pair of groups, Welch's test over the seeds
decides, with an error rate of 5% for all pairs together (Holm).
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.runs import Run
from analysis.summary import (
    RELEVANT,
    average_over_time,
    read_evals,
    show_setting,
    smooth_column,
)
from record import number_formats
from record.metrics import duration
from settings.config import is_default

SEED_ENDING = re.compile("[-_]seed[0-9]+$")
ERROR_RATE = 0.05  # of decisions where there is no difference
MOST_SEEDS = 100  # that somebody might train to decide
# These choose the text that is scored, and its tokens.
SCORED_TEXT = ("DATA", "DATA_MIX", "TOKENIZER", "VOCAB_SIZE", "SEQ_LEN", "EVAL_TOKENS", "EVAL_DATA")
OTHER_TEXT = (
    "The runs were scored on different text or with different tokenizers, so their losses per token "
    "do not compare, and bits per byte only roughly."
)
UNKNOWN_TEXT = (
    "Logs do not say which text they were scored on, nor with which tokenizer. Their losses compare "
    "only if both are the same."
)
NOTHING = "The runs have no loss in common at the same number of tokens or steps, on the same text."

BITS = "bits per byte"

Groups = Mapping[str, Sequence[Run]]  # name -> runs that differ by their seed, or one run


class Curve(NamedTuple):
    """A loss that runs can be compared by: of evaluations of one kind, or of steps, smoothed."""

    column: str
    is_full: bool
    name: str
    unit: str


CURVES = (  # the best first
    Curve("val_loss", True, "validation loss on the full set", "nats per token"),
    Curve("val_loss", False, "validation loss", "nats per token"),
    Curve("val_bpb", True, "validation loss on the full set", BITS),
    Curve("val_bpb", False, "validation loss", BITS),
    Curve("loss", False, "smoothed training loss", "nats per token"),
)


class Lines(NamedTuple):
    """A curve of all runs, and the part of the axis (tokens, step or minutes) where all of them have it.

    `points`: group -> x and y of each run, (points,) each.
    """

    curve: Curve
    axis: str
    points: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]
    start: float
    end: float

    def interpolate(self, places: Any) -> dict[str, np.ndarray]:
        """Return group -> (seeds,) at one place, or (seeds, places)."""
        values = {}
        for name, points in self.points.items():
            values[name] = np.array([np.interp(places, x, y) for x, y in points])
        return values


@dataclass(frozen=True)
class Verdict:
    """Welch's test of two groups.

    Attributes:
        difference: mean of `worse` minus mean of `better`.
        low, high: its interval, of 95% for all pairs together.
        p: after Holm's correction; the difference is decided below ERROR_RATE.
        words: all of it in a sentence, and how many seeds would decide.
    """

    better: str
    worse: str
    difference: float
    low: float
    high: float
    p: float
    words: str


@dataclass(frozen=True)
class Comparison:
    """Groups compared, as it is shown and in numbers.

    Attributes:
        rows: heading -> cell, for each group.
        sentences: verdicts, what differs, and what a reader must beware of.
        losses: heading of a column -> group -> the loss of each run.
        verdicts: the same in numbers, the surest first.
        differences: setting -> group -> its value.
    """

    rows: Sequence[Mapping[str, str]]
    sentences: Sequence[str]
    losses: Mapping[str, Mapping[str, Sequence[float]]]
    verdicts: Sequence[Verdict]
    differences: Mapping[str, Mapping[str, str]]


# ---------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------


def group_runs(runs: Iterable[Run]) -> Groups:
    """Return the groups of runs, in the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(SEED_ENDING.sub("", run.name), []).append(run)
    return groups


def find_differences(groups: Groups) -> dict[str, dict[str, str]]:
    """Return setting -> group -> its value, for those that differ and can change the result.

    A group whose runs differ has several values, with "/" between them. Logs have no settings and are left out.
    So are defaults that follow from another setting.
    """
    differences = {}
    for setting in RELEVANT:
        values = {}
        distinct: set[str] = set()
        for group, runs in groups.items():
            known = list_values(runs, setting)
            if known:
                values[group] = "/".join(known)
            distinct.update(known)
        if len(distinct) > 1 and setting != "SEED" and not is_default_in_all(groups, setting):
            differences[setting] = values
    if "DATA" in differences:  # which shows it where DATA is empty
        differences.pop("DATA_MIX", None)
    return differences


def list_values(runs: Iterable[Run], setting: str) -> list[str]:
    """Return the distinct values that runs with settings have."""
    return sorted({show_setting(run, setting) for run in runs if run.settings})


def is_default_in_all(groups: Groups, setting: str) -> bool:
    """Return whether nobody set a setting, in any run."""
    runs = itertools.chain(*groups.values())
    return all(is_default(setting, run.settings) for run in runs if run.settings)


def identify_scored_texts(groups: Groups) -> set[str]:
    """Return what tells on which text and with which tokenizer runs were scored; "" for a log."""
    texts = set()
    for run in itertools.chain(*groups.values()):
        texts.add(" ".join(str(run.settings[name]) for name in SCORED_TEXT if run.settings))
    return texts


# ---------------------------------------------------------------------------------------------------
# ColumnBuilder
# ---------------------------------------------------------------------------------------------------


def read_curve(run: Run, curve: Curve, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (points,) positions on an axis, ascending, and (points,) values."""
    if curve.column != "loss":
        return read_evals(run, curve.column, curve.is_full, axis)
    positions = run.columns[axis]
    values = smooth_column(run, "loss")
    known = np.isfinite(positions + values)
    return positions[known], values[known]


def read_lines(groups: Groups, axes: Sequence[str], is_range: bool = False) -> Iterator[Lines]:
    """Yield the curves that all runs have, over the first of these axes that they have too.

    Losses on different text compare in bits per byte only.

    Args:
        is_range: whether all runs must have the curve for a while, and not only at one place.
    """
    is_same_text = len(identify_scored_texts(groups) - {""}) < 2
    for axis, curve in itertools.product(axes, CURVES):
        if curve.unit != BITS and not is_same_text:
            continue
        points = {}
        for group, runs in groups.items():
            points[group] = [read_curve(run, curve, axis) for run in runs]
        positions = [x for x, _ in itertools.chain(*points.values())]
        start = max(x.min(initial=math.inf) for x in positions)
        end = min(x.max(initial=-math.inf) for x in positions)
        if start < end or (start == end and not is_range):
            yield Lines(curve, axis, points, start, end)


def read_last_bits(run: Run) -> float:
    """Return the bits per byte of the last evaluation that has them; NaN if none has."""
    bits = [record["val_bpb"] for record in run.evals if record.get("val_bpb") is not None]
    return float(bits[-1]) if bits else math.nan


def describe_place(lines: Lines) -> str:
    """Return the last position that all runs reach."""
    if lines.axis == "minutes":
        return f"after {duration(60 * lines.end)}"
    if lines.axis == "tokens":
        return f"at {number_formats.count(lines.end)} tokens"
    return f"at step {lines.end:,.0f}"


def describe_difference(setting: str, values: Mapping[str, str]) -> str:
    """Return a setting, and each of its values with the groups that have it."""
    owners: dict[str, list[str]] = {}
    for group, value in values.items():
        owners.setdefault(value, []).append(group)
    parts = [f"{value} ({', '.join(names)})" for value, names in owners.items()]
    return f"{setting}: {', '.join(parts)}"


def describe_values(values: np.ndarray) -> str:
    """Return mean and standard deviation."""
    spread = f" +- {values.std(ddof=1):.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{spread}"


def judge(values: Mapping[str, np.ndarray], unit: str) -> list[Verdict]:
    """Test each pair of groups. The surest verdict comes first.

    Args:
        values: group -> (seeds,), two or more.
        unit: of the values, of which the lower ones are better.
    """
    from scipy import stats  # takes a second

    tests = []
    for better, worse in itertools.combinations(
        sorted(values, key=lambda name: values[name].mean()), 2
    ):
        pair = values[worse], values[better]
        # With two seeds against many, Welch's test errs too often. Then Student's is more careful.
        welch, student = (stats.ttest_ind(*pair, equal_var=equal) for equal in (False, True))
        if student.pvalue > welch.pvalue:
            tests.append((student, "Student's", better, worse))
        else:
            tests.append((welch, "Welch's", better, worse))
    tests.sort(key=lambda entry: entry[0].pvalue or 1.0)

    verdicts = []
    p = 0.0
    for rank, (test, kind, better, worse) in enumerate(tests):
        pairs = len(tests) - rank  # Holm: those that are left
        level = ERROR_RATE / pairs
        # A log may round all losses of a group to the same number. That p, 0, decides nothing.
        p = max(p, min(1.0, (test.pvalue or 1.0) * pairs))
        low, high = test.confidence_interval(1 - level)
        difference = values[worse].mean() - values[better].mean()
        size = f"{difference:.3g} {unit} (95%: {low:.3g} to {high:.3g}; {kind} test, p = {p:.2g})."
        words = f"{better} is better than {worse} by {size}"
        if p >= ERROR_RATE:
            samples = values[better], values[worse]
            seeds = np.arange(max(map(len, samples)) + 1, MOST_SEEDS)
            variance = sum(sample.var(ddof=1) for sample in samples)
            errors = np.sqrt(variance / seeds)
            enough = seeds[stats.t.ppf(1 - level / 2, 2 * seeds - 2) * errors < difference]
            words = (
                f"Not decided: {better} is ahead of {worse} by {size} With these seeds, a difference "
                f"below {(high - low) / 2:.2g} would not show. This one would take at least "
                f"{enough.min(initial=MOST_SEEDS)} seeds each."
            )
            if not variance:
                words = (
                    f"Not decided: the seeds of {better} have equal losses, and so have those of {worse}. "
                    "Perhaps their log rounds them."
                )
        verdicts.append(Verdict(better, worse, difference, low, high, p, words))
    return verdicts


def compare(groups: Groups) -> Comparison:
    """Compare groups at equal tokens (or steps, if a log has no tokens) and at equal training time."""
    rows = {}
    seeded = []
    for group, runs in groups.items():
        rows[group] = {"": group, "seeds": str(len(runs))}
        seeds = {run.settings.get("SEED", run.name) for run in runs}
        if len(seeds) == len(runs) > 1:
            seeded.append(group)
    verdicts: list[Verdict] = []
    losses: dict[str, dict[str, list[float]]] = {}
    common = next(read_lines(groups, ("tokens", "step")), None)
    columns = [common] if common else []
    for lines in read_lines(groups, ("minutes",)):
        if common and lines.curve.column == common.curve.column:  # another loss would mislead
            columns.append(lines)
            break
    for lines in columns:
        heading = f"{lines.curve.name} ({lines.curve.unit}) {describe_place(lines)}"
        values = lines.interpolate(lines.end)
        losses[heading] = {name: numbers.tolist() for name, numbers in values.items()}
        for name, numbers in values.items():
            rows[name][heading] = describe_values(numbers)
        if lines is common:
            verdicts = judge({name: values[name] for name in seeded}, lines.curve.unit)
    heading = f"{BITS}, last evaluation"
    bits = {}
    for group, runs in groups.items():
        numbers = np.array([read_last_bits(run) for run in runs])
        if np.isfinite(numbers).all():
            bits[group] = numbers
    if bits:
        losses[heading] = {name: numbers.tolist() for name, numbers in bits.items()}
        for name, row in rows.items():
            row[heading] = describe_values(bits[name]) if name in bits else "n/a"
    for group, runs in groups.items():
        speed = np.mean([average_over_time(run, "tokens_per_s") for run in runs])
        rows[group]["tokens/s"] = f"{speed:,.0f}".replace("nan", "n/a")

    sentences = [verdict.words for verdict in verdicts]
    differences = find_differences(groups)
    if differences:
        settings = [describe_difference(*entry) for entry in differences.items()]
        sentences.append(f"They differ in {'; '.join(settings)}.")
        mixed = []
        for name in differences:
            if any(len(list_values(runs, name)) > 1 for runs in groups.values()):
                mixed.append(name)
        if mixed:
            sentences.append(
                f"Runs of one group have different {', '.join(mixed)}: they are no seeds."
            )
    texts = identify_scored_texts(groups)
    if len(texts - {""}) > 1:
        sentences.append(OTHER_TEXT)
    if not common:
        sentences.append(NOTHING)
    if "" in texts:
        sentences.append(UNKNOWN_TEXT)
    few_seeds = [name for name in rows if name not in seeded]
    if few_seeds:
        sentences.append(
            f"Too few seeds to tell a difference from noise: {', '.join(few_seeds)}. Train each at least "
            "twice, with another SEED and a RUN_NAME that ends in -seed1, -seed2 and so on."
        )
    return Comparison(list(rows.values()), sentences, losses, verdicts, differences)
