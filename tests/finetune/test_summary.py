"""What a pipeline has learned, against intervals that are computed in another way."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from finetune.chat_eval import Counts, score
from finetune.pipeline import summary

Z = 1.959963984540054  # of a normal distribution, 2.5% are above


def bounds(right: int, asked: int) -> tuple[float, float]:
    """Return the shares from which what was right is just Z standard deviations away, by bisection."""
    found = []
    for inside, outside in ((right / asked, 0.0), (right / asked, 1.0)):
        for _ in range(100):
            middle = (inside + outside) / 2
            deviation = math.sqrt(middle * (1 - middle) / asked)
            if abs(right / asked - middle) <= Z * deviation:
                inside = middle
            else:
                outside = middle
        found.append(inside)
    return found[0], found[1]


@pytest.mark.parametrize("right", [0, 1, 50, 60, 61, 119, 120])
def test_learned_means_that_the_interval_is_above_guessing(right: int) -> None:
    result = score(Counts(right=right, asked=120, chance=60))
    assert result["interval"] == pytest.approx(bounds(right, 120), abs=1e-5)
    wanted = "learned" if bounds(right, 120)[0] > 0.5 else "not above chance"
    assert summary.judge(result) == wanted
    assert (right > 61) == (wanted == "learned")


def write(run: Path, name: str, **facts: Any) -> None:
    folder = run / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(facts))


def test_the_newest_evaluations_are_summarized(tmp_path: Path) -> None:
    base = tmp_path / "x-base"
    write(base, "step_0000009", val_bpb=9.0)
    write(base, "step_0000012", val_bpb=1.25, core={"core": 0.05})
    assert list(summary.summarize(base)) == ["x-base:", "  bits per byte: 1.2500", "  CORE: 0.0500"]
    tuned = tmp_path / "x-sft"
    nothing = score(Counts())
    right = score(Counts(right=118, asked=120, chance=1))
    chance = score(Counts(right=31, asked=120, chance=30))
    sources = {
        "data/copying.jsonl": {"choice": nothing, "written": right},
        "OWNER/NAME:test": {"choice": chance, "written": nothing},
    }
    write(tuned, "chat_step_0000003", by_source=sources)
    write(tuned, "chat_step_0000003_until_1", by_source={})
    results = {"arc_easy": {"alias": "arc_easy", "acc,none": 0.5, "acc_stderr,none": 0.1}}
    write(tuned, "benchmarks_step_0000003", results=results)
    lines = list(summary.summarize(tuned))
    assert lines[1].startswith(
        "  copying, written answers: 98.3% [94.1, 99.5] of 120, guessing 0.8%"
    )
    assert lines[1].endswith(": learned")
    assert lines[2].startswith("  NAME:test, multiple choice: 25.8%")
    assert lines[2].endswith(": not above chance")
    assert lines[3:] == ["  arc_easy: acc,none 50.0%"]
