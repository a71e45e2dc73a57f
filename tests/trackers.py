"""Trackers in tests: a Python that has their packages, their processes, and what they stored, read with the packages.

python = python_with_trackers()                    .venv with requirements/trackers.txt on top, cached in /tmp
process = start(python, "trackio", run)            follows run/metrics.jsonl until its standard input ends
read_values(python, "trackio", run)                [(step, name, value, time), ...]
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests import wandb_file
from tests.extra_packages import install_apart
from tests.running import ROOT, environment

READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(run + "/tensorboard", size_guidance={"scalars": 0}).Reload()
values = [
    (event.step, name, event.value, event.wall_time)
    for name in events.Tags()["scalars"]
    for event in events.Scalars(name)
]
""",
    "trackio": """
import datetime, os
os.environ["TRACKIO_DIR"] = run + "/trackio"
from trackio.sqlite_storage import SQLiteStorage
values = []
for row in SQLiteStorage.get_logs("pure-transformer", "run"):
    time = datetime.datetime.fromisoformat(row.pop("timestamp")).timestamp()
    step = row.pop("step")
    values += [(step, name, value, time) for name, value in row.items()]
""",
}


def list_pins(name: str) -> set[str]:
    """Return the pins of a list in requirements/, with their markers."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return set(re.findall(r"^[a-z0-9]\S*==[^\\\n]*[^\\\s]", text, re.M))


def python_with_trackers() -> str:
    """Return a Python that has the packages of TRACKERS too. Skips the test where there is no package index."""
    folder = install_apart("trackers", list_pins("trackers") - list_pins("base"), make_environment)
    return str(folder / "bin" / "python")


def make_environment(folder: Path) -> list:
    """Make a virtual environment that sees .venv; return the options of uv that name it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / "base.pth").write_text(sysconfig.get_path("purelib"))
    return ["--python", folder / "bin" / "python"]


def start(python: str, name: str, run: Path, **more: str) -> subprocess.Popen:
    """Start the process of a tracker as the trainer does."""
    mode = "offline" if name == "wandb" else "disabled"
    env = environment(run.parent, {}, WANDB_MODE=mode, MAX_STEPS=40, RETRY_S=1) | more
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # a file limit would leave torn .pyc files
    command = [python, "-m", f"record.trackers.{name}_tracker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def read_values(python: str, name: str, run: Path) -> list[tuple[int, str, float, float]]:
    """Return all values that a tracker stored, by step and name."""
    if not (run / name).exists():
        return []
    if name == "wandb":
        return sorted(
            (row["step"], key, value, row["_timestamp"])
            for row in wandb_file.read_rows(run)
            for key, value in row.items()
            if "/" in key
        )
    code = f"import json\nrun = {str(run)!r}\n{READERS[name]}\nprint('\\n' + json.dumps(values))"
    output = subprocess.check_output([python, "-c", code], text=True)
    return sorted(map(tuple, json.loads(output.splitlines()[-1])))


def find_process(lock: Path) -> int:
    """Return the process that holds a lock file open; 0 without one."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == str(lock):
                return int(descriptor.parts[2])
        except OSError:
            continue
    return 0
