"""What is wrong with a run as such: it waits, takes too long to begin, hangs, or is gone. Pure functions of a moment.

Each phase has its own limit. Those by which the trainer ends itself (EVAL_MINUTES, train/timeouts.py)
are longer by what it takes until it does.
"""

import re
from collections.abc import Iterator

from k8s.cluster.words import FINAL, MEANING
from monitor.facts import Fault, Gpu, Node, Seen
from monitor.snapshot import (
    HANG_FACTOR,
    HANG_S,
    ago,
    all_gpus,
    begun,
    brief,
    count,
    doing,
    errors,
    in_phase_s,
    is_gone,
    is_over_well,
    listed,
    make,
    middle,
    named,
    no_step_s,
    pod_of,
    restart,
    resume_with,
    said,
    stands_still,
    step_s,
)
from record.status import FAILED, OVER
from settings.config import Config
from train import timeouts
from train.distributed.registry import WAITING

FULL_SET = (
    20  # times EVAL_MINUTES for the evaluation at the end, as in train/evaluate/validation.py
)
PEERS_MINUTES = 3.0  # nodes may wait so long for each other
SETUP_MINUTES = 10.0  # opening the data, the model, the first step, a sample, the plots, each
COMPILE_MINUTES = 20.0  # compiling, or rehearsing a step
SILENT_MINUTES = 3.0  # a pod may tell nothing of its node for so long
BUSY_PERCENT = 90.0  # a GPU of such utilisation counts as busy
IDLE_PERCENT = 5.0  # and one of less than this as idle
HANG_POWER_PERCENT = 60.0  # of what a GPU draws in training, or else of its limit: busy with less,
# it only waits
MEMORY_PERCENT = 95.0  # of a machine's or pod's memory may be in use
SLOW_DISK = 20e6  # bytes/s, for which the trainer waits in a save (train/checkpoint/saver.py)
WATCHDOG_S = 15.0  # until a trainer that watches itself has ended
NEEDS_PART = 0.95  # of what is computed that a step needs: it is known to some per cent

HINTS = {
    1: "{logs} shows why",
    64: "mend the setting that it names, then {again}",
    69: "{status} and the other nodes' logs say who is missing; then {again}",
    70: "{logs} shows what failed again and again; then {again}",
    78: "mend the data or the folder that it names, then {again}",
    137: "more memory, or a smaller MICRO_BATCH_SIZE; {again}",
}

WHO = re.compile(r"\[?\brank[ =]?(\d+)\]?", re.IGNORECASE)
HOST = re.compile(r"\brank[ =]\d+ (?:on |host=)([\w.-]+):", re.IGNORECASE)
BEFORE = "the attempt before: "  # what the watchdog said of another attempt (log_errors.HANGS)
LOST = "lost the connection to another process"
# What says that processes do not hear of each other, the plainest first: the watchdog's report, which tells who hangs
# from who waits; what one process says of itself; NCCL's and gloo's time-outs; a connection that broke.
BROKEN = (
    (re.compile(r"\bHANGS: rank \d+"), "does not come on, and the others wait for it"),
    (re.compile(r"\bwaits for others: rank \d+"), "only waits for another one, which hangs"),
    (re.compile(r"no progress in .+ for \d+ s \(see \w+\)"), "made no progress"),
    (
        re.compile(
            r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out|"
            r"Timed out waiting \d+ms"
        ),
        "waited in vain for another process (a collective timed out)",
    ),
    (
        re.compile(
            r"NCCL error|DistBackendError|\bnccl[A-Z]\w*Error\b|NCCL communicator was aborted|"
            r"remote process exited|gloo/transport\S+ Connection (?:closed|reset)"
        ),
        LOST,
    ),
    # the last: this may be a download's as well, and says nothing as long as the run goes on
    (re.compile(r"Connection (?:closed|reset) by peer"), LOST),
)


# ---------------------------------------------------------------------------------------------------
# Before the first step
# ---------------------------------------------------------------------------------------------------


def peers(seen: Seen, c: Config) -> list[Fault]:
    """Nodes that wait for others, and for which."""
    waited = in_phase_s(seen)
    if doing(seen) != WAITING or waited is None or waited <= 60 * PEERS_MINUTES or not seen.first:
        return []
    told = seen.first.status.get("missing")
    missing = [int(rank) for rank in told] if isinstance(told, list) else []
    if missing:
        who = listed(f"node {number}{of_pod(seen, number)}" for number in missing)
    else:  # an older trainer: those of which nothing is heard
        silent = (
            [pod.index for pod in seen.cluster.pods if pod.phase != "Running"]
            if seen.cluster
            else []
        )
        who = listed(f"node {number}{of_pod(seen, number)}" for number in silent) or "others"
    there = seen.phase.removeprefix(WAITING).strip()
    target = "finetune-node" if c.model else "train-node"
    look = (
        f"{make(seen, 'logs', NODE_RANK=missing[0])} and {make(seen, 'describe')} show what it does"
        if seen.cluster and missing
        else f"start them (make {target} with NODE_RANK={listed(missing) or 'theirs'}), and look whether a "
        "firewall keeps the port of MASTER_ADDR (29500) closed; docs/two-nodes.md"
    )
    return [
        Fault(
            "peers",
            f"waiting for {who} for {ago(waited)}: {there} nodes have joined; they give up "
            f"after START_TIMEOUT_S={c.start_timeout_s}",
            look,
        )
    ]


def of_pod(seen: Seen, number: int) -> str:
    """' (its pod is Pending)'"""
    pod = pod_of(seen, number)
    if pod is None:
        return " (it has no pod)" if seen.cluster and seen.cluster.pods else ""
    where = f" on {pod.node}" if pod.node else ""
    return f" (its pod is {pod.phase}{where})"


def limit_s(phase: str, seen: Seen, c: Config) -> tuple[float, str] | None:
    """How long a phase may last, and the setting that says so, "" where none does; None for one without a limit of its
    own."""
    setup = 60 * SETUP_MINUTES
    step = seen.progress.step if seen.progress else 0
    if phase == "data":
        return (
            (setup, "SETUP_MINUTES")
            if setup >= timeouts.DATA_TIMEOUT_S
            else (float(timeouts.DATA_TIMEOUT_S), "the trainer")
        )
    if phase in ("model", "first step", "drawing plots"):
        return setup, ""
    if phase in ("compiling", "rehearsing"):  # and what a resume reads
        size = (seen.progress.checkpoint_bytes if seen.progress else None) or 0.0
        return 60 * COMPILE_MINUTES + size / SLOW_DISK, ""
    if phase == "evaluating":
        longer = (
            FULL_SET
            if seen.progress and seen.progress.last_step and step >= seen.progress.last_step
            else 1
        )
        return 60 * c.eval_minutes * longer + c.train_timeout_s + WATCHDOG_S, "EVAL_MINUTES"
    if phase == "saving":
        size = (
            (seen.progress.checkpoint_bytes if seen.progress else None)
            or seen.expected.checkpoint_bytes
            or 0.0
        )
        return 2 * timeouts.CHECKPOINT_TIMEOUT_S + size / SLOW_DISK + WATCHDOG_S, "the trainer"
    if phase == "syncing":  # with other sites, one of which may fetch weights
        return 2.0 * timeouts.SYNC_TIMEOUT_S, "the trainer"
    if phase == "sampling":
        return setup + c.sample_tokens, ""
    return None


def phase(seen: Seen, c: Config) -> list[Fault]:
    """A phase that takes longer than it may."""
    name, lasted = doing(seen), in_phase_s(seen)
    limit = limit_s(name, seen, c)
    if (
        limit is None
        or lasted is None
        or lasted <= limit[0]
        or is_gone(seen)
        or data_stands_still(seen)
    ):
        return []
    seconds, setting = limit
    if setting:
        allows = f"{setting} allows {ago(seconds)}"
    else:
        allows = f"the limit is {ago(seconds)}"
    still = f"still at its {name}"
    if name == "first step":
        still = "still waiting for its first step"
    elif name == "rehearsing":
        still = "still at its dry run of a step"
    elif name.endswith("ing") or name.startswith("drawing"):
        still = f"still {name}"
    return [
        Fault(
            "phase",
            f"{still} after {ago(lasted)}; {allows}",
            f"{make(seen, 'logs')} shows what it does; {make(seen, 'restart')} begins it anew",
            about=name,
        )
    ]


def not_begun(seen: Seen, c: Config) -> list[Fault]:
    """Less memory in use than weights, gradients and moments take: no step was ever made, however busy GPUs look."""
    needs, lasted = seen.expected.needs_gib, in_phase_s(seen)
    if (
        needs is None
        or lasted is None
        or lasted <= 60 * SETUP_MINUTES / 2
        or begun(seen)
        or is_gone(seen)
        or doing(seen) not in ("first step", "training")
    ):
        return []
    short = [
        (node, gpu)
        for node, gpu in all_gpus(seen)
        if gpu.memory_gib is not None and gpu.memory_gib < NEEDS_PART * needs
    ]
    if not short:
        return []
    node, gpu = min(short, key=lambda pair: pair[1].memory_gib or 0.0)
    busy = middle(gpu.utilisation_percent for _, gpu in short)
    looks = (
        f", though they show {busy:.0f}% utilisation"
        if busy is not None and busy >= BUSY_PERCENT
        else ""
    )
    total = f" of {gpu.memory_total_gib:.0f}" if gpu.memory_total_gib else ""
    where = f"{gpu.memory_gib:.1f}{total} GiB on GPU {gpu.index} of {named(seen, node)}"
    return [
        Fault(
            "not-begun",
            f"training has not begun: less memory is in use on {count(len(short), 'GPU')} ({where}) "
            f"than the {needs:.1f} GiB of weights, gradients and moments, {ago(lasted)} into the first step"
            + looks,
            f"{errors(seen)}; {make(seen, 'restart')} begins it anew",
        )
    ]


# ---------------------------------------------------------------------------------------------------
# Gone
# ---------------------------------------------------------------------------------------------------


def killed(seen: Seen, c: Config) -> list[Fault]:
    """The status, or without one the record, says that a run is at work, and no process is."""
    first, name = seen.first, doing(seen)
    if first is None or first.at_work is not False or name in OVER:
        return []
    if not name:
        return status_lost(seen, c)
    step = f" at step {seen.progress.step:,}" if seen.progress and seen.progress.step else ""
    full = memory_is_full(first)
    why = f". {full} GiB of memory were in use" if full else ""
    return [
        Fault(
            "killed",
            f"the process was killed while {name}{step}{why}",
            f"{resume(seen, c)}. If memory ran out, dmesg | tail shows it",
            failing=True,
        )
    ]


def resume(seen: Seen, c: Config) -> str:
    """The command that continues a run of which no process is left."""
    if seen.cluster:
        return restart(seen)
    return resume_with(seen, make(seen, "finetune" if c.model else "train"))


def status_lost(seen: Seen, c: Config) -> list[Fault]:
    """A run that has made steps, whose record tells of no end, and that has no status: gone without a word."""
    if seen.cluster or not seen.progress or not seen.progress.step or seen.progress.end_reason:
        return []
    return [
        Fault(
            "killed",
            f"the run stopped at step {seen.progress.step:,} without finishing, and STATUS.json is missing "
            "or corrupt: it was killed, or the disk was full or failed",
            resume(seen, c),
            failing=True,
        )
    ]


def memory_is_full(node: Node) -> str:
    """'91.3 of 96.0', in GiB, where that is too much; else ""."""
    used, most = node.memory_bytes, node.memory_limit_bytes
    if used is None or not most or 100 * used <= MEMORY_PERCENT * most:
        return ""
    return f"{used / 2**30:.1f} of {most / 2**30:.1f}"


def crashed(seen: Seen, c: Config) -> list[Fault]:
    """The trainer ended with an error: what its exit code means, and why, by its own words or its last complaint."""
    failed = bool(seen.cluster and seen.cluster.ended == "Failed")
    if not failed and seen.phase not in FAILED:
        return []
    code = seen.first.status.get("exit_code") if seen.first and seen.phase in FAILED else None
    code = code if isinstance(code, int) else None
    again = not is_gone(seen) and code not in FINAL
    step = f" at step {seen.progress.step:,}" if seen.progress and seen.progress.step else ""
    meaning = (
        f" (exit code {code}: {MEANING.get(code, 'not one of ours')})" if code is not None else ""
    )
    head = (
        f"the Job has failed, {seen.cluster.job.removeprefix('failed: ')}"
        if failed and seen.cluster
        else seen.phase
    )
    why = (
        said(str(seen.first.status.get("why") or "") or seen.first.complaint) if seen.first else ""
    )
    last = f": {why}" if why else ""
    hint = HINTS.get(code if code is not None else 1, HINTS[1]).format(
        logs=errors(seen), status=make(seen, "status"), again=restart(seen)
    )
    if again:
        hint = f"the launcher starts it again; {errors(seen)} shows why"
    elif restart(seen) not in hint:
        hint = f"{hint}; {restart(seen)}"
    return [Fault("crashed", f"{head}{step}{meaning}{last}", hint, failing=not again)]


def silent(seen: Seen, c: Config) -> list[Fault]:
    """Pods that run, and tell nothing of their nodes any more."""
    if seen.cluster is None or seen.cluster.ended or is_over_well(seen):
        return []
    faults = []
    for node in seen.nodes:
        pod, quiet = pod_of(seen, node.node), seen.now - node.time
        if pod and pod.phase == "Running" and quiet > 60 * SILENT_MINUTES:
            faults.append(
                Fault(
                    "silent",
                    f"{named(seen, node)} has told nothing for {ago(quiet)}, and its pod "
                    f"{pod.name} is said to run: the machine, or the network to it, may be gone",
                    f"{make(seen, 'describe')} and {make(seen, 'logs', NODE_RANK=node.node)}",
                    about=f"node {node.node}",
                )
            )
    return faults


# ---------------------------------------------------------------------------------------------------
# No step comes
# ---------------------------------------------------------------------------------------------------


def goes_on(seen: Seen, c: Config) -> bool:
    """This attempt has made a step, and is in no phase for too long, evaluations and saves among them."""
    between = bool(
        seen.first and seen.first.stage
    )  # the script is at something else, and no trainer is there
    ended = is_gone(seen) or seen.phase in FAILED or between
    return begun(seen) and not (
        ended or stands_still(seen) or data_stands_still(seen) or phase(seen, c)
    )


def nccl(seen: Seen, c: Config) -> list[Fault]:
    """Processes that do not hear of each other: which rank, and where. Of a run that goes on it is an old line."""
    if is_over_well(seen) or goes_on(seen, c):
        return []
    ends = is_gone(seen) or seen.phase in FAILED or stands_still(seen)
    for pattern, words in BROKEN if ends else BROKEN[:-1]:
        for number, host, line in complaints(seen):
            if not pattern.search(line) or (begun(seen) and BEFORE in line):
                continue
            rank, on = WHO.search(line), HOST.search(line)
            where = by_host(seen, on[1] if on else host, None if on else number)
            who = f"rank {rank[1]}" if rank else "a process"
            return [
                Fault(
                    "nccl",
                    f"{who} on {where} {words}: {said(line)}",
                    f"{errors(seen, NODE_RANK=number)}, and the stacks in its folder hang/; "
                    f"{again(seen)}",
                    about=who,
                    failing=is_gone(seen),
                )
            ]
    return []


def again(seen: Seen) -> str:
    return (
        restart(seen)
        if is_gone(seen)
        else f"the launcher starts it again, and if it does not, {restart(seen)}"
    )


def complaints(seen: Seen) -> Iterator[tuple[int, str, str]]:
    """(node, host, line) of what nodes complain of, and of the last lines of pods, newest first."""
    for node in seen.nodes:
        if node.complaint:
            yield node.node, node.host, node.complaint
    for pod in seen.cluster.pods if seen.cluster else ():
        for line in reversed(pod.lines):
            yield pod.index, pod.name, line


def by_host(seen: Seen, host: str, number: int | None) -> str:
    """A node by its number, or by what its processes call it."""
    node = next(
        (
            node
            for node in seen.nodes
            if node.node == number or (number is None and node.host == host)
        ),
        None,
    )
    return named(seen, node) if node else host


def hanging(seen: Seen, c: Config) -> list[Fault]:
    """No step for much longer than one takes; by the GPUs whether they wait, compute, or have nothing to do."""
    waited, usual = no_step_s(seen), step_s(seen)
    if waited is None or usual is None or not stands_still(seen):
        return []
    gpus = [gpu for _, gpu in all_gpus(seen)]
    idle = [
        f"GPU {gpu.index} of node {node.node}"
        for node, gpu in all_gpus(seen)
        if gpu.utilisation_percent is not None and gpu.utilisation_percent < IDLE_PERCENT
    ]
    times = f"no step for {ago(waited)} (a step takes {brief(usual)})"
    follow = f"{errors(seen)}; {restart(seen)}"
    busy = [
        gpu
        for gpu in gpus
        if gpu.utilisation_percent is not None and gpu.utilisation_percent >= BUSY_PERCENT
    ]
    if only_waits(busy):
        rest = ""
        if idle:
            rest = f"; {listed(idle)} {'is' if len(idle) == 1 else 'are'} idle"
        return [Fault("hanging", f"hanging: {drawn(busy)}, {times}{rest}", follow)]
    if busy:
        return [
            Fault(
                "hanging",
                f"{times}, and {drawn(busy)}: they compute, so that a kernel is slow or is being "
                "compiled anew",
                follow,
            )
        ]
    if gpus and len(idle) == len(gpus):
        return [
            Fault(
                "hanging",
                f"{times}, and {count(len(gpus), 'GPU')} {'is' if len(gpus) == 1 else 'are'} idle: a "
                "process waits for a disk, for data, or in Python",
                follow,
            )
        ]
    return [Fault("hanging", f"hanging: {times}", follow)]


def only_waits(busy: list[Gpu]) -> bool:
    """Whether GPUs that look busy draw so little that they spin in a kernel that waits, as NCCL's do. Without readings
    of power nothing speaks against it."""
    parts = [
        100 * gpu.power_w / most
        for gpu in busy
        if gpu.power_w is not None and (most := gpu.training_w or gpu.power_limit_w)
    ]
    part = middle(parts)
    return bool(busy) and (part is None or part < HANG_POWER_PERCENT)


def drawn(busy: list[Gpu]) -> str:
    """'8 GPUs at 100% utilisation and 140 of 400 W'"""
    text = f"{count(len(busy), 'GPU')} at {middle(gpu.utilisation_percent for gpu in busy):.0f}% utilisation"
    power, most = middle(gpu.power_w for gpu in busy), middle(gpu.power_limit_w for gpu in busy)
    usual = middle(gpu.training_w for gpu in busy)
    if power is None:
        return text
    text += f" and {power:.0f}{f' of {most:.0f}' if most else ''} W"
    return text + (f" ({usual:.0f} W in training)" if usual else "")


def data_stands_still(seen: Seen) -> bool:
    """Training, once begun, waits for data."""
    lasted = in_phase_s(seen)
    usual = step_s(seen) or 0.0
    return (
        doing(seen) == "data"
        and begun(seen)
        and lasted is not None
        and lasted > max(HANG_FACTOR * usual, HANG_S)
    )


def waits_for_data(seen: Seen, c: Config) -> list[Fault]:
    """Training stands still until data come."""
    lasted = in_phase_s(seen)
    if lasted is None or not data_stands_still(seen) or is_gone(seen):
        return []
    return [
        Fault(
            "waits-for-data",
            f"training stands still for {ago(lasted)} and waits for data: their producer is "
            "slower than training, or was refused; the run ends when it makes no progress for "
            f"{timeouts.DATA_TIMEOUT_S} s",
            f"{errors(seen)}, and logs/producer.log of the run; {make(seen, 'data')} prepares them beforehand",
        )
    ]


RULES = (killed, crashed, nccl, not_begun, hanging, waits_for_data, phase, peers, silent)
