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
from plan import memory, storage
from plan.finetuning import tuned_memory, tuning
from plan.fleet import Fleet
from plan.hours import Pace, time_of, waiting_s
from plan.measured import Probe, cpu_name, of_card, read
from plan.network.traffic import syncs
from plan.speed import speed
from record.goodput import phases_of
from record.metrics import RecordReader
from record.run_paths import RunPaths
from settings import SettingsError
from settings.config import SETTINGS, Config
from settings.json_file import read_object
from train.data.sources.source import CorpusError

# What a start record calls the parts of a start-up (train/assemble.py), and the phase of STATUS.json in that time.
LAPS = {"data": "data", "model": "model", "compile": "compiling", "rehearsal": "rehearsing"}
HEAD_BYTES = 65_536
PLACES = {"ENV_FILE", "RUNS_DIR", "DATA_DIR", "RUN_NAME", "NODE_RANK"}  # of whoever looks


@dataclasses.dataclass(frozen=True)
class Run:
    """The run's own settings, and what it is on; fleet: None where that is not known, and why in words."""

    c: Config
    fleet: Fleet | None
    why: str = ""


def expected(
    c: Config, fleet: Fleet | None, started: float | None = None, why: str = ""
) -> Expected:
    """Computed, for c on these devices; started: Unix seconds of its first start, from which the
    planned end is counted."""
    if fleet is None:
        return Expected(why=why)
    return of_tuning(c, fleet) if c.model else of_fleet(c, fleet, started)


@functools.lru_cache(maxsize=4)
def of_fleet(c: Config, fleet: Fleet, started: float | None) -> Expected:
    probe = probe_of(c, fleet)
    fast = speed(c, fleet, probe)
    ways = syncs(c, fleet, fast.step_s, probe.link_gb_s if probe else None)
    pace = Pace(fast, waiting_s(ways))
    hours = time_of(c, fast, pace.wait_s)
    between = (
        next((sync.bytes_per_step for sync in ways if sync.chosen), None)
        if fleet.nodes > 1
        else None
    )
    gbit = c.wan_gbit if fleet.sites > 1 else c.lan_gbit
    mfu = (
        fast.mfu_percent * fast.step_s / pace.step_s
        if fast.mfu_percent and fast.step_s and pace.step_s
        else None
    )
    need = memory.memory(c, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu)
    return Expected(
        tokens_per_s=pace.tokens_per_s,
        mfu_percent=None if fleet.on_cpu else mfu,
        why=fast.why,
        step_s=pace.step_s,
        needs_gib=least_gib(c, fleet),
        memory_gib=need.total / memory.GIB,
        bytes_per_step=between,
        link_bytes_per_s=1e9 / 8 * gbit if fleet.nodes > 1 else None,
        checkpoint_bytes=storage.checkpoint_bytes(c) if c.save_every != 0 else None,
        save_every_s=save_every_s(c, pace.step_s),
        end=started + 3600 * hours.total if hours and started is not None else None,
        eval_s=c.eval_tokens / (3 * pace.tokens_per_s) if pace.tokens_per_s else None,
    )


@functools.lru_cache(maxsize=4)
def of_tuning(c: Config, fleet: Fleet) -> Expected:
    """Of a fine-tuning; of a MODEL that is not here nothing but how often it saves."""
    saves = save_every_s(c, None)
    try:
        t, *_ = tuning.tuned_here(c)
    except SettingsError as error:
        return Expected(why="; ".join(error.problems), save_every_s=saves)
    need = tuned_memory.memory(t, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu)
    between = next(
        (sync.bytes_per_step for sync in syncs(c, fleet, None, None, t.sent) if sync.chosen), None
    )
    several = fleet.nodes > 1
    gbit = c.wan_gbit if fleet.sites > 1 else c.lan_gbit
    is_lite = c.checkpoint_mode == "lite" and not c.keep_every
    checkpoint_bytes = t.lite_bytes if is_lite else t.full_bytes
    return Expected(
        why="the speed of a fine-tuning is seen once it trains",
        memory_gib=need.total / memory.GIB,
        needs_gib=tuned_memory.standing(t, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu)
        / memory.GIB,
        bytes_per_step=between if several else None,
        link_bytes_per_s=1e9 / 8 * gbit if several else None,
        checkpoint_bytes=checkpoint_bytes if c.save_every != 0 else None,
        save_every_s=saves,
    )


def probe_of(c: Config, fleet: Fleet) -> Probe | None:
    """What make doctor PROBE=1 measured of the slowest of these devices, if it did; nothing is measured now."""
    return of_card(c, fleet.slowest(c.dtype)) if fleet.cards else read(c, cpu_name())


def least_gib(c: Config, fleet: Fleet) -> float:
    """Weights, gradients and moments of one process, and what sites have in common: a step has all of them at once
    when it ends."""
    k = memory.case(c, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu)
    held = memory.FLOAT * k.p.total / k.shards + memory.moments(k) + memory.outer_standing(k)
    return (held + memory.gradients(k, whole=True)) / memory.GIB


def save_every_s(c: Config, step_s: float | None) -> float | None:
    """Seconds between two checkpoints: SAVE_MINUTES, or SAVE_EVERY steps where these are through before."""
    if c.save_every == 0:
        return None
    by_step = c.save_every * step_s if c.save_every and step_s else None
    return min(60 * c.save_minutes, by_step) if by_step else 60 * c.save_minutes


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
