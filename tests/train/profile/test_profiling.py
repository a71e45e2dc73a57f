"""PROFILE=1: which steps are recorded, and a run's own summary beside another reading of the trace that it wrote."""

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.running import environment, losses, train
from train.profile.profiling import window


@pytest.mark.parametrize(
    ("step", "last", "count", "busy", "expected"),
    [
        (0, 100, 3, (), [5, 6, 7]),
        (40, 100, 3, (), [45, 46, 47]),
        (0, 100, 3, (6,), [8, 9, 10]),  # an evaluation behind step 7 would be recorded with 8
        (0, 100, 3, (4, 10), [6, 7, 8]),  # the one behind 8 is not
        (0, 100, 4, (3,), [5, 6, 7, 8]),  # never quiet: the first place
        (0, 9, 3, (6,), [5, 6, 7]),  # quiet only beyond the end
        (0, 6, 3, (), [5, 6]),  # two are left
        (0, 4, 3, (), []),
        (97, 100, 1, (), []),
    ],
)
def test_steps_are_recorded_behind_the_start_and_apart_from_evaluations(
    step: int, last: int, count: int, busy: tuple[int, ...], expected: list[int]
) -> None:
    assert list(window(step, last, count, busy)) == expected


def outermost(events: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Events whose names begin so and that lie in no other such one."""
    found: list[dict[str, Any]] = []
    end = 0.0  # the furthest of those before
    for e in sorted(
        (e for e in events if e["name"].startswith(names)), key=lambda e: (e["ts"], -e["dur"])
    ):
        if e["ts"] + e["dur"] > end:
            found.append(e)
            end = e["ts"] + e["dur"]
    return found


def lasted(events: list[dict[str, Any]]) -> float:
    return sum(e["dur"] for e in events)


def by_durations(path: Path) -> dict[str, float]:
    """Shares in percent of a trace of a CPU, from the durations of what is outermost; no self time is worked out."""
    events = [
        e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e["ph"] == "X"
    ]
    steps = [e for e in events if e["name"] == "train step"]
    events = [
        e
        for e in events
        if e["cat"] in ("cpu_op", "user_annotation")
        and any(s["ts"] <= e["ts"] < s["ts"] + s["dur"] for s in steps)
        and e["name"] != "train step"
    ]
    products, attention = (
        ("aten::linear", "aten::mm", "aten::addmm"),
        ("aten::scaled_dot", "aten::_scaled_dot"),
    )
    loss = outermost(
        events, "_LinearCrossEntropy", "autograd::engine::evaluate_function: _LinearCrossEntropy"
    )
    in_loss = [e for e in events if any(o["ts"] <= e["ts"] < o["ts"] + o["dur"] for o in loss)]
    found = {
        "matmul": lasted(outermost(events, *products)),
        "attention": lasted(outermost(events, *attention)),
        "loss": lasted(loss) - lasted(outermost(in_loss, *products)),
        "optimizer": lasted(outermost(events, "Optimizer.")),
        "data wait": lasted(outermost(events, "data wait")),
        "host gaps": lasted(steps) - lasted(outermost(events, "")),
    }
    found["other"] = lasted(steps) - sum(found.values())
    return {name: 100 * us / lasted(steps) for name, us in found.items()}


def shares_said(text: str) -> dict[str, float]:
    return {
        name: float(percent)
        for name, percent in re.findall(r"^(\w[\w ,]*?) +([\d.]+)% +[\d.]+ ms", text, re.M)
    }


def test_a_run_s_summary_is_what_its_trace_says_read_in_another_way(
    tmp_path: Path, data: dict[str, str]
) -> None:
    env = environment(tmp_path, data, EVAL_EVERY=6, PROFILE_STEPS=2, SAVE_EVERY=8)
    train(env | {"MAX_STEPS": "12", "RUN_NAME": "plain"})
    out = train(env | {"MAX_STEPS": "12", "PROFILE": "1"})
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_0000005.json.gz",
        "step_0000005.txt",
    ]
    text = (folder / "step_0000005.txt").read_text()
    assert text in out and f"trace: {folder}/step_0000005.json.gz" in out
    assert text.startswith(
        "profile of 2 steps from 5 on: rank 0 of 1, CPU, float32, operators of the CPU"
    )
    assert len(text.splitlines()) < 24
    said, expected = shares_said(text), by_durations(folder / "step_0000005.json.gz")
    assert said.pop("a step") == 100.0 and said.pop("communication, exposed") == 0.0
    assert said == pytest.approx(expected, abs=0.06)  # it is said to a tenth
    assert sum(said.values()) == pytest.approx(100, abs=0.5)
    assert (
        min(
            said[name]
            for name in ("matmul", "attention", "loss", "optimizer", "host gaps", "other")
        )
        > 0
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")

    out = train(env | {"MAX_STEPS": "21", "PROFILE": "1"})  # its own, apart from 16 and 18
    assert "profile of 2 steps from 20 on" in out and len(list(folder.iterdir())) == 4
    out = train(env | {"MAX_STEPS": "24", "PROFILE": "1"})
    assert "PROFILE=1: nothing is profiled: it takes 5 steps or more, and 24 - 21 are left" in out
    assert len(list(folder.iterdir())) == 4


# Runs the trainer, which in its eighth step is told to stop, or fails.
CUT_SHORT = """
import os, signal, sys
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
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("how", "code", "said"), [("told", 75, "stopped by SIGTERM"), ("fails", 78, "a shard is gone")]
)
def test_a_run_that_ends_while_it_is_recorded_ends_as_any_other(
    tmp_path: Path, data: dict[str, str], how: str, code: int, said: str
) -> None:
    """torch's profiler ended the process with a segmentation fault where nobody had stopped it."""
    env = environment(tmp_path, data, MAX_STEPS=40, PROFILE=1, PROFILE_STEPS=30)
    out = train(env, command=[sys.executable, "-c", CUT_SHORT, how], code=code)
    assert (
        said in out
        and "PROFILE=1: the run ended before its steps were recorded; nothing is written" in out
    )
    assert not (tmp_path / "run" / "profile").exists()


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path: Path, data: dict[str, str]) -> None:
    env = environment(tmp_path, data, MAX_STEPS=8, PROFILE=1, PROFILE_STEPS=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()  # where the folder would be
    out = train(env)
    assert (
        "PROFILE=1: no profile of the steps 5 to 5, and training goes on:" in out
        and "step=8/8" in out
    )
