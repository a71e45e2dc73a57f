"""Processes at the sites of a lab that do something together when they are told to, and say what it took."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.wan_lab.network import Network, address_of
from doctor.gpu_probe.foreign_load import Foreign
from settings import ROOT
from settings.resolve import NO_TARGET

INTERFACE = "wan0"  # that gloo shall use; it would ask for the host name else
QUIET = "TORCH_CPP_LOG_LEVEL=ERROR"  # it warns that addresses of the lab have no names elsewhere
LIGHTHOUSE_PORT = 29510
ANSWER_S = 180.0  # for all to answer: the slowest round takes a fifth of it, and a start on a busy machine half


class Crew:
    """A process at each place, which answers each line that it is given with one of JSON."""

    def __init__(self, network: Network, module: str, arguments: Sequence[Sequence[str]]):
        """arguments: of each place."""
        self.processes: list[subprocess.Popen[str]] = []
        self.network = network
        for place, given in enumerate(arguments):
            command = [
                "env",
                *NO_TARGET,
                f"GLOO_SOCKET_IFNAME={INTERFACE}",
                "OMP_NUM_THREADS=1",
                QUIET,
                sys.executable,
                "-m",
                module,
                *given,
            ]
            self.processes.append(
                network.start(
                    place,
                    command,
                    cwd=ROOT,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )

    def answers(self) -> list[dict[str, Any]]:
        """The next line of each. Raises RuntimeError where one has ended, or says nothing for ANSWER_S."""
        timer = threading.Timer(ANSWER_S, self.close)
        timer.start()
        try:
            return self.lines()
        finally:
            timer.cancel()

    def lines(self) -> list[dict[str, Any]]:
        found = []
        for place, process in enumerate(self.processes):
            assert process.stdout
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"the process of site {place} ended with exit code {process.wait()}, see above; "
                    f"one that says nothing for {ANSWER_S:.0f} s is killed"
                )
            found.append(dict(json.loads(line)))
        return found

    def turn(self, word: str = "go") -> dict[str, Any]:
        """All do it once. Returns the seconds of the slowest, the bytes that the busiest site sent, the share of this
        machine's processors that went to others than these, and the answers."""
        before = self.network.counters()
        pids = [process.pid for process in self.processes]
        foreign = Foreign(
            [*pids, self.network.relay.pid] if self.network.relay else pids, time.monotonic()
        )
        for process in self.processes:
            assert process.stdin
            process.stdin.write(word + "\n")
            process.stdin.flush()
        answers = self.answers()
        percent = foreign.percent(time.monotonic())
        sent = [
            now.sent_bytes - then.sent_bytes
            for now, then in zip(self.network.counters(), before, strict=True)
        ]
        return {
            "seconds": max(answer["seconds"] for answer in answers),
            "sent_bytes": max(sent),
            "foreign_percent": percent,
            "answers": answers,
        }

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def crew(network: Network, module: str, arguments: Sequence[Sequence[str]]) -> Iterator[Crew]:
    """A crew that is ready, until the block ends. Raises RuntimeError where one of it ends before."""
    taken = Crew(network, module, arguments)
    try:
        taken.answers()  # they are ready
        yield taken
    finally:
        taken.close()


@contextlib.contextmanager
def lighthouse(network: Network, min_sites: str) -> Iterator[str]:
    """`make lighthouse` at the network's hub until the block ends: where it listens, as LIGHTHOUSE."""
    where = f"{address_of(network.hub)}:{LIGHTHOUSE_PORT}"
    given = [
        f"{name}={value}"
        for name, value in {
            "PRESET": "tiny",
            "DEVICE": "cpu",
            "MIN_SITES": min_sites,
            "LIGHTHOUSE": where,
        }.items()
    ]
    with tempfile.NamedTemporaryFile("a") as log:  # a pipe that nobody reads would stop it one day
        process = network.start(
            network.hub,
            ["env", *NO_TARGET, QUIET, *given, sys.executable, "-m", "train.diloco.lighthouse"],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            until_it_listens(process, Path(log.name))
            yield where
        finally:
            process.kill()
            process.wait()


def until_it_listens(process: "subprocess.Popen[Any]", log: Path) -> None:
    """Wait for a lighthouse that writes to this log. Raises RuntimeError where it ends."""
    while "lighthouse on " not in (said := log.read_text()):
        if process.poll() is not None:
            raise RuntimeError(f"the lighthouse does not start: {said}")
        time.sleep(0.1)


def prepare_data(settings: dict[str, str]) -> None:
    """The token shards of these settings, before sites want them. Raises RuntimeError with what was said."""
    done = subprocess.run(
        [
            "env",
            *NO_TARGET,
            *(f"{name}={value}" for name, value in settings.items()),
            sys.executable,
            "-m",
            "train.data.prepare",
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"train.data.prepare ended with exit code {done.returncode}:\n{done.stdout}"
        )
