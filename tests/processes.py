"""Functions of a test in several processes, as ranks of a job; and whole trainers, which start without importing.

Both are copies of the fork server (tests/fork_server.py).
"""

import base64
import contextlib
import faulthandler
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hardware import ports
from tests import fork_server
from tests.faults import inject
from tests.forked import Forked

STACKS_S = 5.0  # how long processes that hang have to print their stacks


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
    """Run function(rank, *arguments) in `size` processes, with the environment of now.

    Raises:
        AssertionError: one of them failed; what they printed is in this test's own output.
    """
    ranks: list[Forked] = []
    with contextlib.ExitStack() as stack:
        stack.callback(end, ranks)
        for rank in range(size):
            ranks.append(start(dict(os.environ), (1, 2), function, rank, *arguments))
        while None in (codes := [rank.poll(0.01) for rank in ranks]):
            if any(codes):
                break
    assert not any(codes), f"exit codes of the ranks (None: still ran): {codes}"


def run_trainer(
    command: Sequence[str],
    env: dict[str, str],
    size: int = 1,
    before: Callable[[], None] | None = None,
    seconds: float = 240,
) -> tuple[int, str]:
    """Run what Python does with a command, or torchrun with `size` processes.

    Args:
        command: -m or -c with arguments.
        env: the environment.
        before: called in each process first.
        seconds: how long it may take.

    Returns:
        The exit code of the first process that failed, by rank; and what they and all that they
        started printed.
    """
    if size > 1:
        env = env | {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports.free_ports(1)),
        }
    deadline = time.monotonic() + seconds
    ranks: list[Forked] = []
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as output, contextlib.ExitStack() as stack:
        stack.callback(end, ranks)
        try:
            for rank in range(size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
                ranks.append(
                    start(env | own, (writing, writing), act_as_trainer, list(command), before)
                )
        finally:
            os.close(writing)
        text = bytearray()
        try:
            # To the end of the pipe: until nobody is left who could print anything.
            while read_more(output, text, deadline):
                pass
        except BaseException as error:  # also the test's own time limit
            for process in ranks:
                process.send_signal(signal.SIGABRT)
            with contextlib.suppress(TimeoutError):
                while read_more(output, text, time.monotonic() + STACKS_S):
                    pass
            if isinstance(error, TimeoutError):
                raise AssertionError(f"not done in {seconds} s:\n{text.decode()}") from None
            print(text.decode(), file=sys.stderr)
            raise
        codes = [process.wait() for process in ranks]
    return next((code for code in codes if code), 0), text.decode()


def read_more(output: Any, text: bytearray, deadline: float) -> bool:
    """Append to the text what comes next; returns whether there may be more.

    Raises:
        TimeoutError: nothing came before the deadline, a time of the monotonic clock.
    """
    left = deadline - time.monotonic()
    if left <= 0 or not select.select([output], [], [], left)[0]:
        raise TimeoutError
    more = output.read(1 << 16)
    text += more
    return bool(more)


def start(
    env: dict[str, str], outputs: tuple[int, int], function: Callable[..., None], *arguments: Any
) -> Forked:
    """Start function(*arguments) in a process with this environment, output and error."""
    call = base64.b64encode(pickle.dumps((ports.RANGE, function, arguments))).decode()
    code = "import tests.processes; tests.processes.run_call()"
    with open(os.devnull) as nothing:
        return Forked(["-c", code, call], env, descriptors=(nothing.fileno(), *outputs))


def end(ranks: list[Forked]) -> None:
    """End those that still run. They print their stacks first, in case they hang."""
    for process in ranks:
        process.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + STACKS_S
    for process in ranks:
        process.poll(max(0.0, deadline - time.monotonic()))
        process.close()  # which kills it


# ---- In such a process


def run_call() -> None:
    """Do what `start` was asked for."""
    faulthandler.enable()
    ports.RANGE, function, arguments = pickle.loads(base64.b64decode(sys.argv[1]))
    function(*arguments)


def act_as_trainer(command: list[str], before: Callable[[], None] | None) -> None:
    """Run the command, as if Python had been started with this environment."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "FAULTS" in os.environ:
        inject.install()  # which Python does by itself where it starts with this environment
    if before:
        before()
    fork_server.run_command(command)
