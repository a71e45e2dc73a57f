"""STATUS.json: what a run is doing now, since when, and a heartbeat. Standard library only.

    python -m record.status runs|status|attach|stop      over the runs on this machine
    python -m record.status hold DESCRIPTOR PID          for scripts/train.sh
    python -m record.status settle                       for scripts/launch.sh: until no process trains the run

Replaced as a whole, so that a reader never sees half of it. Phases: waiting for peers i/n, data, model, rehearsing or
compiling, first step, training, evaluating, saving, sampling, stopped, crashed, done. A phase before `stopped` whose
process is gone means that the run was killed; the same command that started it goes on from its last checkpoint.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from record.run_paths import RunPaths
from settings.config import Config
from settings.declare import ROOT, SettingsError, shown

log = logging.getLogger(__name__)

OVER = ("stopped", "crashed", "done")
BEAT_S = 1.0  # at most one heartbeat in this time
LONGEST_WHY = 300
SETTLE_S = 10.0  # a trainer whose torchrun was killed holds its run this much longer, at most


class RunFolderError(Exception):
    """The run folder cannot be used; the message says why and what to do."""


class RunIsHeld(RunFolderError):
    """Another process trains the run."""


class Status:
    """Writes the status of a run. Only the first rank has one that is `active`."""

    def __init__(self, path: Path, active: bool, **facts: Any):
        self.path, self.active = path, active
        self.facts: dict[str, Any] = {"schema": 1, "pid": os.getpid(), **facts}
        self.last_beat, self.failed = 0.0, False

    def phase(self, name: str, **facts: Any) -> None:
        """Enter a phase. One that is entered again goes on, whatever numbers are in its name."""
        goes_on = re.sub("[0-9]", "", name) == re.sub("[0-9]", "", str(self.facts.get("phase", "")))
        since = self.facts["since"] if goes_on else time.time()
        self.facts |= {"phase": name, "since": since, **facts}
        self.write()

    def end(self, code: int, why: str = "") -> None:
        """Enter the last phase of an attempt that ended with an exit code which is not 0; why: in words."""
        told = {"why": " ".join(why.split())[:LONGEST_WHY]} if why else {}
        self.phase("stopped" if code in (75, 143) else "crashed", exit_code=code, **told)

    def beat(self, **facts: Any) -> None:
        """Say that the phase goes on; cheap enough for every step."""
        self.facts |= facts
        if time.monotonic() - self.last_beat >= BEAT_S:
            self.write()

    @property
    def is_going_on(self) -> bool:
        """Whether a phase was entered, and not yet the last one."""
        return self.facts.get("phase", "done") not in OVER

    def write(self) -> None:
        """Replace the file. A disk that is full, or gone for now, is said once and ends no run."""
        if not self.active:
            return
        self.last_beat = time.monotonic()
        temporary = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        try:
            temporary.write_text(
                json.dumps(self.facts | {"heartbeat": time.time()}, indent=1) + "\n"
            )
            os.replace(temporary, self.path)
            self.failed = False
        except OSError as error:
            if not self.failed:
                log.warning(
                    "%s: cannot be written (%s); what it says is old", self.path, error.strerror
                )
            self.failed = True
            with contextlib.suppress(OSError):
                temporary.unlink()


def of_run(c: Config, paths: RunPaths, active: bool) -> Status:
    """The run's status, with what the last attempt knew until this one knows better: step, loss, and the seconds that
    a step and a save took."""
    last = read(paths.status)
    return Status(
        paths.status,
        active,
        run=c.run_name,
        host=socket.gethostname(),
        last_step=c.last_step,
        **{key: last[key] for key in ("step", "loss", "step_s", "save_s") if key in last},
    )


def read(path: Path) -> dict[str, Any]:
    """The last status of a run; {} if there is none, or a crash of the machine left none that can be read."""
    try:
        state = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


# ---------------------------------------------------------------------------------------------------
# The targets that look after runs
# ---------------------------------------------------------------------------------------------------


def take(lock: TextIO | int, patience_s: float = 1.0) -> None:
    """Lock a run or job. Tried for a second: `make status` holds a lock for an instant to see whether it is free."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether a process has it. What is not there, or cannot be looked into, counts as not held."""
    try:
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    return False


def is_held(paths: RunPaths) -> bool:
    """Whether a process on this machine, the first of the run's, trains it now."""
    return paths.node == 0 and is_locked(paths.lock)


def hold_run(paths: RunPaths, patience_s: float = 1.0) -> TextIO:
    """Make the run's folder, and hold it against a second trainer for as long as the returned file is open.

    Raises RunFolderError where that fails, or another process has it.
    """
    try:
        for folder in (paths.checkpoints, paths.plots):
            folder.mkdir(parents=True, exist_ok=True)
        lock = open(paths.lock, "a+", encoding="utf-8")  # noqa: SIM115 (held until it is closed)
        take(lock, patience_s)
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
        lock.flush()
    except BlockingIOError:
        raise RunIsHeld(
            f"{paths.folder}: another process trains this run ({paths.lock.read_text()}); wait for "
            "it, stop it, or choose another RUN_NAME"
        ) from None
    except OSError as error:
        raise RunFolderError(
            f"{error.filename or paths.folder}: cannot be written ({error.strerror}); choose another "
            "place with RUNS_DIR, or mend its permissions"
        ) from None
    return lock


def settle(paths: RunPaths, patience_s: float = SETTLE_S) -> None:
    """Wait until no process trains the run, for as long as one may take that dies with its parent."""
    deadline = time.monotonic() + patience_s
    while is_held(paths) and time.monotonic() < deadline:
        time.sleep(0.1)


def has_job(paths: RunPaths) -> bool:
    """Whether scripts/train.sh is at work on the run: preparing data, training, drawing."""
    return is_locked(paths.job)


def describe(paths: RunPaths) -> str:
    """One line: name, phase, step, loss, heartbeat."""
    state, stage = read(paths.status), ""
    if has_job(paths) and not is_held(paths):
        stage = paths.job.read_text().partition(": ")[2].strip() or "starting"
    if not state:
        otherwise = "STATUS.json cannot be read" if paths.status.exists() else "not started"
        return f"{paths.name:30} {stage or otherwise}"
    phase = stage or state.get("phase", "?")
    over = bool(stage) or phase in OVER
    if not over and state.get("host") == socket.gethostname() and not is_locked(paths.lock):
        phase = f"killed while {phase}"
    return line_of(paths.name, state, phase, over, time.time())


def line_of(name: str, state: dict[str, Any], phase: str, over: bool, now: float) -> str:
    """What a status says, in a line; over: nobody is expected to be at work."""
    loss = f"loss {state['loss']:.4f}" if isinstance(state.get("loss"), float) else ""
    ago = "" if over else f"{now - state.get('heartbeat', 0):.0f} s ago on {state.get('host')}"
    return f"{name:30} {phase:14} step {state.get('step', 0)}/{state.get('last_step')}  {loss}  {ago}".rstrip()


def mirrored(paths: RunPaths) -> str:
    """A line of where the run is at W&B; empty if it is not."""
    state = read(paths.wandb_state)
    offline = state.get("mode") == "offline" and any(paths.wandb.glob("offline-run-*"))
    where = state.get("url") or (
        f"offline; to upload it: {sync_command(paths)}" if offline else None
    )
    return f"\n{'':30} W&B: {where}" if where else ""


def sync_command(paths: RunPaths) -> str:
    """What uploads the files of all attempts that were mirrored offline."""
    return f"{shown(Path(sys.prefix))}/bin/wandb sync {shown(paths.wandb)}/offline-run-*"


class StopError(Exception):
    """The run goes on; the message says why and what to do."""


def stop(paths: RunPaths, patience_s: float = 150.0) -> str:
    """Ask the run's process to save and stop, and wait for it. Returns what happened; StopError if it goes on.

    Where none trains, the job's script is asked. The trainer is sent SIGINT, which none but a user sends:
    torchrun ends those that are left of several processes with SIGTERM when one has died. A trainer that failed
    just then is started again: that one is asked too.
    """
    deadline, pid = time.monotonic() + patience_s, None
    while (trains := is_held(paths)) or has_job(paths):
        # not STATUS.json: it may be of an earlier attempt
        holder = re.match(
            r"pid (\d+) on ([^\s:]+)", (paths.lock if trains else paths.job).read_text()
        )
        if holder and (pid is None or (trains and pid != int(holder[1]))):
            pid = ask(paths, int(holder[1]), holder[2], signal.SIGINT if trains else signal.SIGTERM)
        if time.monotonic() > deadline:
            raise StopError(
                f"run {paths.name} has not stopped in {patience_s:.0f} s (pid {pid}); look at "
                f"{paths.train_log}, and kill it if it hangs: its last checkpoint is safe"
            )
        time.sleep(0.1)
    return describe(paths) if pid else f"run {paths.name} is not running here"


def ask(paths: RunPaths, pid: int, host: str, number: int) -> int:
    """Signal a process that holds the run; returns its pid. A shared disk shows the lock on every machine."""
    if host != socket.gethostname():
        raise StopError(
            f"run {paths.name} is trained on {host} (pid {pid}), and this is {socket.gethostname()}: "
            f"run make stop RUN_NAME={paths.name} there"
        )
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has just ended by itself
        pass
    except PermissionError:
        raise StopError(
            f"run {paths.name} belongs to another user (pid {pid}), who alone may stop it"
        ) from None
    return pid


def attach(paths: RunPaths) -> None:
    """Follow the run's log, and before there is one what a detached job says, until it is over or Ctrl-C."""
    own = paths.node_log(paths.node) if paths.node else paths.train_log
    position = {paths.console_log: 0, own: 0}
    while True:
        over = not is_held(paths) and not has_job(paths)
        path = own if own.exists() else paths.console_log
        if path.exists():
            with open(path, encoding="utf-8", errors="replace") as said:
                said.seek(position[path])
                sys.stdout.write(said.read())
                position[path] = said.tell()
            sys.stdout.flush()
        if over:
            return
        time.sleep(0.5)


def hold(paths: RunPaths, descriptor: int, pid: int) -> int:
    """Lock the job for the shell script `pid` that has opened paths.job as this descriptor. Returns an exit code."""
    try:
        take(descriptor)
    except BlockingIOError:
        who = paths.job.read_text().strip() or "it has just begun"
        sys.stderr.write(
            f"run {paths.name} is at work already ({who}); make status, attach "
            "and stop look after it, or choose another RUN_NAME\n"
        )
        return 78
    holder = f"pid {pid} on {socket.gethostname()}"
    os.ftruncate(descriptor, 0)
    os.write(descriptor, holder.encode())
    sys.stdout.write(holder + "\n")
    return 0


def main(argv: list[str]) -> int:
    try:
        config = Config.load()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 64
    paths = RunPaths.of_node(config, ROOT)
    if argv[:1] == ["hold"]:
        return hold(paths, int(argv[1]), int(argv[2]))
    if argv == ["settle"]:
        settle(paths)
        return 0
    if argv == ["runs"]:
        found = [
            run
            for run in (
                RunPaths(path, paths.node) for path in sorted(paths.folder.parent.glob("*"))
            )
            if run.status.exists() or (run.folder.is_dir() and has_job(run))
        ]
        text = "\n".join(map(describe, found)) or f"no runs in {paths.folder.parent}"
    elif not paths.status.exists() and not has_job(paths):
        sys.stderr.write(
            f"there is no run {config.run_name} in {paths.folder.parent}; make runs lists them\n"
        )
        return 78
    elif argv == ["stop"]:
        try:
            text = stop(paths)
        except StopError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    elif argv == ["attach"]:
        try:
            attach(paths)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        return 0
    else:
        text = describe(paths) + mirrored(paths)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
