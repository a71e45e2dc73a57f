"""Real power failures: a file system in a file, copied while the trainer is stopped, has what reached the disk."""

import contextlib
import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.faults.trial import Trial
from tests.running import wait_until
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


def reported(trial):
    """The newest checkpoint that the record knows."""
    saved = trial.events("checkpoint") if trial.steps else []
    return max((record["step"] for record in saved), default=0)


@pytest.mark.slow
@pytest.mark.fault(2)
@needs_loop_device
def test_a_run_goes_on_to_the_bit_after_a_power_failure(tmp_path, data):
    settings = {"MAX_STEPS": 60, "SAVE_EVERY": 2}
    alone = Trial(tmp_path / "alone", data, **settings)
    alone.train()
    image = tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(2**27)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)

    least = []
    with mounted(image, tmp_path / "live") as folder:
        live = Trial(folder, data, **settings)
        process = live.start()
        try:
            for number in range(3):
                wait_until(lambda n=number: reported(live) > 12 * n)
                time.sleep(0.02 * number)
                process.send_signal(signal.SIGSTOP)
                shutil.copy(image, tmp_path / f"{number}.img")
                least.append(reported(live))
                process.send_signal(signal.SIGCONT)
            live.end(process, 0)
        finally:
            live.close()

    for number, step in enumerate(least):
        with mounted(tmp_path / f"{number}.img", tmp_path / str(number)) as folder:
            crashed = Trial(folder, data, **settings)
            assert find.find_latest(crashed.checkpoints)[1]["step"] >= step
            crashed.train()
            assert crashed.losses == alone.losses
