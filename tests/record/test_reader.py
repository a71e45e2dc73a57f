"""record/reader.py: lines out, lines back, and which of them count after a resume."""

import json
import math
from pathlib import Path

import pytest

from record import reader

STEP = {
    "schema": 1,
    "event": "step",
    "time": 1.5,
    "mono_s": 2.5,
    "host": "h",
    "attempt": 0,
    "step": 1200,
    "tokens": 629145600,
    "loss": 3.412711,
    "lr": 6e-4,
    "grad_norm": 0.41,
    "step_ms": 353.42,
    "tokens_per_s": 1483200.4,
    "mfu": 41.24,
    "mem_gib": 61.2,
}


def events(*pairs: tuple[str, int]) -> list[dict]:
    """Records of these events at these steps, numbered in the order of writing."""
    return [
        {"event": event, "step": step, "number": number}
        for number, (event, step) in enumerate(pairs)
    ]


def test_a_line_is_json_that_gives_the_record_back() -> None:
    line = reader.to_json(STEP)
    assert "\n" not in line
    assert json.loads(line) == STEP


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null_in_a_map_of_sources_too(value: float) -> None:
    line = reader.to_json({"val_loss_by_source": {"one": value, "other": 2.5}, "list": (value, 1)})
    assert json.loads(line) == {
        "val_loss_by_source": {"one": None, "other": 2.5},
        "list": [None, 1],
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(value: float) -> None:
    line = reader.to_json({"loss": value, "step": 3})
    assert line == '{"loss": null, "step": 3}'


def test_the_console_line_has_the_keys_of_the_record_in_few_digits() -> None:
    assert reader.to_console(STEP, 18865) == (
        "step=1200/18865 loss=3.4127 lr=6.000e-04 grad_norm=0.410 step_ms=353.4 tokens_per_s=1483200 mfu=41.2 "
        "mem_gib=61.20 tokens=629145600"
    )


def test_the_console_says_na_for_what_is_unknown_and_nothing_for_what_is_absent() -> None:
    assert (
        reader.to_console({"step": 1, "loss": 2.0, "mfu": None}, 10)
        == "step=1/10 loss=2.0000 mfu=n/a"
    )
    assert (
        reader.to_console({"step": 1, "val_loss": 2.0}, 10, ("val_loss", "val_bpb"))
        == "step=1/10 val_loss=2.0000"
    )


def test_every_key_of_the_console_has_a_unit() -> None:
    """Of the common keys only tokens is shown."""
    assert set(reader.CONSOLE_KEYS) - {"tokens"} <= reader.STEP_UNITS.keys()


def test_what_goes_back_and_what_has_units_are_events() -> None:
    assert set(reader.GOES_BACK) <= set(reader.EVENTS)
    assert reader.EVENT_UNITS.keys() <= set(reader.EVENTS)
    assert all(units and all(units.values()) for units in reader.EVENT_UNITS.values())


def test_a_time_is_minutes_and_seconds_with_hours_where_there_are_any() -> None:
    times = (0.0, 0.4, 59.6, 3599.4, 3599.6, 3723.0, 90_000.0)
    assert [reader.duration(s) for s in times] == [
        "0:00",
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "1:02:03",
        "25:00:00",
    ]


def test_records_are_read_in_order_with_keys_that_this_version_does_not_know(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    written = [STEP | {"step": step, "of_the_future": [1]} for step in (1, 2, 3)]
    path.write_text("".join(reader.to_json(r) + "\n" for r in written))
    assert list(reader.read(path)) == written


def test_a_last_line_that_a_kill_cut_short_is_left_out_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = reader.to_json(STEP)
    for length in (1, 10, len(line) - 1, len(line)):  # the last lacks only its line end
        path.write_text(line + "\n" + line[:length])
        assert list(reader.read(path)) == [STEP]


@pytest.mark.parametrize(
    "line", ["", "{", "[1]", "3", "null", '"text"', '{"event": "step"}', "step=1/2 loss=3"]
)
def test_a_line_within_the_file_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{reader.to_json(STEP)}\n{line}\n{reader.to_json(STEP)}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is not a record"):
        list(reader.read(path))


def test_a_newer_schema_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(reader.to_json(STEP | {"schema": 2}) + "\n")
    with pytest.raises(ValueError, match="line 1 has schema 2; this version reads 1"):
        list(reader.read(path))


def test_after_a_resume_the_last_record_of_each_step_counts() -> None:
    """Killed behind step 5 with a checkpoint at 3; the second attempt is at step 4."""
    written = events(
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("checkpoint", 3),
        ("step", 4),
        ("step", 5),
        ("resume", 3),
        ("step", 4),
    )
    assert [(r["step"], r["number"]) for r in reader.last_of_each_step(written)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 8),
    ]


def test_steps_behind_a_rollback_are_dropped_and_a_new_start_drops_all() -> None:
    written = events(("start", 0), ("step", 1), ("step", 2), ("step", 3), ("rollback", 1))
    assert [r["step"] for r in reader.last_of_each_step(written)] == [1]
    assert reader.last_of_each_step([*written, *events(("start", 0))]) == []


def test_other_events_take_no_step_away() -> None:
    written = events(
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("eval", 1),
        ("signal", 1),
        ("checkpoint", 1),
        ("nonfinite", 1),
        ("skip", 1),
        ("end", 1),
    )
    assert [r["step"] for r in reader.last_of_each_step(written)] == [1, 2]
