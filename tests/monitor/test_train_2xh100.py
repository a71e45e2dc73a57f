"""scripts/train_2xh100.sh: what it refuses, and that the sampler is a process apart from training."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from settings.declare import ROOT

# Stands in for .venv/bin/python: answers about settings as the real one does, and writes down what else it is to run.
STUB = f"""#!/usr/bin/env bash
if [[ "$2 $3" == "settings.config get" ]]; then exec "{sys.executable}" "$@"; fi
if [[ "$2" == record.status ]]; then echo "pid 1 on here"; exit; fi
session=$(cut -d ' ' -f 6 /proc/$$/stat)
echo "session=$session PRESET=${{PRESET-}} NPROC=${{NPROC-}} $*" >> "$TOLD"
if [[ "$2" == monitor.gpu_sampler ]]; then echo "samples"; fi
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads sessions in /proc")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with no settings, and GPUS GPUs by nvidia-smi."""
    for folder in ("venv/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    executable(tmp_path / "venv/bin/python", STUB)
    executable(
        tmp_path / "bin/nvidia-smi",
        '#!/bin/sh\nfor i in $(seq $GPUS); do echo "GPU $i: H100"; done\n',
    )
    (tmp_path / "empty.env").touch()
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "VENV": str(tmp_path / "venv"),
        "GPUS": "2",
        "RUNS_DIR": str(tmp_path / "runs"),
        "ENV_FILE": str(tmp_path / "empty.env"),
        "PYTHONPATH": str(ROOT),
        "TOLD": str(tmp_path / "told"),
    }


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def train(env: dict[str, str], **values: str) -> tuple[int, str]:
    done = subprocess.run(
        [ROOT / "scripts/train_2xh100.sh"],
        env=env | values,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    return done.returncode, done.stdout


def told(env: dict[str, str], count: int) -> list[str]:
    """What was run, when that many things were."""
    deadline, path = time.monotonic() + 30, Path(env["TOLD"])
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return path.read_text().splitlines()


def test_the_preset_on_two_gpus_with_the_sampler_apart(env: dict[str, str], tmp_path: Path) -> None:
    code, out = train(env)
    assert code == 0, out
    folder = tmp_path / "runs" / "d16-2xh100"
    assert (
        f"into {folder}/gpu_metrics_*.csv; what it says is in {folder}/logs/gpu_sampler.log" in out
    )
    ran = told(env, 5)
    assert all("PRESET=d16-2xh100 NPROC=2 " in line for line in ran)
    sampler = next(line for line in ran if line.endswith("-m monitor.gpu_sampler --follow"))
    others = [line for line in ran if line != sampler]  # one after the other
    assert [line.split(" ", 3)[3] for line in others] == [
        "-m doctor.before_run",
        "-m train.data.prepare",
        "-m torch.distributed.run --standalone --max-restarts=0 --nproc-per-node=2 -m train.main",
        "-m analysis.plots",
    ]
    assert (
        len({line.split()[0] for line in others}) == 1
        and sampler.split()[0] != others[0].split()[0]
    )
    assert (folder / "logs" / "gpu_sampler.log").read_text().endswith("samples\n")


def test_what_the_user_sets_wins(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.env").write_text("PRESET=d24-2xh100\n")
    assert train(env, ENV_FILE=str(tmp_path / "mine.env"), RUN_NAME="mine")[0] == 0
    assert all("PRESET=d24-2xh100 NPROC=2 " in line for line in told(env, 4))
    assert (tmp_path / "runs" / "mine" / "logs" / "gpu_sampler.log").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"DEVICE": "cpu"},
            "NPROC=2 NODES=1 DEVICE=cpu says otherwise: leave those out, or use make train PRESET=d16",
        ),
        ({"NPROC": "1"}, "trains on 2 GPUs of one machine, and NPROC=1"),
        ({"NODES": "2", "MASTER_ADDR": "a"}, "NODES=2"),
        ({"NPROC": "two"}, "NPROC=two (environment): must be a whole number"),
    ],
    ids=str,
)
def test_what_is_not_two_gpus_of_one_machine_is_refused(
    env: dict[str, str], tmp_path: Path, values: dict[str, str], words: str
) -> None:
    code, out = train(env, **values)
    assert code == 64 and words in out
    assert not (tmp_path / "runs").exists() and not (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("gpus", "visible", "words"),
    [
        ("0", None, "none can be seen here"),
        ("1", None, "1 can be seen here"),
        ("8", "3", "1 can be seen here"),
    ],
)
def test_without_two_gpus_it_says_so(
    env: dict[str, str], tmp_path: Path, gpus: str, visible: str | None, words: str
) -> None:
    code, out = train(env, GPUS=gpus, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    assert code == 78 and f"train-2xh100 needs 2 GPUs, and {words}" in out and out.count("\n") == 1
    assert not (tmp_path / "runs").exists() and not (tmp_path / "told").exists()


def test_a_folder_that_cannot_be_written_is_for_training_to_complain_of(
    env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, out = train(env, RUNS_DIR=str(tmp_path / "file"))
    assert code == 78 and "cannot be written (Not a directory)" in out and "GPU sampler" not in out
