"""analysis/energy on files that the sampler itself wrote, of the stand-in for NVML whose load is known."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.energy.join import add_energy
from analysis.runs import read_run
from tests.monitor.conftest import Sampled, energy

WALL_LESS_MONO = 1.7e9  # of in_time.py
STEP_S = 0.35


@pytest.mark.parametrize("is_same_boot", [True, False])
def test_steps_have_the_joules_that_the_load_had(
    in_time: Callable[..., Sampled], tmp_path: Path, is_same_boot: bool
) -> None:
    """Joined by the monotonic clock or else by the wall clock; in several files, with slots missed, the counter's
    values held for 100 ms."""
    found = in_time(40, fake={"GPUS": 2}, late_ms=4, rotate_bytes=60_000)
    assert len(found.fast_files) > 1
    for path, about in zip(found.fast_files, found.sidecars, strict=True):
        facts = {"host": "h", "node": 0, "boot_id": "b"}
        path.with_suffix(".json").write_text(json.dumps(about | facts))
    began = found.about["elapsed_0"]["mono_s"] + 1.0
    ends = began + STEP_S * np.arange(1, 101)
    common = {"schema": 1, "host": "h", "attempt": 0}
    records = [
        {
            "event": "start",
            "step": 0,
            "time": began + WALL_LESS_MONO,
            "mono_s": began,
            "world_size": 2,
        }
        | common
    ]
    records += [
        {
            "event": "step",
            "step": i + 1,
            "tokens": 100 * i,
            "time": end + WALL_LESS_MONO,
            "mono_s": end,
            "step_ms": 1000 * STEP_S,
        }
        | common
        for i, end in enumerate(ends.tolist())
    ]
    folder = tmp_path / "run"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    attempts = [{"boot_id": "b" if is_same_boot else "another"}]
    (folder / "config.json").write_text(json.dumps({"settings": {}, "attempts": attempts}))
    result = add_energy(read_run(folder)).energy
    assert result
    for gpu in (0, 1):
        exact = np.array([energy(gpu, end) - energy(gpu, end - STEP_S) for end in ends.tolist()])
        error = result.steps[f"gpu{gpu}"] - exact
        assert float(np.sqrt(np.mean(error**2))) < 0.02 * exact.mean()
    assert result.total.joules == pytest.approx(
        sum(energy(g, ends[-1]) - energy(g, began) for g in (0, 1)), rel=1e-3
    )
