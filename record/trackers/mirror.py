"""The trainer's side of the W&B mirror: start it, pass on what it says, let it end. Nothing here waits or fails.

    trainer --metrics.jsonl--> wandb_mirror.py --network--> W&B
        \\__ a pipe that it holds: its end tells the mirror that the trainer is gone, however that happened

    python -m record.trackers.mirror      mirrors RUN_NAME now: what an earlier mirror could not, or a run trained without

The record of a run is metrics.jsonl. The mirror is another process, so that W&B being slow, absent or broken
is no affair of the trainer, which does not even import it: that alone takes a second.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from record.run_paths import RunPaths
from settings.config import Config
from settings.declare import ROOT, SettingsError
from settings.wandb_env import environment, has_key

DONE_S = 15.0  # how long the end of a run waits for the last upload
STOPPED_S = 3.0  # the same after a signal: whoever sent it may kill soon


def mode_of(c: Config) -> str:
    """online, offline or disabled; `auto` is online where there is a key."""
    if c.wandb_mode == "auto":
        return "online" if has_key(c.wandb_api_key) else "disabled"
    return c.wandb_mode


class Mirror:
    """A running mirror process. `start` gives None where W&B is disabled or the process could not be started."""

    def __init__(self, process: subprocess.Popen, say: Callable[[str], None]):
        self.process, self.say = process, say
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    @classmethod
    def start(
        cls, c: Config, paths: RunPaths, say: Callable[[str], None], alone: bool = False
    ) -> "Mirror | None":
        """Start the process; what it has to say is said, by a thread that sleeps otherwise. alone: nobody trains now,
        whose end it could hold up."""
        if mode_of(c) == "disabled":
            return None
        values = {
            "WANDB_MODE": mode_of(c),
            "WANDB_PROJECT": c.wandb_project,
            "WANDB_ENTITY": c.wandb_entity,
            "WANDB_API_KEY": c.wandb_api_key,
        }  # the key goes by environment: command lines are seen by all
        try:
            paths.wandb_log.parent.mkdir(exist_ok=True)
            with open(paths.wandb_log, "ab") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "record.trackers.wandb_mirror",
                        *(["alone"] if alone else []),
                    ],
                    cwd=ROOT,
                    bufsize=0,
                    env=environment(values),
                    start_new_session=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
        except OSError as error:
            say(f"W&B: the mirror cannot be started ({error}); the run goes on without it")
            return None
        return cls(process, say)

    def listen(self) -> None:
        """Say each line of the process. Read unbuffered: a buffer's lock could hang the trainer's exit."""
        assert self.process.stdout
        rest = b""
        while piece := os.read(self.process.stdout.fileno(), 4096):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self.say(line.decode(errors="replace"))

    def let_go(self) -> None:
        """Tell the process that nothing more will come."""
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self, hurried: Callable[[], bool]) -> None:
        """End the mirror, with some patience for the last upload; what needs longer goes on by itself."""
        self.let_go()
        began = time.monotonic()
        while self.process.poll() is None:
            if time.monotonic() - began > (STOPPED_S if hurried() else DONE_S):
                self.say(
                    f"W&B: not finished; process {self.process.pid} goes on with it, this one does not wait"
                )
                return
            time.sleep(0.05)
        self.listener.join(timeout=1)


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Mirror the run from its record, to the end. Returns the exit code."""
    try:
        c = Config.load()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 64
    paths = RunPaths.of_node(c, ROOT)
    if mode_of(c) == "disabled":
        sys.stderr.write(
            "W&B is disabled: set WANDB_API_KEY in the environment or ENV_FILE, or WANDB_MODE=offline\n"
        )
        return 64
    if not paths.metrics.exists():
        sys.stderr.write(
            f"there is no run {c.run_name} in {paths.folder.parent}; make runs lists them\n"
        )
        return 78
    mirror = Mirror.start(c, paths, write, alone=True)
    if not mirror:
        return 1
    mirror.let_go()
    mirror.listener.join()
    return 1 if mirror.process.wait() else 0


if __name__ == "__main__":
    sys.exit(main())
