"""Runs that are killed and go on equal runs that were left alone, to the bit."""

import contextlib
import json
import shutil
import signal
import sys

import pytest

from tests.faults.inject import Fault
from tests.faults.trial import Trial
from tests.running import train, wait_for

SETTINGS = {"EVAL_EVERY": 12, "KEEP_LAST": 9}


@pytest.fixture
def trial(tmp_path, data):
    with contextlib.closing(Trial(tmp_path, data)) as trial:
        yield trial


def status(trial):
    return json.loads((trial.run / "STATUS.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    trial = Trial(tmp_path_factory.mktemp("undisturbed"), data, SAVE_EVERY=8, **SETTINGS)
    out = trial.train()
    assert "step=40/40" in out and "bits per byte" in out
    return trial


@pytest.mark.fault(4)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(trial, undisturbed, number):
    trial.settings |= SETTINGS
    process = trial.start(Fault("step", "sleep", value=0.1, every=True))
    wait_for(trial.run / "metrics.jsonl", '"step": 3,')
    for _ in range(2):  # a terminal and the launcher both pass it on: twice at once is once
        process.send_signal(number)
    out = trial.end(process, 75)
    assert f"stopped by {number.name} after step" in out and "the same command to resume" in out
    state = status(trial)
    assert (state["phase"], state["exit_code"]) == ("stopped", 75)
    assert trial.saved == [state["step"]]
    assert f"resumed from step_{state['step']:07d}" in trial.train()
    assert trial.losses == undisturbed.losses and trial.has_tensors_of(undisturbed, 40)


def test_a_checkpoint_of_a_copy_of_a_run_is_refused_by_name(trial):
    trial.train(MAX_STEPS=4)
    copy = trial.run.with_name("copy")
    shutil.copytree(trial.run, copy)
    trial.train(RUN_NAME="copy", MAX_STEPS=8, LEARNING_RATE=0.004)  # a copy continues alone
    newest = trial.run / "checkpoints" / "step_0000008"
    shutil.copytree(copy / "checkpoints" / newest.name, newest)
    out = trial.train(MAX_STEPS=12, code=78)
    assert f"{newest}: is of a copy of this run, with LEARNING_RATE=0.004 (here " in out
    shutil.rmtree(newest)
    out = trial.train(MAX_STEPS=12, LEARNING_RATE=0.005)
    assert "resumed from step_0000004" in out and "changed since then: LEARNING_RATE=0.005" in out
    trial.train(MAX_STEPS=16, LEARNING_RATE=0.005)  # from a checkpoint of the second attempt


@pytest.mark.slow
def test_a_last_step_that_is_already_past_is_said_and_nothing_is_done(trial):
    trial.train(MAX_STEPS=10)
    names = ("metrics.jsonl", "config.json", "tokenizer.json")
    before = [(trial.run / name).read_bytes() for name in names]
    path = trial.run / "STATUS.json"
    for text in (path.read_bytes(), b'{"phase": "crashed", "step": 10}'):
        path.write_bytes(text)
        out = trial.train(MAX_STEPS=5)
        assert "is done: 10 of 5 steps" in out and "MAX_STEPS=20" in out
        assert "bits per byte" not in out
        assert path.read_bytes() == text
    assert [(trial.run / name).read_bytes() for name in names] == before


# Else `make status` would call it "starting" while it leaves.
TO_THE_END = """
import sys
from pathlib import Path
from record import locks, run_paths
from train import main
paths = run_paths.RunPaths(Path(sys.argv[1]))
main.leave = lambda: print("held to the end:", locks.is_held(paths))
sys.exit(main.main())
"""


def test_a_run_without_checkpoints_cannot_be_trained_further(trial):
    trial.settings |= {"SAVE_EVERY": 0, "MAX_STEPS": 2}
    command = [sys.executable, "-c", TO_THE_END, str(trial.run)]
    assert "held to the end: True" in train(trial.env(), command=command)
    assert trial.saved == []
    record = trial.run / "metrics.jsonl"
    before = record.read_bytes()
    out = trial.train()
    assert record.read_bytes() == before
    assert "run run is done: 2 of 2 steps" in out
    assert "train it further" not in out


@pytest.mark.slow
def test_an_attempt_that_ends_before_training_keeps_what_the_last_one_reached(trial):
    trial.train(MAX_STEPS=4)
    done = status(trial)
    trial.settings |= {"MAX_STEPS": 6}
    trial.train(N_EMBD=64, code=64)
    assert status(trial) == done  # refused before anything was touched
    for faults, settings, phase, code in (
        ([], {"DATA_DIR": trial.folder / "nowhere"}, "refused", 78),
        ([Fault("resuming", "term")], {}, "stopped", 143),
    ):
        trial.train(*faults, code=code, **settings)
        state = status(trial)
        assert (state["phase"], state["exit_code"]) == (phase, code)
        assert (state["step"], state["last_step"], state["loss"]) == (4, 6, done["loss"])


@pytest.mark.fault(31)
def test_a_frozen_setting_is_refused_by_name_and_a_tracked_one_recorded(trial):
    trial.train(MAX_STEPS=4)
    trial.settings |= {"MAX_STEPS": 6}
    out = trial.train(N_EMBD=64, SEED=5, code=64)
    assert "N_EMBD=64: The run was started with N_EMBD=32" in out
    assert "SEED=5" in out and "RUN_NAME" in out
    out = trial.train(LEARNING_RATE="1e-3")
    assert "changed since then: LEARNING_RATE=0.001, was 0.003" in out
    assert trial.events("resume")[-1]["changes"]["LEARNING_RATE"] == [0.003, 0.001]
    stored = json.loads((trial.run / "config.json").read_text())
    assert stored["settings"]["LEARNING_RATE"] == 0.001
    assert stored["attempts"][-1]["changes"]
