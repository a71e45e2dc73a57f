"""analysis/load.py: records by hand, and the columns that must come of them."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.load import RecordError, load

ROOT = Path(__file__).resolve().parents[2]
START = 1763719200.0  # 2025-11-21 10:00:00 UTC


def write_run(
    folder: Path, records: list[dict], tail: str = "", settings: dict | None = None
) -> Path:
    """A run folder with these records, one second apart, and whatever a kill left behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"schema": 1, "time": START + i} | record) + "\n"
        for i, record in enumerate(records)
    ]
    (folder / "metrics.jsonl").write_text("".join(lines) + tail, encoding="utf-8")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps({"settings": settings}), encoding="utf-8")
    return folder


def step(number: int, loss: float, **more: object) -> dict:
    return {
        "event": "step",
        "step": number,
        "tokens": 100 * number,
        "loss": loss,
        "step_ms": 6000.0,
        "lr": 1e-3,
    } | more


def evaluation(number: int, loss: float, full: bool = False) -> dict:
    return {"event": "eval", "step": number, "tokens": 100 * number, "val_loss": loss, "full": full}


def same(values: object, expected: list[float]) -> bool:
    """Equal, with NaN equal to NaN."""
    return repr(list(values)) == repr(expected)  # type: ignore[call-overload]


def test_columns_are_the_records_by_key_with_nan_where_one_is_silent(tmp_path):
    run = load(
        write_run(
            tmp_path / "r",
            [
                {"event": "start", "step": 0},
                step(1, 5.5, mfu=None, host="a"),
                step(2, 5.25, mfu=31.5, other_number=7),
                step(3, 5.0, grad_norm=0.1),
            ],
        )
    )
    assert run.name == "r"
    assert run.columns["step"].tolist() == [1, 2, 3]
    assert run.columns["loss"].tolist() == [5.5, 5.25, 5.0]
    assert run.columns["tokens"].tolist() == [100, 200, 300]
    assert run.columns["time"].tolist() == [START + 1, START + 2, START + 3]
    nan = math.nan
    assert same(run.columns["mfu"].tolist(), [nan, 31.5, nan])
    assert same(run.columns["grad_norm"].tolist(), [nan, nan, 0.1])
    assert same(run.columns["mem_gib"].tolist(), [nan, nan, nan])  # known by name, never written
    assert same(
        run.columns["other_number"].tolist(), [nan, 7.0, nan]
    )  # a key of a later version is kept
    assert "host" not in run.columns


def test_what_a_resume_went_back_behind_is_dropped_although_not_yet_repeated(tmp_path):
    run = load(
        write_run(
            tmp_path,
            [
                {"event": "start", "step": 0},
                step(1, 5.0),
                step(2, 4.0),
                evaluation(2, 4.1),
                step(3, 3.0),
                step(4, 2.0),
                evaluation(4, 2.1),
                {"event": "resume", "step": 2, "attempt": 1},
                step(3, 3.5),
                evaluation(3, 3.6),
                evaluation(3, 3.7, full=True),
            ],
        )
    )
    assert run.columns["loss"].tolist() == [5.0, 4.0, 3.5]
    assert run.lost_steps == 2
    assert [(e["step"], e["val_loss"]) for e in run.evals] == [(2, 4.1), (3, 3.6), (3, 3.7)]
    assert [e["event"] for e in run.events] == ["start", "resume"]


def test_an_evaluation_done_again_at_the_same_step_counts_once(tmp_path):
    run = load(
        write_run(
            tmp_path,
            [
                {"event": "start", "step": 0},
                step(1, 5.0),
                evaluation(1, 9.0),
                {"event": "resume", "step": 1},
                evaluation(1, 4.5),
            ],
        )
    )
    assert [e["val_loss"] for e in run.evals] == [4.5]


def test_an_evaluation_that_failed_does_not_displace_one_that_did_not(tmp_path):
    failed = evaluation(1, 0.0) | {"val_loss": None, "error": "no memory"}
    run = load(
        write_run(
            tmp_path,
            [
                {"event": "start", "step": 0},
                step(1, 5.0),
                evaluation(1, 4.5),
                {"event": "resume", "step": 1},
                failed,
                step(2, 5.0),
                failed | {"step": 2},
                {"event": "resume", "step": 2},
                evaluation(2, 4.25),
                step(3, 5.0),
                failed | {"step": 3},
            ],
        )
    )
    assert [(e["step"], e["val_loss"]) for e in run.evals] == [(1, 4.5), (2, 4.25), (3, None)]


def test_training_time_sums_the_kept_steps_only(tmp_path):
    run = load(
        write_run(
            tmp_path,
            [
                {"event": "start", "step": 0},
                step(1, 5.0, step_ms=60000.0),
                step(2, 4.0, step_ms=999999.0),
                {"event": "resume", "step": 1},
                step(2, 4.0, step_ms=30000.0),
                step(3, 3.0, step_ms=None),
                step(4, 3.0, step_ms=15000.0),
            ],
        )
    )
    assert same(run.columns["minutes"].tolist(), [1.0, 1.5, math.nan, 1.75])
    assert [run.minutes_at(s) for s in (0, 1, 2, 3, 4, 9)] == [0.0, 1.0, 1.5, 1.5, 1.75, 1.75]


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path):
    cut = json.dumps({"schema": 1, "time": START} | step(3, 1.0))[:-9]
    run = load(
        write_run(tmp_path, [{"event": "start", "step": 0}, step(1, 5.0), step(2, 4.0)], tail=cut)
    )
    assert run.columns["step"].tolist() == [1, 2]


def test_lrm_is_relative_to_the_setting_and_without_settings_to_the_highest_rate(tmp_path):
    records = [step(1, 5.0, lr=1e-4), step(2, 5.0, lr=4e-4), step(3, 5.0, lr=2e-4)]
    settings = {"LEARNING_RATE": 8e-4, "SETTING_OF_A_LATER_VERSION": 1}
    stored = load(write_run(tmp_path / "a", records, settings=settings))
    assert stored.columns["lrm"].tolist() == pytest.approx([0.125, 0.5, 0.25], rel=1e-12)
    alone = load(write_run(tmp_path / "b", records))
    assert alone.columns["lrm"].tolist() == pytest.approx([0.25, 1.0, 0.5], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"TRAIN_TOKENS": 1000, "BATCH_TOKENS": 300, "MAX_STEPS": None}, 4),  # 3.33 steps
        ({"TRAIN_TOKENS": 1000, "BATCH_TOKENS": 300, "MAX_STEPS": 3}, 3),
        (None, None),
    ],
)
def test_where_the_run_ends_follows_from_its_settings(tmp_path, settings, last):
    assert load(write_run(tmp_path, [step(1, 5.0)], settings=settings)).last_step == last


def test_the_stamp_is_the_first_start_in_utc(tmp_path, monkeypatch):
    run = load(
        write_run(
            tmp_path,
            [
                {"event": "start", "step": 0},
                step(1, 5.0),
                {"event": "resume", "step": 1},
                {"event": "start", "step": 1},
            ],
        )
    )
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    stamp = run.stamp
    monkeypatch.undo()
    time.tzset()
    assert stamp == "20251121_100000"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"schema": 1, "event": "start", "time": 1, "step": 0}\n',
            ["holds no step yet", "make plots"],
        ),
        ('{"schema": 1, "eve\n', ["metrics.jsonl line 1 is damaged: it is not JSON", "restore it"]),
        (
            '{"schema": 2, "event": "step"}\n',
            ["metrics.jsonl line 1 has schema 2", "the version that wrote it"],
        ),
        (
            '{"schema": 1, "event": "step", "time": 1}\n',
            ["metrics.jsonl line 1 is a record without a valid 'step'"],
        ),
        (b"\xff\xfe\n", ["metrics.jsonl line 1 is damaged: it is not JSON", "restore it"]),
    ],
)
def test_a_record_that_cannot_be_drawn_is_named_with_what_to_do(tmp_path, text, words):
    (tmp_path / "metrics.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecordError) as error:
        load(tmp_path)
    assert all(word in str(error.value) for word in [str(tmp_path), *words])


def test_a_missing_record_is_named_with_the_runs_that_have_one(tmp_path):
    with pytest.raises(
        RecordError, match=r"does not exist: train it first.*make train RUN_NAME=absent"
    ):
        load(tmp_path / "absent")
    write_run(tmp_path / "present", [step(1, 5.0)])
    with pytest.raises(
        RecordError, match=rf"absent/metrics\.jsonl does not exist.*{tmp_path} .*present"
    ):
        load(tmp_path / "absent")


def test_a_broken_config_is_refused_and_not_replaced_by_a_guess(tmp_path):
    write_run(tmp_path, [step(1, 5.0)])
    (tmp_path / "config.json").write_text('{"settings": {"LEARN', encoding="utf-8")
    with pytest.raises(
        RecordError, match=r"config\.json does not hold the settings of a run.*move it away"
    ):
        load(tmp_path)


def test_analysis_never_imports_torch(tmp_path):
    write_run(tmp_path / "r", [step(1, 5.0), step(2, 4.0)])
    (tmp_path / "torch.py").write_text(
        ""
    )  # found first, and there even where torch is not installed
    code = (
        "import sys; from analysis.plots import main; code = main([sys.argv[1]]); "
        "loaded = [name for name in sys.modules if name.split('.')[0] == 'torch']; "
        "sys.exit(code or (f'loaded {loaded}' if loaded else 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("loss_curves") == 2
    )  # so that everything was imported that drawing needs
