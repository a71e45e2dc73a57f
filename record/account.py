"""The plan held to account: what plan.json predicted of a run, and what the run took. Standard library only.

    plan.json (plan/accounting/prediction.py wrote it) + metrics.jsonl -> name -> [predicted, actual] -> the record `end`, a line

    seconds        up to the last step that was planned, without start-up and pauses
    step_s         of a step of as many tokens as the run's had
    tokens_per_s
    memory_gib     of the largest process
    energy_kwh     of the GPUs

Lost work, saving and all that disturbed the run is in its seconds. What was not predicted is null, and what was not
measured is left out.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from record import number_formats
from record.goodput import Timeline, number
from record.metrics import Record, duration, is_number, read_records
from record.regular_file import open_regular
from record.run_paths import RunPaths
from settings.json_file import read_object

Figures = dict[str, list[float | None]]

STEPPING = ("training", "data_wait", "exchange")  # what steps take, by the categories of goodput.py
# What is compared: of the time the first figure that is known, as SHOW prints it.
ITEMS = {"time": ("seconds", "step_s"), "memory": ("memory_gib",), "energy": ("energy_kwh",)}
SHOW = {
    "seconds": duration,
    "step_s": lambda value: f"{number_formats.seconds(value)} per step",
    "memory_gib": lambda value: f"{number_formats.gib(value * number_formats.GIB)} GiB",
    "energy_kwh": lambda value: f"{number_formats.number(value)} kWh",
}
JOULES_PER_KWH = 3.6e6
SAMPLED = (0.99, 1.1)  # of the run's time, at least and at most, for samples that are its own
LAST_ROWS = 65_536  # bytes


def hold_to_plan(paths: RunPaths, unwritten: Iterable[Record] = ()) -> Figures:
    """Compare a run, as far as its record goes, with its plan.json. {} without plan or steps.

    Args:
        unwritten: records that follow.

    Raises:
        OSError: the record cannot be read.
        ValueError: plan.json is damaged. The message follows its path.
    """
    try:
        prediction = read_object(paths.plan)
        records = itertools.chain(read_records(paths.metrics), unwritten)
        figures = compare(prediction, records, paths.folder)
    except FileNotFoundError:
        return {}
    except (LookupError, TypeError):
        raise ValueError("is damaged: a number is missing") from None
    for name, (predicted, _) in figures.items():
        if predicted is not None and not is_number(predicted):
            raise ValueError(f"is damaged: {name} is not a number")
    return figures


def compare(prediction: dict[str, Any], records: Iterable[Record], folder: Path) -> Figures:
    """Compare what was predicted with the records since then; {} if they have no step."""
    timeline = Timeline()
    memory_gib = 0.0
    batch_tokens = 0.0
    for record in records:
        if record["time"] < prediction["time"]:
            continue
        timeline.add(record)
        if record["event"] == "step":
            memory_gib = max(memory_gib, number(record, "mem_gib"))
            batch_tokens = record["tokens"] / record["step"]
    steps = len(timeline.steps())
    if not steps:
        return {}
    spent = timeline.seconds()
    step_s = sum(spent[category] for category in STEPPING) / steps
    running_s = sum(spent.values()) - spent["down"]
    planned_rate = prediction["tokens_per_s"]
    figures = {
        "step_s": [batch_tokens / planned_rate if planned_rate else None, step_s],
        "tokens_per_s": [planned_rate, batch_tokens / step_s],
        "memory_gib": [prediction["memory_gib"], memory_gib],
    }
    if timeline.last_step == prediction["steps"]:
        figures["seconds"] = [prediction["seconds"], running_s - spent["start_up"]]
    if prediction["energy_kwh"]:
        energy_kwh = find_energy_kwh(folder, running_s, prediction["processes"])
        if energy_kwh:
            figures["energy_kwh"] = [prediction["energy_kwh"], energy_kwh]
    return figures


def find_energy_kwh(folder: Path, running_s: float, gpus: int) -> float | None:
    """Return what the energy counters of the GPUs rose by while they were sampled.

    None unless that was about as long as the run ran, and of all its GPUs. analysis/energy tells more.
    """
    joules = 0.0
    sampled_s = 0.0
    for path in folder.glob("gpu_metrics_*.csv"):
        try:
            first, last = read_ends(path)
            counters = [name for name in first if name.endswith("_energy_j")]
            joules += sum(float(last[name]) - float(first[name]) for name in counters)
            sampled_s += float(last["elapsed_sec"]) - float(first["elapsed_sec"])
        except (OSError, LookupError, ValueError):  # no rows yet, or damaged
            return None
        if len(counters) != gpus:
            return None
    is_its_own = SAMPLED[0] * running_s <= sampled_s <= SAMPLED[1] * running_s
    return joules / JOULES_PER_KWH if is_its_own else None


def read_ends(path: Path) -> list[dict[str, str]]:
    """Return the first row of a CSV file and the last whole one, without reading all of it."""
    with open_regular(path) as file:
        header = file.readline()
        rows = [file.readline()]
        file.seek(max(0, path.stat().st_size - LAST_ROWS))
        rows.append(file.read().split(b"\n")[-2])
    names = header.decode().strip().split(",")
    return [dict(zip(names, row.decode().strip().split(","), strict=True)) for row in rows]


def find_known(figures: Figures) -> dict[str, tuple[str, float, float]]:
    """Return item -> (name, predicted, actual) of what is known of both."""
    known = {}
    for item, names in ITEMS.items():
        for name in names:
            predicted, actual = figures.get(name, (None, None))
            if predicted and actual and item not in known:
                known[item] = (name, predicted, actual)
    return known


def describe(figures: Figures) -> str:
    """Return a line: "plan: predicted 4:10 and 0.31 GiB; took 4:32 (9% more) and 0.31 GiB (as planned)"."""
    planned = []
    took = []
    for name, predicted, actual in find_known(figures).values():
        percent = round(100 * (actual / predicted - 1))
        difference = f"{abs(percent)}% {'less' if percent < 0 else 'more'}"
        planned.append(SHOW[name](predicted))
        took.append(f"{SHOW[name](actual)} ({difference if percent else 'as planned'})")
    return f"plan: predicted {' and '.join(planned)}; took {' and '.join(took)}"
