"""STATUS.json: what a run is doing now, since when, and a heartbeat. Standard library only.

    python -m train.status runs|status|attach|stop      over the runs on this machine

Replaced as a whole, so that a reader never sees half of it. Phases: data, model, compiling, first step, training,
evaluating, saving, sampling, stopped, crashed, done. A phase before `stopped` whose process is gone means
that the run was killed; the same command that started it goes on from its last checkpoint.
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
from typing import Any

from train.config import Config
from train.runs import RunPaths
from train.settings import ROOT, SettingsError, shown

log = logging.getLogger(__name__)

BEAT_S = 1.0  # at most one heartbeat in this time


class Status:
    """Writes the status of a run. Only the first rank has one that is `active`."""

    def __init__(self, path: Path, active: bool, **facts: Any):
        self.path, self.active = path, active
        self.facts: dict[str, Any] = {"schema": 1, "pid": os.getpid(), **facts}
        self.last_beat, self.failed = 0.0, False

    def phase(self, name: str, **facts: Any) -> None:
        """Enter a phase."""
        self.facts |= {"phase": name, "since": time.time(), **facts}
        self.write()

    def beat(self, **facts: Any) -> None:
        """Say that the phase goes on; cheap enough for every step."""
        self.facts |= facts
        if time.monotonic() - self.last_beat >= BEAT_S:
            self.write()

    def write(self) -> None:
        """Replace the file. A disk that is full, or gone for now, is said once and ends no run."""
        if not self.active:
            return
        self.last_beat = time.monotonic()
        temporary = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        try:
            temporary.write_text(json.dumps(self.facts | {"heartbeat": time.time()}, indent=1) + "\n")
            os.replace(temporary, self.path)
            self.failed = False
        except OSError as error:
            if not self.failed:
                log.warning("%s: cannot be written (%s); what it says is old", self.path, error.strerror)
            self.failed = True
            with contextlib.suppress(OSError):
                temporary.unlink()


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

def is_held(paths: RunPaths) -> bool:
    """Whether a process on this machine trains the run now."""
    try:
        with open(paths.lock, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def describe(paths: RunPaths) -> str:
    """One line: name, phase, step, loss, heartbeat."""
    state = read(paths.status)
    if not state:
        return f"{paths.name:30} " + ("STATUS.json cannot be read" if paths.status.exists() else "not started")
    phase, over = state.get("phase", "?"), ("stopped", "crashed", "done")
    if phase not in over and state.get("host") == socket.gethostname() and not is_held(paths):
        phase = f"killed while {phase}"
    loss = f"loss {state['loss']:.4f}" if isinstance(state.get("loss"), float) else ""
    ago = "" if state["phase"] in over else f"{time.time() - state['heartbeat']:.0f} s ago on {state.get('host')}"
    return f"{paths.name:30} {phase:14} step {state.get('step', 0)}/{state.get('last_step')}  {loss}  {ago}".rstrip()


def mirrored(paths: RunPaths) -> str:
    """A line of where the run is at W&B; empty if it is not."""
    state = read(paths.wandb_state)
    offline = f"offline; to upload it: {sync_command(paths)}" if state.get("mode") == "offline" else None
    where = state.get("url") or offline
    return f"\n{'':30} W&B: {where}" if where else ""


def sync_command(paths: RunPaths) -> str:
    """What uploads the files of all attempts that were mirrored offline."""
    return f"{shown(Path(sys.prefix))}/bin/wandb sync {shown(paths.wandb)}/offline-run-*"
class StopError(Exception):
    """The run goes on; the message says why and what to do."""


def stop(paths: RunPaths, patience_s: float = 150.0) -> str:
    """Ask the run's process to save and stop, and wait for it. Returns what happened; StopError if it goes on."""
    deadline, pid = time.monotonic() + patience_s, None
    while is_held(paths):
        # not STATUS.json: it may be of an earlier attempt
        holder = re.match(r"pid (\d+) on (\S+)", paths.lock.read_text())
        if pid is None and holder:
            pid = ask(paths, int(holder[1]), holder[2])
        if time.monotonic() > deadline:
            raise StopError(f"run {paths.name} has not stopped in {patience_s:.0f} s (pid {pid}); look at "
                            f"{paths.train_log}, and kill it if it hangs: its last checkpoint is safe")
        time.sleep(0.1)
    return describe(paths) if pid else f"run {paths.name} is not running here"


def ask(paths: RunPaths, pid: int, host: str) -> int:
    """Signal a process that holds the run; returns its pid. A shared disk shows the lock on every machine."""
    if host != socket.gethostname():
        raise StopError(f"run {paths.name} is trained on {host} (pid {pid}), and this is {socket.gethostname()}: "
                        f"run make stop RUN_NAME={paths.name} there")
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:  # it has just ended by itself
        pass
    except PermissionError:
        raise StopError(f"run {paths.name} belongs to another user (pid {pid}), who alone may stop it") from None
    return pid


def attach(paths: RunPaths) -> None:
    """Follow train.log until the run is over or Ctrl-C."""
    with open(paths.train_log, encoding="utf-8") as log:
        while True:
            over = not is_held(paths)
            sys.stdout.write(log.read())
            sys.stdout.flush()
            if over:
                return
            time.sleep(0.5)


def main(argv: list[str]) -> int:
    try:
        config = Config.load()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 64
    paths = RunPaths.of(config.runs_dir, config.run_name, ROOT)
    if argv == ["runs"]:
        found = sorted(p for p in paths.folder.parent.glob("*") if (p / "STATUS.json").exists())
        text = "\n".join(describe(RunPaths(p)) for p in found) or f"no runs in {paths.folder.parent}"
    elif not paths.status.exists():
        sys.stderr.write(f"there is no run {config.run_name} in {paths.folder.parent}; make runs lists them\n")
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
