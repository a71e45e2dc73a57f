"""A process that has imported torch and the trainer, and forks a copy of itself for each command.

    scripts/test_lib.sh -> main: import IMPORTED, listen on a Unix socket
    tests/forked.py     -> one connection per process: command, environment, folder, descriptors
    act                 -> the child acts as `python COMMAND` would, without importing anything again

Messages on a connection:
    requester: length of the request in bytes (8, little-endian) with descriptors 0 to 2; the
        request as JSON; later one byte per signal that the child is to get
    server: the child's pid, and later its exit code or -(number of the signal that ended it), each
        on a line of its own

The child is killed when its connection is closed, and the server ends when its owner, the process
that started it, has ended. The server itself computes nothing: a fork copies none of the threads
of OpenMP or MKL, and a child would wait for them.
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any, NoReturn

from tests.site import sitecustomize

# What takes seconds to import.
IMPORTED = (
    "tests.conftest",
    "tests.processes",
    "train.main",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "finetune.main",
    "peft",
    "transformers.models.glm4_moe.modeling_glm4_moe",
)
OWNER_CHECK_S = 0.3
REQUEST_TIMEOUT_S = 20.0


def main() -> None:
    """Serve on the socket argv[1] until the process argv[2], which must be the parent, has ended."""
    path, owner = Path(sys.argv[1]), int(sys.argv[2])
    # Ctrl-C reaches the children too: they end by themselves, and the owner after them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before the imports, which take seconds, so that requests wait instead of failing.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    path_at_start = list(sys.path)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the collector does not write to, and thereby copy, shared pages
    try:
        Server(listener, path_at_start, owner).serve()
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


class Server:
    """The loop that forks, passes signals on and reports how children ended."""

    def __init__(self, listener: socket.socket, sys_path: list[str], owner: int):
        self.listener = listener
        self.owner = owner
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, socket.socket] = {}  # pid -> connection
        # Python's own path: without the folder of -m, and without PYTHONPATH.
        own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.sys_path = [entry for entry in sys_path[1:] if entry not in own]
        # A child that ends makes the loop look at once.
        self.wakeup_reader, self.wakeup_writer = os.pipe()
        os.set_blocking(self.wakeup_reader, False)
        os.set_blocking(self.wakeup_writer, False)
        signal.set_wakeup_fd(self.wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.wakeup_reader, selectors.EVENT_READ)
        while os.getppid() == self.owner:
            for key, _ in self.selector.select(OWNER_CHECK_S):
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fileobj == self.wakeup_reader:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wakeup_reader, 4096)
                else:
                    self.pass_signals_on(key.fileobj, key.data)
            self.report_ended()
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)

    def accept(self) -> None:
        """Fork the child that one connection asks for."""
        connection, _ = self.listener.accept()
        connection.settimeout(REQUEST_TIMEOUT_S)
        descriptors: list[int] = []
        try:
            header, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
            request = json.loads(receive(connection, int.from_bytes(header, "little")))
        except (OSError, ValueError):  # the requester has ended meanwhile
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return
        pid = os.fork()
        if pid == 0:
            self.leave_to_child(connection)
            act(request, descriptors, self.sys_path)
        for descriptor in descriptors:
            os.close(descriptor)
        self.children[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % pid)

    def leave_to_child(self, connection: socket.socket) -> None:
        """In the child: nothing of the server stays open, and signals do what they do at start."""
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError):  # some are the C library's own
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.selector.close()
        for one in (self.listener, connection, *self.children.values()):
            one.close()
        os.close(self.wakeup_reader)
        os.close(self.wakeup_writer)

    def pass_signals_on(self, connection: socket.socket, pid: int) -> None:
        """Send the child the signals that its requester wants; SIGKILL where that has gone."""
        try:
            numbers = connection.recv(16)
        except OSError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            with contextlib.suppress(OSError):  # there is no such signal
                os.kill(pid, number)  # not reaped yet, or it would not be registered
        if not numbers:
            self.selector.unregister(connection)

    def report_ended(self) -> None:
        """Reap all children that have ended, and report their exit codes."""
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self.children.pop(pid)
            with contextlib.suppress(KeyError):
                self.selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            connection.close()


def receive(connection: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes."""
    data = bytearray()
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the requester has gone")
        data += more
    return bytes(data)


# ---- In the child


def act(request: dict[str, Any], descriptors: list[int], sys_path: list[str]) -> NoReturn:
    """Be the Python that was asked for, and end with its exit code."""
    code = 1
    try:
        become(request, descriptors, sys_path)
        code = exit_code_of(request["command"])
    except BaseException:  # of this module: there is nobody above to report it
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code & 0xFF)


def become(request: dict[str, Any], descriptors: list[int], sys_path: list[str]) -> None:
    """Take over descriptors, environment, folder and arguments."""
    if request["group"]:
        os.setpgid(0, 0)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        if descriptor > 2:
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    tempfile.tempdir = None  # TMPDIR may be another
    os.chdir(request["folder"])
    command = request["command"]
    unbuffered = "-u" in options_of(command) or bool(os.environ.get("PYTHONUNBUFFERED"))
    open_output(unbuffered)
    python_path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = ["", *python_path, *sys_path]
    importlib.invalidate_caches()
    sys.orig_argv = [sys.executable, *command]
    sitecustomize.change_process(os.environ)


def options_of(command: list[str]) -> list[str]:
    """Return the options before -c or -m."""
    for index, word in enumerate(command):
        if word in ("-c", "-m"):
            return command[:index]
        if word != "-u":
            break
    raise ValueError(f"the fork server starts -c and -m, with -u at most, and not {command}")


def open_output(unbuffered: bool) -> None:
    """Open standard output and error anew, as Python does at its start.

    Those of the server remember whether its files could be sought in, and these may be pipes.
    """
    # The old objects must live: handlers of logging have them, and their end would close 1 and 2.
    SERVER_STREAMS.extend((sys.stdout, sys.stderr))
    sys.stdout = sys.__stdout__ = text_on(1, sys.stdout, unbuffered)
    sys.stderr = sys.__stderr__ = text_on(2, sys.stderr, unbuffered)


def text_on(descriptor: int, like: Any, unbuffered: bool) -> io.TextIOWrapper:
    """A text stream on a descriptor, with the buffering that Python gives it."""
    raw = open(descriptor, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        raw,
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=descriptor == 2 or os.isatty(descriptor),
        write_through=unbuffered,
    )


SERVER_STREAMS: list[Any] = []


def exit_code_of(command: list[str]) -> int:
    """Run the command to its end, with all that Python does after it."""
    code, interrupted = 0, False
    try:
        run_command(command)
    except SystemExit as end:
        code = code_of(end)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        if sys.stdout and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:  # a full disk, a pipe that nobody reads
        code = 120  # as Python has it
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


def code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


def run_command(command: list[str]) -> None:
    """Run -c or -m with arguments in a new __main__, in this process."""
    how, what, *arguments = command[len(options_of(command)) :]
    main_module = types.ModuleType("__main__")
    main_module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main_module
    sys.argv = [how, *arguments]
    if how == "-c":
        exec(compile(what, "<string>", "exec"), main_module.__dict__)
    else:
        sys.path[0] = os.getcwd()
        sys.modules.pop(what, None)  # it is to be __main__
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
