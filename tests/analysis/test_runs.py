"""analysis/runs.py: records made by hand, and the columns that must come of them."""

import math
import time

import pytest
from numpy.testing import assert_array_equal

from analysis.runs import RunError, read_run
from tests.analysis.conftest import START, write_record

START_RECORD = {"event": "start", "step": 0}


def step(number, loss=5.0, **more):
    return {"event": "step", "step": number, "loss": loss, "step_ms": 6000.0, "lr": 1e-3, **more}


def evaluation(number, loss, **more):
    return {"event": "eval", "step": number, "val_loss": loss, **more}


def go_back(number, event="resume"):
    return {"event": event, "step": number}


def test_columns_are_the_records_by_key_with_nan_where_one_is_silent(tmp_path):
    records = [
        START_RECORD,
        step(1, 5.5, mfu=None, host="a"),
        step(2, None, mfu=31.5, later_key=7),
        step(3),
    ]
    run = read_run(write_record(tmp_path / "r", records))
    assert (run.name, run.folder, run.steps, run.started) == ("r", tmp_path / "r", 3, START)
    nan = math.nan
    for name, expected in (
        ("step", [1.0, 2.0, 3.0]),
        ("loss", [5.5, nan, 5.0]),
        ("time", [START + 1, START + 2, START + 3]),
        ("mfu", [nan, 31.5, nan]),
        ("mem_gib", [nan, nan, nan]),  # a known key that no record has
        ("later_key", [nan, 7.0, nan]),  # of a later version
    ):
        assert_array_equal(run.columns[name], expected)
    assert "host" not in run.columns and run.is_not_finite("loss").tolist() == [False, True, False]
    assert not read_run(write_record(tmp_path / "s", [step(1)])).not_finite


@pytest.mark.parametrize("event", ["resume", "rollback", "start"])
def test_what_a_run_went_back_past_is_dropped_although_not_yet_repeated(tmp_path, event):
    first = [
        START_RECORD,
        step(1),
        step(2, 4.0),
        evaluation(2, 4.1),
        step(3),
        step(4),
        evaluation(4, 2.1),
    ]
    again = [go_back(2, event), step(3, 3.5), evaluation(3, 3.6), evaluation(3, 3.7, full=True)]
    run = read_run(write_record(tmp_path, first + again))
    assert run.columns["loss"].tolist() == [5.0, 4.0, 3.5]
    assert [(each["step"], each["val_loss"]) for each in run.evals] == [
        (2, 4.1),
        (3, 3.6),
        (3, 3.7),
    ]
    assert [each["event"] for each in run.events] == ["start", event]


def test_the_last_evaluation_of_a_step_counts_unless_it_failed(tmp_path):
    failed = {"error": "no memory"}
    records = [
        START_RECORD,
        step(1),
        evaluation(1, 9.0),
        go_back(1),
        evaluation(1, 4.5),
        evaluation(1, None, **failed),
    ]
    records += [
        step(2),
        evaluation(2, None, **failed),
        evaluation(2, 4.25),
        {"event": "eval", "step": 2, "core": 0.25},
    ]
    records += [step(3), evaluation(3, None, **failed)]
    evals = read_run(write_record(tmp_path, records)).evals
    assert [(each["step"], each.get("val_loss"), each.get("core")) for each in evals] == [
        (1, 4.5, None),
        (2, 4.25, 0.25),
        (3, None, None),
    ]


def test_training_time_sums_the_steps_that_count(tmp_path):
    records = [START_RECORD, step(1, step_ms=60000.0), step(2, step_ms=999999.0), go_back(1)]
    records += [step(2, step_ms=30000.0), step(3, step_ms=None), step(4, step_ms=15000.0)]
    run = read_run(write_record(tmp_path, records))
    assert_array_equal(run.columns["minutes"], [1.0, 1.5, math.nan, 1.75])


def test_settings_give_the_peak_rate_and_the_last_step(tmp_path):
    records = [step(1, lr=1e-4), step(2, lr=4e-4), step(3, lr=2e-4)]
    settings = {
        "LEARNING_RATE": 8e-4,
        "TRAIN_TOKENS": 1000,
        "BATCH_TOKENS": 300,
        "SETTING_OF_A_LATER_VERSION": 1,
    }
    stored = read_run(write_record(tmp_path / "a", records, settings))
    assert stored.columns["lrm"].tolist() == pytest.approx([0.125, 0.5, 0.25], rel=1e-12)
    assert stored.last_step == 4 and stored.settings["LEARNING_RATE"] == 8e-4
    alone = read_run(write_record(tmp_path / "b", records))
    assert alone.columns["lrm"].tolist() == pytest.approx([0.25, 1.0, 0.5], rel=1e-12)
    assert alone.last_step is None and alone.settings == {}


def test_the_stamp_is_the_first_start_in_utc(tmp_path, monkeypatch):
    run = read_run(write_record(tmp_path, [START_RECORD, step(1), go_back(1, "start")]))
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()
        assert run.stamp == "20251121_100000"
    time.tzset()


def test_damage_is_reported_and_the_rest_is_read(tmp_path):
    path = write_record(tmp_path, [START_RECORD, step(1), step(2)]) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "\x00\x00", *lines[2:3], ""]))
    run = read_run(tmp_path)
    assert run.columns["step"].tolist() == [1, 2]
    assert str(path) in run.remarks[0] and run.remarks[0].endswith("left out: 1")


def test_a_run_that_cannot_be_read_is_refused_with_what_to_do(tmp_path):
    def refuse(name):
        with pytest.raises(RunError) as error:
            read_run(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)
        return str(error.value)

    assert "RUN_NAME=absent` trains this one" in refuse("absent")
    path = write_record(tmp_path / "empty", [START_RECORD]) / "metrics.jsonl"
    assert "has not taken its first step" in refuse("empty")
    path.write_text("{}\n")
    assert "restore the file from a copy" in refuse("empty")
    (write_record(tmp_path / "broken", [step(1)]) / "config.json").write_text(
        '{"settings": {"LEARN'
    )
    assert "config.json does not have the settings of a run" in refuse("broken")
