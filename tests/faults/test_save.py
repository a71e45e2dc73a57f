"""Checkpoints that cannot be written for a while: said, tried again, and training goes on."""

import sys

import pytest

from tests.faults.conftest import STEPS
from tests.faults.inject import Fault, faulty
from tests.running import environment, events, losses, train
from tests.small_disk import needs_mount, small_disk
from train.checkpoint import find, manifest


@pytest.mark.slow
@pytest.mark.fault(7, 35)
@pytest.mark.parametrize(
    ("do", "words"),
    [("fail", "injected"), ("no room", "[Errno 28] No space left on device")],
    ids=["fails", "no room"],
)
def test_a_save_that_fails_beside_training_is_said_and_tried_once_more(
    tmp_path, data, alone, do, words
):
    out = train(
        faulty(
            environment(tmp_path, data, **STEPS),
            tmp_path,
            Fault("commit", do),
            Fault("step", "wait for the save", step=9),
        )
    )
    run = tmp_path / "run"
    said = f"checkpoint failed: {run}/checkpoints/step_0000008: could not write it: {words}"
    assert said in out
    assert "saving is tried again now" in out
    saved = [r["step"] for r in events(run, "checkpoint")]
    assert saved == [10, 16, 24]  # heard of after step 9, and tried after the next
    assert "GiB free" in out
    assert "KEEP_LAST" in out
    assert not list((run / "checkpoints").glob("*tmp*"))
    for step in saved:
        manifest.verify(find.folder_of(run / "checkpoints", step))
    assert losses(run) == losses(alone)


@pytest.mark.slow
@pytest.mark.fault(7)
@needs_mount
def test_a_disk_that_fills_up_on_the_way_ends_nothing(tmp_path, data):
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
    with small_disk(tmp_path / "small", "8m") as small:
        for name, code in (("freed", 0), ("full", 78)):
            env = environment(
                tmp_path, data, RUNS_DIR=small, RUN_NAME=name, SAVE_EVERY=4, MAX_STEPS=16
            )
            out = train(env, command=[sys.executable, "-c", script, str(small), name], code=code)
            assert "checkpoint failed" in out
            assert "Traceback" not in out
            assert not list(small.rglob("*tmp*"))
            assert out.count("STATUS.json: cannot be written (No space left on device)") == 1
            steps = [r["step"] for r in events(small / name, "step")]
            assert len(steps) == 16 if name == "freed" else len(steps) >= 5
            assert steps == list(range(1, len(steps) + 1))
