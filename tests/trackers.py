"""Trackers in tests: a Python that has their packages, and what they stored, read back with the packages.

python = python_with_trackers()                    .venv with requirements/trackers.txt on top, cached in /tmp
mirror(python, run, TRACKERS="trackio")            sends the record of a run, as `make mirror` does
read_values(python, "trackio", run)                [(step, name, value, time), ...]
"""

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests import wandb_file
from tests.extra_packages import install_apart
from tests.running import ROOT, environment, train

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


def mirror(python: str, run: Path, code: int = 0, **settings: object) -> str:
    """Send a run of 40 steps to its trackers, and return what was printed."""
    env = environment(run.parent, {}, MAX_STEPS=40, **settings)
    return train(env, command=[python, "-m", "train.hooks.trackers"], code=code)


def read_values(python: str, name: str, run: Path) -> list[tuple[int, str, float, float]]:
    """Return all values that a tracker stored, by step and name."""
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
