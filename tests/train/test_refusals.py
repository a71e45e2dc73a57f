"""What is wrong is said in one sentence before training, with the exit code that tells whether to retry."""

import fcntl
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.running import environment, train
from tests.small_disk import needs_mount, small_disk


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}, 64, ("DEVICE=cuda", "DEVICE=cpu")),
        ({"DATA_DIR": "/nowhere"}, 78, ("make data",)),
        (
            {"N_HEAD": "5", "GRAD_CLIP": "big"},
            64,
            ("Invalid settings:\n", "N_HEAD", "GRAD_CLIP=big"),
        ),
    ],
)
def test_what_cannot_be_is_named_with_what_to_do(tmp_path, data, settings, code, words):
    out = train(environment(tmp_path, data | settings), code=code)
    assert all(word in out for word in words)
    assert "Traceback" not in out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.fault(32)
def test_a_second_trainer_on_a_run_folder_is_turned_away(tmp_path, data):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as lock:
        lock.write("pid 4711 on elsewhere")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = train(environment(tmp_path, data), code=78)
    assert "another process trains this run (pid 4711 on elsewhere)" in out
    assert "RUN_NAME" in out
    train(environment(tmp_path, data, MAX_STEPS=2))


@pytest.mark.fault(8)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_unwritable_run_folder_is_named(data):
    script = (
        "import os, sys, train.main\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(train.main.main())"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        os.chmod(folder, 0o755)
        out = train(
            environment(Path(folder), data), command=[sys.executable, "-c", script], code=78
        )
    assert f"{folder}/run: cannot be written (Permission denied)" in out
    assert "RUNS_DIR" in out
    assert "Traceback" not in out


@pytest.mark.fault(7)
@needs_mount
def test_a_full_disk_is_said_before_training(tmp_path, data):
    with small_disk(tmp_path / "small", "300k") as small:
        out = train(environment(tmp_path, data, RUNS_DIR=small), code=78)
        assert "a checkpoint takes" in out
        assert "free; make room" in out
        assert "Traceback" not in out
        assert not (small / "run" / "metrics.jsonl").exists()
