"""python -m monitor as a user sees it: on a made run folder, beside a process that trains, under a terminal."""

import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from monitor import __main__ as monitor
from monitor.facts import Fault
from monitor.screen import Screen
from record.run_paths import RunPaths
from settings import ROOT
from tests.constants import constants
from tests.monitor import scenes
from tests.running import wait_for


@dataclasses.dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Once = Callable[..., Done]

# A stand-in for a trainer: holds the run as train/main.py does, makes a step of 1,000 tokens every 50 ms, and is done
# with the last, or told to. A third argument names a file that it waits for before it is done.
TRAINER = """
import fcntl, json, os, signal, socket, sys, time
from pathlib import Path
folder, last = Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
lock = open(folder / ".lock", "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
began = time.time()
def write(path, text):
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)
def status(phase, step):
    write(folder / "STATUS.json", json.dumps({"schema": 1, "pid": os.getpid(), "host": socket.gethostname(),
          "phase": phase, "since": began, "heartbeat": time.time(), "step": step, "last_step": last}))
with open(folder / "metrics.jsonl", "a", buffering=1) as record:
    def tell(event, step, **values):
        record.write(json.dumps({"schema": 1, "event": event, "time": time.time(), "mono_s": time.monotonic(),
                                 "attempt": 0, "step": step, "tokens": 1000 * step, **values}) + "\\n")
    tell("start", 0, startup_s={"import": 0.5, "compile": 2.0})
    for step in range(1, last + 1):
        status("training", step)
        tell("step", step, loss=4.0 - step / 1000, step_ms=50.0, tokens_per_s=20000.0, mfu=None, mem_gib=0.5)
        if step == 1:
            print("begun", flush=True)
        time.sleep(0.05)
    while sys.argv[3:] and not os.path.exists(sys.argv[3]):
        status("training", last)
        time.sleep(0.05)
    tell("end", last, reason="done")
    status("done", last)
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "env").touch()
    (tmp_path / "runs" / "a-run").mkdir(parents=True)
    return RunPaths(tmp_path / "runs" / "a-run")


def environment(paths: RunPaths, **settings: str) -> dict[str, str]:
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "LANG", "VIRTUAL_ENV")
        if name in os.environ
    }
    return (
        kept
        | {
            "ENV_FILE": str(paths.folder.parent.parent / "env"),
            "RUNS_DIR": str(paths.folder.parent),
            "RUN_NAME": "a-run",
            "WHERE": "local",
            "DEVICE": "cpu",
        }
        | settings
    )


def run(paths: RunPaths, **settings: str) -> Done:
    """A process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "monitor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(paths, **settings),
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def once(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Once:
    """Looks once, in this process, which is quicker."""

    def look(**settings: str) -> Done:
        for name, value in environment(paths, **{"ONCE": "1"} | settings).items():
            monkeypatch.setenv(name, value)
        return Done(monitor.main(), *capfd.readouterr())

    return look


def train(
    paths: RunPaths, processes: list[subprocess.Popen], last: int = 100_000, *until: Path
) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(paths.folder), str(last), *map(str, until)],
        stdout=subprocess.PIPE,
        text=True,
    )
    processes.append(process)
    assert process.stdout and process.stdout.readline() == "begun\n"
    return process


def made(paths: RunPaths, phase: str, steps: int = 20, loss: float = 3.5) -> None:
    """A run of 20 steps of 1 s whose process is gone."""
    began = time.time() - 100
    state = {
        "schema": 1,
        "host": socket.gethostname(),
        "phase": phase,
        "since": began + 30,
        "heartbeat": began + 30,
        "step": steps,
        "last_step": 20,
    }
    paths.status.write_text(json.dumps(state))
    lines = [
        {"event": "start", "step": 0, "time": began, "mono_s": 0.0, "startup_s": {"import": 4.0}}
    ]
    lines += [
        {
            "event": "step",
            "step": n,
            "time": began + n,
            "mono_s": float(n),
            "loss": loss,
            "step_ms": 1000.0,
            "tokens_per_s": 1000.0,
            "mfu": None,
            "mem_gib": 0.5,
        }
        for n in range(1, steps + 1)
    ]
    if phase in ("done", "stopped", "crashed"):
        lines.append(
            {
                "event": "end",
                "step": steps,
                "time": began + steps,
                "mono_s": float(steps),
                "reason": phase,
            }
        )
    paths.metrics.write_text(
        "".join(
            json.dumps({"schema": 1, "attempt": 0, "tokens": 1000 * line["step"]} | line) + "\n"
            for line in lines
        )
    )


# ---- Once


def test_a_run_that_is_done_is_told_with_its_last_figures(paths: RunPaths) -> None:
    made(paths, "done")
    told = run(paths, ONCE="1")
    assert told.returncode == 0 and told.stderr == "", told.stdout + told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].startswith("run: a-run, preset tiny, seen 2") and not re.search(
        "^fault", told.stdout, re.M
    )
    for line in (
        "step: 20 of 20, 100.0%, attempt 1",
        "tokens: 20,000",
        "speed: 1,000 tokens/s",
        "goodput: training 83.3%, start-up 16.7%",
        "checkpoint: none yet",
    ):
        assert line in lines, (line, told.stdout)
    assert any(line.startswith("phase: done since ") for line in lines)
    assert any(line.startswith("verdict: done: 20 of 20 steps") for line in lines)
    assert not re.search("^eta", told.stdout, re.M)


def test_a_run_that_was_stopped_is_well_and_one_that_was_killed_is_not(
    once: Once, paths: RunPaths
) -> None:
    made(paths, "stopped", 12)
    assert once().returncode == 0
    made(paths, "training", 12)
    told = once()
    assert told.returncode == 1 and "\nphase: killed while training since " in told.stdout
    assert re.search(r"^fault killed: .*; next: make train .*RUN_NAME=a-run", told.stdout, re.M), (
        told.stdout
    )
    made(paths, "crashed", 12)
    told = once()
    assert told.returncode == 1 and "\nfault crashed: " in told.stdout


def test_a_run_that_trains(once: Once, paths: RunPaths, processes: list[subprocess.Popen]) -> None:
    train(paths, processes)
    wait_for(paths.metrics, '"step": 8,')
    told = once()
    assert told.returncode == 0, told.stdout + told.stderr
    step = re.search(r"^step: ([0-9,]+) of 100,000, 0\.0%, attempt 1$", told.stdout, re.M)
    assert step and int(step[1]) >= 5
    assert re.search(r"^phase: training for \d+ s$", told.stdout, re.M)
    assert "\nspeed: 20,000 tokens/s\n" in told.stdout and "\nstep time: 50.0 ms" in told.stdout
    assert re.search(
        r"^eta: 1:2\d:\d\d, at ", told.stdout, re.M
    )  # 100,000 steps of 50 ms are 1:23:20


def test_a_job_that_has_no_trainer_yet(once: Once, paths: RunPaths) -> None:
    with open(paths.job, "w") as job:
        fcntl.flock(job, fcntl.LOCK_EX)
        job.write(f"pid {os.getpid()} on {socket.gethostname()}: preparing data\n")
        job.flush()
        told = once()
    assert told.returncode == 0 and "\nphase: preparing data\n" in told.stdout
    assert (
        "\nplan: n/a: " in told.stdout and f"\nnode 0: {socket.gethostname()}, seen " in told.stdout
    )


def test_no_such_run_and_bad_settings(once: Once, paths: RunPaths) -> None:
    told = once()
    assert (told.returncode, told.stdout) == (78, "")
    assert (
        told.stderr == f"There is no run a-run in {paths.folder.parent}. `make runs` lists them.\n"
    )
    told = once(INTERVAL_MS="0")
    assert told.returncode == 64 and "INTERVAL_MS=0" in told.stderr and told.stdout == ""
    made(paths, "done")
    told = once(INTERVAL_MS="10", ALERT_CMD="/no/such/program")
    assert (
        told.returncode == 64 and "ALERT_CMD=/no/such/program" in told.stderr and told.stdout == ""
    )


@pytest.mark.parametrize("torn", ["metrics", "status", "config"])
def test_a_torn_file_is_no_crash(once: Once, paths: RunPaths, torn: str) -> None:
    made(paths, "done")
    path = getattr(paths, torn)
    path.write_bytes(
        b'\x00{"schema": 1, "event"' + (path.read_bytes()[:20] if path.exists() else b"")
    )
    told = once()
    assert (
        told.returncode in (0, 1)
        and "Traceback" not in told.stderr
        and told.stdout.startswith("run: a-run")
    )


def test_what_cannot_be_printed_is_replaced(once: Once, paths: RunPaths) -> None:
    made(paths, "crashed", 12)
    state = json.loads(paths.status.read_text()) | {
        "exit_code": 1,
        "why": "FileNotFoundError: /data/caf\udce9.txt",
    }
    paths.status.write_text(json.dumps(state))
    told = once()
    assert told.returncode == 1 and r"FileNotFoundError: /data/caf\udce9.txt" in told.stdout
    console = Console(file=io.StringIO(), width=80, height=24)
    fault = Fault("crashed", "/data/caf\udce9.txt", "make logs \ud800")
    console.print(Screen(scenes.here(), [fault], fault.text, fault.text, [fault.text]))
    assert "caf\ufffd.txt".encode() in console.file.getvalue().encode()  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [{}, {"ONCE": "0"}, {"WHERE": "auto"}])
def test_a_run_that_may_not_be_read_is_said_in_a_line(
    paths: RunPaths, settings: dict[str, str]
) -> None:
    made(paths, "done")
    humble = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if humble and not shutil.which("setpriv"):
        pytest.skip("this is root, who may read everything, and there is no setpriv")
    paths.folder.chmod(0)
    try:
        done = subprocess.run(
            [*humble, sys.executable, "-m", "monitor"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(paths, **{"ONCE": "1"} | settings),
            check=False,
        )
    finally:
        paths.folder.chmod(0o755)
    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    assert done.stderr.count("\n") == 1 and f"{paths.folder}/" in done.stderr
    assert "may not be read (Permission denied): run make monitor as its owner" in done.stderr


def test_alerts_ring_once_for_a_fault(once: Once, paths: RunPaths) -> None:
    made(paths, "training", 12)
    heard = paths.folder.parent.parent / "heard"
    bell = heard.with_name("bell.sh")
    bell.write_text(f'#!/bin/sh\necho "$MONITOR_FAULT $1" >> {heard}\n')
    bell.chmod(0o755)
    for _ in range(2):
        assert once(ALERT_CMD=str(bell)).returncode == 1
    lines = heard.read_text().splitlines()
    assert [line.split()[0] for line in lines].count(
        "killed"
    ) == 1 and "a-run: the process was killed while training" in lines[0]


# ---- What it loads


def test_it_loads_nothing_heavy(paths: RunPaths) -> None:
    made(paths, "done")
    heavy = {
        "torch",
        "numpy",
        "wandb",
        "datasets",
        "tokenizers",
        "matplotlib",
        "pandas",
        "huggingface_hub",
    }
    loaded = f"str(sorted({heavy} & sys.modules.keys()))"
    shown = (
        "import sys; from monitor import __main__ as m, watch\n"
        f"def start(self): sys.exit({loaded})\n"  # all that comes before the first picture
        "watch.Watcher.start, m.is_screen = start, lambda: True\n"
        "m.main()"
    )
    for code, more in (
        (shown, {"TERM": "xterm"}),
        (
            f"import sys; from monitor.__main__ import main; main(); sys.exit({loaded})",
            {"ONCE": "1"},
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(paths, **more),
            check=False,
        )
        assert done.stderr.strip() == "[]"


# ---- Again and again


def test_a_pipe_is_told_what_changes_until_the_end(
    paths: RunPaths, processes: list[subprocess.Popen]
) -> None:
    go = paths.folder.parent.parent / "go"
    train(paths, processes, 60, go)
    watching = subprocess.Popen(
        [sys.executable, "-m", "monitor"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.STDOUT,
        env=environment(paths, ONCE="0", **constants(REFRESH_S=0.5)),
    )
    processes.append(watching)
    assert watching.stdout
    told = ""
    while not re.search("^phase: training", told, re.M):
        line = watching.stdout.readline()
        assert line, told
        told += line
    go.touch()
    told += watching.communicate(timeout=120)[0]
    assert watching.returncode == 0, told
    phases = re.findall(r"^phase: (\w+)", told, re.M)
    assert phases[0] == "training" and phases[-1] == "done" and len(phases) <= 4
    assert "\nstep: 60 of 60, 100.0%, attempt 1\n" in told.split("phase: done")[1]


def test_a_folder_that_vanishes_is_said(paths: RunPaths, processes: list[subprocess.Popen]) -> None:
    trainer = train(paths, processes)
    watching = subprocess.Popen(
        [sys.executable, "-m", "monitor"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
        env=environment(paths, **constants(REFRESH_S=0.5)),
    )
    processes.append(watching)
    assert watching.stdout
    while not watching.stdout.readline().startswith("phase: training"):
        pass
    trainer.kill()
    trainer.wait()
    shutil.move(paths.folder, paths.folder.with_name("moved"))
    for line in watching.stdout:
        if line.startswith("look: run a-run is gone from "):
            break
    watching.send_signal(signal.SIGINT)
    err = watching.communicate(timeout=120)[1]
    assert watching.returncode == 1 and err == "", err


class Terminal:
    """A pseudo-terminal of some size with the monitor in it."""

    def __init__(self, paths: RunPaths, columns: int, lines: int, **settings: str):
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execve(
                sys.executable,
                [sys.executable, "-m", "monitor"],
                environment(
                    paths,
                    **constants(REFRESH_S=0.5),
                    **{"TERM": "xterm-256color", "LANG": "C.UTF-8"} | settings,
                ),
            )
        self.size(columns, lines)
        self.said = ""

    def size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, until: str = "", seconds: float = 20.0) -> str:
        """What comes until a pattern is in it, or to the end where there is none."""
        begun, deadline = len(self.said), time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self.descriptor], [], [], 0.2)[0]:
                try:
                    data = os.read(self.descriptor, 65536)
                except OSError:  # the other side is closed
                    break
                self.said += data.decode(errors="replace")
                if until and re.search(until, plain(self.said[begun:]), re.DOTALL):
                    break
        else:
            raise AssertionError(f"{until!r} did not come: {plain(self.said[begun:])!r}")
        return plain(self.said[begun:])

    def end(self, number: int) -> int:
        os.kill(self.pid, number)
        self.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.descriptor)
        return code


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_screen_in_a_terminal(paths: RunPaths, processes: list[subprocess.Popen]) -> None:
    train(paths, processes)
    terminal = Terminal(paths, 80, 24)
    assert "looking ..." in terminal.read("looking")
    first = terminal.read(r"step +\d+/100,000.*machine")
    assert "nothing is wrong" in first
    shown = re.findall(r"step +(\d+)/100,000", first)[-1:]
    deadline = time.monotonic() + 60
    while shown[-1] == shown[0]:  # the same view may be drawn again
        assert time.monotonic() < deadline
        shown += re.findall(r"step +(\d+)/100,000", terminal.read(r"step +\d+/100,000.*machine"))[
            -1:
        ]
    assert int(shown[-1]) > int(shown[0])
    terminal.size(100, 12)
    os.kill(terminal.pid, signal.SIGWINCH)
    terminal.read(r"a-run  training for \d+ s {50,}")
    assert terminal.end(signal.SIGINT) == 0
    assert terminal.said.count("\x1b[?1049h") == terminal.said.count("\x1b[?1049l") == 1
    assert terminal.said.rindex("\x1b[?25h") > terminal.said.rindex(
        "\x1b[?25l"
    )  # the cursor is back
    left = plain(terminal.said.split("\x1b[?1049l")[1])
    assert (
        re.match(r"\s*a-run  training for ", left)
        and "nothing is wrong" in left
        and "Traceback" not in left
    )
    assert max(map(len, left.splitlines())) <= 100


def test_the_terminal_is_given_back_when_it_is_told_to_end(
    paths: RunPaths, processes: list[subprocess.Popen]
) -> None:
    train(paths, processes)
    terminal = Terminal(paths, 80, 24, NO_COLOR="1")
    terminal.read("training for")
    assert terminal.end(signal.SIGTERM) == 143
    assert terminal.said.count("\x1b[?1049l") == 1 and "\x1b[32m" not in terminal.said


def test_a_dumb_terminal_gets_text(paths: RunPaths) -> None:
    made(paths, "done")
    terminal = Terminal(paths, 80, 24, TERM="dumb")
    said = terminal.read()
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 0
    os.close(terminal.descriptor)
    assert "phase: done since" in said and "\x1b" not in terminal.said
