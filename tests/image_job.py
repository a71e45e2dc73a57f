"""The main job in an image that is unpacked in a folder, as a pod runs it: killed, stopped, resumed. For make image-test.

    python -m tests.image_job ROOT WORK REVISION VERSION

WORK/image.json is what the image declares.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import metrics as record_reader
from settings import ROOT

STEPS, KILLED_AT, STOPPED_AT, SAVE_EVERY = 120, 48, 80, 20
# One thread: several may add up in another order, and what is asked here is what a checkpoint holds.
SETTINGS = {
    "PRESET": "tiny",
    "RUNS_DIR": "/volume/runs",
    "DATA_DIR": "/volume/data",
    "MAX_STEPS": STEPS,
    "SAVE_EVERY": SAVE_EVERY,
    "EVAL_EVERY": 0,
    "EVAL_TOKENS": 1024,
    "LOG_EVERY": 10,
    "OMP_NUM_THREADS": 1,
}
RIGHTS = """id -u; id -g; grep -E "^(CapEff|CapBnd|NoNewPrivs)" /proc/self/status | tr -s "\\t" " "
for folder in / /app /app/train /opt/venv /etc /usr /root /var/tmp; do
  touch "$folder/probe" 2>/dev/null && echo "can write to $folder"
done
touch /tmp/probe /dev/shm/probe /volume/probe && rm /volume/probe && echo "can write to its own" """
EXPECTED_RIGHTS = """1000
1000
CapEff: 0000000000000000
CapBnd: 0000000000000000
NoNewPrivs: 1
can write to its own
"""


def check_declared(config: dict[str, Any], revision: str, version: str) -> None:
    """Check how the image says that it is to be run."""
    labels = config["Labels"]
    expected = {
        "title": "pure-transformer",
        "licenses": "MIT",
        "revision": revision,
        "version": version,
    }
    for name, value in expected.items():
        assert labels[f"org.opencontainers.image.{name}"] == value, labels
    assert "torch=cpu" in labels["pure-transformer.built-with"]
    assert config["User"] == "1000:1000" and config["WorkingDir"] == "/app", config
    assert config["Entrypoint"] == ["tini", "--"], config
    assert config["Cmd"] == ["/opt/venv/bin/python", "-m", "scripts.train"], config
    names = {line.split("=")[0] for line in config["Env"]}
    assert "VENV=/opt/venv" in config["Env"] and "NVIDIA_VISIBLE_DEVICES" not in names
    leaked = [
        name for name in names if re.search("PIP_|SSL_|PROXY|KEY|TOKEN|SECRET|PASSWORD", name)
    ]
    assert not leaked, f"the image keeps {leaked} of its build"


def check_files(root: Path, revision: str) -> None:
    """Nothing but this commit's files is in it, and no module is left out."""
    assert (root / "app/REVISION").read_text() == f"{revision}\n"
    found = {
        str(path.relative_to(root / "app")) for path in (root / "app").rglob("*") if path.is_file()
    }
    inside = {name for name in found if not name.endswith(".pyc")} - {"REVISION"}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = set(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
            "\n"
        )
    )
    assert inside <= tracked, f"git does not know {inside - tracked}"
    rooms = r"(settings|record|hardware|train|finetune|analysis)/.*\.(py|toml)"
    missing = {name for name in tracked - inside if re.fullmatch(rooms, name)}
    assert not missing, f".dockerignore leaves out {missing}"
    assert not [*(root / "tmp").iterdir(), *(root / "mnt").iterdir()], "files in /tmp or /mnt"


class Pod:
    """A pod's process. What it prints goes to a console."""

    def __init__(self, root: Path, work: Path, config: dict[str, Any], *command: str):
        self.pid_file = work / "pid"
        self.pid_file.unlink(missing_ok=True)
        environment = [*config["Env"], *(f"{name}={value}" for name, value in SETTINGS.items())]
        spaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
        pod = [
            "bash",
            "scripts/image_pod.sh",
            str(root),
            str(work / "volume"),
            str(self.pid_file),
            "/app",
        ]
        command = command or (*config["Entrypoint"], *config["Cmd"])
        self.console = work / "console"
        with open(self.console, "a") as console:
            words = [*spaces, *pod, *environment, *command]
            self.process = subprocess.Popen(
                words, cwd=ROOT, stdout=console, stderr=subprocess.STDOUT
            )

    def signal_at(self, step: int, record: Path, number: signal.Signals) -> None:
        """Send a signal once the record has a step."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                if re.search(rf'"event": "step".*"step": {step},', record.read_text()):
                    break
            assert self.process.poll() is None, self.console.read_text()
            time.sleep(0.1)
        os.kill(int(self.pid_file.read_text()), number)

    def ends(self, *codes: int) -> None:
        code = self.process.wait()
        assert code in codes, f"{self.console.read_text()}\nended with {code}, not {codes}"


def check_run(run: Path, revision: str, console: str) -> str:
    """Three attempts: killed, stopped, done. What they computed twice they computed alike."""
    records = list(record_reader.read_records(run / "metrics.jsonl"))
    begins = [r["step"] for r in records if r["event"] in ("start", "resume")]
    assert len(begins) == 3 and begins[1] == KILLED_AT // SAVE_EVERY * SAVE_EVERY, begins
    losses: dict[int, set[float]] = {}
    repeated = 0
    for record in records:
        if record["event"] == "step":
            repeated += record["step"] in losses
            losses.setdefault(record["step"], set()).add(record["loss"])
    assert sorted(losses) == list(range(1, STEPS + 1)), "steps are missing"
    assert repeated >= KILLED_AT - begins[1], "no step was computed twice"
    assert all(len(values) == 1 for values in losses.values()), "a resumed step differs"
    assert min(losses[STEPS]) < min(losses[1]) - 1.5, "it does not learn"
    assert [r["reason"] for r in records if r["event"] == "end"] == ["stopped", "done"]
    assert (run / "checkpoints" / f"step_{STEPS:07d}").is_dir()
    assert (run / "plots/loss_curves.html").is_file()
    attempts = json.loads((run / "config.json").read_text())["attempts"]
    commit = revision.removesuffix("-dirty")
    assert [(a["git"], a["git_dirty"]) for a in attempts] == 3 * [(commit, commit != revision)]
    assert not re.search("^(setup: |Collecting |Downloading )", console, re.M), (
        "it installs something"
    )
    return f"image-test: resumed after steps {begins[1:]}; {repeated} steps came out the same to the bit"


def main(root: Path, work: Path, revision: str, version: str) -> None:
    config = json.loads((work / "image.json").read_text())["OCIv1"]["config"]
    check_declared(config, revision, version)
    check_files(root, revision)
    volume = work / "volume"
    volume.mkdir()
    os.chown(volume, 1000, 1000)
    pod = Pod(root, work, config, "tini", "--", "bash", "-c", RIGHTS)
    pod.ends(0)
    assert pod.console.read_text() == EXPECTED_RIGHTS, pod.console.read_text()
    run = volume / "runs/tiny"
    pod = Pod(root, work, config)
    pod.signal_at(KILLED_AT, run / "metrics.jsonl", signal.SIGKILL)
    pod.ends(137, 1, -signal.SIGKILL)  # unshare of Debian 12 fails to end by the signal itself
    print(f"image-test: killed at step {KILLED_AT}", flush=True)
    pod = Pod(root, work, config)
    pod.signal_at(STOPPED_AT, run / "metrics.jsonl", signal.SIGTERM)
    pod.ends(75)
    print(f"image-test: stopped at step {STOPPED_AT}", flush=True)
    pod = Pod(root, work, config)
    pod.ends(0)
    print(check_run(run, revision, pod.console.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
