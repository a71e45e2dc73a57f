"""PROFILE=1: which steps are recorded, and a run's summary compared with another reading of the trace that it wrote."""

import gzip
import json
import sys

import pytest

from tests.running import environment, losses, train
from train.profile.time_shares import read_table


def total(events, *names):
    """Microseconds in events whose names begin so, without those inside of another such one."""
    sum_us = end = 0.0
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if e["name"].startswith(names) and e["ts"] + e["dur"] > end:
            end = e["ts"] + e["dur"]
            sum_us += e["dur"]
    return sum_us


def inside(events, others):
    return [e for e in events if any(o["ts"] <= e["ts"] < o["ts"] + o["dur"] for o in others)]


def by_durations(path):
    """Shares in percent of a trace of a CPU, from the durations of what is outermost: without self times."""
    trace = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    events = [e for e in trace if e.get("cat") in ("cpu_op", "user_annotation")]
    steps = [e for e in events if e["name"] == "train step"]
    events = inside([e for e in events if e not in steps], steps)
    assert [e["name"] for e in events].count("data wait") == len(steps) == 2
    products = ("aten::linear", "aten::mm", "aten::addmm")
    loss = ("_LinearCrossEntropy", "autograd::engine::evaluate_function: _LinearCrossEntropy")
    in_loss = inside(events, [e for e in events if e["name"].startswith(loss)])
    step_us = total(steps, "")
    found = {
        "matmul": total(events, *products),
        "attention": total(events, "aten::scaled_dot", "aten::_scaled_dot"),
        "loss": total(events, *loss) - total(in_loss, *products),
        "optimizer": total(events, "Optimizer."),
        "data wait": total(events, "data wait"),
        "host gaps": step_us - total(events, ""),
    }
    found["other"] = step_us - sum(found.values())
    return {name: 100 * us / step_us for name, us in found.items()}


FILES = ["step_0000005.json.gz", "step_0000005.txt"]


def test_a_run_s_summary_is_what_its_trace_says_read_in_another_way(tmp_path, data):
    env = environment(tmp_path, data, EVAL_EVERY=6, PROFILE_STEPS=2, SAVE_EVERY=8)
    train(env | {"MAX_STEPS": "12", "RUN_NAME": "plain"})
    out = train(env | {"MAX_STEPS": "12", "PROFILE": "1"})
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    text = (folder / FILES[1]).read_text()
    assert text in out and f"trace: {folder}/{FILES[0]}" in out
    assert text.startswith(
        "profile of 2 steps from 5 on: rank 0 of 1, CPU, float32, operators of the CPU"
    )
    shares = {name: percent for name, (percent, _) in read_table(text).items()}
    assert shares.pop("a step") == 100.0 and shares.pop("communication, exposed") == 0.0
    assert shares == pytest.approx(by_durations(folder / FILES[0]), abs=0.06)  # one decimal
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    shares.pop("data wait")
    assert min(shares.values()) > 0
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")

    out = train(env | {"MAX_STEPS": "21", "PROFILE": "1"})
    assert "profile of 2 steps from 17 on" in out and len(list(folder.iterdir())) == 4
    out = train(env | {"MAX_STEPS": "24", "PROFILE": "1"})
    assert "No step is profiled. It takes at least 5 steps, and only 3 are left" in out
    assert len(list(folder.iterdir())) == 4


# Runs the trainer, which in its eighth step is told to stop, or fails.
CUT_SHORT = """
import os, signal, sys, torch
from train import loop, main
from train.data.manifest import DataError

take, calls = loop.train_step, []

def step(*args, **kwargs):
    calls.append(1)
    if len(calls) == 8 and sys.argv[1] == "told":
        os.kill(os.getpid(), signal.SIGTERM)
    if len(calls) == 8 and sys.argv[1] == "fails":
        raise DataError("a shard is gone")
    return take(*args, **kwargs)

loop.train_step = step
code = main.main()
assert not torch.autograd.profiler._is_profiler_enabled
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [("told", 75, "stopped by SIGTERM"), ("fails", 78, "a shard is gone")],
)
def test_a_run_that_ends_while_it_is_recorded_ends_as_any_other(tmp_path, data, how, code, reason):
    """torch's profiler ended the process with a segmentation fault if nobody had stopped it."""
    env = environment(tmp_path, data, MAX_STEPS=40, PROFILE=1, PROFILE_STEPS=30)
    out = train(env, command=[sys.executable, "-c", CUT_SHORT, how], code=code)
    assert reason in out and "PROFILE=1: The run ended before its steps were recorded." in out
    assert not (tmp_path / "run" / "profile").exists()


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path, data):
    env = environment(tmp_path, data, MAX_STEPS=8, PROFILE=1, PROFILE_STEPS=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()  # where the folder would be
    out = train(env)
    assert "PROFILE=1: The profile of steps 5 to 5 failed, and training continues:" in out
    assert "step=8/8" in out
