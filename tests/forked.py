"""Processes that the fork server (tests/fork_server.py) starts. Imports nothing slow.

As a program it stands for one of them: descriptors, signals and exit code are those of the process.

    python tests/forked.py -m pytest tests/plan
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120.0


class Forked:
    """A process that acts as `python COMMAND` would; killed when this object is closed."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        folder: str | Path = ROOT,
        descriptors: tuple[int, int, int] = (0, 1, 2),
        group: bool = False,
    ):
        """
        Args:
            command: what follows `python`: options, then -c or -m with arguments.
            environment: all of the process's environment.
            folder: its working directory.
            descriptors: its standard input, output and error.
            group: whether it gets a process group of its own.
        """
        request = json.dumps(
            {
                "command": command,
                "environment": environment,
                "folder": str(folder),
                "group": group,
            }
        ).encode()
        self.exitcode: int | None = None
        self.connection = connect(server_address())
        socket.send_fds(self.connection, [len(request).to_bytes(8, "little")], list(descriptors))
        self.connection.sendall(request)
        self.answers = self.connection.makefile("rb")
        self.pid = int(self.answers.readline())

    def poll(self, seconds: float = 0.0) -> int | None:
        """Return the exit code, negative for a signal, or None if it has not ended by then."""
        if self.exitcode is None and select.select([self.connection], [], [], seconds)[0]:
            line = self.answers.readline()
            self.exitcode = int(line) if line else -signal.SIGKILL  # the server itself has gone
            self.close()
        return self.exitcode

    def wait(self) -> int:
        while (code := self.poll(3600.0)) is None:
            pass
        return code

    def send_signal(self, number: int) -> None:
        if self.exitcode is None:
            with contextlib.suppress(OSError):  # it has just ended
                self.connection.sendall(bytes([number]))

    def close(self) -> None:
        self.answers.close()
        self.connection.close()


def connect(address: str) -> socket.socket:
    """Connect to the server, which may be about to start."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):  # it does not listen yet
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def server_address() -> str:
    """Return the socket of the server that the test script has started, or of one of our own."""
    return os.environ.get("FORK_SERVER") or start_server(os.getpid())


@functools.cache
def start_server(owner: int) -> str:
    address = os.path.join(tempfile.mkdtemp(prefix="fork."), "socket")
    subprocess.Popen(
        [
            sys.executable,
            "-m",
            "train.tune",
            "--cpu",
            "1",
            "tests.fork_server",
            address,
            str(owner),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    return address


def main() -> None:
    """Run argv as a forked process, and end as it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process gets the terminal's own
    process = Forked(sys.argv[1:], dict(os.environ), os.getcwd())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGABRT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
