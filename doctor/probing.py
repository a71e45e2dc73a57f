"""`PROBE=1`: about a minute of real work on this machine, and what came of it, in a file for the plan and in words.

    disk (doctor/gpu_probe/probe_disk.py) -> products, memory, links (doctor/gpu_probe/probe.py) -> a step (doctor/gpu_probe/probe_step.py)

Each part is a process, or one for each GPU, with a share of the time, and is ended where it takes half as long again.
A step that needs more memory than there is, or more time than is left, is tried with a smaller micro-batch, and only
what was really measured is recorded.
"""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from doctor import gpu_state
from doctor.gpu_probe.foreign_load import Foreign
from doctor.gpu_state import State
from hardware.model_size import flops_of
from hardware.ports import free_ports
from plan.measured import Probe, Step, cpu_name, path_of, read, shape_of, to_json
from record.durable import write_whole
from settings import ROOT
from settings.config import Config

SECONDS = 60.0
OVERTIME = 1.45  # times its share of the time, when a part is ended
SHARES = {"disk": 0.12, "ceilings": 0.3}  # of the time; a step has the rest
PASSES = 5  # forward and backward passes that measuring a step takes at least: a rehearsal, and steps of 1, 1, 2
START_S = 5.0  # for a process to load torch and build a model
LEAST_SHARE = 0.3  # of the measured products that a step reaches at least, to judge whether there is time for one
STEPS = 50  # kept of earlier measurements
NO_ROOM = "memory does not suffice"


@dataclasses.dataclass
class Measured:
    """What came of it. Lists are by process; what is empty or None could not be measured, and `notes` say why.

    c: of which the step is, on this machine alone; step: as doctor/gpu_probe/probe_step.py has it.
    """

    c: Config
    began: float
    threads: int | None = None
    torch: str = ""
    names: list[str] = dataclasses.field(default_factory=list)
    uuids: list[str] = dataclasses.field(default_factory=list)
    matmul: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # TFLOP/s
    memory: list[float] = dataclasses.field(default_factory=list)  # GB/s
    link: dict[str, float] | None = None
    disk: dict[str, Any] | None = None
    step: dict[str, Any] | None = None
    notes: dict[str, str] = dataclasses.field(default_factory=dict)  # part -> what went wrong
    before: dict[str, State] = dataclasses.field(default_factory=dict)
    busy: dict[str, State] = dataclasses.field(default_factory=dict)
    foreign_percent: float | None = None  # of a CPU, that other processes took, where that was most

    @property
    def processes(self) -> int:
        return len(self.names)

    @property
    def on_gpu(self) -> bool:
        return any(self.uuids)


def alone(c: Config) -> Config:
    """What this machine does of a run: its share of the batch."""
    return c.replace(nodes=1, node_rank=0, master_addr="", batch_tokens=c.batch_tokens // c.nodes)


# ---------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------


def measure(c: Config, say: Callable[[str], None], seconds: float = SECONDS) -> Measured:
    """All of it, in about so many seconds and never half as many again; say is told each part as it begins.

    What a part starts ends with it, and with this process (Ctrl-C, SIGTERM).
    """
    found = Measured(alone(c), time.time())
    if c.nodes > 1:
        say(f"NODES={c.nodes}: this machine is measured alone, with its share of the batch")
    with ended_by_sigterm():
        found.before = gpu_state.states() if c.device != "cpu" else {}
        disk_s, ceilings_s = (SHARES[part] * seconds for part in ("disk", "ceilings"))
        say(f"disk at RUNS_DIR={c.runs_dir}, for up to {disk_s:.0f} s")
        run(
            found,
            "disk",
            disk_s,
            [
                sys.executable,
                "-m",
                "doctor.gpu_probe.probe_disk",
                str((ROOT / c.runs_dir).absolute()),
            ],
        )
        say(f"products, memory{', links' if c.nproc != 1 else ''}, for up to {ceilings_s:.0f} s")
        run(found, "ceilings", ceilings_s, command(found.c, "ceilings"))
        take_step(found, say, found.began + seconds, found.began + OVERTIME * seconds)
    return found


def take_step(found: Measured, say: Callable[[str], None], until: float, limit: float) -> None:
    """A step at the run's own shape, or at the largest micro-batch below it that fits into memory and time."""
    problems: list[str] = []
    for micro_batch in micro_batches(found.c, found.processes or 1):
        c = found.c if not problems else found.c.replace(micro_batch_size=micro_batch)
        left = until - time.time()
        if (needs := least_s(found, c)) is not None and needs > left:
            problems.append(
                f"MICRO_BATCH_SIZE={micro_batch} would take {needs:.0f} s to measure (computed), and "
                f"{max(0.0, left):.0f} s are left"
            )
            say(problems[-1])
            continue
        if left < START_S:
            problems.append("no time was left for it")
            break
        say(
            f"a step of BATCH_TOKENS={c.batch_tokens} at MICRO_BATCH_SIZE={micro_batch}, for up to {left:.0f} s"
        )
        run(found, "step", left, command(c, "step"), limit)
        if found.step is not None:
            found.c = c
            break
        problems.append(found.notes.pop("step"))
        if not problems[-1].startswith(NO_ROOM):
            break
        say(problems[-1])
    if found.step is None:
        found.notes["step"] = problems[-1]
    elif problems:
        found.notes["smaller"] = problems[0]


def micro_batches(c: Config, processes: int) -> Iterator[int]:
    """The sizes to try: the run's own, and each time half as large or less; all divide what a process has."""
    share, size = max(1, c.batch_windows // processes), c.micro_batch(processes)
    while size >= 1:
        yield size
        size = max((n for n in range(1, size // 2 + 1) if share % n == 0), default=0)


def least_s(found: Measured, c: Config) -> float | None:
    """Seconds that measuring a step of c takes at most (computed), by the products that were measured; None without."""
    if not (rates := found.matmul.get(c.dtype)):
        return None
    work = PASSES * c.micro_batch(found.processes) * c.seq_len * flops_of(c)
    return START_S + work / (LEAST_SHARE * min(rates) * 1e12)


def command(c: Config, part: str) -> list[str]:
    """What starts the processes of a part, with those settings that are not the defaults."""
    defaults = Config().stored()
    chosen = {name: value for name, value in c.stored().items() if value != defaults[name]}
    return [
        sys.executable,
        "-m",
        "doctor.gpu_probe.start",
        c.device,
        str(c.nproc or ""),
        str(free_ports(1)),
        part,
        json.dumps(chosen),
    ]


# ---------------------------------------------------------------------------------------------------
# A part
# ---------------------------------------------------------------------------------------------------


def run(
    found: Measured, part: str, seconds: float, words: Sequence[str], limit: float | None = None
) -> None:
    """Start a part, and take in what it says until it has ended or is ended. What went wrong is in found.notes."""
    now = time.time()
    limit = limit or now + OVERTIME * seconds
    foreign, phase, last = Foreign([], time.monotonic()), "starting", ""
    said: queue.Queue[str | None] = queue.Queue()
    started: queue.Queue[subprocess.Popen] = queue.Queue()
    try:
        threading.Thread(
            target=start, args=([*words, str(now + seconds), str(limit)], started, said)
        ).start()
        while (line := next_line(said, limit + 1)) is not None:
            if not line.startswith("{"):
                last = line.strip() or last
                continue
            values = json.loads(line)
            phase = values.get("phase", phase)
            if problem := take_in(found, part, values):
                found.notes[part] = problem + (f": {last}" if last and "ended" in values else "")
                break
    finally:
        with contextlib.suppress(queue.Empty):
            end(started.get(timeout=5))
    if (
        part != "disk"
        and not found.on_gpu
        and (percent := foreign.percent(time.monotonic())) is not None
    ):
        found.foreign_percent = max(percent, found.foreign_percent or 0.0)
    whole = {
        "disk": found.disk,
        "ceilings": found.link if found.processes > 1 else found.memory,
        "step": found.step,
    }
    if not whole[part] and part not in found.notes:
        found.notes[part] = f"it was cut short after {time.time() - now:.0f} s ({phase})"


def start(
    words: list[str], started: "queue.Queue[subprocess.Popen]", said: "queue.Queue[str | None]"
) -> None:
    """Start a process, hand it on, then each line of it, and None behind the last. In a thread, where no signal can
    come between the start and the word of it."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    started.put(process)
    for line in process.stdout or ():
        said.put(line)
    said.put(None)


def next_line(said: "queue.Queue[str | None]", limit: float) -> str | None:
    """The next line; None behind the last, and at the limit, a Unix time."""
    try:
        return said.get(timeout=max(0.0, limit - time.time()))
    except queue.Empty:
        return None


def take_in(found: Measured, part: str, values: dict[str, Any]) -> str:
    """A line of a part; returns what went wrong, in words, or ""."""
    if values.pop("busy", False) and found.on_gpu:
        found.busy = gpu_state.states()
    found.matmul |= values.pop("matmul", {})
    for name in ("names", "uuids", "torch", "threads", "memory", "link", "disk", "step"):
        if name in values:
            setattr(found, name, values[name])
    if part == "disk" and found.disk and "problem" in found.disk:
        problem, found.disk = str(found.disk["problem"]), None
        return problem
    if "refused" in values:
        return str(values["refused"])
    if "out_of_memory" in values:
        return f"{NO_ROOM} ({values['out_of_memory']})"
    if "failed" in values:
        return str(values["failed"])
    code = values.get("ended", 0)
    if code in (0, 128 + signal.SIGALRM):  # an alarm is the limit
        return ""
    return (
        NO_ROOM + " (the system ended it)"
        if code == 128 + signal.SIGKILL
        else f"it ended with code {code}"
    )


def end(process: subprocess.Popen) -> None:
    """End all that was started with it, which is in a session of its own, and wait for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
            if not group_is_there(process.pid):
                break
    process.wait()


def group_is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that what it started ends with it. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def told(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------------------------------


def probes(found: Measured) -> list[Probe]:
    """What is recorded, for each kind of device here: of several alike the slowest, for which a step waits; of a CPU,
    which is one device for all processes, their sum. Empty where not even the device is known."""
    made = []
    for name in dict.fromkeys(found.names):
        mine = [i for i, other in enumerate(found.names) if other == name]
        of_all: Callable[[list[float]], float] = min if found.on_gpu else sum
        step = (
            ()
            if found.step is None
            else (
                Step(
                    shape_of(found.c),
                    found.processes,
                    found.step["tokens_per_s"],
                    found.step["peak_gib"],
                ),
            )
        )
        made.append(
            Probe(
                device=name if found.on_gpu else cpu_name(),
                time=found.began,
                torch=found.torch,
                matmul_tflops={
                    kind: of_all([rates[i] for i in mine]) for kind, rates in found.matmul.items()
                },
                memory_gb_s=of_all([found.memory[i] for i in mine]) if found.memory else None,
                link_gb_s=found.link["bus_gb_s"] if found.link else None,
                disk_mb_s=found.disk["write_mb_s"] if found.disk else None,
                steps=step,
            )
        )
    return made


def merged(new: Probe, old: Probe | None) -> Probe:
    """The new one, with what the old one knows and the new one could not measure: links, with one process; other types;
    and steps of other shapes, the newest first."""
    if old is None:
        return new
    taken = {(step.shape, step.processes) for step in new.steps}
    steps = (
        *new.steps,
        *(step for step in old.steps if (step.shape, step.processes) not in taken),
    )[:STEPS]
    kept = {
        name: getattr(old, name)
        for name in ("memory_gb_s", "link_gb_s", "disk_mb_s")
        if getattr(new, name) is None
    }
    return dataclasses.replace(
        new, steps=steps, matmul_tflops=old.matmul_tflops | new.matmul_tflops, **kept
    )


def keep(c: Config, found: Measured) -> list[Probe]:
    """Write what was found behind what was known, and return it. Raises OSError."""
    known = [merged(new, read(c, new.device)) for new in probes(found)]
    for probe in known:
        write_whole(path_of(c, probe.device), to_json(probe).encode())
    return known
