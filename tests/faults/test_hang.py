"""Ranks that are slow or hang, clocks that are set, an evaluation that fails or never ends."""

import os
import re
import signal
import socket
import subprocess
import time

import pytest

from record import metrics as record_reader
from tests.faults.conftest import LAUNCH, STEPS
from tests.faults.inject import Fault, faulty, processes
from tests.running import ROOT, environment, events, losses, train, wait_for


@pytest.mark.slow
@pytest.mark.fault(18)
def test_a_slow_rank_is_named_with_its_host_and_how_slow_it_is(tmp_path, data, pair):
    env = environment(tmp_path, data, NPROC=2, **STEPS)
    out = train(
        faulty(env, tmp_path, Fault("step", "sleep", rank=1, value=0.2, every=True)), command=LAUNCH
    )
    (said,) = re.findall(
        r"straggler: rank (\d) on (\S+) takes ([0-9.]+) times as long as the others", out
    )
    assert said[:2] == ("1", socket.gethostname()) and float(said[2]) > 1.5
    (step,) = [
        r
        for r in record_reader.read_records(tmp_path / "run" / "metrics.jsonl")
        if "straggler" in r
    ]
    assert (
        step["step"] <= 50 and step["straggler"]["rank"] == 1 and step["straggler"]["own_s"] > 0.2
    )
    assert losses(tmp_path / "run") == losses(pair)


@pytest.mark.slow
@pytest.mark.fault(19)
@pytest.mark.parametrize("how", ["sleep", "sleep with the lock"])
def test_a_rank_that_hangs_is_shown_by_its_stack_and_the_run_starts_again(
    tmp_path, data, pair, how
):
    env = environment(tmp_path, data, NPROC=2, MAX_RESTARTS=1, TRAIN_TIMEOUT_S=16, **STEPS)
    saved = Fault("step", "wait for the save", step=11, every=True)  # the checkpoint of step 8
    out = train(
        faulty(env, tmp_path, saved, Fault("step", how, step=11, rank=1, value=10_000)),
        command=LAUNCH,
    )
    run, host = tmp_path / "run", socket.gethostname()
    stacks = {path.name: path.read_text() for path in run.glob("hang/attempt_*/rank_*.txt")}
    assert stacks.keys() == {"rank_0.txt", "rank_1.txt"}
    assert "train/loop.py" in stacks["rank_0.txt"] and "inject.py" in stacks["rank_1.txt"]
    assert f"rank=0 host={host}: no progress in step 11" in out
    (line,) = {
        line.split("HANGS: ")[1] for line in out.splitlines() if "the attempt before: HANGS" in line
    }
    assert line.startswith("rank 1") and re.search(r"train/loop\.py:\d+ in train", line)
    assert "starting again in" in out and "resumed from step_0000008" in out
    assert losses(run) == losses(pair)


@pytest.mark.slow
@pytest.mark.fault(44)
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_job_that_is_stopped_for_longer_than_a_step_may_take_goes_on(
    tmp_path, data, alone, pair, nproc
):
    """All its processes, at once: no step is lost, and none is made again."""
    env = environment(tmp_path, data, NPROC=nproc, TRAIN_TIMEOUT_S=10, **STEPS)
    slowly = faulty(env, tmp_path, Fault("step", "sleep", value=0.2, every=True))
    with open(tmp_path / "out", "w+") as out:
        job = subprocess.Popen(LAUNCH, env=slowly, cwd=ROOT, stdout=out, stderr=out)
        wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 6')
        pids = [pid for pid, _ in processes(tmp_path)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(20)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert job.wait(120) == 0, (tmp_path / "out").read_text()
    assert "no progress" not in (tmp_path / "out").read_text()
    assert losses(tmp_path / "run") == losses(pair if nproc == 2 else alone)
    assert [r["event"] for r in events(tmp_path / "run", "resume")] == []


@pytest.mark.slow
@pytest.mark.fault(20)
def test_a_clock_that_is_set_by_an_hour_changes_nothing(tmp_path, data, alone):
    env = environment(tmp_path, data, **STEPS)
    train(
        faulty(
            env,
            tmp_path,
            Fault("step", "set the clock", step=6, value=3600),
            Fault("step", "set the clock", step=14, value=-7200),
        )
    )
    run = tmp_path / "run"
    assert losses(run) == losses(alone)
    records = list(record_reader.read_records(run / "metrics.jsonl"))
    assert [r["step"] for r in records if r["event"] == "checkpoint"] == [8, 16, 24]
    assert all(0 < r["step_ms"] < 60_000 for r in records if r["event"] == "step")
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        f"step_{n:07d}" for n in (8, 16, 24)
    ]
    wall_s = records[-1]["mono_s"] - records[0]["mono_s"]
    assert all(
        seconds >= 0 for seconds in records[-1]["goodput"].values() if isinstance(seconds, float)
    )
    assert wall_s < 60


@pytest.mark.slow
@pytest.mark.fault(37)
def test_an_evaluation_that_fails_or_never_ends_costs_its_number_only(tmp_path, data, pair):
    env = environment(tmp_path, data, NPROC=2, EVAL_EVERY=6, EVAL_MINUTES=0.2, **STEPS)
    out = train(
        faulty(
            env,
            tmp_path,
            Fault("evaluation", "fail", step=6, rank=1),
            Fault("evaluation", "sleep", step=12, rank=0, value=10_000),
        ),
        command=LAUNCH,
    )
    run = tmp_path / "run"
    found = {
        r["step"]: r
        for r in record_reader.read_records(run / "metrics.jsonl")
        if r["event"] == "eval"
    }
    assert sorted(found) == [6, 12, 18, 24]
    assert [step for step, r in found.items() if r["val_loss"] is None] == [6, 12]
    assert (
        "rank 1: Injected: injected" in found[6]["error"]
        and "EVAL_MINUTES=0.2" in found[12]["error"]
    )
    assert out.count("failed, and training goes on") == 2
    assert losses(run) == losses(pair)
