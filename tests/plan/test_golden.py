"""golden.json: the numbers that commit 9fc3810 planned for 42 runs. Those of other rooms are recomputed elsewhere.

Newer are those of FSDP2, which gathers weights once a step while gradients accumulate (config.gathers_once), and
memory (docs/decisions/0033).
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from settings.finding import code_of, split
from tests.plan.conftest import Planned

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
NOT_COMPARED = {"recommended"}


def differences(expected: Any, found: Any, path: str) -> Iterator[str]:
    if isinstance(expected, dict):
        for key, value in expected.items():
            if key not in NOT_COMPARED:
                yield from differences(value, found[key], f"{path}.{key}")
    elif isinstance(expected, list):
        if len(expected) != len(found):
            yield f"{path}: {len(expected)} against {len(found)}"
        for number, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, other, f"{path}[{number}]")
    elif isinstance(expected, float) and found is not None:
        if not math.isclose(expected, found, rel_tol=1e-9):
            yield f"{path}: {expected} against {found}"
    elif expected != found:
        yield f"{path}: {expected} against {found}"


@pytest.mark.parametrize("name", GOLDEN)
def test_numbers_are_those_of_the_first_edition(planned: Planned, name: str) -> None:
    golden = GOLDEN[name]
    plan = planned(golden["settings"])
    found = plan.as_json()
    assert list(differences(golden["plan"], found, name)) == []
    recommended = golden["plan"]["recommended"]
    assert (found["between_sites"] or {"name": ""})["name"] == recommended
    stopping, _ = split("", plan.findings)
    assert code_of(stopping) == golden["code"]


def test_keys_of_the_json_are_a_contract(planned: Planned) -> None:
    """New keys are welcome; one that goes breaks somebody's script."""
    found = planned({"PRESET": "d16-2xh100"}).as_json()
    assert set(found) >= {
        *("schema", "fine_tuning", "preset", "run_name", "model", "source", "now", "from_step"),
        *("settings", "devices", "parameters", "tokens", "steps", "batch_tokens"),
        *("flops_per_token", "flops_per_token_causal", "flops", "compute_optimal_tokens"),
        *("expected_loss", "speed", "time", "evaluation_seconds", "gpu_hours", "kwh", "cost"),
        *("milestones", "memory", "disk", "network", "between_sites", "data", "findings"),
    }
    assert set(found["speed"]) == {
        *("mfu_percent", "why", "source", "measured", "peak_flops_per_s", "tokens_per_s"),
        *("tokens_per_s_computing", "step_seconds", "step_seconds_computing"),
    }
    assert set(found["memory"]["ways"][0]) == {
        *("parallel", "optimizer", "activation_checkpointing", "bytes", "total_bytes", "moment"),
        *("fits", "largest_micro_batch", "chosen"),
    }
    assert json.loads(json.dumps(found, allow_nan=False)) == found
