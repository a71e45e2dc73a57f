"""What is seen, in words: the same for the screen and for plain text. What is not known is "n/a", or not said."""

import dataclasses
import datetime
import math
import re

from monitor.facts import Gpu, Link, Node, Pod, Seen
from monitor.snapshot import SURROGATES, all_gpus, no_step_s
from record import number_formats
from record.goodput import CATEGORIES
from record.metrics import duration, figures
from record.status import OVER

GIB, GB = 2.0**30, 1e9
NA = "n/a"
LATE, LATE_S = (
    2.0,
    5.0,
)  # steps come as long as the last is not older than so many times what one takes, and so much
# What a log may hold for a terminal, and no screen may hand on: colours and cursors, and all else that is no character
SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Phase -> what it shows, where the phase itself is no word for people
PHASES = {
    "data": "reading data",
    "model": "building the model",
    "rehearsing": "dry run of a step",
    "syncing": "syncing weights with other sites",
}


def span(seconds: float) -> str:
    """How long: '12 s', '3:10', '1:02:03', '3.2 days'"""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    return duration(seconds) if seconds >= 59.5 else f"{max(0.0, seconds):.0f} s"


def clock(at: float, now: float) -> str:
    """Local time: '14:05' today, 'Tue 14:05' within a week of now, else '24 Nov 14:05', with the year where it is
    another."""
    then, today = datetime.datetime.fromtimestamp(at), datetime.datetime.fromtimestamp(now)
    if then.date() == today.date():
        return then.strftime("%H:%M")
    if abs(at - now) < 6 * 86400:
        return then.strftime("%a %H:%M")
    return then.strftime("%d %b %H:%M" if then.year == today.year else "%d %b %Y %H:%M")


def size(size_bytes: float) -> str:
    """Decimal, as disks and networks are sold: '8.02 GB'"""
    return number_formats.size(size_bytes)


def clean(text: str) -> str:
    """Without what would steer a terminal, or cannot be printed; on one line."""
    return SURROGATES.sub("\ufffd", CONTROLS.sub(" ", SEQUENCES.sub("", text))).rstrip()


def number(value: float | None, form: str = ".4f") -> str:
    return NA if value is None else format(value, form)


def of(value: float | None, most: float | None, form: str = ".0f") -> str:
    """'71 of 80'; what is not known is n/a, and a whole that is not known is left out."""
    return number(value, form) if most is None else f"{number(value, form)} of {number(most, form)}"


# ---------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Phase:
    """What the run is at. words: for people; since: Unix seconds; usual_s: how long it takes as a rule, and most_s:
    how long it may, where that is known; over: no process is at work on it."""

    words: str
    since: float | None = None
    usual_s: float | None = None
    most_s: float | None = None
    over: bool = False


def phase(seen: Seen) -> Phase:
    """The first node's, or before there is one that of the Job."""
    first = seen.first
    if first is None:
        return of_job(seen)
    name, since = str(first.status.get("phase", "")), moment(first.status.get("since"))
    # of a Job the cluster says whether it is over: its pods come back
    over = of_job(seen).over if seen.cluster else not first.at_work
    if first.stage and not over:
        return Phase(first.stage)
    if not name:
        return of_job(seen) if seen.cluster else Phase(without_status(seen), over=over)
    if name in OVER:
        return Phase(name, since, over=over)
    if over and (seen.cluster or first.at_work is False):
        return Phase(
            f"killed while {name}", moment(first.status.get("heartbeat")) or since, over=True
        )
    return Phase(PHASES.get(name, name), since, usual_s(seen, name), most_s(seen, name))


def without_status(seen: Seen) -> str:
    """Of a run here: what its record says."""
    p = seen.progress
    if p is None:
        return "not begun"
    return p.end_reason or (f"{NA}: STATUS.json is not there or damaged" if p.step else "not begun")


def of_job(seen: Seen) -> Phase:
    if seen.cluster is None:
        return Phase("not begun")
    there = seen.cluster
    return Phase(
        there.job or NA,
        over=bool(there.ended) or (there.asked is not None and not there.wanted_pods),
    )


def usual_s(seen: Seen, name: str) -> float | None:
    """How long a phase takes: as it took before, or as the plan computes it."""
    known = dict(seen.expected.phases)
    p = seen.progress
    if name == "evaluating":
        if p and p.last_step and p.step >= p.last_step:
            return None  # the last one scores up to twenty times as many tokens
        return (seen.progress.eval_s if seen.progress else None) or seen.expected.eval_s
    if name == "saving":
        taken = seen.first.status.get("save_s") if seen.first else None
        return float(taken) if isinstance(taken, int | float) else None
    return known.get(name)


def most_s(seen: Seen, name: str) -> float | None:
    """How long a phase may take before a rule says that it takes too long; "waiting for peers 2/4" is any of these."""
    return next((limit for start, limit in seen.expected.limits if name.startswith(start)), None)


def moment(value: object) -> float | None:
    """Unix seconds of what a STATUS.json says, which anything may have written."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def phase_words(seen: Seen) -> str:
    """'compiling for 3:10 of about 5 min', 'training for 1:02:03', 'done since Tue 14:05'"""
    now = phase(seen)
    if now.since is None:
        return now.words
    if now.over:
        return f"{now.words} since {clock(now.since, seen.now)}"
    usual = f" of about {about(now.usual_s)}" if now.usual_s else ""
    if not usual and now.most_s:
        usual = f" of at most {about(now.most_s)}"
    return f"{now.words} for {span(max(0.0, seen.now - now.since))}{usual}"


def about(seconds: float) -> str:
    """'45 s', '5 min', '1.5 h'"""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def step_s(seen: Seen) -> float | None:
    """Seconds of a step with its share of evaluations and checkpoints, as they were so far."""
    p = seen.progress
    if p is None or not p.step_s:
        return None
    trained = sum(p.goodput.get(key, 0.0) for key in ("training", "data_wait"))
    beside = sum(p.goodput.get(key, 0.0) for key in ("evaluation", "checkpoint"))
    return p.step_s * (1 + beside / trained) if trained > 0 else p.step_s


def eta_s(seen: Seen) -> float | None:
    """Seconds to the last step, at the pace of the last steps; None where it is not known, and where nothing is left
    or at work."""
    p, each = seen.progress, step_s(seen)
    if (
        p is None
        or each is None
        or p.last_step is None
        or p.step >= p.last_step
        or phase(seen).over
    ):
        return None
    return (p.last_step - p.step) * each


def planned_end(seen: Seen) -> str:
    """', planned 13:50', the plan's end of the run; "" where it is not known."""
    if seen.expected.end is None:
        return ""
    return f", planned {clock(seen.expected.end, seen.now)}"


def share_of_plan(seen: Seen) -> float | None:
    """Tokens/s over those of the plan."""
    p, planned = seen.progress, seen.expected.tokens_per_s
    return p.tokens_per_s / planned if p and p.tokens_per_s is not None and planned else None


def speed(seen: Seen) -> str:
    """'34,100 tokens/s, 97% of the plan's 35,000'"""
    p, planned = seen.progress, seen.expected.tokens_per_s
    if p is None or p.tokens_per_s is None:
        return NA
    share = share_of_plan(seen)
    return f"{p.tokens_per_s:,.0f} tokens/s" + (
        f", {100 * share:.0f}% of the plan's {planned:,.0f}"
        if share is not None and planned
        else ""
    )


def goodput(seen: Seen) -> list[tuple[str, float]]:
    """(cause, share of the time since the first start), in the order of goodput.py, without what is less than 0.05%."""
    p = seen.progress
    total = sum(p.goodput.values()) if p else 0.0
    if p is None or total <= 0:
        return []
    return [
        (name, p.goodput[key] / total)
        for key, name in CATEGORIES.items()
        if p.goodput.get(key, 0.0) / total >= 0.0005
    ]


def goodput_words(seen: Seen) -> str:
    parts = goodput(seen)
    return ", ".join(f"{name} {100 * share:.1f}%" for name, share in parts) or NA


def saved(seen: Seen) -> str:
    """The last checkpoint: 'step 1,200, 5:01 ago, 313 MB'"""
    p = seen.progress
    if p is None or p.checkpoint_step is None:
        return "none yet"
    ago = f", {span(seen.now - p.checkpoint_time)} ago" if p.checkpoint_time is not None else ""
    return f"step {p.checkpoint_step:,}{ago}" + (
        f", {size(p.checkpoint_bytes)}" if p.checkpoint_bytes else ""
    )


def energy(seen: Seen, short: bool = False) -> str:
    """'12.3 kWh by the counters of 8 GPUs, since their sampler began at 14:05; about 4.5 kJ a step', which is a step's
    time at the power in training; in short '12.3 kWh since 14:05; about 4.5 kJ a step'; "" where neither is known."""
    counted = [
        node for node in seen.nodes if node.energy_j is not None and node.energy_since is not None
    ]
    said = []
    if counted:
        joules, gpus = (
            sum(node.energy_j or 0.0 for node in counted),
            sum(len(node.gpus) for node in counted),
        )
        began = min(node.energy_since or 0.0 for node in counted)
        part = (
            f" on {len(counted)} of {len(seen.nodes)} nodes"
            if len(counted) < len(seen.nodes)
            else ""
        )
        used = seen.progress.processes if seen.progress else None
        more = (
            f", of which the run has {used}" if used and gpus > used else ""
        )  # the sampler was not told which
        number_of = f"{gpus} GPU{'s' * (gpus != 1)}{part}{more}"
        by = f" by the counters of {number_of}, since their sampler began at"
        in_short = f" of {number_of}, since" if more else f"{part} since"
        said.append(
            f"{figures(joules / 3.6e6, 3)} kWh{in_short if short else by} {clock(began, seen.now)}"
        )
    if (each := step_j(seen)) is not None:
        said.append(
            f"about {f'{figures(each / 1000, 3)} kJ' if each >= 1000 else f'{figures(each, 3)} J'} a step"
        )
    return "; ".join(said)


def step_j(seen: Seen) -> float | None:
    """What a step takes: the power that the GPUs have in training, or now while steps come, times its time. None where
    that of one of them is not known."""
    p, waited = seen.progress, no_step_s(seen)
    if p is None or not p.step_s or waited is None:
        return None
    comes = waited < LATE * p.step_s + LATE_S
    drawn = [gpu.training_w or (gpu.power_w if comes else None) for _, gpu in all_gpus(seen)]
    known = [watts for watts in drawn if watts is not None]
    return sum(known) * p.step_s if drawn and len(known) == len(drawn) else None


# ---------------------------------------------------------------------------------------------------
# Devices, network, pods
# ---------------------------------------------------------------------------------------------------


def reasons(gpu: Gpu) -> str:
    """Why its clocks are low: 'power cap, sw thermal'"""
    return ", ".join(reason.replace("_", " ") for reason in gpu.throttle)


def need_bytes_per_s(seen: Seen) -> float | None:
    """What the plan's steps send through the link between nodes."""
    plan = seen.expected
    return (
        plan.bytes_per_step / plan.step_s
        if plan.bytes_per_step is not None and plan.step_s
        else None
    )


def planned_network(seen: Seen) -> str:
    """What the plan counts on between nodes; "" of one node."""
    need, has = need_bytes_per_s(seen), seen.expected.link_bytes_per_s
    if seen.expected.bytes_per_step is None:
        return ""
    each_s = f", {rate(need)}" if need is not None else ""
    return f"the plan sends {size(seen.expected.bytes_per_step)} a step{each_s}" + (
        f", through {rate(has)}" if has is not None else ""
    )


def rate(bytes_per_s: float | None) -> str:
    """'1.2 GB/s', '41 B/s'"""
    if bytes_per_s is None:
        return NA
    return f"{size(bytes_per_s)}/s" if bytes_per_s >= 1000 else f"{bytes_per_s:.0f} B/s"


def link_words(link: Link) -> str:
    """'in 1.2 GB/s, out 1.1 GB/s of 3.13 GB/s'"""
    full = f" of {rate(link.speed_bytes_per_s)}" if link.speed_bytes_per_s is not None else ""
    return f"in {rate(link.in_bytes_per_s)}, out {rate(link.out_bytes_per_s)}{full}"


def busy(links: tuple[Link, ...]) -> list[Link]:
    """Those that carry anything, the busiest first; where none does, one of them."""

    def most(link: Link) -> float:
        return max(link.in_bytes_per_s or 0.0, link.out_bytes_per_s or 0.0)

    found = sorted(links, key=most, reverse=True)
    return [link for link in found if most(link) > 0] or found[:1]


def disk(node: Node, seen: Seen) -> str:
    """'212 GB left, 677 checkpoints'"""
    if node.disk_free_bytes is None:
        return NA
    p = seen.progress
    each = (p.checkpoint_bytes if p else None) or seen.expected.checkpoint_bytes
    more = f", for {int(node.disk_free_bytes // each):,} checkpoints" if each else ""
    return f"{size(node.disk_free_bytes)} left{more}"


def memory(node: Node) -> str:
    """Of the host or the container, in GiB."""
    if node.memory_bytes is None:
        return NA
    limit = node.memory_limit_bytes
    return f"{of(node.memory_bytes / GIB, limit / GIB if limit else None, '.1f')} GiB"


def pod_state(pod: Pod, now: float) -> str:
    """Its phase and what keeps it: 'Pending: finds no node: ...', 'pulling its image for 2:10'"""
    if (
        pod.pulling_since is not None
        and pod.pulled is None
        and pod.phase not in ("Running", "Succeeded", "Failed")
    ):
        return f"pulling its image for {span(now - pod.pulling_since)}"
    return f"{pod.phase} ({pod.waiting})" if pod.waiting else pod.phase


def last_line(pod: Pod, now: float) -> str:
    if not pod.last_line:
        return ""
    ago = f"{span(now - pod.last_line_time)} ago: " if pod.last_line_time is not None else ""
    return ago + clean(pod.last_line)
