"""`make energy`: what a run took from the wall, by step, by token and by cause, from its record and its GPU samples.

    python -m analysis.energy.energy [RUN_FOLDER] [--runs-dir DIR]        exit codes as of `make plots`

    metrics.jsonl -> stretches of time by cause (intervals.py) -+-> joules of each, summed by cause
    gpu_metrics_* -> joules up to any moment (samples.py)      -+-> joules of each step -> energy_*.csv

An attempt's record and a sampler of the same boot of a machine have one monotonic clock. config.json and the sampler's
.json name that boot; where one does not, it is known by when their clocks say that it began. Else both are brought to
the clock on the wall. A stretch or a step takes the counter's joules where that covers it, else integrated power. A
step that is not covered by a GPU for each process of the run has no energy, nor one with more; causes have that of the
part that is covered, and say how much that is. While the run is down after `make stop`, or its end, its GPUs are given
back: that time counts for none. Samples may still be growing: the sums go up to the last record.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.energy.downsample import sampled
from analysis.energy.intervals import Interval, place_claims
from analysis.energy.samples import Meter, Sampler, boots_of, same_boot, samplers
from analysis.load import Cause, Energy, RecordError, Run, load, run_folders, shown
from analysis.prices import Prices
from analysis.tables import WHOLE_NUMBERS, cells, write_csv
from record.goodput import CATEGORIES, Attempt
from record.metrics import duration, figures
from settings import SettingsError

DONE, BAD_SETTING, BAD_DATA = 0, 64, 78

UNSPLIT = "between samples"  # counted while nothing was sampled, over more than one cause
SURE_S = 1.0  # by that much more power must cover than the counter, to be taken for a part
NS = 1e-6  # seconds: rounding


# ---------------------------------------------------------------------------------------------------
# The join
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """A GPU in each stretch of the run, and in each of its steps.

    joules, covered_s, by_power: of the stretches; by_power where integrated power was taken. steps: joules, NaN where a
    step is not covered. unsplit: joules, and seconds, that only the counter knows, of more than one stretch. compared:
    joules by counter and by power, of stretches that both cover.
    """

    name: str
    joules: np.ndarray
    covered_s: np.ndarray
    by_power: np.ndarray
    steps: np.ndarray
    unsplit: tuple[float, float]
    compared: tuple[float, float]


def join(run: Run, prices: Prices) -> Energy | None:
    """The energy of a run; None where its folder holds no samples, or it is from a log. Raises OSError."""
    timeline = run.timeline
    found, remarks = samplers(run.paths.folder) if timeline.attempts else ([], [])
    if not found:
        return None
    ran, stretches, boots = timeline.attempts, place_claims(timeline), boots_of(run.paths.config)
    rested = at_rest(run, stretches)
    nodes = {sampler.node for sampler in found}
    gpus: list[Measured] = []
    for sampler in found:
        shifts, same = zip(
            *(shift(sampler, each, boots.get(each.number)) for each in ran), strict=True
        )
        prefix = ""
        if len(nodes) > 1:
            prefix = "unknown." if sampler.node is None else f"node{sampler.node}."
        new = [
            measured(run, stretches, np.array(shifts), meter, f"{prefix}gpu{meter.index}", rested)
            for meter in sampler.measure(moments(run, stretches, np.array(shifts)))
        ]
        remarks += [clock_words(sampler, new, same, stretches), *sampler.remarks]
        gpus += new
    of = np.array([stretch.attempt for stretch in stretches])
    sampled = np.array(
        [[gpu.covered_s[of == k].sum() > 0 for gpu in gpus] for k in range(len(ran))]
    )
    wanted = np.array([attempt.world_size or 0 for attempt in ran])
    remarks += [
        f"attempt {k + 1} had {wanted[k]} processes, and {n} {'GPU was' if n == 1 else 'GPUs were'} sampled: the "
        "joules are theirs alone, and steps have none"
        for k, n in enumerate(sampled.sum(axis=1))
        if 0 < n < wanted[k]
    ]
    remarks += [
        f"{n} GPUs were sampled and attempt {k + 1} had {wanted[k]} process{'es' * bool(wanted[k] > 1)}: "
        f"the joules and the cost are of all {n}, and steps have none; CUDA_VISIBLE_DEVICES beside make "
        "gpu-sampler samples fewer"
        for k, n in enumerate(sampled.sum(axis=1))
        if 0 < wanted[k] < n
    ]
    expected = np.maximum(wanted, sampled.sum(axis=1))
    causes = by_cause(stretches, gpus, np.where(expected > 0, expected, expected.max()), rested)
    energy_j = of_steps(run, gpus, sampled, wanted)
    names = sorted({gpu.name for gpu in gpus})
    compared = {
        name: (
            sum(gpu.compared[0] for gpu in gpus if gpu.name == name),
            sum(gpu.compared[1] for gpu in gpus if gpu.name == name),
        )
        for name in names
    }
    return Energy(
        causes,
        sum(causes.values(), Cause()),
        energy_j,
        energy_j / step_seconds(run),
        step_seconds(run),
        {name: together([gpu.steps for gpu in gpus if gpu.name == name]) for name in names},
        sum(float(gpu.joules[gpu.by_power].sum()) for gpu in gpus),
        {name: pair for name, pair in compared.items() if pair[0] > 0},
        prices,
        remarks,
    )


def at_rest(run: Run, stretches: Sequence[Interval]) -> np.ndarray:
    """(stretches,) bool: the run was down since somebody stopped it, or it was done, and not since it crashed."""
    ends = {
        event.get("attempt"): event.get("reason") for event in run.events if event["event"] == "end"
    }
    return np.array(
        [
            s.category == "down"
            and ends.get(run.timeline.attempts[s.attempt].number) in ("stopped", "done")
            for s in stretches
        ]
    )


def shift(sampler: Sampler, attempt: Attempt, boot: str | None) -> tuple[float, bool]:
    """(seconds from an attempt's clock to a sampler's, whether both are one monotonic clock). boot: the attempt's."""
    if sampler.monotonic and attempt.offsets:
        if boot is not None and sampler.boot_id is not None:
            same = (
                boot == sampler.boot_id
            )  # whatever the host is called: pods on one machine have names of their own
        else:
            same = (
                attempt.host is not None
                and attempt.host == sampler.host
                and same_boot(attempt.offsets, sampler.offsets)
            )
        if same:
            return 0.0, True
    return (attempt.offsets[-1] if attempt.offsets else 0.0) - sampler.offsets[-1], False


def edges(stretches: Sequence[Interval], shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where stretches begin and end on a sampler's clock; never back, though clocks on the wall may say so."""
    begins = [(stretch.attempt, stretch.begin) for stretch in stretches]
    both = [*begins, (stretches[-1].attempt, stretches[-1].end)]
    moved = np.maximum.accumulate(np.array([t for _, t in both]) + shifts[[k for k, _ in both]])
    return moved[:-1], moved[1:]


def step_seconds(run: Run) -> np.ndarray:
    """(steps,) seconds that each step of the run took, NaN where its record does not say."""
    return run.columns["step_ms"] / 1000


def step_edges(run: Run, shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where steps begin and end; one of which it is not known how long it took has no length."""
    steps = run.timeline.steps()
    ends = np.array([step.end for step in steps]) + shifts[[step.attempt for step in steps]]
    return ends - np.nan_to_num(step_seconds(run)), ends


def moments(run: Run, stretches: Sequence[Interval], shifts: np.ndarray) -> np.ndarray:
    """All that a curve will be asked for."""
    return np.unique(np.concatenate([*edges(stretches, shifts), *step_edges(run, shifts)]))


def measured(
    run: Run,
    stretches: Sequence[Interval],
    shifts: np.ndarray,
    meter: Meter,
    name: str,
    rested: np.ndarray,
) -> Measured:
    """rested: of the stretches, those in which the GPU was not the run's: they have none of what was measured."""
    begins, ends = edges(stretches, shifts)
    joules, covered_s, by_power, compared = chosen(meter, begins, ends)
    joules, covered_s = (np.where(rested, 0.0, values) for values in (joules, covered_s))
    first, last = step_edges(run, shifts)
    step_j, step_s, _, _ = chosen(meter, first, last)
    whole = (last > first) & (step_s >= last - first - NS)
    return Measured(
        name,
        joules,
        covered_s,
        by_power,
        np.where(whole, step_j, np.nan),
        unsplit(meter, begins, ends, rested),
        compared,
    )


def chosen(
    meter: Meter, begins: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[float, float]]:
    """(joules, covered seconds, whether by power) of intervals, and the joules by counter and by power of all those
    that both cover. The counter's, unless power alone covers an interval, or covers much more of it."""
    (count_j, count_s), (power_j, power_s) = (
        curve.between(begins, ends) for curve in (meter.counter, meter.power)
    )
    length = ends - begins
    counted, integrated = (seconds >= length - NS for seconds in (count_s, power_s))
    by_power = (power_s > count_s + SURE_S) | (integrated & ~counted)
    both = counted & integrated
    return (
        np.where(by_power, power_j, count_j),
        np.where(by_power, power_s, count_s),
        by_power,
        (float(count_j[both].sum()), float(power_j[both].sum())),
    )


def unsplit(
    meter: Meter, begins: np.ndarray, ends: np.ndarray, rested: np.ndarray
) -> tuple[float, float]:
    """(joules, seconds) of holes across the bounds of stretches, which the counter tells as a whole and power not;
    without those that reach into a time at rest."""
    joules, seconds = 0.0, 0.0
    for begin, end, inside in meter.counter.holes:
        k = int(np.searchsorted(begins, begin, side="right")) - 1
        apart = (k >= 0 and end <= ends[k]) or rested[
            max(k, 0) : int(np.searchsorted(begins, end))
        ].any()
        if (
            not apart
            and begins[0] <= begin
            and end <= ends[-1]
            and not math.isnan(inside)
            and meter.power.blind_s(begin, end) > end - begin - SURE_S
        ):
            joules, seconds = joules + inside, seconds + end - begin
    return joules, seconds


def by_cause(
    stretches: Sequence[Interval],
    gpus: Sequence[Measured],
    expected: np.ndarray,
    rested: np.ndarray,
) -> dict[str, Cause]:
    """expected: GPUs of each attempt; while the run is down after a crash, those before, and at rest none."""
    joules, covered_s = (
        np.sum([getattr(gpu, name) for gpu in gpus], axis=0) for name in ("joules", "covered_s")
    )
    causes = dict.fromkeys(CATEGORIES, Cause())
    for stretch, part_j, part_s, free in zip(
        stretches, joules.tolist(), covered_s.tolist(), rested, strict=True
    ):
        seconds = stretch.end - stretch.begin
        gpu_s = 0.0 if free else seconds * int(expected[stretch.attempt])
        causes[stretch.category] += Cause(seconds, gpu_s, part_s, part_j)
    if joules_between := sum(gpu.unsplit[0] for gpu in gpus):
        causes[UNSPLIT] = Cause(0.0, 0.0, sum(gpu.unsplit[1] for gpu in gpus), joules_between)
    return causes


def of_steps(
    run: Run, gpus: Sequence[Measured], sampled: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Joules of all GPUs in each step; NaN where one that its attempt had is not covered, or was never sampled, and
    where more were sampled than it had."""
    of = np.array([step.attempt for step in run.timeline.steps()])
    number = sampled[of].sum(axis=1)
    joules = np.where((number > 0) & ((number == wanted[of]) | (wanted[of] == 0)), 0.0, np.nan)
    for i, gpu in enumerate(gpus):
        joules += np.where(sampled[of, i], gpu.steps, 0.0)
    return joules


def together(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One GPU in several boots of its machine: what any of them covers."""
    whole = parts[0]
    for part in parts[1:]:
        whole = np.where(np.isnan(whole), part, whole)
    return whole


# ---------------------------------------------------------------------------------------------------
# In words and numbers
# ---------------------------------------------------------------------------------------------------


def clock_words(
    sampler: Sampler, gpus: Sequence[Measured], same: Sequence[bool], stretches: Sequence[Interval]
) -> str:
    """What sampled where, and how it was joined, of the attempts that it was there for."""
    attempts = {
        s.attempt for i, s in enumerate(stretches) if any(gpu.covered_s[i] > 0 for gpu in gpus)
    }
    where = " on ".join(
        [
            *([f"node {sampler.node}"] if sampler.node is not None else ["a node"]),
            *([sampler.host] if sampler.host else []),
        ]
    )
    files = f"{len(sampler.tables)} {'file' if len(sampler.tables) == 1 else 'files'}"
    clocks = sorted(
        {"the monotonic clock" if same[k] else "the clock on the wall" for k in attempts}
    )
    how = f"joined by {' and '.join(clocks)}" if clocks else "not of the time of this run"
    return f"{', '.join(gpu.name for gpu in gpus)} of {where} in {files}, {how}"


def text(name: str, run: Run, energy: Energy) -> str:
    """The table, and what one must know to read it."""
    total, priced = energy.total, energy.cost is not None
    rows = [["", "time", "kWh", "share", "W a GPU", "covered", *(["cost"] if priced else [])]]
    named = [
        (CATEGORIES.get(key, key), cause)
        for key, cause in energy.causes.items()
        if cause.seconds or cause.joules
    ]
    for label, cause in [*named, ("total", total)]:
        cost = energy.prices.cost(cause.joules, cause.gpu_s)
        rows.append(
            [
                label,
                duration(cause.seconds),
                figures(cause.joules / 3.6e6) if cause.covered_s else "n/a",
                f"{100 * cause.joules / total.joules:.1f}%" if total.joules else "n/a",
                known(cause.mean_w, ".0f"),
                f"{100 * min(1.0, cause.covered_s / cause.gpu_s):.1f}%" if cause.gpu_s else "n/a",
                *([known(cost, ".2f")] if priced else []),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{name}, step {int(run.columns['step'][-1]):,}: energy of the GPUs",
        *(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ),
    ]
    lines += per_step(run, energy)
    if energy.per_cent is None:
        lines.append("counter and integrated power cannot be compared: no time that both cover")
    else:
        each = ", ".join(
            f"{gpu} {100 * (power / counter - 1):+.2f}%"
            for gpu, (counter, power) in energy.disagreement.items()
        )
        lines.append(
            f"integrated power against the energy counter: {energy.per_cent:+.2f}% ({each})"
        )
    if energy.power_j:
        lines.append(
            f"{100 * energy.power_j / total.joules:.1f}% of the joules are integrated power, where there is "
            "no counter"
        )
    if not priced:
        lines.append("cost n/a: set PRICE_KWH or PRICE_GPU_HOUR")
    return "\n".join([*lines, *energy.remarks]) + "\n"


def per_step(run: Run, energy: Energy) -> list[str]:
    """Medians over the steps that are covered."""
    known_j = energy.energy_j[np.isfinite(energy.energy_j)]
    if not len(known_j):
        return ["joules of a step n/a: samples cover none on all of its GPUs, and on no other"]
    tokens = per_token(run, energy)
    of = (
        f"{len(known_j):,} of {len(energy.energy_j):,} steps are covered; the median one took"
        if len(known_j) < len(energy.energy_j)
        else "the median step took"
    )
    each = (
        f", {figures(1e3 * float(np.nanmedian(tokens)))} mJ a token"
        if np.isfinite(tokens).any()
        else ""
    )
    return [
        f"{of} {figures(float(np.median(known_j)))} J at {float(np.nanmedian(energy.power_w)):,.0f} W{each}"
    ]


def per_token(run: Run, energy: Energy) -> np.ndarray:
    """Joules a token of each step: watts over tokens/s of the whole job."""
    rate = run.columns["tokens_per_s"]
    return np.divide(energy.power_w, rate, out=np.full(len(rate), np.nan), where=rate > 0)


def known(value: float | None, form: str) -> str:
    return "n/a" if value is None or math.isnan(value) else format(value, form)


def with_energy(run: Run, prices: Prices) -> Run:
    """The run with energy_j and power_w of its steps, and the curves of its samples; the same where nothing was
    sampled. Raises OSError."""
    energy = join(run, prices)
    if energy is None:
        return run
    columns = {**run.columns, "energy_j": energy.energy_j, "power_w": energy.power_w}
    return dataclasses.replace(
        run, columns=columns, energy=energy, sampled=sampled(run.paths.folder)
    )


def write(run: Run, energy: Energy) -> Path:
    """energy_YYYYMMDD_HHMMSS.csv beside the record, a line for each step; returns its path."""
    path = run.paths.folder / f"energy_{run.stamp}.csv"
    columns = {
        "step": run.columns["step"],
        "tokens": run.columns["tokens"],
        "time": run.columns["time"],
        "seconds": energy.step_s,
        "joules": energy.energy_j,
        "watts": energy.power_w,
        "joules_per_token": per_token(run, energy),
    }
    columns |= {f"{gpu}_j": joules for gpu, joules in energy.steps.items()}
    rows = zip(
        *(cells(values, key in WHOLE_NUMBERS) for key, values in columns.items()), strict=True
    )
    write_csv(path, list(columns), rows)
    return path


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    made = argparse.ArgumentParser(
        prog="python -m analysis.energy.energy",
        allow_abbrev=False,
        description="The energy of a run, from its GPU samples.",
    )
    made.add_argument(
        "run_folder",
        nargs="?",
        metavar="RUN_FOLDER",
        help="default: the run of the settings (RUN_NAME)",
    )
    made.add_argument(
        "--runs-dir", metavar="DIR", help="holds the runs; default: the setting RUNS_DIR"
    )
    try:
        arguments = made.parse_args(argv)
        folder = run_folders(
            [arguments.run_folder] if arguments.run_folder else [], arguments.runs_dir
        )[0]
        prices = Prices.of_settings()
    except SystemExit as stop:  # argparse has said what is wrong, and its own code for that is 2
        return BAD_SETTING if stop.code else DONE
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTING
    try:
        run = load(folder)
        energy = join(run, prices)
        if energy is None:
            raise RecordError(
                f"{folder} holds no gpu_metrics_*.csv with samples: run `make gpu-sampler "
                f"RUN_NAME={folder.name}` beside its training, or train by make train-2xh100"
            )
        path = write(run, energy)
    except RecordError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_DATA
    except OSError as error:
        sys.stderr.write(
            f"{error.filename or folder} cannot be read or written ({error.strerror}): make its folder "
            "accessible, or free its disk\n"
        )
        return BAD_DATA
    sys.stdout.write(f"{text(run.name, run, energy)}{shown(path)}\n")
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
