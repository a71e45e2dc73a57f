"""Several processes train what one would: equal losses, equal weights on all, through any change of their number."""

import dataclasses
import json
import os
import subprocess

import pytest
import torch

from record import metrics as record_reader
from record import status
from record.run_paths import RunPaths
from tests.processes import run_ranks, run_trainer
from tests.running import ROOT, environment, losses, same, tensors, train, wait_for
from train.checkpoint import checkpoint
from train.checkpoint.manifest import CheckpointError
from train.distributed import world as distributed
from train.model import compilation
from train.model.model import build
from train.optim import build_optimizer

LAUNCH = [str(ROOT / "scripts" / "launch.sh")]


def launch(
    folder,
    data,
    nproc,
    max_steps,
    by_user=False,
    **settings,
):
    """A run of `nproc` processes; by_user: with all that a user starts, scripts and torchrun."""
    name = f"run{settings.pop('name', nproc)}"
    env = environment(folder, data, NPROC=nproc, MAX_STEPS=max_steps, RUN_NAME=name, **settings)
    code, out = (
        (0, train(env, command=LAUNCH))
        if by_user
        else run_trainer(["-m", "train.main"], env, nproc)
    )
    assert not code and f"processes={nproc} " in out, out
    return folder / name


def relative(one, other):
    assert one.keys() == other.keys()
    return max(abs(one[s][0] / other[s][0] - 1) for s in one)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, data):
    return launch(tmp_path_factory.mktemp("one"), data, 1, 20, MICRO_BATCH_SIZE=16)


@pytest.mark.parametrize(
    ("nproc", "how"),
    [
        (2, {"by_user": True}),
        (2, {"PARALLEL": "fsdp"}),
        *[
            pytest.param(nproc, how, marks=pytest.mark.slow)
            for nproc, how in (
                (4, {"by_user": True, "MICRO_BATCH_SIZE": 1}),
                (2, {"PARALLEL": "fsdp", "COMPILE": "1"}),
                (
                    2,
                    {
                        "PARALLEL": "fsdp",
                        "ACTIVATION_CHECKPOINTING": "full",
                        "GRAD_SYNC": "micro-batch",
                    },
                ),
                (4, {"PARALLEL": "hsdp", "SHARD_RANKS": 2, "MICRO_BATCH_SIZE": 1}),
            )
        ],
    ],
    ids=str,
)
def test_any_number_of_processes_follows_one_split_or_whole(
    tmp_path, data, one_process, nproc, how
):
    if "COMPILE" in how and compilation.find_missing(torch.device("cpu")):
        pytest.skip("needs a C++ compiler")
    run = launch(tmp_path, data, nproc, 20, **how)
    assert len(losses(run)) == 20
    assert relative(losses(run), losses(one_process)) < 1e-5
    weights, reference = tensors(run, 20), tensors(one_process, 20)
    for name, value in reference.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.fault(33)
def test_the_number_of_processes_may_change_at_each_resume(tmp_path, data, one_process):
    for nproc, steps in ((2, 6), (1, 10), (4, 20)):
        run = launch(tmp_path, data, nproc, steps, name="changing")
    three = environment(tmp_path, data, NPROC=3, MAX_STEPS=24, RUN_NAME="runchanging")
    assert "nearest is BATCH_TOKENS=" in train(three, command=LAUNCH, code=64)
    assert relative(losses(run), losses(one_process)) < 1e-5


@pytest.mark.slow
def test_four_processes_stopped_and_started_go_on_to_the_bit(tmp_path, data):
    whole = launch(tmp_path, data, 4, 12, name="whole", SAVE_EVERY=5)
    launch(tmp_path, data, 4, 7, name="killed", SAVE_EVERY=5)
    killed = launch(tmp_path, data, 4, 12, name="killed", SAVE_EVERY=5)
    assert losses(killed) == losses(whole)
    assert same(tensors(killed, 12), tensors(whole, 12))


@pytest.mark.fault(25)
def test_the_launcher_returns_the_trainers_own_code(tmp_path, data):
    out = train(environment(tmp_path, data, NPROC=3), command=LAUNCH, code=64)
    assert "BATCH_TOKENS=512 (environment): Must be a multiple of" in out
    assert "The nearest is BATCH_TOKENS=384." in out


# What goes wrong in some ranks only: sitecustomize is what Python runs first, in every process.
FAULT = """
import os
if rank := os.environ.get("RANK"):
    import signal, time
    from train import loop
    from train.checkpoint import checkpoint, find
    from train.data import prepare
    from train.distributed import signals as interrupt
    from train.model import generate as sample
    def kill(number): os.kill(os.getpid(), number)
    {fault}
"""


def with_fault(env, folder, *lines):
    """The environment in which each process of a job runs these lines before it trains; `rank` is a string."""
    (folder / "sitecustomize.py").write_text(FAULT.format(fault="\n    ".join(lines)))
    return env | {"PYTHONPATH": f"{folder}:{ROOT}"}


def status_of(folder):
    state = json.loads((folder / "run" / "STATUS.json").read_text())
    return state["phase"], state["exit_code"]


@pytest.mark.slow
def test_a_rank_that_fails_after_the_others_are_done_is_not_a_success(tmp_path, data):
    env = with_fault(
        environment(tmp_path, data, NPROC=2, MAX_STEPS=2),
        tmp_path,
        "from record import recorder",
        "close, calls = recorder.Recorder.close, []",
        "recorder.Recorder.close = lambda self: (calls.append(time.sleep(1)), "
        "1 / 0 if rank == '0' and len(calls) == 1 else close(self))",
    )
    assert "ZeroDivisionError" in train(env, command=LAUNCH, code=1)
    records = list(record_reader.read_records(tmp_path / "run" / "metrics.jsonl"))
    assert (records[-1]["event"], records[-1]["reason"], records[-1]["step"]) == (
        "end",
        "crashed",
        2,
    )
    assert status_of(tmp_path) == ("crashed", 1)


@pytest.mark.slow
@pytest.mark.fault(4)
def test_ranks_that_stop_leave_together_however_long_the_first_takes(tmp_path, data):
    env = with_fault(
        environment(tmp_path, data, NPROC=2),
        tmp_path,
        "interrupt.PATIENCE_S = 0.1",
        "prune, rate = find.prune, loop.lr_at",
        "find.prune = lambda *args, **more: (time.sleep(3), prune(*args, **more))",
        "told = lambda step: rank == '0' and step == 3 and kill(signal.SIGTERM)",
        "loop.lr_at = lambda step, c: (told(step), rate(step, c))[1]",
    )
    out = train(env, command=LAUNCH, code=75)
    assert "stopped by SIGTERM after step 3/40 and saved" in out
    assert status_of(tmp_path) == ("stopped", 75)
    assert [r["event"] for r in record_reader.read_records(tmp_path / "run" / "metrics.jsonl")][
        -3:
    ] == [
        "checkpoint",
        "signal",
        "end",
    ]


def test_a_rank_killed_before_training_is_no_stop_on_request(tmp_path, data):
    env = with_fault(
        environment(tmp_path, data, NPROC=2),
        tmp_path,
        "prepare.open_sources = lambda *_, **__: time.sleep(300) if rank == '0' else kill(signal.SIGKILL)",
    )
    assert "stopped by SIGTERM before training" in train(env, command=LAUNCH, code=1)


@pytest.mark.fault(6)
def test_make_stop_before_training_is_a_stop_on_request(tmp_path, data):
    env = with_fault(
        environment(tmp_path, data, NPROC=2),
        tmp_path,
        "prepare.open_sources = lambda *_, **__: time.sleep(300)",
    )
    process = subprocess.Popen(
        LAUNCH, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(tmp_path / "run" / "STATUS.json", '"data"')
    assert "stopped" in status.stop(RunPaths(tmp_path / "run"), patience_s=30)
    assert process.wait(120) == 143
    assert status_of(tmp_path) == ("stopped", 143)


def test_the_cause_of_a_failure_is_in_the_log_of_its_rank(tmp_path, data):
    env = with_fault(
        environment(tmp_path, data, NPROC=2),
        tmp_path,
        "prepare.open_sources = lambda *_, **__: time.sleep(300) if rank == '0' else 1 / 0",
    )
    train(env, command=LAUNCH, code=1)
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    assert (
        "rank=1 the trainer failed" in logs["rank_1.log"]
        and "ZeroDivisionError" in logs["rank_1.log"]
    )
    assert "ZeroDivisionError" not in logs["node_0.log"]


@pytest.mark.slow
def test_a_split_model_whose_evaluation_fails_is_whole_for_its_sample(tmp_path, data):
    env = with_fault(
        environment(tmp_path, data, NPROC=2, PARALLEL="fsdp", MAX_STEPS=2),
        tmp_path,
        "from train.evaluate import validation as evaluate",
        "evaluate.Evaluator.padded = lambda *_: 1 / 0",
    )
    out = train(env, command=LAUNCH)
    assert (
        "the evaluation at step 2 failed" in out
        and "ZeroDivisionError" in out
        and "sample, step 2:" in out
    )
    assert status_of(tmp_path) == ("done", 0)


def save_where_one_has_no_room(rank, folder, c):
    """Save where the last rank finds no room, and once more where all do."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    world = distributed.join(c)
    model = build(c, world.device)
    states = checkpoint.tensor_states(model, build_optimizer(model, c))
    group = distributed.group_of([0, 1], 120)
    room = checkpoint.check_space

    def find_no_room(*_):
        if rank:
            raise CheckpointError("no room here")

    checkpoint.check_space = find_no_room
    with pytest.raises(CheckpointError, match=r"^rank 1: .*: could not write it: no room here"):
        checkpoint.write(folder, 1, states, 1, {"data": {}}, world, group)
    checkpoint.check_space = room
    checkpoint.write(folder, 2, states, 1, {"data": {}}, world, group)
    distributed.leave()


@pytest.mark.slow
def test_a_rank_that_cannot_save_holds_nobody_up(tmp_path, tiny, free_port, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    run_ranks(save_where_one_has_no_room, (tmp_path, dataclasses.replace(tiny, device="cpu")), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000002"]
