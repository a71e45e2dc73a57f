"""Runs that are killed and go on equal runs that were left alone, to the bit."""

import json
import signal
import subprocess
import sys

import pytest

from tests.running import (
    ROOT,
    environment,
    events,
    losses,
    same,
    saved_steps,
    slow_steps,
    tensors,
    train,
    wait_for,
)

CHANGING = (".lock", "train.log", "STATUS.json")  # files of a run that each start writes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("undisturbed")
    out = train(environment(folder, data, SAVE_EVERY=8, EVAL_EVERY=12, KEEP_LAST=9))
    assert "step=40/40" in out
    assert "bits per byte" in out
    return folder / "run"


@pytest.mark.fault(4)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, data, undisturbed, number):
    env = environment(tmp_path, data, KEEP_LAST=9, EVAL_EVERY=12)
    run = tmp_path / "run"
    process = subprocess.Popen(
        slow_steps(0.1), env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    wait_for(run / "metrics.jsonl", '"step": 3,')
    for _ in range(2):  # a terminal and the launcher both pass it on: twice at once is once
        process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    asked = "Ctrl-C or make stop" if number == signal.SIGINT else number.name
    assert f"stopped by {asked} after step" in out
    assert "the same command to resume" in out
    state = json.loads((run / "STATUS.json").read_text())
    assert (state["phase"], state["exit_code"]) == ("stopped", 75)
    step = state["step"]
    assert (run / "checkpoints" / f"step_{step:07d}").is_dir()
    assert f"resumed from step_{step:07d}" in train(env)
    assert losses(run) == losses(undisturbed)
    assert same(tensors(run, 40), tensors(undisturbed, 40))


@pytest.mark.slow
@pytest.mark.fault(6)
def test_a_signal_in_an_evaluation_stops_there_and_the_evaluation_is_made_up_for(
    tmp_path, data, undisturbed
):
    env = environment(tmp_path, data, KEEP_LAST=9, EVAL_EVERY=12)
    run = tmp_path / "run"
    told = (
        "import os, signal; from train.evaluate import validation as evaluate; from train import main; f = evaluate.Evaluator.padded\n"
        "def padded(*a):\n    os.kill(os.getpid(), signal.SIGTERM); return f(*a)\n"
        "evaluate.Evaluator.padded = padded; raise SystemExit(main.main())"
    )
    for _ in range(2):  # the second time nothing is trained, and nothing lost
        out = train(env, command=[sys.executable, "-c", told], code=75)
        assert "stopped by SIGTERM after step 12/40" in out
        assert saved_steps(run) == [12]
    train(env)
    assert [r["step"] for r in events(run, "eval")] == [12, 24, 36, 40]
    assert [r["step"] for r in events(run, "signal")] == [12, 12]
    assert losses(run) == losses(undisturbed)


@pytest.mark.slow
def test_a_last_step_that_lies_behind_is_said_and_nothing_is_done(tmp_path, data):
    env = environment(tmp_path, data)
    run = tmp_path / "run"
    train(env | {"MAX_STEPS": "10"})
    status = run / "STATUS.json"
    files = [path for path in run.glob("*.*") if path.name not in CHANGING]
    assert {"metrics.jsonl", "config.json", "tokenizer.json"} <= {path.name for path in files}
    before = [path.read_bytes() for path in files]
    for text in (status.read_bytes(), b'{"phase": "crashed", "step": 10}'):
        status.write_bytes(text)
        out = train(env | {"MAX_STEPS": "5"})
        assert "is already at step 10, past MAX_STEPS=5" in out
        assert "MAX_STEPS=20" in out
        assert "bits per byte" not in out
        assert status.read_bytes() == text
    assert [path.read_bytes() for path in files] == before


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


def test_a_run_without_checkpoints_cannot_be_trained_further(tmp_path, data):
    env = environment(tmp_path, data, SAVE_EVERY="0", MAX_STEPS=2)
    out = train(env, command=[sys.executable, "-c", TO_THE_END, str(tmp_path / "run")])
    assert "held to the end: True" in out
    assert saved_steps(tmp_path / "run") == []
    record = tmp_path / "run" / "metrics.jsonl"
    before = record.read_bytes()
    out = train(env)
    assert record.read_bytes() == before
    assert "run run is done: 2 of 2 steps" in out
    assert "train another" in out
    assert "train it further" not in out


@pytest.mark.slow
def test_an_attempt_that_ends_before_training_keeps_what_the_last_one_reached(tmp_path, data):
    env = environment(tmp_path, data, MAX_STEPS=4)
    path = tmp_path / "run" / "STATUS.json"
    train(env)
    done = json.loads(path.read_text())
    train(env | {"MAX_STEPS": "6", "N_EMBD": "64"}, code=64)
    assert json.loads(path.read_text()) == done  # refused before anything was touched
    told = (
        "import os, signal; from train import main; from train.data import prepare\n"
        "prepare.open_sources = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "raise SystemExit(main.main())"
    )
    for changes, command, phase, code in (
        ({"DATA_DIR": str(tmp_path / "nowhere")}, None, "refused", 78),
        ({}, [sys.executable, "-c", told], "stopped", 75),
    ):
        train(env | {"MAX_STEPS": "6"} | changes, command=command, code=code)
        state = json.loads(path.read_text())
        assert (state["phase"], state["exit_code"]) == (phase, code)
        assert (state["step"], state["last_step"]) == (4, 6)
        assert state["loss"] == done["loss"]


@pytest.mark.fault(31)
def test_a_frozen_setting_is_refused_by_name_and_a_tracked_one_recorded(tmp_path, data):
    env = environment(tmp_path, data, MAX_STEPS=4)
    train(env)
    out = train(env | {"MAX_STEPS": "6", "N_EMBD": "64", "SEED": "5"}, code=64)
    assert "N_EMBD=64: The run was started with N_EMBD=32" in out
    assert "SEED=5" in out
    assert "RUN_NAME" in out
    out = train(env | {"MAX_STEPS": "6", "LEARNING_RATE": "1e-3"})
    assert "changed since then: LEARNING_RATE=0.001, was 0.003" in out
    assert events(tmp_path / "run", "resume")[-1]["changes"]["LEARNING_RATE"] == [0.003, 0.001]
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["settings"]["LEARNING_RATE"] == 0.001
    assert stored["attempts"][-1]["changes"]


@pytest.mark.slow
@pytest.mark.fault(13, 15)
def test_flipped_bits_are_found_and_the_checkpoint_before_is_taken(tmp_path, data):
    env = environment(tmp_path, data, MAX_STEPS=8, SAVE_EVERY=4)
    train(env)
    run = tmp_path / "run"
    path = run / "checkpoints" / "step_0000008" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)
    out = train(env | {"MAX_STEPS": "10"})
    assert (
        "step_0000008: __0_0.distcp is damaged (its hash differs); falling back to step_0000004"
        in out
    )
    assert "step_0000008 was set aside" in out
    assert len(list((run / "checkpoints").glob(".damaged-*"))) == 1
    for manifest in (run / "checkpoints").glob("step_*/MANIFEST.json"):
        manifest.write_text("{}")
    out = train(env | {"MAX_STEPS": "12"}, code=78)
    assert "no valid checkpoint" in out
    assert "3 found" in out
