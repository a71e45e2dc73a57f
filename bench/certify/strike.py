"""Find the processes of a run, and kill one or all of them. Linux only; standard library only."""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path


def find_processes(runs_dir: Path) -> list[tuple[int, str]]:
    """Return pid and command line of all processes with this RUNS_DIR: those that train there, and what they started."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"RUNS_DIR={runs_dir}\0" in (path / "environ").read_text():
                command = (path / "cmdline").read_text().replace("\0", " ").strip()
                processes.append((int(path.name), command))
        except (OSError, UnicodeDecodeError):  # it has just ended, or is somebody else's
            continue
    return processes


def kill_processes(runs_dir: Path) -> None:
    """Kill all processes with this RUNS_DIR, and wait until they have ended."""
    while processes := find_processes(runs_dir):
        for pid, _ in processes:
            kill(pid)
        time.sleep(0.01)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def strike(
    blow: str, runs_dir: Path, launcher: "subprocess.Popen[bytes]", rng: random.Random
) -> None:
    """Strike whatever of a run is there.

    Args:
        blow: "stop" sends SIGTERM to the launcher, as make stop does. SIGKILL goes to "a rank", "torchrun",
            "all ranks", or "everything": the launcher, too.
    """
    if blow == "stop":
        launcher.terminate()
        return
    running = find_processes(runs_dir)
    agents = [pid for pid, command in running if "train.torchrun" in command]
    ranks = [pid for pid, command in running if command.endswith("-m train.main")]
    struck = {
        "a rank": rng.sample(ranks, min(1, len(ranks))),
        "all ranks": ranks,
        "torchrun": agents,
        "everything": [launcher.pid, *agents, *ranks],
    }[blow]
    for pid in struck:
        kill(pid)
