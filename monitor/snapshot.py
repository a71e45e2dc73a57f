"""What rules ask of a moment: is the run at work, how long since its last step, which GPUs are its own; and the
commands that they tell.

Ages are counted by the clock of the node that told them: another machine's may be set differently, and what a pod
tells arrives late. Pure functions.
"""

import math
import re
from collections.abc import Iterable
from statistics import median

from monitor.facts import Gpu, Node, Pod, Seen
from record.metrics import duration
from settings.config import Config
from train.distributed.registry import WAITING

OVER_WELL = ("done", "stopped")
SURROGATES = re.compile(
    "[\ud800-\udfff]"
)  # halves of characters, which JSON can tell and nothing can print
SETTLED_STEPS, SETTLED_S = (
    10,
    30.0,
)  # of an attempt, and since it could train, before its pace is judged
HANG_FACTOR = 8.0  # no step for so many times as long as one takes, and for HANG_S, is a hang
HANG_S = 30.0  # seconds
SLOW_PERCENT = 80.0  # of the plan's tokens/s: below it a run is below plan
STALE_S = 60.0  # readings of GPUs that are older say nothing of now
OWN_MEMORY = 0.1  # of the fullest GPU's memory: one with less is not of this run


# ---------------------------------------------------------------------------------------------------
# How far it is
# ---------------------------------------------------------------------------------------------------


def doing(seen: Seen) -> str:
    """What the run is at: its phase, with "waiting for peers" for each of these; else what the job's script is at."""
    if seen.first and seen.first.stage:
        return seen.first.stage
    return WAITING if seen.phase.startswith(WAITING) else seen.phase


def at(seen: Seen) -> float:
    """The clock by which the run's times are: the first node's."""
    return seen.first.time if seen.first else seen.now


def since(seen: Seen) -> float | None:
    """When the phase began."""
    found = seen.first.status.get("since") if seen.first else None
    return float(found) if isinstance(found, int | float) else None


def in_phase_s(seen: Seen) -> float | None:
    began = since(seen)
    return None if began is None else at(seen) - began


def is_over_well(seen: Seen) -> bool:
    """Done, or stopped by somebody; the script may still draw its plots."""
    ended = seen.progress.end_reason if seen.progress else ""
    return (
        seen.phase in OVER_WELL
        or (not seen.phase and ended in OVER_WELL)
        or bool(seen.cluster and seen.cluster.ended == "Complete")
    )


def is_gone(seen: Seen) -> bool:
    """Nobody is at work on the run: no process here, or a Job that has failed."""
    return bool(seen.first and seen.first.at_work is False) or bool(
        seen.cluster and seen.cluster.ended == "Failed"
    )


def trains(seen: Seen) -> bool:
    """Whether steps are due now."""
    return doing(seen) == "training" and not is_gone(seen)


def step_s(seen: Seen) -> float | None:
    """What a step takes."""
    progress = seen.progress
    if progress and progress.step_s:
        return progress.step_s
    told = seen.first.status.get("step_s") if seen.first else None
    return float(told) if isinstance(told, int | float) and told > 0 else None


def no_step_s(seen: Seen) -> float | None:
    """How long training has gone on without a step; None where no step is due. An evaluation or a save before that
    counts for nothing, nor does the attempt before."""
    if not trains(seen):
        return None
    p = seen.progress
    times = (since(seen), *((p.step_time, p.attempt_started) if p else ()))
    began = [time for time in times if time is not None]
    return max(0.0, at(seen) - max(began)) if began else None


def stands_still(seen: Seen) -> bool:
    """No step for so long that it is no slow one (HANG_FACTOR, HANG_S)."""
    waited, usual = no_step_s(seen), step_s(seen)
    return waited is not None and usual is not None and waited > max(HANG_FACTOR * usual, HANG_S)


def is_stepping(seen: Seen) -> bool:
    """Steps come: training has made one in this attempt, and does not stand still."""
    return trains(seen) and begun(seen) and not stands_still(seen)


def begun(seen: Seen) -> bool:
    """Whether this attempt has made a step."""
    p = seen.progress
    return bool(
        p
        and p.step_time is not None
        and (p.attempt_started is None or p.step_time >= p.attempt_started)
    )


def left_s(seen: Seen) -> float | None:
    """Until the last step, at the speed of the recent ones."""
    p, usual = seen.progress, step_s(seen)
    return (p.last_step - p.step) * usual if p and p.last_step and usual else None


def slowness(seen: Seen) -> float | None:
    """The recent steps' tokens/s, as a part of the plan's."""
    p, plan = seen.progress, seen.expected.tokens_per_s
    return p.tokens_per_s / plan if p and p.tokens_per_s is not None and plan else None


def is_slow(seen: Seen) -> bool:
    part = slowness(seen)
    return part is not None and 100 * part < SLOW_PERCENT and is_settled(seen)


def is_settled(seen: Seen) -> bool:
    """Whether the recent steps are enough to judge their pace: the first ones of an attempt wait for caches, clocks and
    kernels that are tried out. As many as there are count where nobody told how many."""
    p = seen.progress
    if p is None or (p.recent_steps is not None and p.recent_steps < SETTLED_STEPS):
        return False
    return p.ready is None or p.step_time is None or p.step_time - p.ready >= SETTLED_S


# ---------------------------------------------------------------------------------------------------
# Who takes part
# ---------------------------------------------------------------------------------------------------


def pod_of(seen: Seen, number: int) -> Pod | None:
    return (
        next((pod for pod in seen.cluster.pods if pod.index == number), None)
        if seen.cluster
        else None
    )


def named(seen: Seen, node: Node) -> str:
    """'node 2 (gpu-c, site ucsd)'"""
    pod = pod_of(seen, node.node)
    where = [
        pod.node or node.host if pod else node.host,
        f"site {pod.site}" if pod and pod.site else "",
    ]
    return (
        f"node {node.node} ({', '.join(filter(None, where))})"
        if any(where)
        else f"node {node.node}"
    )


def own_gpus(node: Node) -> list[Gpu]:
    """The GPUs of a node that the run is on, read lately. One with hardly anything in its memory is another's, and
    where there are more than the run has processes, those with the least."""
    if node.gpus_time is not None and node.time - node.gpus_time > STALE_S:
        return []
    there = [gpu for gpu in node.gpus if not gpu.lost]
    most = max((gpu.memory_gib for gpu in there if gpu.memory_gib is not None), default=0.0)
    there = [gpu for gpu in there if gpu.memory_gib is None or gpu.memory_gib >= OWN_MEMORY * most]
    processes = (node.progress.processes if node.progress else None) or len(there)
    own = sorted(there, key=lambda gpu: gpu.memory_gib if gpu.memory_gib is not None else math.inf)[
        -processes:
    ]
    return [gpu for gpu in there if gpu in own]


def all_gpus(seen: Seen) -> list[tuple[Node, Gpu]]:
    return [(node, gpu) for node in seen.nodes for gpu in own_gpus(node)]


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


# ---------------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------------


def make(seen: Seen, target: str, **settings: object) -> str:
    """'make logs ONLY=errors RUN_NAME=big WHERE=cluster': a command about this run, wherever the settings point."""
    words = ["make", target, *(f"{name}={value}" for name, value in settings.items())]
    if target in ("train", "restart", "plan", "data") and seen.preset:
        words.append(f"PRESET={seen.preset}")
    if target not in ("plan", "data", "sites", "doctor"):
        words.append(seen.named or f"RUN_NAME={seen.run}")
    if seen.cluster and target not in ("plan", "sites"):
        words.append("WHERE=cluster")
        if seen.cluster.job_name != Config().job_name and target not in ("data", "doctor"):
            words.append(f"JOB_NAME={seen.cluster.job_name}")
    return " ".join(words)


def restart(seen: Seen, **settings: object) -> str:
    """'make restart RUN_NAME=big resumes from step 12,000'"""
    return resume_with(seen, make(seen, "restart", **settings))


def resume_with(seen: Seen, command: str) -> str:
    """Say where a command resumes, by what is known of the checkpoints. After the last step there are no more."""
    p = seen.progress
    saved = p.checkpoint_step if p else None
    if p and saved and p.last_step and saved >= p.last_step:
        return f"{command} does what is left: the last evaluation and the sample"
    if saved:
        return f"{command} resumes from step {saved:,}"
    if p and p.goodput:  # the record was read from its beginning
        return f"{command} starts again from step 0, since there is no checkpoint yet"
    return f"{command} resumes from its last checkpoint, if there is one"


def errors(seen: Seen, **settings: object) -> str:
    return make(seen, "logs", ONLY="errors", **settings)


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(names: Iterable[object], most: int = 4) -> str:
    """'1, 3, 5 and 7 more'"""
    all_names = [str(name) for name in names]
    rest = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {rest} more" if rest > 0 else "")


def ago(seconds: float) -> str:
    """'45 s', '4:10', '1:02:03'"""
    return (
        f"{max(0.0, seconds):.0f} s" if seconds < 60 else duration(seconds)
    )  # a clock may have been set back


def brief(seconds: float) -> str:
    """A step's time: '0.35 s', '2.9 s', '48 s'"""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def said(line: str, most: int = 300) -> str:
    """A line of a log, without its clock, on one line and not too long."""
    line = " ".join(re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d{3})? ", "", line).split())
    return line if len(line) <= most else line[: most - 3] + "..."
