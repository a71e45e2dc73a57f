"""Start the trackers of a run, print what they report, and end with them. Nothing here waits for long or fails a run.

    trainer --metrics.jsonl--> wandb_tracker.py       --network--> W&B
                               tensorboard_tracker.py --> RUN/tensorboard/
                               trackio_tracker.py     --> RUN/trackio/

    python -m record.trackers.processes     sends RUN_NAME to its trackers now: what they lack, or all of it

Each tracker follows metrics.jsonl in a process of its own, so a tracker that is slow, absent or broken cannot slow or
stop the trainer, which imports none of them. The trainer holds a pipe to each process. When it closes, the trainer is
gone, however that happened: the record alone cannot say so, since a trainer that is killed writes no end to it.
Standard library only.
"""

import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from record.locks import RunFolderError
from record.run_paths import RunPaths
from record.trackers.wandb_env import build_environment, find_mode, has_key
from settings import ROOT, SettingsError, explain_error, load_config
from settings.config import Config
from settings.resolve import show_path

TITLES = {"wandb": "W&B", "tensorboard": "TensorBoard", "trackio": "trackio"}
BIN = show_path(Path(sys.executable).parent)  # where the commands of a tracker are
INSTALL = f"{BIN}/python -m pip install --no-deps -r requirements/trackers.txt"

REPORTED = 3  # exit code of a tracker that failed and reported why
DONE_S = 15.0  # how long the end of a run waits for the last upload
STOPPED_S = 3.0  # the same for a run that was stopped or failed: it may be killed soon
UPLOAD_S = 600  # how long a tracker tries after it was let go


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


def describe_later(run_name: str) -> str:
    """Return the command that sends what a tracker did not."""
    return f"To send the run later: make mirror RUN_NAME={run_name}"


class TrackerProcess(threading.Thread):
    """The trainer's side of a tracker: its process, and the thread that prints what it reports."""

    def __init__(
        self, name: str, run_name: str, process: subprocess.Popen, say: Callable[[str], object]
    ):
        super().__init__(daemon=True)
        self.title = TITLES[name]
        self.later = describe_later(run_name)
        self.process = process
        self.say = say
        self.start()

    def run(self) -> None:
        """Print each line. The pipe is unbuffered: the lock of a buffer could hang the exit of the trainer."""
        for line in self.process.stdout or ():
            self.report(line.decode(errors="replace").rstrip())
        code = self.process.wait()
        if code not in (0, REPORTED):
            self.report(f"its process died with exit code {code}. {self.later}")

    def report(self, text: str) -> None:
        self.say(f"{self.title}: {text}")


def start_trackers(
    c: Config, paths: RunPaths, say: Callable[[str], object]
) -> list[TrackerProcess]:
    """Start a process for each tracker that is on."""
    trackers = []
    for name in list_trackers(c):
        log_path = paths.tracker_log(name)
        try:
            log_path.parent.mkdir(exist_ok=True)
            with open(log_path, "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", f"record.trackers.{name}_tracker"],
                    cwd=ROOT,
                    env=build_environment(c),
                    bufsize=0,
                    start_new_session=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            trackers.append(TrackerProcess(name, c.run_name, process, say))
        except OSError as error:
            say(f"{TITLES[name]}: cannot be started ({error}). The run goes on without it")
    return trackers


def close_trackers(trackers: Sequence[TrackerProcess], patience_s: float) -> None:
    """End the pipes, which say that the record is complete, and wait a little for the last upload.

    What takes longer continues by itself.
    """
    for tracker in trackers:
        if tracker.process.stdin:
            tracker.process.stdin.close()
    deadline = time.monotonic() + patience_s
    for tracker in trackers:
        tracker.join(max(0.0, deadline - time.monotonic()))
        if tracker.is_alive():
            tracker.report(
                f"not finished. Process {tracker.process.pid} continues in the background. "
                f"{tracker.later}"
            )


def main() -> int:
    """Send the run to its trackers from its record, to the end. Returns the exit code."""
    try:
        c = load_config()
        check_trackers(c)
        if not list_trackers(c):
            raise SettingsError(
                [
                    "No tracker is on. Set WANDB_API_KEY in the environment or ENV_FILE, "
                    "WANDB_MODE=offline, or TRACKERS=tensorboard."
                ]
            )
        paths = RunPaths.of_node(c, ROOT)
        if not paths.metrics.exists():
            raise RunFolderError(f"There is no run {paths.folder}. `make runs` lists them.")
    except (SettingsError, RunFolderError) as error:
        sys.stderr.write(f"{explain_error(error)}\n")
        return error.exit_code
    trackers = start_trackers(c, paths, lambda line: sys.stdout.write(f"{line}\n"))
    close_trackers(trackers, 2 * UPLOAD_S)  # they end before that
    codes = [tracker.process.poll() for tracker in trackers]
    return int(codes != [0] * len(list_trackers(c)))


if __name__ == "__main__":
    sys.exit(main())
