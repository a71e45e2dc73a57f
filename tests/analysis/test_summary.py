"""The numbers and words of a run, by hand and by slow loops."""

import math
import types

import numpy as np
import pytest

from analysis import summary
from analysis.runs import read_run
from analysis.summary import find_spikes, find_state, list_marks, smooth, summarize
from tests.analysis.made_runs import make_eval, make_run, write_run


def test_a_run_is_summed_up_as_by_hand():
    run = make_run(
        "a",
        loss=[5.0, math.nan, 2.0, 3.0, math.nan],
        evals=[
            make_eval(2, 4.0, val_bpb=1.5),
            make_eval(4, 3.5, full=True, val_ppl=33.1),
            make_eval(5, None),
        ],
        columns={
            "step_ms": np.array([1000.0, 1000.0, 2000.0, np.nan, 1000.0]),
            "tokens_per_s": np.array([10.0, 20.0, 70.0, 9.0, np.nan]),
            "mfu": np.array([40.0, np.nan, np.nan, np.nan, np.nan]),
            "minutes": np.array([1.0, 2, 3, 4, 90.5]),
        },
        not_finite={"loss": np.array([0, 0, 0, 0, 1], bool)},
        energy=types.SimpleNamespace(kwh=1.23456, coverage=0.27, remarks=["a"]),
    )
    assert summarize(run) == {
        "state": "not finished at step 5",
        "steps": "5",
        "last loss": "3.0000 (step 4)",
        "validation loss": "3.5000 (step 4, full set)",
        "bits per byte": "1.5000 (step 2)",
        "perplexity": "33.1000 (step 4, full set)",
        "tokens": "5,000",
        "tokens/s": "42",  # (10 + 20 + 2 * 70) / 4, and rounded
        "MFU": "40.00%",
        "training time": "1:30:30",
        "energy": "1.235 kWh (27% of the GPUs' time sampled)",
    }
    assert summary.list_remarks(run) == ["a", "the loss is not finite on 1 steps, first at step 5"]

    columns = {"tokens": np.array([np.nan]), "minutes": np.array([0.0])}
    nothing = make_run("a", [math.nan], step_ms=math.nan, columns=columns)
    assert list(summarize(nothing)) == ["state", "steps"]
    assert summary.list_remarks(nothing) == []


@pytest.mark.parametrize(
    ("ends", "facts", "state"),
    [
        (["stopped"], {"last_step": 4}, "stopped at step 2 of 4"),
        (["crashed", None], {}, "not finished at step 2"),
        ([], {"state": "complete, as its log says"}, "complete, as its log says"),
    ],
)
def test_the_state_is_that_of_the_last_attempt(ends, facts, state):
    events = []
    for reason in ends:
        events += [{"event": "resume"}, {"event": "end", "reason": reason}][: 1 + bool(reason)]
    assert find_state(make_run("a", [3.0, 2.0], events=events, **facts)) == state


@pytest.mark.parametrize(("steps", "window"), [(1, 5), (10, 501), (400, 9), (400, 1)])
def test_smoothing_is_a_mean_that_neither_lags_nor_invents(steps, window):
    values = np.random.default_rng(0).normal(size=steps)
    values[3:4] = np.nan
    expected = []
    for place in range(steps):
        reach = min(window // 2, place)
        near = values[place - reach : place + reach + 1]
        expected.append(np.nanmean(near) if np.isfinite(near).any() else math.nan)
    np.testing.assert_allclose(smooth(values, window), expected, atol=1e-12)


def test_the_window_is_a_fiftieth_of_the_run_and_a_mean_is_not_smoothed_again():
    windows = [summary.find_window(steps) for steps in (1, 250, 350, 20_000, 999_999)]
    assert windows == [5, 5, 7, 401, 501]
    values = [5.0, 1.0, 4.0, 2.0, 8.0]
    assert list(summary.smooth_column(make_run("a", values, loss_is="a mean"), "loss")) == values
    assert list(summary.smooth_column(make_run("a", values), "loss")) != values


def test_spikes_are_8_standard_deviations_above_the_128_steps_before():
    loss = np.tile([2.9, 3.1], 200)
    loss[[10, 127, 128, 250, 390]] = math.nan, 9, 3.95, 4.1, 4.1
    assert find_spikes(make_run("a", loss)) == [391]
    assert find_spikes(make_run("a", [3.0] * 200 + [3.02])) == []  # less than 8 thousandths


def test_marks_say_what_happened_and_where():
    events = [
        {"event": "start", "step": 0},
        {"event": "checkpoint", "step": 5, "bytes": 12345},
        {"event": "skip", "step": 6, "reason": "loss"},
        {"event": "tea break", "step": 7},
        {"event": "signal", "step": None, "name": "SIGTERM"},
    ]
    evals = [make_eval(8, None, error="out of time"), make_eval(9, 3.0), {"step": 9, "core": 0.2}]
    marks = list_marks(make_run("a", [*[3.0, 3.1] * 90, 9], evals, events=events))
    assert [tuple(mark.values()) for mark in marks] == [
        ("checkpoint", 5, "checkpoint"),
        ("skip", 6, "skipped step, loss"),
        ("tea break", 7, "tea break"),
        ("eval", 8, "evaluation failed, out of time"),
        ("spike", 181, "spike"),
    ]


def test_evaluations_that_a_log_prints_between_and_beyond_its_steps():
    columns = {"step": np.array([100.0, 200.0])}
    evals = [make_eval(step, step / 100) for step in (0, 50, 150, 200, 299)]
    run = make_run("a", [3.0, 3.0], evals, columns=columns)
    positions, losses = summary.read_evals(run, "val_loss", False, "step")
    assert positions.tolist() == [0, 50, 150, 200, 299]
    positions, losses = summary.read_evals(run, "val_loss", False, "tokens")
    assert positions.tolist() == [0, 500, 1500, 2000] and losses.tolist() == [0, 0.5, 1.5, 2]


def test_facts_are_the_model_and_the_settings_that_matter(tmp_path):
    run = read_run(write_run(tmp_path / "a", 3.0, SEED="7", N_LAYER="2", SAVE_MINUTES="9"))
    facts = summary.describe_run(run)
    settings = facts.pop("settings that are not the default").split()
    assert facts == {
        "started": "2023-11-14 22:13 UTC",
        "hardware": "8 x H100",
        "commit": "abc123",
        "model": "2 layers x 192, 2.46M parameters",
    }
    assert "N_LAYER=2" in settings and "SEED=7" in settings and "SAVE_MINUTES" not in settings
    assert list(summary.describe_run(make_run("log"))) == ["started"]


def test_defaults_that_follow_from_other_settings_are_not_listed(tmp_path):
    run = read_run(write_run(tmp_path / "a", 3.0, N_EMBD="128", DATA="novel.txt"))
    facts = summary.describe_run(run)["settings that are not the default"].split()
    names = {fact.split("=")[0] for fact in facts}
    assert {"N_EMBD", "DATA"} <= names
    assert names.isdisjoint({"N_KV_HEAD", "MLP_DIM", "DATA_MIX"})
    run = read_run(write_run(tmp_path / "b", 3.0, MLP_DIM="640"))
    assert "MLP_DIM=640" in summary.describe_run(run)["settings that are not the default"]
