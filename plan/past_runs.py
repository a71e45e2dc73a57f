"""How fast finished runs in RUNS_DIR were on the devices that a run is planned for.

A run tells it by its plan.json and by the end of its record, which has what it took (record/account.py).
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from plan.fleet import Fleet
from plan.measured import DECIDES, cpu_name
from record.locks import RunFolderError
from record.metrics import RecordReader
from record.status import find_runs
from settings import ROOT
from settings.config import Config
from settings.json_file import read_object

OF_A_STEP = (
    *DECIDES,
    "model",
    "lora_rank",
    "lora_targets",
)  # settings that decide how long it takes
TAIL_BYTES = 65_536  # of a record


@dataclasses.dataclass(frozen=True)
class PastRun:
    """A finished run. devices: what devices_of returned; settings: of its plan; step_flops: of a step as planned."""

    name: str
    devices: tuple[str, int, int]
    settings: dict[str, Any]
    step_flops: float
    flops_per_s: float


def has_same(stored: dict[str, Any], config: Config, names: Collection[str]) -> bool:
    """Tell whether settings have the stored values. One that was not stored, as DATA decided it, does not matter."""
    return all(name not in stored or stored[name] == getattr(config, name) for name in names)


def devices_of(fleet: Fleet) -> tuple[str, int, int]:
    """Return what a run is on: the CPU or the GPUs, processes, nodes."""
    return cpu_name() if fleet.on_cpu else fleet.text, fleet.processes, fleet.nodes


def find_past_runs(config: Config, fine_tuning: bool) -> Iterator[PastRun]:
    """Yield the finished runs of the same kind on one node: on several, steps also wait for the network.

    What cannot be read is left out. make plan REVIEW=1 names it.
    """
    try:
        folders = find_runs(ROOT / config.runs_dir)
    except RunFolderError:  # what writes to it reports it
        return
    for paths in folders:
        try:
            plan = read_object(paths.plan)
            end = RecordReader(paths.metrics, TAIL_BYTES).read_new()[-1]
            is_alike = plan["fine_tuning"] == fine_tuning and plan["nodes"] == 1
            if is_alike and end["reason"] == "done":
                devices = (plan["device"], plan["processes"], plan["nodes"])
                flops = plan["flops_per_token"]
                step_flops = flops * plan["batch_tokens"]
                _, tokens_per_s = end["plan"]["tokens_per_s"]
                flops_per_s = flops * tokens_per_s
                yield PastRun(paths.name, devices, plan["settings"], step_flops, flops_per_s)
        except (OSError, LookupError, TypeError, ValueError):
            continue
