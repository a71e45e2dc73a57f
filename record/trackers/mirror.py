"""Start the trackers of a run, print what they report, and end with them. Nothing here waits for long or fails a run.

    trainer --metrics.jsonl--> wandb_mirror.py       --network--> W&B
                               tensorboard_mirror.py --> RUN/tensorboard/
                               trackio_mirror.py     --> RUN/trackio/

    python -m record.trackers.mirror      mirrors RUN_NAME now: what an earlier mirror could not send, or a run that
                                          trained without one

The record of a run is metrics.jsonl. Each tracker follows it in a process of its own, so a tracker that is slow, absent
or broken cannot slow or stop the trainer, which imports none of them. The trainer holds a pipe to each process: when it
closes, the trainer is gone, however that happened. Standard library only.
"""

import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from record.exit_codes import BAD_DATA, BAD_SETTING
from record.run_paths import RunPaths
from record.trackers.wandb_env import build_environment, find_mode, has_key
from settings import ROOT, SettingsError
from settings.config import Config
from settings.resolve import show_path

TITLES = {"wandb": "W&B", "tensorboard": "TensorBoard", "trackio": "trackio"}
INSTALL = f"{show_path(Path(sys.executable))} -m pip install --no-deps -r requirements/trackers.txt"

DONE_S = 15.0  # how long the end of a run waits for the last upload
STOPPED_S = 3.0  # the same for a run that was stopped or failed: it may be killed soon


def list_trackers(c: Config) -> list[str]:
    """Return the trackers that are on."""
    trackers = [name for name in c.trackers.split(",") if name]
    if find_mode(c) != "disabled":
        trackers.append("wandb")
    return trackers


def check_trackers(c: Config) -> None:
    """Refuse trackers that cannot work here. Called where training begins, before there is work to lose.

    Raises:
        SettingsError: WANDB_MODE=online has no key, or a package of TRACKERS is not installed.
    """
    problems = []
    if c.wandb_mode == "online" and not has_key(c):
        problems.append(
            "WANDB_MODE=online: there is no key. Set WANDB_API_KEY in the environment or ENV_FILE, run "
            "`wandb login`, or use WANDB_MODE=offline."
        )
    for name in c.trackers.split(","):
        if name and importlib.util.find_spec(name) is None:
            problems.append(
                f"TRACKERS={c.trackers}: the package {name} is not installed. Install it with "
                f"`{INSTALL}`, or remove {name} from TRACKERS."
            )
    if problems:
        raise SettingsError(problems)


class Mirror(threading.Thread):
    """A process that mirrors the run to one tracker, and the thread that prints what it reports."""

    def __init__(self, title: str, process: subprocess.Popen, say: Callable[[str], object]):
        super().__init__(daemon=True)
        self.title = title
        self.process = process
        self.say = say
        self.start()

    def run(self) -> None:
        """Print each line. The pipe is unbuffered: the lock of a buffer could hang the exit of the trainer."""
        for line in self.process.stdout or ():
            self.say(line.decode(errors="replace").rstrip())

    def let_go(self) -> None:
        """Tell the process that the record is complete."""
        if self.process.stdin:
            self.process.stdin.close()


def start_mirrors(
    c: Config, paths: RunPaths, say: Callable[[str], object], gpus: Iterable[int] = ()
) -> list[Mirror]:
    """Start a process for each tracker that is on.

    Args:
        gpus: NVML indices of the GPUs of this node that train: W&B records their utilization and power.
    """
    mirrors = []
    for name in list_trackers(c):
        title = TITLES[name]
        log_path = paths.tracker_log(name)
        try:
            log_path.parent.mkdir(exist_ok=True)
            with open(log_path, "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", f"record.trackers.{name}_mirror", *map(str, gpus)],
                    cwd=ROOT,
                    env=build_environment(c),
                    bufsize=0,
                    start_new_session=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            mirrors.append(Mirror(title, process, say))
        except OSError as error:
            say(f"{title}: cannot be started ({error}). The run goes on without it")
    return mirrors


def close_mirrors(mirrors: Sequence[Mirror], patience_s: float) -> None:
    """End the mirrors, and wait a little for the last upload; what takes longer continues by itself."""
    for mirror in mirrors:
        mirror.let_go()
    deadline = time.monotonic() + patience_s
    for mirror in mirrors:
        mirror.join(max(0.0, deadline - time.monotonic()))
        if mirror.is_alive():
            mirror.say(
                f"{mirror.title}: not finished. Process {mirror.process.pid} continues in the "
                "background; should it fail, upload the run with `make mirror`"
            )


def main() -> int:
    """Mirror the run from its record, to the end. Returns the exit code."""
    try:
        c = Config.load()
        check_trackers(c)
        if not list_trackers(c):
            raise SettingsError(
                [
                    "No tracker is on. Set WANDB_API_KEY in the environment or ENV_FILE, "
                    "WANDB_MODE=offline, or TRACKERS=tensorboard."
                ]
            )
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTING
    paths = RunPaths.of_node(c, ROOT)
    if not paths.metrics.exists():
        sys.stderr.write(f"There is no run {paths.folder}. `make runs` lists them.\n")
        return BAD_DATA
    mirrors = start_mirrors(c, paths, lambda line: sys.stdout.write(f"{line}\n"))
    for mirror in mirrors:
        mirror.let_go()
    for mirror in mirrors:
        mirror.join()
    finished = [mirror for mirror in mirrors if mirror.process.wait() == 0]
    return int(len(finished) < len(list_trackers(c)))


if __name__ == "__main__":
    sys.exit(main())
