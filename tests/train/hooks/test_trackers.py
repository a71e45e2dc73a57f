"""The trackers of a run: which rows they have, and that nothing they do changes a run."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from settings.config import Config
from tests import wandb_file
from tests.running import ROOT, environment, losses, saved_steps, train, wait_for
from tests.trackers import mirror, python_with_trackers, read_values
from tests.wandb_server import MANNERS, server
from train.hooks.trackers import Tracker

KEYS = [("0123456789abcdef" * 3)[:40], "wandb_v1_" + "aB3_" * 19 + "xyz"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    """The losses of a run without trackers."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert "W&B" not in train(environment(folder, data))
    assert not list((folder / "run").rglob("*wandb*"))
    return losses(folder / "run")


def online(there, key=KEYS[0], mode="online"):
    """Return the settings with which a run goes to a server."""
    return {
        "WANDB_BASE_URL": there.url,
        "WANDB_API_KEY": key,
        "WANDB_MODE": mode,
    }


def find_text(text, folder):
    """Return the files that hold a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def find_lines(out):
    """Return what was printed of W&B."""
    return [line for line in out.splitlines() if "W&B: " in line]


def make_record(event, step, **values):
    return {
        "schema": 1,
        "event": event,
        "time": 100.5 + step,
        "step": step,
        **values,
    }


def make_steps(first, last):
    """Return records of steps; step / 64 is exact in float32 too."""
    return [make_record("step", step, lr=step / 64, mfu=None) for step in range(first, last + 1)]


def write_record(run, records):
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def expect(steps, *evaluations):
    """Return what a tracker must have."""
    values = [(step, "train/lr", step / 64) for step in steps]
    return [
        (step, name, value, 100.5 + step) for step, name, value in sorted([*values, *evaluations])
    ]


# ---- Which rows


def select(*records, last_sent=-1):
    """Return the rows that a tracker which has some of them sends of a run of 22 steps."""
    tracker = Tracker(Config(log_every=5, max_steps=22), None, print)
    tracker.last_sent = last_sent
    return tracker.select(records)


def test_rows_are_every_nth_step_the_first_and_the_last_and_all_evaluations():
    rows = select(
        make_record("start", 0),
        make_record("eval", 0, val_loss=9.0),
        *make_steps(1, 12),
        make_record("eval", 12, val_loss=2.0, val_bpb=1.0),
        make_record("skip", 13, lr=7.0),
        *make_steps(13, 22),
        make_record("eval", 22, val_loss=1.5, val_bpb=None, val_ppl=4.5),
        make_record("eval", 22, val_loss=1.25, full=True),
        make_record("eval", 22, core=None, core_partial=0.5, core_centred={"a": 1.0}),
        {"schema": 1, "event": "end", "time": 1.0, "step": None},
    )
    assert [(row.step, row.time, row.values) for row in rows] == [
        (0, 100.5, {"val/loss": 9.0}),
        (1, 101.5, {"train/lr": 1 / 64}),
        (5, 105.5, {"train/lr": 5 / 64}),
        (10, 110.5, {"train/lr": 10 / 64}),
        (12, 112.5, {"val/loss": 2.0, "val/bpb": 1.0}),
        (15, 115.5, {"train/lr": 15 / 64}),
        (20, 120.5, {"train/lr": 20 / 64}),
        (22, 122.5, {"train/lr": 22 / 64}),
        (22, 122.5, {"val/loss": 1.5, "val/perplexity": 4.5}),
        (22, 122.5, {"val/loss": 1.25}),
        (22, 122.5, {"core/partial": 0.5, "core/a": 1.0}),
    ]


def test_what_is_not_known_or_no_number_is_left_out():
    rows = select(
        make_record("step", 10, loss=None, lr="x", grad_norm=2),
        make_record("eval", 10, val_loss=None, error="HTTP 403"),
        make_record("eval", 15, val_loss_by_source={"a": None, "b": 2.0}),
    )
    assert [(row.step, row.values) for row in rows] == [
        (10, {"train/grad_norm": 2}),
        (15, {"val/loss/b": 2.0}),
    ]


def test_steps_that_a_resumed_run_repeats_are_sent_once():
    core = make_record("eval", 4, core=0.5)
    again = [make_record("resume", 8), *make_steps(9, 15)]
    assert [row.step for row in select(core, *make_steps(5, 10), *again)] == [4, 5, 10, 15]
    assert [row.step for row in select(*make_steps(5, 15), last_sent=40)] == [15]


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_a_record_that_is_sent_twice_is_there_once(tmp_path, name):
    python = python_with_trackers()
    settings = {"TRACKERS": name}
    if name == "wandb":
        settings = {"WANDB_MODE": "offline"}
    run = tmp_path / "run"
    validation = make_record("eval", 12, val_loss=0.5, val_loss_by_source={"a": 1.5})
    first = [make_record("start", 0), *make_steps(1, 12), validation]
    write_record(run, first)
    mirror(python, run, **settings)
    shown = expect([1, 5, 10], (12, "val/loss", 0.5), (12, "val/loss/a", 1.5))
    assert read_values(python, name, run) == shown

    if name == "tensorboard":  # as a power failure leaves it
        (events,) = (run / name).iterdir()
        events.rename(run / name / "events.out.tfevents.1.of_an_earlier_version")
        events = run / name / "events.out.tfevents.1.of_an_earlier_version"
        events.write_bytes(events.read_bytes() + b"\x18\x00\x00")
    core = make_record("eval", 12, core=0.25)
    write_record(run, [*first, make_record("resume", 8), *make_steps(9, 12), core])
    mirror(python, run, **settings)
    shown = expect(
        [1, 5, 10], (12, "val/loss", 0.5), (12, "val/loss/a", 1.5), (12, "core/core", 0.25)
    )
    assert read_values(python, name, run) == shown


# ---- A run and its tracker

# Is told to stop in its step 15.
STOPPED = """
import os, signal, sys
from train import loop, main
step, calls = loop.train_step, []
def train_step(*args, **kwargs):
    calls.append(1)
    if len(calls) == 15:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*args, **kwargs)
loop.train_step = train_step
sys.exit(main.main())
"""

# Waits after 15 steps until the file of its argument exists.
HELD = """
import pathlib, sys, time
from train import loop, main
step, go, calls = loop.train_step, pathlib.Path(sys.argv[1]), []
def train_step(*args, **kwargs):
    calls.append(1)
    while len(calls) > 15 and not go.exists():
        time.sleep(0.05)
    return step(*args, **kwargs)
loop.train_step = train_step
sys.exit(main.main())
"""

# Takes 0.1 s for a step, and finds the package of its argument.
SLOW = """
import sys, time
from train import loop, main
step = loop.train_step
def train_step(*args, **kwargs):
    time.sleep(0.1)
    return step(*args, **kwargs)
loop.train_step = train_step
sys.path.insert(0, sys.argv[1])
sys.exit(main.main())
"""

# A package that fails or hangs somewhere.
BROKEN = """
import time
def act(where):
    if where == "{where}":
        raise SystemExit("it is broken") if "{how}" == "fails" else time.sleep(1000)
act("import")
class Settings:
    def __init__(self, **settings): pass
class Run:
    starting_step, url = 0, "/runs/"
    def define_metric(self, *args, **kwargs): pass
    def log(self, *args, **kwargs): act("log")
    def finish(self, *args, **kwargs): act("finish")
def init(*args, **kwargs):
    act("init")
    return Run()
"""


def test_a_run_offline_is_the_same_and_leaves_no_secret(tmp_path, data, undisturbed):
    run = tmp_path / "run"
    harmful = {f"WANDB_{name}": "must" for name in ("RUN_ID", "RESUME", "NAME", "DIR")}
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEYS[0],
        "DONE_S": 120,
    }
    out = train(environment(tmp_path, data, **settings) | harmful)
    assert losses(run) == undisturbed
    (line,) = find_lines(out)
    assert f"wandb sync {run}/wandb/offline-run-*" in line

    rows = wandb_file.read_rows(run)
    steps = {row["step"]: row["train/loss"] for row in rows[:-1]}
    assert steps == {step: undisturbed[step][0] for step in (1, *range(5, 41, 5))}
    assert "val/loss" in rows[-1]
    (path,) = wandb_file.list_files(run)
    messages = {m.WhichOneof("record_type"): m for m in wandb_file.read_messages(path)}
    about = messages["run"].run
    assert (about.project, about.entity, about.display_name) == ("pure-transformer", "", "run")
    assert about.run_id == json.loads((run / "wandb.json").read_text())["id"] != "must"
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    del config["_wandb"]
    assert config == json.loads((run / "config.json").read_text())["settings"]
    assert messages["metric"].metric.step_metric == "step"
    assert messages["exit"].exit.exit_code == 0
    assert "stats" not in messages  # of machines, where no GPU trains
    assert find_text(KEYS[0], run) == []


def test_a_run_is_the_same_with_other_trackers_and_they_have_it(tmp_path, data, undisturbed):
    python = python_with_trackers()
    env = environment(tmp_path, data, TRACKERS="tensorboard,trackio", DONE_S=120)
    train(env, command=[python, "-m", "train.main"])
    run = tmp_path / "run"
    assert losses(run) == undisturbed
    expected = [(step, pytest.approx(undisturbed[step][0])) for step in (1, *range(5, 41, 5))]
    for name in ("tensorboard", "trackio"):
        values = read_values(python, name, run)
        shown = [(step, value) for step, key, value, _ in values if key == "train/loss"]
        assert shown == expected


@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("where", "how", "problem"),
    [
        ("import", "fails", "SystemExit: it is broken"),
        ("init", "hangs", "no answer for 2 s"),
        ("log", "fails", "SystemExit: it is broken"),
        ("finish", "hangs", "not finished within 2 s"),
    ],
)
def test_a_package_that_fails_or_hangs_is_one_warning(
    tmp_path, data, undisturbed, where, how, problem
):
    text = BROKEN.replace("{where}", where).replace("{how}", how)
    (tmp_path / "wandb.py").write_text(text)
    env = environment(tmp_path, data, WANDB_MODE="offline", STUCK_S=2, DONE_S=2)
    out = train(env, command=[sys.executable, "-c", SLOW, str(tmp_path)])
    (line,) = [line for line in find_lines(out) if "make mirror" in line]
    assert problem in line and "make mirror RUN_NAME=run" in line
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_run_that_resumes_is_one_run_without_doubled_steps(tmp_path, data, mode):
    run = tmp_path / "run"
    with server("good") as there:
        settings = online(there, KEYS[1], mode)
        env = environment(tmp_path, data, SAVE_EVERY=8, STOPPED_S=60, DONE_S=60, **settings)
        train(env, command=[sys.executable, "-c", STOPPED], code=75)
        last = saved_steps(run)[-1]
        assert last > 10
        shutil.rmtree(run / "checkpoints" / f"step_{last:07d}")
        train(env)
        kinds = [
            message.WhichOneof("record_type")
            for message in wandb_file.read_messages(wandb_file.list_files(run)[0])
        ]
        assert "preempting" in kinds
        if mode == "offline":  # the command that is printed makes one run of the two files
            subprocess.run(
                [
                    Path(sys.executable).with_name("wandb"),
                    "sync",
                    *sorted(run.glob("wandb/offline-run-*")),
                ],
                env=environment(tmp_path, {}, **settings),
                check=True,
                timeout=120,
                cwd=tmp_path,  # where it leaves its own logs
            )
        (one,) = there.lines
        steps = [row.get("step") for row in there.read_history(one)]
        assert steps == [1, *range(5, 41, 5), 40]
        assert there.ended == [(one, 75), (one, 0)]
        where = json.loads((run / "wandb.json").read_text())["where"]
        expected = f"{there.url}/a-team/pure-transformer/runs/{one}"
        assert where.startswith("offline") if mode == "offline" else where == expected
    assert find_text(KEYS[1], run) == []


@pytest.mark.slow
@pytest.mark.fault(21)
def test_servers_that_misbehave_change_nothing_of_a_run(tmp_path, data, undisturbed):
    def check(manner):
        folder = tmp_path / manner
        folder.mkdir()
        with server(manner) as there:
            out = train(environment(folder, data, DONE_S=5, **online(there)))
        (line,) = find_lines(out)
        assert "make mirror" in line and "Traceback" not in out, out
        assert losses(folder / "run") == undisturbed, manner
        assert json.loads((folder / "run" / "wandb.json").read_text())["where"] is None, manner

    with ThreadPoolExecutor(2) as pool:  # at once, since most of it is waiting
        list(pool.map(check, MANNERS[1:]))
    assert find_text(KEYS[0], tmp_path) == []


def find_child(pid, name):
    """Return the child of a process that runs a program of this name."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if name in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise AssertionError(f"{pid} has no child {name}")


@pytest.mark.slow
@pytest.mark.fault(21)
@pytest.mark.parametrize("manner", ["hangs", "500", "killed"])
def test_what_fails_during_training_is_reported_in_one_line_and_changes_nothing(
    tmp_path, data, undisturbed, manner
):
    run = tmp_path / "run"
    go = tmp_path / "go"
    with server("good") as there:
        env = environment(tmp_path, data, DONE_S=5, **online(there, mode="auto"))
        command = [sys.executable, "-c", HELD, str(go)]
        with subprocess.Popen(
            command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE
        ) as process:
            wait_for(run / "train.log", "/runs/")
            wait_for(run / "metrics.jsonl", '"step": 15,')
            if manner == "killed":
                os.kill(find_child(process.pid, "wandb-core"), signal.SIGKILL)
            there.manner = manner
            go.touch()
            out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
    (line,) = [line for line in find_lines(out) if "/runs/" not in line]
    assert "make mirror" in line
    assert losses(run) == undisturbed


# ---- make mirror


def test_a_run_is_sent_later(tmp_path, data):
    train(environment(tmp_path, data))
    with server("good") as there:
        assert there.url in mirror(sys.executable, tmp_path / "run", **online(there, mode="auto"))
        (one,) = there.lines
        assert [row["step"] for row in there.read_history(one)] == [1, *range(5, 41, 5), 40]
        assert there.ended == [(one, 0)]


def test_what_cannot_be_sent_is_refused(tmp_path):
    run = tmp_path / "run"
    assert "No tracker is on" in mirror(sys.executable, run, code=64)
    out = mirror(sys.executable, run, code=78, WANDB_MODE="offline")
    assert f"There is no run {run}" in out
    write_record(run, make_steps(1, 2))
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is running" in mirror(sys.executable, run, code=78, WANDB_MODE="offline")
