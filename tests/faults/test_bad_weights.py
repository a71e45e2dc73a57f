"""Weights that are no number: the run goes back to its last checkpoint, and ends where that does not help."""

import json
import sys

import pytest

from tests.running import environment, events, losses, train

POISON = """
import sys, time
from train import assemble; from train.data import batch; from train.checkpoint import find; from train import main
read = find.verify
find.verify = lambda folder: (time.sleep(seconds), read(folder))[1]  # a large one on a slow disk
build, batch_of, times, seconds = assemble.build, batch.Loader.batch, int(sys.argv[1]), float(sys.argv[2])

def poisoned(self, step, gaps=()):
    global times
    if step == 6 and times:
        times -= 1
        main.model.embed_tokens.weight.data[:] = float("nan")
    return batch_of(self, step, gaps)

def remembered(*args):
    main.model = build(*args)
    return main.model

batch.Loader.batch, assemble.build = poisoned, remembered
sys.exit(main.main())
"""


@pytest.mark.fault(16)
def test_weights_that_are_nan_are_those_of_the_last_checkpoint_again(tmp_path, data):
    env = environment(tmp_path, data, SAVE_EVERY=4, MAX_STEPS=12, TRAIN_TIMEOUT_S=12)
    out = train(env, command=[sys.executable, "-c", POISON, "1", "7"])
    assert "step 7: loss=nan" in out
    assert "the step is skipped" in out
    assert "Traceback" not in out
    assert "python-stdlib:epoch 0:train_0000" in out
    assert "went back to step_0000004" in out
    run = tmp_path / "run"
    fault = events(run, "skip")[0]
    assert fault["step"] == 7
    assert fault["loss"] is None
    assert [r["samples"] for r in events(run, "skip")] == [[96, 111], [112, 127], [128, 143]]
    (back,) = events(run, "rollback")
    # Steps 5 and 6, and the three that were skipped.
    assert (back["step"], back["from"], back["passed_over"]) == (4, 6, 5 * 16)
    assert list(losses(run)) == list(range(1, 13))


@pytest.mark.slow
def test_a_run_that_goes_astray_again_and_again_ends_with_a_code_that_nobody_retries(
    tmp_path, data
):
    env = environment(tmp_path, data, SAVE_EVERY=4, MAX_STEPS=12, MAX_ROLLBACKS=2)
    out = train(env, command=[sys.executable, "-c", POISON, "99", "0"], code=70)
    assert "going back 2 times did not help. Lower LEARNING_RATE" in out
    assert "Traceback" not in out
    assert json.loads((tmp_path / "run" / "STATUS.json").read_text())["phase"] == "crashed"
    out = train(
        environment(tmp_path, data, RUN_NAME="none", MAX_STEPS=12),
        command=[sys.executable, "-c", POISON, "99", "0"],
        code=70,
    )
    assert "there is no checkpoint to go back to" in out
