"""Checkpoints that cannot be written for a while: said, tried again, and training goes on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from record import metrics as record_reader
from tests.faults.conftest import STEPS
from tests.faults.inject import Fault, faulty
from tests.running import environment, losses, train
from train.checkpoint import checkpoint


@pytest.mark.slow
@pytest.mark.fault(7, 35)
@pytest.mark.parametrize(
    ("do", "words"),
    [("fail", "injected"), ("no room", "[Errno 28] No space left on device")],
    ids=["fails", "no room"],
)
def test_a_save_that_fails_beside_training_is_said_and_tried_once_more(
    tmp_path: Path, data: dict[str, str], alone: Path, do: str, words: str
) -> None:
    out = train(
        faulty(
            environment(tmp_path, data, **STEPS),
            tmp_path,
            Fault("commit", do),
            Fault("step", "wait for the save", step=9),
        )
    )
    run = tmp_path / "run"
    said = f"checkpoint failed: {run}/checkpoints/step_0000008: could not be written on rank 0: {words}"
    assert said in out and "it is tried again now" in out
    saved = [
        r["step"]
        for r in record_reader.read_records(run / "metrics.jsonl")
        if r["event"] == "checkpoint"
    ]
    assert saved == [
        10,
        16,
        24,
    ]  # heard of behind step 9, and tried behind the one that begins then
    assert "GiB free" in out and "KEEP_LAST" in out
    assert not list((run / "checkpoints").glob("*tmp*"))
    for step in saved:
        checkpoint.read_manifest(checkpoint.folder_of(run / "checkpoints", step))
    assert losses(run) == losses(alone)


@pytest.mark.slow
@pytest.mark.fault(7)
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a small disk"
)
def test_a_disk_that_fills_up_on_the_way_ends_nothing(tmp_path: Path, data: dict[str, str]) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=False
    ).returncode:
        pytest.skip("this machine lets nobody mount")
    script = (
        "import sys; from pathlib import Path; from train import loop; from train import main; from record import status; f = loop.lr_at\n"
        "status.BEAT_S = 0; filler = Path(sys.argv[1]) / 'filler'\n"
        "def fill(step, c):\n"
        "    if 6 <= step < 11 or step > 11 and sys.argv[2] == 'full':\n"
        "        with open(filler, 'ab', buffering=0) as file:  # again: a save that failed gave its room back\n"
        "            try:\n                while file.write(bytes(4096)): pass\n"
        "            except OSError: pass\n"
        "    if step == 11 and sys.argv[2] == 'freed': filler.unlink()\n"
        "    return f(step, c)\n"
        "loop.lr_at = fill; sys.exit(main.main())"
    )
    try:
        for name, code in (("freed", 0), ("full", 78)):
            env = environment(
                tmp_path, data, RUNS_DIR=small, RUN_NAME=name, SAVE_EVERY=4, MAX_STEPS=16
            )
            out = train(env, command=[sys.executable, "-c", script, str(small), name], code=code)
            assert (
                "checkpoint failed" in out
                and "Traceback" not in out
                and not list(small.rglob("*tmp*"))
            )
            assert out.count("STATUS.json: cannot be written (No space left on device)") == 1
            steps = [
                r["step"]
                for r in record_reader.read_records(small / name / "metrics.jsonl")
                if r["event"] == "step"
            ]
            assert (
                steps == list(range(1, 17 if name == "freed" else len(steps) + 1))
                and len(steps) >= 5
            )
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.slow
@pytest.mark.fault(7)
def test_a_save_that_fails_on_the_way_is_tried_again_and_does_not_end_the_run(
    tmp_path: Path, data: dict[str, str]
) -> None:
    script = (
        "import sys, time; from train.checkpoint import checkpoint; from train import loop; from train import main\n"
        "f, rate, calls = checkpoint.check_space, loop.lr_at, []\n"
        "def slowly(*a):\n    time.sleep(0.5 * (len(calls) == 3)); return rate(*a)  # until it is tried again\n"
        "loop.lr_at = slowly\n"
        "def full(root, need):\n    calls.append(1)\n"
        "    if len(calls) == 3: raise checkpoint.CheckpointError('disk full')\n"
        "checkpoint.check_space = full; sys.exit(main.main())"
    )
    env = environment(tmp_path, data, SAVE_EVERY=8, MAX_STEPS=40, KEEP_LAST=9)
    out = train(env, command=[sys.executable, "-c", script])
    assert "checkpoint failed" in out and "disk full" in out and "it is tried again now" in out
    saved = [
        int(p.name.removeprefix("step_")) for p in (tmp_path / "run" / "checkpoints").iterdir()
    ]
    assert (
        {8, 24, 32, 40} < set(saved) and 16 not in saved and any(16 < step < 24 for step in saved)
    )
