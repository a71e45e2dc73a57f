"""Faults in a trainer's processes, put there from outside: product code knows nothing of them.

    test: faulty(env, folder, Fault("numbers", "kill", step=7, rank=1))
    process: site/sitecustomize.py -> install -> a function of the trainer is wrapped, and fails when its time has come

A fault happens once in a run, however often the run is started again, unless `every` is set.
"""

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PATH = f"{ROOT / 'tests' / 'faults' / 'site'}:{ROOT}"  # PYTHONPATH of processes that have faults


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens where: at one step (the one being made, counted from 1), in one rank, at the n-th call."""

    where: str  # POINTS; or "start", before anything of the trainer is imported
    do: str  # ACTIONS
    step: int | None = None
    rank: int | None = None
    n: int | None = None
    samples: tuple[int, int] | None = None  # any of the process's samples lies in [a, b)
    value: float = 0.0
    every: bool = False


# Where: module of train/, function, and whether the fault comes before it or behind it.
POINTS = {
    "rehearsal": ("assemble", "dry_run", "before"),
    "resuming": ("checkpoint.resume", "resume", "before"),
    "step": ("data.batch", "Loader.batch", "behind"),
    "forward": ("model.model", "Transformer.forward", "behind"),
    "numbers": ("step", "read_numbers", "before"),
    "evaluation": ("evaluate.validation", "Evaluator.padded", "before"),
    "verify": ("checkpoint.find", "verify", "before"),
    "commit": ("checkpoint.checkpoint", "commit", "before"),
    "committed": ("checkpoint.find", "prune", "before"),
    # in the producer of a run that streams; their step is the number of shards that the source has
    "document": ("data.shard_writer", "ShardWriter.add", "before"),
    "seal": ("data.shard_writer", "ShardWriter.write_manifest", "before"),
}
IN_THE_PRODUCER = ("document", "seal")


class Injected(Exception):
    """A fault that no part of the trainer can have foreseen."""


def faulty(env: dict[str, str], folder: Path, *faults: Fault) -> dict[str, str]:
    """The environment in which trainers have these faults; `folder` remembers which have happened."""
    assert all(fault.where in {"start", *POINTS} and fault.do in ACTIONS for fault in faults)
    return env | {
        "PYTHONPATH": PATH,
        "FAULTS_FOLDER": str(folder),
        "FAULTS": json.dumps([dataclasses.asdict(fault) for fault in faults]),
    }


# ---------------------------------------------------------------------------------------------------
# In the trainer
# ---------------------------------------------------------------------------------------------------


def no_memory(_):
    import torch

    raise torch.OutOfMemoryError("tried to allocate 80.00 GiB")


def no_room(_):
    raise OSError(28, "No space left on device")


def fail(_):
    raise Injected("injected")


def sleep_with_the_lock(seconds):
    """As C code does that is stuck: no other thread of Python runs, and no signal ends it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    # Of a pipe in which nothing comes: a signal would end a sleep.
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def until_told(_):
    """Until this process has been told to stop; in "numbers" that is heard behind the step after this one."""
    while Now.job.interrupt.asked is None:
        time.sleep(0.05)


def wait_for_the_save(_):
    """Until the checkpoint that is written beside training is there, or has failed, on all ranks."""
    Now.job.saver.wait()  # it has collectives of its own, and needs nothing of the thread that waits


def sleep_when_waited_for(seconds):
    """In the producer: until training says that it has no data, and then for so long."""
    log = Path(os.environ["RUNS_DIR"], os.environ["RUN_NAME"], "train.log")
    known = log.stat().st_size if log.exists() else 0  # of waits that are over
    while not log.exists() or b"waiting for data" not in log.read_bytes()[known:]:
        time.sleep(0.05)
    time.sleep(seconds)


def spoil_weights(_):
    for weight in Now.job.model.parameters():
        weight.data.fill_(math.nan)


def filler():
    """A file on the disk that has the runs."""
    return Path(os.environ["RUNS_DIR"], "filler")


def fill_disk(_):
    with contextlib.suppress(OSError), open(filler(), "ab", buffering=0) as file:
        for _ in range(4096):  # 16 MiB at most
            file.write(bytes(4096))


def set_clock(seconds):
    """As a time server does that finds the clock wrong."""
    real = time.time
    time.time = lambda: real() + seconds


ACTIONS: dict[str, Callable[[float], Any]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "kill the parent": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "term": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "sleep": time.sleep,
    "sleep with the lock": sleep_with_the_lock,
    "sleep when waited for": sleep_when_waited_for,
    "wait for the save": wait_for_the_save,
    "fail": fail,
    "no room": no_room,
    "no memory": no_memory,
    "until told": until_told,
    "set the clock": set_clock,
    "spoil the weights": spoil_weights,
    "fill the disk": fill_disk,
    "make room": lambda _: filler().unlink(),
    "multiply": lambda factor: factor,
}


class Now:
    """Where the trainer is."""

    step: int | None = None
    samples = range(0)
    job: Any = None  # since training began
    calls: dict[int, int] = {}  # noqa: RUF012 (there is one)


def is_due(fault, number):
    """Whether it happens at this call, which is counted."""
    if fault.rank is not None and fault.rank != int(os.environ.get("RANK", 0)):
        return False
    if fault.step is not None and fault.step != Now.step:
        return False
    # Not in an evaluation, nor in the rehearsal of a step.
    if fault.where == "forward" and not (Now.job and is_grad_enabled()):
        return False
    if fault.samples and (
        Now.samples.stop <= fault.samples[0] or Now.samples.start >= fault.samples[1]
    ):
        return False
    Now.calls[number] = Now.calls.get(number, 0) + 1
    if fault.n is not None and fault.n != Now.calls[number]:
        return False
    if fault.every:
        return True
    mark = f".fault_{number}_rank_{os.environ.get('RANK', 0)}"
    try:
        Path(os.environ["FAULTS_FOLDER"], mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def is_grad_enabled():
    import torch

    return torch.is_grad_enabled()


def wrap(function, faults, when):
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if hasattr(args[0] if args else None, "manifest"):
            Now.step = len(
                args[0].manifest.seals
            )  # in the producer: of the source whose shards are made
        if when == "before":
            act(None)
        result = function(*args, **kwargs)
        return act(result) if when == "behind" else result

    def act(result):
        for number, fault in faults:
            if is_due(fault, number):
                done = ACTIONS[fault.do](fault.value)
                if fault.do == "multiply":
                    result = (result[0] * done, *result[1:])
        return result

    return wrapped


def follow_steps():
    """Keep Now as the trainer goes on."""
    from train import loop
    from train.data.batch import Loader

    batch = Loader.batch

    def followed(self: Any, step: int, *args: Any) -> Any:
        result = batch(self, step, *args)
        Now.step, Now.samples = step + 1, result.samples
        return result

    Loader.batch = followed  # type: ignore[method-assign]
    loop_train = loop.train

    def train(job: Any) -> Any:
        Now.job = job
        return loop_train(job)

    loop.train = train


def install(producer=False):
    """Put the faults that the environment names where they belong, in the trainer or in its producer of data."""
    import importlib

    faults = list(enumerate(Fault(**fault) for fault in json.loads(os.environ["FAULTS"])))
    for number, fault in faults:
        if fault.where == "start" and not producer and is_due(fault, number):
            ACTIONS[fault.do](fault.value)
    if not producer:
        follow_steps()
    for point, (module_name, name, when) in POINTS.items():
        here = [
            (number, fault)
            for number, fault in faults
            if fault.where == point and (point in IN_THE_PRODUCER) == producer
        ]
        if here:
            owner: Any = importlib.import_module(f"train.{module_name}")
            *path, last = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            setattr(owner, last, wrap(getattr(owner, last), here, when))
