"""Processes that are killed or told to stop, one or all of them: the run goes on as if nothing had happened."""

import json
import os
import signal
import subprocess
import time

import pytest

from bench.certify.strike import find_processes
from tests.faults.inject import Fault
from tests.running import wait_for, wait_until

SAVED = [Fault("step", "wait for the save", step=step, every=True) for step in (13, 17)]


@pytest.mark.slow
@pytest.mark.fault(1, 2, 3)
def test_whatever_is_killed_the_launcher_starts_again_and_nothing_is_lost(trial, pair):
    out = trial.train(
        Fault("numbers", "kill", step=5, rank=1),  # in the middle of a step
        Fault("commit", "kill", rank=0),  # files are written, the manifest is not
        Fault("numbers", "kill the parent", step=13, rank=0),  # torchrun itself
        # Behind the rename, before old ones go: the save is quicker than the step, or is not.
        Fault("committed", "kill", rank=0, step=16),
        Fault("committed", "kill", rank=0, step=17),
        *SAVED,
        NPROC=2,
        MAX_RESTARTS=3,
    )
    assert out.count("starting again in") == 4 and "last checkpoint: step 8" in out
    assert trial.losses == pair.losses and trial.has_tensors_of(pair, 24)
    assert [resumed["step"] for resumed in trial.events("resume")] == [8, 16]
    assert trial.saved == [8, 16, 24]
    trial.wait_until_gone()


@pytest.mark.slow
@pytest.mark.fault(3)
def test_a_torchrun_that_is_killed_while_its_processes_start_leaves_none(trial):
    with open(os.devnull, "w") as nothing:  # no pipe that they leave
        env = trial.env(Fault("start", "kill the parent", rank=1), NPROC=2)
        command = trial.command({"NPROC": 2})
        assert subprocess.run(command, env=env, stdout=nothing, stderr=nothing).returncode == 137
    trial.wait_until_gone(200)  # they hear of it when they have imported what they need


@pytest.mark.slow
@pytest.mark.fault(5)
def test_a_save_that_is_not_given_the_time_leaves_the_one_before_and_the_next_start_says_so(
    trial, pair
):
    trial.settings |= {"SAVE_EVERY": 4, "GRACE_PERIOD_S": 63, "NPROC": 2}
    process = trial.start(
        Fault("commit", "sleep", n=1, value=4),
        Fault("step", "sleep", step=6, value=6),
        Fault("step", "sleep", step=7, value=1),
        Fault("commit", "sleep", n=2, value=30),
    )
    wait_for(trial.run / "metrics.jsonl", '"step": 6,')
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode in (1, 143), out
    assert [path.name for path in trial.checkpoints.glob("step_???????")] == ["step_0000004"]
    trial.wait_until_gone()
    out = trial.train()
    assert "a step and a save took" in out and "GRACE_PERIOD_S=63 leaves 3 s" in out
    assert "resumed from step_0000004" in out and trial.losses == pair.losses
    assert not list(trial.checkpoints.glob("*tmp*"))


@pytest.mark.slow
@pytest.mark.fault(3)
def test_a_stopped_trainer_saves_and_ends_with_its_launcher(trial):
    process = trial.start(Fault("step", "until told", step=6), NPROC=1)
    wait_for(trial.run / "metrics.jsonl", '"step": 5,')
    trainers = [pid for pid, _ in find_processes(trial.folder) if pid != process.pid]
    for pid in trainers:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.communicate()
    trial.wait_until_gone()
    assert trial.saved[-1] == 6


@pytest.mark.fault(6)
@pytest.mark.parametrize(
    ("fault", "saved"),
    [
        (Fault("rehearsal", "term"), None),
        (Fault("resuming", "term"), None),
        (Fault("forward", "term", step=3, n=2), 4),
    ],
    ids=["at the rehearsal, where it compiles", "at load", "in accumulation"],
)
def test_told_to_stop_it_does_so_at_once_wherever_it_is(trial, fault, saved):
    began = time.monotonic()
    out = trial.train(fault, code=75 if saved else 143)
    assert time.monotonic() - began < 60 and "Traceback" not in out
    when = f"after step {saved}/24 and saved" if saved else "stopped by SIGTERM before training"
    assert when in out
    assert trial.saved == ([saved] if saved else [])
    assert json.loads((trial.run / "STATUS.json").read_text())["phase"] == "stopped"


def test_a_process_is_found_by_the_folder_that_it_trains_in(tmp_path):
    sleeper = subprocess.Popen(["sleep", "60"], env=os.environ | {"RUNS_DIR": str(tmp_path)})
    try:
        wait_until(lambda: find_processes(tmp_path) == [(sleeper.pid, "sleep 60")], 5)
    finally:
        sleeper.kill()
        sleeper.wait()
