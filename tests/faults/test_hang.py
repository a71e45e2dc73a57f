"""Ranks that are slow or hang, clocks that are set, an evaluation that fails or takes too long."""

import os
import re
import signal
import socket
import time

import pytest

from bench.certify.strike import find_processes
from tests.faults.inject import Fault
from tests.running import wait_for

HOST = socket.gethostname()


@pytest.mark.slow
@pytest.mark.fault(18)
@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("step", {"NPROC": 2, "PARALLEL": "ddp"}),
        ("forward", {"NPROC": 2, "PARALLEL": "fsdp"}),
        ("forward", {"NPROC": 4, "PARALLEL": "hsdp", "SHARD_RANKS": 2}),
    ],
)
def test_a_slow_rank_is_named_with_its_host_and_how_slow_it_is(trial, pair, where, settings):
    slowly = Fault(where, "sleep", rank=1, value=0.2, every=True)
    out = trial.train(slowly, **settings)
    line = r"straggler: rank (\d) on (\S+) takes ([0-9.]+) times as long as the others"
    ((rank, host, times),) = re.findall(line, out)
    assert (rank, host) == ("1", HOST) and float(times) > 1.5
    (slow,) = [step["straggler"] for step in trial.steps if "straggler" in step]
    assert slow["rank"] == 1 and slow["compute_s"] > 0.2
    if settings["PARALLEL"] == "ddp":
        assert trial.losses == pair.losses


@pytest.mark.slow
@pytest.mark.fault(19)
@pytest.mark.parametrize("how", ["sleep", "sleep with the lock"])
def test_a_rank_that_hangs_is_shown_by_its_stack_and_the_run_starts_again(trial, pair, how):
    out = trial.train(
        Fault("step", "wait for the save", step=11, every=True),  # the checkpoint of step 8
        Fault("step", how, step=11, rank=1, value=10_000),
        NPROC=2,
        MAX_RESTARTS=1,
        TRAIN_TIMEOUT_S=16,
    )
    stacks = {path.name: path.read_text() for path in trial.run.glob("hang/attempt_*/rank_*.txt")}
    assert stacks.keys() == {"rank_0.txt", "rank_1.txt"}
    assert "train/loop.py" in stacks["rank_0.txt"] and "inject.py" in stacks["rank_1.txt"]
    assert f"rank=0 host={HOST}: no progress in step 11" in out
    (line,) = set(re.findall(r"the attempt before: HANGS: (.*)", out))
    assert line.startswith("rank 1") and re.search(
        r"train/loop\.py:\d+ in (train|take_steps)", line
    )
    assert "starting again in" in out and "resumed from step_0000008" in out
    assert trial.losses == pair.losses


@pytest.mark.slow
@pytest.mark.fault(44)
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_job_that_is_stopped_for_longer_than_a_step_may_take_goes_on(trial, alone, pair, nproc):
    """All its processes, at once: no step is lost, and none is made again."""
    slowly = Fault("step", "sleep", value=0.2, every=True)
    job = trial.start(slowly, NPROC=nproc, TRAIN_TIMEOUT_S=10)
    wait_for(trial.run / "metrics.jsonl", '"step": 6')
    pids = [pid for pid, _ in find_processes(trial.folder)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(20)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert "no progress" not in trial.end(job, 0)
    assert trial.losses == (pair if nproc == 2 else alone).losses
    assert trial.events("resume") == []


@pytest.mark.slow
@pytest.mark.fault(20)
def test_a_clock_that_is_set_by_an_hour_changes_nothing(trial, alone):
    trial.train(
        Fault("step", "set the clock", step=6, value=3600),
        Fault("step", "set the clock", step=14, value=-7200),
    )
    assert trial.losses == alone.losses
    assert [saved["step"] for saved in trial.events("checkpoint")] == trial.saved == [8, 16, 24]
    assert all(0 < step["step_ms"] < 60_000 for step in trial.steps)
    (end,) = trial.events("end")
    assert 0 < end["mono_s"] - trial.events("start")[0]["mono_s"] < 60
    seconds = [value for value in end["goodput"].values() if isinstance(value, float)]
    assert all(value >= 0 for value in seconds)


@pytest.mark.slow
@pytest.mark.fault(37)
def test_an_evaluation_that_fails_or_takes_too_long_costs_its_number_only(trial, pair):
    out = trial.train(
        Fault("evaluation", "fail", step=6, rank=1),
        Fault("evaluation", "sleep", step=12, rank=0, value=13),
        NPROC=2,
        EVAL_EVERY=6,
        EVAL_MINUTES=0.2,
    )
    evaluations = {entry["step"]: entry for entry in trial.events("eval")}
    assert [step for step, entry in evaluations.items() if entry["val_loss"] is None] == [6, 12]
    assert sorted(evaluations) == [6, 12, 18, 24]
    assert "rank 1: Injected: injected" in evaluations[6]["error"]
    assert "EVAL_MINUTES=0.2" in evaluations[12]["error"]
    assert out.count("failed, and training continues") == 2
    assert trial.losses == pair.losses
