"""Processes that are killed or told to stop, one or all of them: the run goes on as if nothing had happened."""

import contextlib
import json
import os
import signal
import subprocess
import time

import pytest

from record import metrics as record_reader
from tests.faults.conftest import LAUNCH, STEPS
from tests.faults.inject import Fault, faulty, processes
from tests.running import ROOT, environment, losses, same, tensors, train, wait_for
from train.checkpoint import find, manifest


def saved_before(*steps: int) -> list[Fault]:
    """Steps that wait for the checkpoint before them, which is written beside training."""
    return [Fault("step", "wait for the save", step=step, every=True) for step in steps]


def wait_until_none(folder, seconds=20):
    deadline = time.monotonic() + seconds
    while left := processes(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.fault(1, 2, 3)
def test_whatever_is_killed_the_launcher_starts_again_and_nothing_is_lost(tmp_path, data, pair):
    env = faulty(
        environment(tmp_path, data, NPROC=2, MAX_RESTARTS=3, **STEPS),
        tmp_path,
        Fault("numbers", "kill", step=5, rank=1),  # in the middle of a step
        Fault("commit", "kill", rank=0),  # files are written, the manifest is not
        Fault("numbers", "kill the parent", step=13, rank=0),  # torchrun itself
        Fault(
            "committed", "kill", rank=0, step=16
        ),  # behind the rename, before old ones go: the save
        Fault(
            "committed", "kill", rank=0, step=17
        ),  # is quicker than the step behind it, or is not
        *saved_before(13, 17),
    )
    out = train(env, command=LAUNCH)
    assert out.count("starting again in") == 4 and "last checkpoint: step 8" in out
    assert losses(tmp_path / "run") == losses(pair)
    assert same(tensors(tmp_path / "run", 24), tensors(pair, 24))
    resumed = [
        r["step"]
        for r in record_reader.read_records(tmp_path / "run" / "metrics.jsonl")
        if r["event"] == "resume"
    ]
    assert resumed == [8, 16]
    assert not list((tmp_path / "run" / "checkpoints").glob("*tmp*"))
    wait_until_none(tmp_path)


@pytest.mark.slow
@pytest.mark.fault(3)
def test_a_torchrun_that_is_killed_leaves_no_process_and_the_same_command_goes_on(
    tmp_path, data, pair
):
    env = environment(tmp_path, data, NPROC=2, **STEPS)
    train(
        faulty(
            env, tmp_path, Fault("numbers", "kill the parent", step=13, rank=1), *saved_before(13)
        ),
        command=LAUNCH,
        code=137,
    )
    wait_until_none(tmp_path)
    assert "resumed from step_0000008" in train(env, command=LAUNCH)
    assert losses(tmp_path / "run") == losses(pair)


@pytest.mark.slow
@pytest.mark.fault(3)
def test_a_torchrun_that_is_killed_while_its_processes_start_leaves_none(tmp_path, data):
    env = environment(tmp_path, data, NPROC=2, **STEPS)
    done = subprocess.run(
        LAUNCH,
        env=faulty(env, tmp_path, Fault("start", "kill the parent", rank=1)),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )  # no pipe that it leaves
    assert done.returncode == 137
    try:
        wait_until_none(tmp_path, 200)  # they hear of it when they have imported what they need
    finally:
        for pid, _ in processes(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.fault(4)
def test_a_launcher_that_is_told_to_stop_has_the_run_saved(tmp_path, data, pair):
    env = environment(tmp_path, data, NPROC=2, MAX_RESTARTS=3, **STEPS)
    slow = faulty(env, tmp_path, Fault("step", "sleep", value=1.0, every=True))
    process = subprocess.Popen(LAUNCH, env=slow, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    run = tmp_path / "run"
    wait_for(run / "metrics.jsonl", '"step": 3,')
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    state = json.loads((run / "STATUS.json").read_text())
    assert (state["phase"], state["exit_code"]) == ("stopped", 75)
    assert (
        manifest.verify(find.folder_of(run / "checkpoints", state["step"]))["step"] == state["step"]
    )
    wait_until_none(tmp_path)
    assert f"resumed from step_{state['step']:07d}" in train(env, command=LAUNCH)
    assert losses(run) == losses(pair)


@pytest.mark.slow
@pytest.mark.fault(5)
def test_a_save_that_is_not_given_the_time_leaves_the_one_before_and_the_next_start_says_so(
    tmp_path, data, pair
):
    settings = STEPS | {"SAVE_EVERY": 4, "GRACE_PERIOD_S": 63}
    env = environment(tmp_path, data, NPROC=2, **settings)
    slow = faulty(
        env,
        tmp_path,
        Fault("commit", "sleep", n=1, value=4),
        Fault("step", "sleep", step=6, value=6),
        Fault("step", "sleep", step=7, value=1),
        Fault("commit", "sleep", n=2, value=30),
    )
    process = subprocess.Popen(LAUNCH, env=slow, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    run = tmp_path / "run"
    wait_for(run / "metrics.jsonl", '"step": 6,')
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode in (1, 143), out
    assert [
        path.name for path in (run / "checkpoints").glob("step_*") if ".tmp" not in path.name
    ] == ["step_0000004"]
    wait_until_none(tmp_path)
    out = train(env, command=LAUNCH)
    assert "a step and a save took" in out and "GRACE_PERIOD_S=63 leaves 3 s" in out
    assert "resumed from step_0000004" in out and losses(run) == losses(pair)
    assert not list((run / "checkpoints").glob("*tmp*"))


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
def test_told_to_stop_it_does_so_at_once_wherever_it_is(tmp_path, data, fault, saved):
    began = time.monotonic()
    out = train(faulty(environment(tmp_path, data, **STEPS), tmp_path, fault), code=75)
    assert time.monotonic() - began < 60 and "Traceback" not in out
    run = tmp_path / "run"
    assert (
        f"after step {saved}/24 and saved" if saved else "stopped by SIGTERM before training"
    ) in out
    assert [path.name for path in (run / "checkpoints").iterdir()] == (
        [f"step_{saved:07d}"] if saved else []
    )
    assert json.loads((run / "STATUS.json").read_text())["phase"] == "stopped"


def test_a_process_is_found_by_the_folder_that_it_trains_in(tmp_path):
    sleeper = subprocess.Popen(["sleep", "60"], env=os.environ | {"RUNS_DIR": str(tmp_path)})
    try:
        deadline = time.monotonic() + 5
        while processes(tmp_path) != [(sleeper.pid, "sleep 60")]:
            assert time.monotonic() < deadline
    finally:
        sleeper.kill()
        sleeper.wait()
