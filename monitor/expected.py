"""What the plan computes for the run that is watched: plan/ on the settings and the devices that it really has.

    here          config.json of the run: its settings, its processes, the name of its device
    not begun     the settings as they are now, on this machine's devices
    cluster       the settings that make train-8xa100 would send, for as many pods and sites as there are

Of a fine-tuning memory, checkpoints and what is sent are computed by its MODEL; its speed is not, since plan/ assumes
that rather than knowing it. A CPU is not measured for this, which would take its cores from the run: without make
doctor PROBE=1 its speed is n/a. Loaded late, by the thread that looks: plan/ takes a tenth of a second.
"""

import dataclasses
import functools
from typing import Any

from hardware.gpu_specs import find_gpu
from k8s import launch_plan as cluster_plan
from k8s.cluster.job_spec import OUTSIDE, cluster_config
from k8s.cluster.where import Place
from monitor.facts import Expected
from plan import fleet as fleets
from plan.fleet import Fleet
from plan.network.traffic import chosen_of, traffic_of
from plan.planner import probe_of
from plan.run import run_of
from plan.speed import Speed
from plan.time import Pace, evaluation_s, pace_of, time_of
from record.goodput import phases_of
from record.metrics import RecordReader
from record.number_formats import GIB
from record.run_paths import RunPaths
from settings import SettingsError
from settings.config import SETTINGS, Config
from settings.json_file import read_object
from train.data.sources.source import CorpusError

# What a start record calls the parts of a start-up (train/assemble.py), and the phase of STATUS.json in that time.
LAPS = {"data": "data", "model": "model", "compile": "compiling", "rehearsal": "rehearsing"}
HEAD_BYTES = 65_536
NOT_PLANNED = Speed(None, None, None, None, "", "the speed of a fine-tuning is seen once it trains")
PLACES = {"ENV_FILE", "RUNS_DIR", "DATA_DIR", "RUN_NAME", "NODE_RANK"}  # of whoever looks


@dataclasses.dataclass(frozen=True)
class Run:
    """The run's own settings, and what it is on; fleet: None where that is not known, and why in words."""

    c: Config
    fleet: Fleet | None
    why: str = ""


@functools.lru_cache(maxsize=4)
def expected(
    c: Config, fleet: Fleet | None, started: float | None = None, why: str = ""
) -> Expected:
    """Computed, for c on these devices; started: Unix seconds of its first start, from which the
    planned end is counted."""
    if fleet is None:
        return Expected(why=why)
    try:
        run = run_of(c, fleet)
    except SettingsError as error:
        return Expected(why="; ".join(error.problems), save_every_s=save_every_s(c, None))
    pace = Pace(NOT_PLANNED, 0.0) if run.is_finetuning else pace_of(run, probe_of(c, fleet))
    time, rate = time_of(c, pace), pace.speed.tokens_per_s
    way = chosen_of(traffic_of(run, None)) if fleet.nodes > 1 else None
    gbit = c.wan_gbit if fleet.sites > 1 else c.lan_gbit
    keeps_whole = run.is_finetuning and c.keep_every
    size = run.model.full_bytes if keeps_whole else run.checkpoint_bytes
    return Expected(
        tokens_per_s=pace.tokens_per_s,
        mfu_percent=None if fleet.on_cpu else pace.mfu_percent,
        why=pace.speed.why,
        step_s=pace.step_s,
        needs_gib=run.standing_bytes / GIB,
        memory_gib=run.memory.total / GIB,
        bytes_per_step=way.bytes_per_step if way else None,
        link_bytes_per_s=1e9 / 8 * gbit if way else None,
        checkpoint_bytes=size if c.save_every != 0 else None,
        save_every_s=save_every_s(c, pace.step_s),
        end=started + time.total_seconds if time and started is not None else None,
        eval_s=evaluation_s(c, rate) if rate else None,
    )


def save_every_s(c: Config, step_s: float | None) -> float | None:
    """Seconds between two checkpoints: SAVE_MINUTES, or SAVE_EVERY steps where these are through before."""
    if c.save_every == 0:
        return None
    by_time = 60.0 * c.save_minutes
    return min(by_time, c.save_every * step_s) if c.save_every and step_s else by_time


# ---------------------------------------------------------------------------------------------------
# Of which run
# ---------------------------------------------------------------------------------------------------


def of_here(c: Config, paths: RunPaths) -> Run:
    """The run of this machine: as config.json has it, and before there is one as it would be."""
    try:
        content = read_object(paths.config)
        return recorded(c, content["settings"], content["attempts"][-1])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    try:
        here = c.replace(cards="here")
        return Run(here, fleets.fleet_of(here))
    except SettingsError as error:
        return Run(c, None, "; ".join(error.problems))


def recorded(c: Config, settings: dict[str, Any], attempt: dict[str, Any]) -> Run:
    """Of what config.json holds; what it does not know, and what is round the run, is as it is now."""
    known = SETTINGS.keys() - OUTSIDE - PLACES
    own = dataclasses.replace(
        c, **{name.lower(): value for name, value in settings.items() if name in known}
    )
    processes, device = (
        int(attempt["world_size"]) * own.replicas,
        str(attempt["device"]),
    )  # each site counts its own
    nodes = own.nodes if processes % own.nodes == 0 else own.replicas
    if device == "CPU":
        return Run(own, Fleet((), processes, nodes, own.replicas))
    if card := find_gpu(device):
        return Run(own, Fleet(((processes, card),), processes, nodes, own.replicas))
    return Run(own, None, f"nothing is known of {device}")


def of_cluster(place: Place, pods: int | None = None, sites: int = 1, tunes: bool = False) -> Run:
    """The run that was sent to the cluster; pods, sites: as many as there are, where that is known; tunes: whether the
    pods fine-tune."""
    try:
        c = cluster_config()[0]
    except (SettingsError, CorpusError):
        c = place.config
    if tunes and not c.model:
        return Run(
            c,
            None,
            "MODEL is not set here, by which the fine-tuning in the cluster is planned; call again "
            "with the settings of make finetune-k8s",
        )
    nodes = pods or c.nodes
    if c.sync != "diloco":  # whose sites are its own, wherever pods have landed
        c = c.replace(sites=sites if nodes % sites == 0 else 1)
    c = c.replace(nodes=nodes)
    found = cluster_plan.fleet_of(c)
    if found is None:
        return Run(c, None, f"one of GPU_PRODUCTS={c.gpu_products} is not known")
    return Run(c, dataclasses.replace(found, sites=c.sites))


def took(paths: RunPaths) -> dict[str, float]:
    """Phase -> seconds, as an earlier start of this run took; {} of a first start, and where none is recorded."""
    try:
        records = RecordReader(paths.metrics).read_new(HEAD_BYTES)
    except OSError:
        return {}
    for record in records:
        if record["event"] in ("start", "resume") and (phases := phases_of(record)):
            return {LAPS[lap]: seconds for lap, seconds in phases.items() if lap in LAPS}
    return {}
