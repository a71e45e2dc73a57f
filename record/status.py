"""STATUS.json: what a run is doing now, since when, and a heartbeat. Standard library only.

    python -m record.status runs|status|stop      for the runs on this machine

It is replaced as a whole, so a reader never sees half of it. Phases: waiting for peers i/n, data, model, rehearsing or
compiling, first step, training, syncing, evaluating, saving, sampling, stopped, refused, crashed, done. A phase before `stopped` whose
process is gone means that the run was killed; the same command resumes it from its last checkpoint. Where STATUS.json
is missing or damaged, the end of metrics.jsonl tells how far the run came. `refused` means that a setting, the data or
the environment is bad, and the attempt did not train.
"""

import contextlib
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

from record import number_formats
from record.durable import make_printable, write_whole
from record.exit_codes import BAD_DATA, BAD_SETTING, INTERRUPTED, OTHER, STOPPED
from record.locks import (
    HOLDER,
    RETRY_S,
    RunFolderError,
    has_job,
    is_at_work,
    is_held,
    is_locked,
    read_holder,
    read_stage,
)
from record.metrics import Record, RecordReader, duration, is_number
from record.regular_file import open_regular
from record.run_paths import RunPaths
from record.wait import wait
from settings import ROOT, SettingsError, explain_error, load_config
from settings.config import Config
from settings.json_file import read_object
from settings.names import find_nearest
from settings.resolve import name_run, show_path
from settings.terminal import complain, say

log = logging.getLogger(__name__)

FAILED = ("refused", "crashed")
OVER = ("stopped", "done", *FAILED)
LARGEST_PID = 2**22  # of Linux
ANSWER_S = 1.0  # for a process that has just taken a lock to write its pid into it
BEAT_S = 1.0  # at most one heartbeat in this time
LONGEST_WHY = 300  # characters
# What a run knows of itself, across attempts; step_s and save_s are the seconds that a step and a save took.
KNOWN = ("step", "loss", "val_loss", "step_s", "save_s")
LAST_BYTES = 2**20  # of a record: some thousand steps
TEXTS = 8  # of a skipped step or a rollback that are shown
LAST_WORDS = 3  # lines
LINE = 200  # characters of each


class StopError(Exception):
    """The run was not stopped; the message says why and what to do."""

    exit_code = OTHER.code


# ---------------------------------------------------------------------------------------------------
# Writing and reading
# ---------------------------------------------------------------------------------------------------


class Status:
    """Write the status of a run. Only that of rank 0 is `active`."""

    def __init__(self, path: Path, active: bool, **facts: Any):
        self.path = path
        self.active = active
        self.facts: dict[str, Any] = {"schema": 1, "pid": os.getpid(), **facts}
        self.has_trained = False
        self.last_beat = 0.0
        self.failed = False

    def phase(self, name: str, **facts: Any) -> None:
        """Enter a phase. One that is entered again continues, whatever numbers are in its name."""
        before = str(self.facts.get("phase", ""))
        if re.sub("[0-9]", "", name) != re.sub("[0-9]", "", before):
            self.facts["since"] = time.time()
        self.has_trained |= name == "training"
        self.facts |= {"phase": name, **facts}
        self.write()

    def end(self, code: int, why: str = "") -> None:
        """Enter the last phase of an attempt that ended with this exit code, which is not 0."""
        phase = "crashed"
        if code in (STOPPED, INTERRUPTED):
            phase = "stopped"
        elif code in (BAD_SETTING, BAD_DATA) and not self.has_trained:
            phase = "refused"
        if why:
            self.facts["why"] = " ".join(why.split())[:LONGEST_WHY]
        self.phase(phase, exit_code=code)

    def beat(self, **facts: Any) -> None:
        """Report that the phase continues; cheap enough for every step."""
        self.facts |= facts
        if time.monotonic() - self.last_beat >= BEAT_S:
            self.write()

    def describe_phase(self) -> str:
        """Say what is going on, and how far or for how long; "" if nothing is."""
        if not self.is_going_on:
            return ""
        if self.has_trained:
            place = f"step {self.facts['step']}/{self.facts['last_step']}"
            return f"{self.facts['phase']}, {place}, loss {self.facts['loss']:.4f}"
        return f"{self.facts['phase']}: {duration(time.time() - self.facts['since'])} so far"

    @property
    def is_going_on(self) -> bool:
        """Whether a phase was entered, and not yet the last one."""
        return self.facts.get("phase", "done") not in OVER

    def write(self) -> None:
        if not self.active:
            return
        self.last_beat = time.monotonic()
        facts = self.facts | {"heartbeat": time.time()}
        try:
            write_whole(self.path, json.dumps(facts, indent=1).encode() + b"\n", flush=False)
            self.failed = False
        except OSError as error:
            if not self.failed:
                log.warning(
                    "%s: cannot be written (%s); what it says is old", self.path, error.strerror
                )
            self.failed = True


def of_run(c: Config, paths: RunPaths, active: bool) -> Status:
    """Return a run's status with what the last attempt knew, until this one knows better."""
    last = read(paths.status)
    known = {key: last[key] for key in KNOWN if key in last}
    return Status(
        paths.status,
        active,
        run=c.run_name,
        host=socket.gethostname(),
        last_step=c.last_step,
        horizon=c.horizon,
        **known,
    )


def mark_stopped(paths: RunPaths) -> None:
    """Enter the last phase of a run that the user has stopped, if its trainer could not do so itself."""
    with contextlib.suppress(OSError, ValueError):  # without a status there is nothing to correct
        state = read_object(paths.status)
        if state.get("phase") not in OVER:
            state |= {"phase": "stopped", "since": time.time(), "exit_code": INTERRUPTED}
            write_whole(paths.status, json.dumps(state, indent=1).encode() + b"\n", flush=False)


def is_done(state: dict[str, Any], last_step: int) -> bool:
    """Return whether this is the status of a run that has made all steps, and been evaluated."""
    step = state.get("step")
    return state.get("phase") == "done" and isinstance(step, int) and step >= last_step


def read(path: Path) -> dict[str, Any]:
    """Return the last status of a run, its text fit for a terminal; {} where there is none that can be read."""
    try:
        state = read_object(path)
    except (FileNotFoundError, ValueError):
        return {}
    return {
        key: make_printable(value) if isinstance(value, str) else value
        for key, value in state.items()
    }


# ---------------------------------------------------------------------------------------------------
# The targets
# ---------------------------------------------------------------------------------------------------


def is_run(paths: RunPaths) -> bool:
    """Return whether a folder is that of a run, or of somebody who lets nobody look into it."""
    if not paths.folder.is_dir():
        return False
    files = (paths.status, paths.metrics, paths.config, paths.console_log)
    return is_closed(paths) or any(map(os.path.lexists, files)) or has_job(paths)


def is_closed(paths: RunPaths) -> bool:
    return not os.access(paths.folder, os.R_OK | os.X_OK)


def describe(paths: RunPaths, width: int = 0) -> str:
    """Return one line: name, phase, step, loss, heartbeat; and a remark if STATUS.json does not tell them.

    width: columns of the name, in a list.
    """
    name = f"{make_printable(paths.name):{width}} "
    if is_closed(paths):
        return f"{name} cannot be read (Permission denied)"
    state, remark = look_up(paths)
    stage = read_stage(paths)
    if not state:
        has_ended = has_words(paths) and not is_at_work(paths)
        return f"{name} {stage or ('ended before training' if has_ended else 'not started')}"
    phase = stage or str(state.get("phase", "?"))
    over = bool(stage) or phase in OVER
    if not over and state.get("host") == socket.gethostname():
        if not is_locked(paths.lock):
            phase = f"killed while {phase}"
        elif phase != "training" and is_number(state.get("since")):  # it has no heartbeat
            phase += f" for {duration(time.time() - state['since'])},"
            over = True
    last_step = state.get("last_step", 0)
    is_all = phase == "done" or (phase == "stopped" and state.get("step") == last_step)
    if is_all and state.get("horizon", 0) > last_step:
        phase = f"stopped at MAX_STEPS={last_step} of {state['horizon']},"
    return line_of(name, state, phase, over, time.time()) + remark


def has_words(paths: RunPaths) -> bool:
    """Return whether a run in the background has said anything."""
    return paths.console_log.is_file() and paths.console_log.stat().st_size > 0


def describe_end(paths: RunPaths) -> str:
    """Return lines with the last words of a run in the background that ended before training; else ""."""
    if look_up(paths)[0] or is_at_work(paths) or not has_words(paths):
        return ""
    with open_regular(paths.console_log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    words = [make_printable(line) for line in lines if line.strip()]
    return "".join(f"\n  {line}" for line in words[-LAST_WORDS:])


def look_up(paths: RunPaths) -> tuple[dict[str, Any], str]:
    """Return the last status of a run, by its record if STATUS.json is bad, and then a remark on that."""
    fault = "is missing"
    try:
        return read_object(paths.status), ""
    except FileNotFoundError:
        if not os.path.lexists(paths.metrics):
            return {}, ""
    except ValueError as error:
        fault = str(error)
    return recall(paths), f"  (STATUS.json {fault}; this is from metrics.jsonl)"


def recall(paths: RunPaths) -> dict[str, Any]:
    """Return what the end of a run's record says of its status."""
    state: dict[str, Any] = {"phase": "unknown"}
    for record in read_tail(paths):
        state |= {"phase": "training", "heartbeat": record["time"]}
        for key in ("host", *KNOWN):
            if record.get(key) is not None:
                state[key] = record[key]
        if record["event"] == "end":
            state["phase"] = record.get("reason", "done")
    return state


def read_tail(paths: RunPaths) -> list[Record]:
    """Return the last records of a run; none where they cannot be read."""
    try:
        return RecordReader(paths.metrics, LAST_BYTES).read_new()
    except OSError:
        return []


def line_of(name: str, state: dict[str, Any], phase: str, over: bool, now: float) -> str:
    """Return a status as one line. `over`: nobody is expected to be at work."""
    line = f"{name} {phase:14} step {state.get('step', 0)}"
    if "last_step" in state:
        line += f"/{state['last_step']}"
    if is_number(state.get("loss")):
        line += f"  loss {state['loss']:.4f}"
    if not over and is_number(state.get("heartbeat")):
        age_s = max(0.0, now - state["heartbeat"])
        age = f"{age_s:.0f} s" if age_s < 60 else duration(age_s)
        line += f"  updated {age} ago on {state.get('host')}"
    return make_printable(line)


def describe_results(paths: RunPaths) -> str:
    """Return the last validation loss, the date of the last heartbeat, and the size of the folder."""
    if is_closed(paths):
        return ""
    state, _ = look_up(paths)
    text = ""
    if is_number(state.get("val_loss")):
        text += f"  validation {state['val_loss']:.4f}"
    if is_number(state.get("heartbeat")):
        text += time.strftime("  %Y-%m-%d", time.localtime(state["heartbeat"]))
    size = 0
    for folder, _, names in os.walk(paths.folder):
        for name in names:
            with contextlib.suppress(OSError):  # a checkpoint that training deletes just now
                size += os.lstat(os.path.join(folder, name)).st_size
    return f"{text}  {number_formats.size(size)}"


def describe_wandb(paths: RunPaths) -> str:
    """Return a line that says where the run is at W&B; "" if it is not."""
    where = read(paths.wandb_state).get("where")
    return f"\n  W&B: {where}" if where else ""


def stop(paths: RunPaths, patience_s: float = 150.0) -> str:
    """Ask the run's process to save and stop, and wait for it. Returns what happened. Raises StopError.

    Who gets SIGTERM is the launcher, or what runs before it: a trainer alone would be started again.
    """
    deadline = time.monotonic() + patience_s
    asked: int | None = None
    while is_at_work(paths):
        # not STATUS.json, which may be of an earlier attempt
        holder = HOLDER.match(read_holder(paths.lock if is_held(paths) else paths.job))
        if holder and asked != int(holder[1]):
            asked = int(holder[1])
            ask(paths, asked, holder[2])
        if time.monotonic() > deadline:
            raise StopError(
                f"run {paths.name} has not stopped in {patience_s:.0f} s (pid {asked}). Look at "
                f"{paths.train_log}, and kill the process if it hangs: its last checkpoint is safe"
            )
        time.sleep(RETRY_S)
    if not asked:
        return f"run {paths.name} is not running here"
    if not look_up(paths)[0]:
        return f"{paths.name} was stopped before it trained"
    return describe(paths)


def ask(paths: RunPaths, pid: int, host: str) -> None:
    """Send SIGTERM to the process that works on the run. A shared disk shows its lock on every machine."""
    if host != socket.gethostname():
        raise StopError(
            f"run {paths.name} is trained on {host} (pid {pid}), and this is {socket.gethostname()}: "
            f"run make stop {name_run(paths.folder)} there"
        )
    if not 1 < pid <= LARGEST_PID:
        raise StopError(
            f"run {paths.name}: its lock names pid {pid}, which is no process of a run. Find who trains it "
            f"with: fuser {paths.lock} {paths.job}"
        )
    # For a moment a lock may name the process that held it before.
    if not wait(lambda: works_on(pid, paths) or not is_at_work(paths), ANSWER_S, RETRY_S):
        raise StopError(
            f"run {paths.name}: its lock names pid {pid}, which does not work on it, so nothing was stopped. "
            f"Find who holds the lock with: fuser {paths.lock} {paths.job}"
        )
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:  # it has just ended by itself
        pass
    except PermissionError:
        raise StopError(
            f"run {paths.name} belongs to another user (pid {pid}), and only they can stop it"
        ) from None


def works_on(pid: int, paths: RunPaths) -> bool:
    """Return whether a process has a lock of the run open, or launched one that has. True if nobody can say."""
    try:
        os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it has ended, belongs to another user, or this is not Linux
        return True
    launched = f"LAUNCHER_PID={pid}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if has_open(process, paths.job) or has_open(process, paths.lock):
                environment = (process / "environ").read_bytes().split(b"\0")
                if process.name == str(pid) or launched in environment:
                    return True
    return False


def has_open(process: Path, path: Path) -> bool:
    """Return whether a process, by its folder in /proc, has a file open. Raises OSError if it cannot be looked into."""
    wanted = os.path.realpath(path)
    return any(os.path.realpath(descriptor) == wanted for descriptor in (process / "fd").iterdir())


def find_trainer(paths: RunPaths) -> int:
    """Return the pid of a process here that writes this run's record; 0 if none is known.

    It has lost its lock if somebody has removed that file.
    """
    state = read(paths.status)
    pid = state.get("pid")
    if state.get("host") != socket.gethostname() or not isinstance(pid, int):
        return 0
    with contextlib.suppress(OSError):
        if has_open(Path(f"/proc/{pid}"), paths.metrics):
            return pid
    return 0


def find_runs(parent: Path, node: int = 0, with_sent: bool = False) -> list[RunPaths]:
    """Return the runs in a folder, by name. Raises RunFolderError if it cannot be read.

    with_sent: also those that are in a cluster alone.
    """
    folders: list[Path] = []
    try:
        folders = sorted(parent.absolute().iterdir())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RunFolderError(
            f"{parent}: cannot be read ({error.strerror}). Fix its permissions, or set RUNS_DIR"
        ) from None
    runs = [RunPaths(folder, node) for folder in folders]
    return [run for run in runs if is_run(run) or (with_sent and run.sent.is_file())]


def explain_missing(paths: RunPaths) -> str:
    """Say that there is no such run, and which one may be meant."""
    parent = paths.folder.parent
    return f"There is no run {paths.name} in {parent}. {suggest(paths)}`make runs` lists them."


def suggest(paths: RunPaths) -> str:
    """Return "Did you mean tiny? " if there is no such run but one of a similar name; else ""."""
    names = [run.name for run in find_runs(paths.folder.parent, with_sent=True)]
    nearest = find_nearest(paths.name, names)
    return f"Did you mean {nearest}? " if nearest else ""


def list_runs(paths: RunPaths) -> str:
    """Return a line for each run next to this one."""
    parent = paths.folder.parent
    runs = find_runs(parent, paths.node)
    width = max((len(run.name) for run in runs), default=0)
    lines = [describe(run, width) + describe_results(run) for run in runs]
    return "\n".join(lines) or f"no runs in {parent}"


def describe_skips(paths: RunPaths) -> str:
    """Return lines on how the samples begin that the last skipped step and the last rollback left out.

    "" if the end of the record has neither.
    """
    last: dict[str, Record] = {}
    for record in read_tail(paths):
        last[record["event"]] = record
    lines = []
    if "skip" in last:
        skip = last["skip"]
        title = f"step {skip['step']} was skipped ({skip['reason']}). Its text:"
        lines += describe_texts(title, skip, paths)
    if "rollback" in last:
        rollback = last["rollback"]
        title = (
            f"the run went back from step {rollback['from']} to {rollback['step']}. "
            "Text that it passes over:"
        )
        lines += describe_texts(title, rollback, paths)
    return "".join(f"\n  {make_printable(line)}" for line in lines)


def describe_texts(title: str, record: dict[str, Any], paths: RunPaths) -> list[str]:
    """Return a title and a line for each of the first texts of a record; [] if it has none."""
    texts = record.get("texts")
    if not texts:
        return []
    lines = [title]
    lines += [describe_text(text)[:LINE] for text in texts[:TEXTS]]
    if len(texts) > TEXTS:
        lines.append(f"and {len(texts) - TEXTS} more in {show_path(paths.metrics)}")
    return lines


def describe_text(text: dict[str, Any]) -> str:
    """Return a text of the record (train/data/sample_text.py) as one line: where it is from, how it begins."""
    return f"{text['source']} {text['shard']}: {text['text']}"


def main(argv: list[str], run: RunPaths | None = None) -> int:
    """Do what a target asks for, and print it. Returns the exit code.

    run: the one that is meant. Default: that of the settings.
    """
    try:
        paths = run or RunPaths.of_node(load_config(), ROOT)
        if argv == ["runs"]:
            text = list_runs(paths)
        elif not is_run(paths):
            raise RunFolderError(explain_missing(paths))
        elif argv == ["stop"]:
            text = stop(paths)
        else:
            text = describe(paths) + describe_end(paths) + describe_skips(paths)
            text += describe_wandb(paths)
    except (SettingsError, RunFolderError, StopError) as error:
        complain(explain_error(error))
        return error.exit_code
    say(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
