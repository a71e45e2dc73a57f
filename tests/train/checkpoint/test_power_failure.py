"""Real power failures: a file system in a file, copied while the trainer is stopped, has what reached the disk."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from record.metrics import read_records
from tests.conftest import make_data
from tests.running import ROOT, environment, losses, train, wait_until
from train.checkpoint import find

needs_loop_device = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("mkfs.ext4") is None,
    reason="needs root and mkfs.ext4, to mount a file system that is in a file",
)


@contextlib.contextmanager
def mounted(image, folder):
    """Mount an image. The kernel flushes nothing by itself for five minutes."""
    folder.mkdir()
    command = ["mount", "-o", "loop,commit=300", image, folder]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("no loop device can be mounted here, as in most containers")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def claimed(metrics):
    """The newest checkpoint that the record knows."""
    records = read_records(metrics) if metrics.exists() else []
    return max((r["step"] for r in records if r["event"] == "checkpoint"), default=0)


@pytest.mark.slow
@pytest.mark.fault(2)
@needs_loop_device
def test_a_run_goes_on_to_the_bit_after_a_power_failure(tmp_path):
    data = make_data(tmp_path / "data")
    settings = {"MAX_STEPS": 60, "SAVE_EVERY": 2}
    train(environment(tmp_path, data, **settings))
    image = tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(2**27)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)

    with mounted(image, tmp_path / "live") as live:
        env = environment(tmp_path, data, **settings) | {"RUNS_DIR": str(live)}
        command = [sys.executable, "-m", "train.main"]
        metrics = live / "run" / "metrics.jsonl"
        trainer = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)
        try:
            for number in range(3):
                wait_until(lambda n=number: claimed(metrics) > 12 * n)
                time.sleep(0.02 * number)
                os.killpg(trainer.pid, signal.SIGSTOP)
                shutil.copy(image, tmp_path / f"{number}.img")
                shutil.copy(metrics, tmp_path / f"{number}.jsonl")
                os.killpg(trainer.pid, signal.SIGCONT)
            assert trainer.wait(240) == 0
        finally:
            trainer.kill()

    for number in range(3):
        with mounted(tmp_path / f"{number}.img", tmp_path / str(number)) as crashed:
            found = find.find_latest(crashed / "run" / "checkpoints")
            assert found[1]["step"] >= claimed(tmp_path / f"{number}.jsonl")
            train(env | {"RUNS_DIR": str(crashed)})
            assert losses(crashed / "run") == losses(tmp_path / "run")
