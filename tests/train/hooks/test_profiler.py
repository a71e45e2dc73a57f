"""PROFILE=1: which steps are recorded, and what a run writes."""

import gzip
import json
import sys

import pytest

from tests.running import environment, losses, train
from tests.train.diloco.sites import Sites
from tests.train.test_ranks import launch

FILES = ["step_0000005.json.gz", "step_0000005.txt"]


def read_steps(trace):
    """Return the numbers of the steps that a trace has, with torch's marks."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [e["name"] for e in events if e["name"].startswith("ProfilerStep#") and e["ph"] == "X"]


def test_a_profiled_run_writes_a_trace_and_a_table_and_trains_as_ever(tmp_path, data):
    env = environment(tmp_path, data, EVAL_EVERY=6, PROFILE_STEPS=2, SAVE_EVERY=8)
    train(env | {"MAX_STEPS": "12", "RUN_NAME": "plain"})
    out = train(env | {"MAX_STEPS": "12", "PROFILE": "1"})
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert read_steps(folder / FILES[0]) == ["ProfilerStep#4", "ProfilerStep#5"]
    table = (folder / FILES[1]).read_text()
    assert "aten::mm" in table and "Optimizer.step" in table and "Self CPU time total" in table
    assert f"{folder}/{FILES[1]} has the time of each operator" in out
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")

    train(env | {"MAX_STEPS": "21", "PROFILE": "1"})
    assert "step_0000017.txt" in [path.name for path in folder.iterdir()]
    out = train(env | {"MAX_STEPS": "24", "PROFILE": "1"})
    assert "PROFILE=1: The run ended before step 27. No profile is written." in out
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
    assert reason in out and "PROFILE=1: The run ended before step 34." in out
    assert not (tmp_path / "run" / "profile").exists()


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path, data):
    env = environment(tmp_path, data, MAX_STEPS=8, PROFILE=1, PROFILE_STEPS=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()  # where the folder would be
    out = train(env)
    assert "PROFILE=1: The profile is not written, and training continues:" in out
    assert "step=8/8" in out


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_are_profiled_and_train_as_ever(tmp_path, data, parallel):
    """A step between the preparation of torch's profiler and its start ended the second process (Kineto)."""
    settings = {"PARALLEL": parallel, "PROFILE_STEPS": 2}
    plain = launch(tmp_path, data, 2, 9, name="plain", **settings)
    run = launch(tmp_path, data, 2, 9, name="profiled", PROFILE=1, **settings)
    assert losses(run) == losses(plain)
    assert sorted(path.name for path in (run / "profile").iterdir()) == FILES


@pytest.mark.slow
def test_each_site_writes_a_profile_of_its_own(tmp_path, data):
    sites = Sites(tmp_path, data, 2, PROFILE=1, PROFILE_STEPS=2, MAX_STEPS=10, SYNC_EVERY=5)
    try:
        sites.ends(0, 0)
    finally:
        sites.end()
    for rank in range(2):
        assert sorted(path.name for path in (sites.run(rank) / "profile").iterdir()) == FILES
        assert len(sites.events(rank, "sync")) == 2
