"""The processes of all trackers, whose files are read back with the real packages; and which rows they get."""

import dataclasses
import importlib.util
import json
import resource
import subprocess
import sys

import pytest

from record.trackers.follow import VALIDATION, Tracker, find_position
from record.trackers.wandb_tracker import is_state
from tests.running import ROOT, environment, losses, train, wait_until
from tests.trackers import python_with_trackers, read_values, start


@pytest.fixture(scope="module")
def python():
    return python_with_trackers()


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


def to_lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def expect(steps, *evaluations):
    """Return what a tracker must have."""
    values = [(step, "train/lr", step / 64) for step in steps]
    return [
        (step, name, value, 100.5 + step) for step, name, value in sorted([*values, *evaluations])
    ]


# ---- The processes


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_a_tracker_that_is_killed_and_resumed_has_each_row_once(tmp_path, python, name):
    run = tmp_path / "run"
    run.mkdir()
    record = run / "metrics.jsonl"
    validation = make_record(
        "eval",
        12,
        val_loss=0.5,
        val_bpb=None,
        val_loss_by_source={"a": 1.5},
    )
    damage = '{"schema": 1}\nno JSON\n{"schema": 2, "event": "step"}\n'
    first = [
        make_record("start", 0),
        *make_steps(1, 12),
        validation,
    ]
    record.write_text(to_lines(first) + damage + '{"schema": 1, "event": "st')
    evaluation = [(12, "val/loss", 0.5), (12, "val/loss/a", 1.5)]
    shown = expect([1, 5, 10], *evaluation)
    process = start(python, name, run)
    wait_until(lambda: read_values(python, name, run) == shown, 60)
    if name == "wandb":  # its files have the rows a moment before wandb.json counts them
        sent = f'"sent": {find_position(12, VALIDATION)}'
        wait_until(lambda: sent in (run / "wandb.json").read_text(), 60)
    process.kill()
    process.communicate()

    if name == "tensorboard":  # as a power failure leaves it
        (events,) = (run / name).iterdir()
        events.write_bytes(events.read_bytes() + b"\x18\x00\x00")
    core = make_record("eval", 12, core=0.25, core_centred={"b": 0.75})
    again = [
        make_record("resume", 8),
        *make_steps(9, 12),
        validation,
        core,
    ]
    record.write_text(to_lines([*first, *again]))
    shown = expect(
        [1, 5, 10],
        *evaluation,
        (12, "core/core", 0.25),
        (12, "core/b", 0.75),
    )
    process = start(python, name, run)
    wait_until(lambda: read_values(python, name, run) == shown, 60)

    record.unlink()  # the trainer begins it anew
    end = [make_record("eval", 40, val_loss=0.25, full=True), make_record("end", 40, reason="done")]
    record.write_text(to_lines([*make_steps(13, 40), *end]))
    process.communicate(timeout=120)
    assert process.returncode == 0
    shown += expect([15, 20, 25, 30, 35, 40], (40, "val/loss", 0.25))
    assert read_values(python, name, run) == shown


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_full_disk_delays_rows_and_tears_none(tmp_path, python, name):
    run = tmp_path / "run"
    run.mkdir()
    process = start(python, name, run)
    resource.prlimit(
        process.pid,
        resource.RLIMIT_FSIZE,
        (300, resource.RLIM_INFINITY),
    )
    (run / "metrics.jsonl").write_text(to_lines(make_steps(1, 40)))
    assert process.stdout
    while "not sent yet" not in process.stdout.readline():
        assert process.poll() is None
    resource.prlimit(
        process.pid,
        resource.RLIMIT_FSIZE,
        (10**7, resource.RLIM_INFINITY),
    )
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert read_values(python, name, run) == expect(list(range(5, 41, 5)))


def test_a_run_has_the_same_losses_with_trackers_and_they_have_them(tmp_path, data, python):
    (tmp_path / "without").mkdir()
    train(environment(tmp_path / "without", data))
    env = environment(tmp_path, data, TRACKERS="tensorboard,trackio", DONE_S=120)
    out = train(env, command=[python, "-m", "train.main"])
    run = tmp_path / "run"
    assert losses(run) == losses(tmp_path / "without" / "run")
    expected = [(step, pytest.approx(losses(run)[step][0])) for step in (1, *range(5, 41, 5))]
    for name in ("tensorboard", "trackio"):
        values = read_values(python, name, run)
        shown = [(step, value) for step, key, value, _ in values if key == "train/loss"]
        assert shown == expected

    # The commands that are printed work as they stand; these show the same without a server.
    commands = [line.split("look at it: ")[1] for line in out.splitlines() if "look at" in line]
    for command in commands:
        command = command.replace("trackio show", "trackio list metrics --run run")
        command = command.replace("tensorboard --", "tensorboard --inspect --")
        shown = subprocess.check_output(
            command,
            shell=True,
            text=True,
            cwd=ROOT,
        )
        assert "train/loss" in shown, command
    assert len(commands) == 2


@pytest.mark.fault(21)
@pytest.mark.parametrize("module", ["train.main", "doctor.before_run", "record.trackers.processes"])
def test_nothing_begins_with_a_tracker_that_cannot_work(tmp_path, data, module):
    env = environment(
        tmp_path,
        data,
        TRACKERS="trackio",
        WANDB_MODE="online",
        HOME=tmp_path,
    )
    out = train(
        env,
        command=[sys.executable, "-m", module],
        code=64,
    )
    assert not (tmp_path / "run").exists()
    assert "WANDB_MODE=online: there is no key" in out
    if importlib.util.find_spec("trackio") is None:
        assert "TRACKERS=trackio: the package trackio is not installed" in out
        assert "pip install --no-deps -r requirements/trackers.txt" in out


# ---- Which rows


def select(records, last_sent=-1):
    """Return the rows that a tracker which has some of them sends of a run of 22 steps."""
    tracker = Tracker()
    tracker.config = dataclasses.replace(tracker.config, log_every=5, max_steps=22)
    tracker.last_sent = last_sent
    return tracker.select(records)


def test_rows_are_every_nth_step_the_first_and_last_of_an_attempt_and_all_evaluations():
    records = [
        make_record("start", 0),
        make_record("eval", 0, val_loss=9.0),
        *make_steps(1, 12),
        make_record("eval", 12, val_loss=2.0, val_bpb=1.0),
        make_record("skip", 13, lr=7.0),
        *make_steps(13, 22),
        make_record("eval", 22, val_loss=1.5, val_bpb=None, val_ppl=4.5),
        make_record("eval", 22, val_loss=1.25, full=True),
        make_record(
            "eval",
            22,
            core=None,
            core_partial=0.5,
            core_centred={"a": 1.0},
        ),
        make_record("end", 22, reason="done"),
    ]
    assert [(row.step, row.time, row.values) for row in select(records)] == [
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
    assert [row.step for row in select([make_record("resume", 7), *make_steps(8, 11)])] == [8, 10]


def test_what_is_not_known_or_no_number_is_left_out():
    records = [
        make_record("step", 5, loss=1e4),  # exp() has no such number
        make_record("step", 10, loss=None, lr="x", grad_norm=2),
        make_record("eval", 10, val_loss=None, error="HTTP 403"),
        make_record("eval", 15, val_loss_by_source={"a": None, "b": 2.0}),
        make_record("step", 20, loss=0.0),
    ]
    assert [(row.step, row.values) for row in select(records)] == [
        (5, {"train/loss": 1e4}),
        (10, {"train/grad_norm": 2}),
        (15, {"val/loss/b": 2.0}),
        (20, {"train/loss": 0.0, "train/perplexity": 1.0}),
    ]


def test_each_row_is_sent_once_and_none_is_left_out():
    core = make_record("eval", 4, core=0.5)
    again = [make_record("resume", 8), *make_steps(9, 10)]
    assert [row.step for row in select([core, *make_steps(5, 10), *again])] == [4, 5, 10]


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([("start", {}), ("end", {"reason": "stopped"})], "stopped"),
        ([("end", {"reason": "done"}), ("resume", {})], "killed"),
        ([("end", {})], "done"),
    ],
)
def test_the_outcome_of_a_run_is_that_of_its_last_attempt(events, outcome):
    tracker = Tracker()
    assert tracker.outcome == "killed"
    tracker.select([make_record(event, 1, **values) for event, values in events])
    assert tracker.outcome == outcome


@pytest.mark.parametrize(
    ("stored", "is_one"),
    [
        ({"schema": 1, "id": "0a1b2c3d", "sent": 4}, True),
        ({"schema": 1, "id": "0a1b2c3d", "step": 12}, False),  # of the first edition
        ({"id": {"a": 1}, "sent": 4}, False),
        ({"id": "../../x y", "sent": 4}, False),
        ({"id": "0a1b2c3d", "sent": None}, False),
        ({}, False),
    ],
)
def test_a_strange_wandb_json_begins_a_new_run(stored, is_one):
    assert is_state(stored) == is_one
