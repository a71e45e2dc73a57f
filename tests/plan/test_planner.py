"""plan/planner.py, plan/as_json.py: the parts put together; hours, kWh and money by hand."""

import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import Any

import pytest

from plan import measured, this_machine
from plan.as_json import KEYS, as_json
from plan.checks import capacity_bytes
from plan.fleet import fleet_of
from plan.measured import Probe, Step, path_of, shape_of
from plan.memory import largest_micro_batch, memory
from plan.planner import Held, Plan, plan
from plan.scaling import effective_tokens, expected_loss
from plan.storage import Place
from record.run_paths import RunPaths
from settings import ROOT, load_config

NOW = datetime.datetime(2026, 11, 22, 9, 0)
RATE = 0.438 * 2 * 989e12 / 2_019_557_376  # tokens/s of d16 on two H100 at 43.8%: 428,987
SCORED_S = 4_194_304 / (3 * RATE)  # of one evaluation


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """A plan of these settings, beside no run and no data."""

    def made(**settings: str) -> Plan:
        c = load_config(
            {
                "ENV_FILE": "",
                "MASTER_ADDR": "planned",
                "RUNS_DIR": str(tmp_path / "runs"),
                "DATA_DIR": str(tmp_path / "data"),
                **settings,
            }
        )
        return plan(c, fleet_of(c, here=()), NOW)

    return made


def way(p: Plan, parallel: str, recompute: str) -> Held:
    return next(
        one
        for one in p.memory
        if (one.c.parallel, one.c.activation_checkpointing) == (parallel, recompute)
    )


# ---- Hours, kWh, money


def test_hours_power_and_money_of_d16(planned: Any) -> None:
    """12,800 steps of 524,288 tokens; 25 evaluations and twenty times one at the end; two cards of 700 W."""
    p = planned(PRESET="d16-2xh100", PRICE_GPU_HOUR="2.5", PRICE_KWH="0.3")
    training, evaluating = 12_800 * 524_288 / RATE / 3600, (25 + 20) * SCORED_S / 3600
    assert p.time is not None and p.tokens == 6_710_886_400
    assert dataclasses.astuple(p.time) == pytest.approx((training, 0, evaluating))
    assert p.time.total == pytest.approx(4.386, abs=0.001)
    assert p.gpu_hours == pytest.approx(8.77, abs=0.005)
    assert p.kwh == pytest.approx(4.386 * 1.4, abs=0.002)
    assert p.cost == pytest.approx(8.7726 * 2.5 + 6.1408 * 0.3, abs=0.005)
    assert (
        p.milestones[-1].hours == pytest.approx(p.time.total)
        and p.milestones[-1].clock == "2026-11-22T13:23"
    )


def test_either_price_alone_is_a_cost_and_none_is_none(planned: Any) -> None:
    assert planned(PRESET="d16-2xh100").cost is None
    assert planned(PRESET="d16-2xh100", PRICE_KWH="0.3").cost == pytest.approx(
        6.1408 * 0.3, rel=1e-4
    )
    assert planned(PRESET="d16-2xh100", PRICE_GPU_HOUR="2").cost == pytest.approx(
        8.7726 * 2, rel=1e-4
    )


def test_four_sites_wait_for_their_gradients(planned: Any) -> None:
    """6 hops of a quarter of 5.34 GB at 1 Gbit/s and half a round trip of 30 ms: 64.2 s beside 3.9 s of computing."""
    p = planned(PRESET="xlarge-8xa100", NODES="4", SITES="4")
    wait_s = 6 * (4 * 1_336_248_320 / 4 * 8 / 1e9 + 0.015)
    assert p.pace.wait_s == pytest.approx(wait_s) == pytest.approx(64.2, abs=0.05)
    assert p.time is not None and p.time.waiting == pytest.approx(190_735 * wait_s / 3600)
    assert p.time.training == pytest.approx(205.3, abs=0.05)
    assert p.pace.tokens_per_s == pytest.approx(524_288 / (524_288 / 135_287 + wait_s), rel=1e-4)


def test_power_of_a_mixed_fleet_is_that_of_all_its_cards(planned: Any) -> None:
    p = planned(PRESET="d16-2xh100", CARDS="4xa100-80gb-sxm,4xa6000")
    assert p.time is not None and p.kwh == pytest.approx(p.time.total * (4 * 400 + 4 * 300) / 1000)
    assert p.pace.fast.peak_tflops == pytest.approx(8 * 154.8)


def test_what_is_not_known_is_none(planned: Any) -> None:
    p = planned(PRESET="d16-2xh100", CARDS="8xv100-32gb-sxm")
    assert (p.time, p.gpu_hours, p.kwh, p.cost, p.milestones) == (None, None, None, None, [])
    assert [finding.name for finding in p.findings] == ["bf16"]
    assert planned(PRESET="d16-2xh100", SAVE_EVERY="0").save_s is None


def test_expected_loss_counts_repeated_text_for_less_and_is_of_models_that_the_law_knows(
    planned: Any,
) -> None:
    """usmle has 2M tokens, of which 2% are held out, and is read 510 times."""
    p = planned(PRESET="xlarge-8xa100")
    assert p.expected_loss == pytest.approx(
        expected_loss(1_336_248_320, 0.99 * 1e11 + effective_tokens(1_960_000, 1e9)), abs=1e-4
    )
    assert p.expected_loss > expected_loss(1_336_248_320, 1e11)
    assert planned(PRESET="tiny", CARDS="1xt4").expected_loss is None


# ---- Memory


def test_a_row_for_each_way_and_one_of_them_is_the_run_s(planned: Any) -> None:
    p = planned(PRESET="d32-8xh100", OPTIMIZER="adamw", PARALLEL="hsdp", SHARD_RANKS="4")
    assert [(held.c.parallel, held.c.activation_checkpointing) for held in p.memory] == [
        (parallel, how)
        for parallel in ("ddp", "fsdp", "hsdp")
        for how in ("none", "selective", "full")
    ]
    assert [held for held in p.memory if held.chosen] == [p.chosen]
    assert (p.chosen.c.parallel, p.chosen.c.activation_checkpointing) == ("hsdp", "selective")
    size = 1_887_578_112
    assert [
        way(p, parallel, "none").need.parts["weights"] for parallel in ("ddp", "fsdp", "hsdp")
    ] == [4 * size, 4 * size / 8, 4 * size / 4]


def test_rows_are_what_memory_says_of_the_same_settings(planned: Any) -> None:
    p = planned(PRESET="xlarge-8xa100")
    for held in p.memory:
        c = dataclasses.replace(
            p.c, parallel=held.c.parallel, activation_checkpointing=held.c.activation_checkpointing
        )
        assert held.need == memory(c, 8, 8, False)
        assert held.largest_micro_batch == largest_micro_batch(
            c, 8, 8, False, capacity_bytes(p.fleet)
        )
        assert held.fits == (held.need.total <= p.capacity_bytes) and held.need.total == sum(
            held.need.parts.values()
        )
    assert way(p, "ddp", "none").chosen


def test_muon_s_split_rows_are_of_adamw_which_has_two_moments_of_each_weight(planned: Any) -> None:
    p = planned(PRESET="d16-2xh100")
    assert [held.c.optimizer for held in p.memory] == 3 * ["muon"] + 3 * ["adamw"]
    assert way(p, "fsdp", "none").need.parts["optimizer"] == 8 * 336_630_784 / 2
    assert way(p, "ddp", "none").need.parts["optimizer"] == 8 * 336_630_784 - 4 * 202_375_168


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_process_has_nothing_to_split(planned: Any, recompute: str) -> None:
    p = planned(PRESET="gpt2-124m", CARDS="1xrtx4090", ACTIVATION_CHECKPOINTING=recompute)
    assert len(p.memory) == 3 and p.chosen.c.activation_checkpointing == recompute and p.syncs == []


# ---- What was measured


def test_a_measured_step_of_this_run_comes_before_all_else(planned: Any) -> None:
    c = planned(PRESET="d16-2xh100").c
    path = path_of(c, "NVIDIA H100 80GB HBM3")
    path.parent.mkdir(parents=True)
    path.write_text(
        measured.to_json(
            Probe(
                "NVIDIA H100 80GB HBM3",
                time.time(),
                "2.13",
                {"bfloat16": 700.0},
                disk_mb_s=2000.0,
                steps=(Step(shape_of(c), 2, 400_000.0, 20.0),),
            )
        )
    )
    p = planned(PRESET="d16-2xh100")
    assert (
        p.pace.fast.measured
        and p.pace.tokens_per_s == pytest.approx(400_000)
        and p.write_mb_s == 2000
    )
    assert p.time is not None and p.time.training == pytest.approx(6_710_886_400 / 400_000 / 3600)
    other = planned(PRESET="d16-2xh100", MICRO_BATCH_SIZE="4")
    assert not other.pace.fast.measured and other.pace.tokens_per_s == pytest.approx(RATE)


def test_a_cpu_of_which_nothing_is_known_is_measured_now(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70% of 0.5 TFLOP/s, 16,515,072 FLOP a token."""
    monkeypatch.setattr(this_machine, "float32_tflops", lambda: 0.5)
    p = planned(PRESET="tiny", CARDS="cpu")
    assert p.pace.tokens_per_s == pytest.approx(0.7 * 0.5e12 / 16_515_072)
    assert (
        p.gpu_hours is None
        and p.kwh is None
        and planned(PRESET="tiny", CARDS="cpu", PRICE_KWH="1").cost is None
    )


def test_what_was_measured_of_a_cpu_is_not_measured_again(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "float32_tflops", lambda: 0.5)
    path = path_of(planned(PRESET="tiny", CARDS="cpu").c, measured.cpu_name())
    path.parent.mkdir(parents=True)
    path.write_text(
        measured.to_json(
            Probe(measured.cpu_name(), time.time(), "2.13", {"float32": 0.2, "bfloat16": 0.1})
        )
    )
    for dtype, tflops in (("float32", 0.2), ("bfloat16", 0.1)):
        p = planned(PRESET="tiny", CARDS="cpu", DTYPE=dtype)
        assert p.pace.tokens_per_s == pytest.approx(0.7 * tflops * 1e12 / 16_515_072)


def test_products_of_a_cpu_are_measured() -> None:
    """More than a thousandth and less than a thousand times of what a core does."""
    assert 1e-4 < this_machine.float32_tflops() < 100


# ---- A run that has begun


def test_of_a_run_that_has_begun_what_is_left_is_planned(planned: Any) -> None:
    """At step 6,400 of 12,800: half the training, 13 of 25 evaluations and those of the end."""
    whole = planned(PRESET="d16-2xh100", PRICE_GPU_HOUR="1")
    folder = RunPaths.of(whole.c.runs_dir, whole.c.run_name, ROOT).checkpoints / "step_0006400"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    half = planned(PRESET="d16-2xh100", PRICE_GPU_HOUR="1")
    assert half.done == 6400 and half.tokens == whole.tokens
    assert half.time.training == pytest.approx(whole.time.training / 2)
    assert half.time.evaluating == pytest.approx((25 - 12 + 20) * SCORED_S / 3600)
    assert half.cost == half.gpu_hours == pytest.approx(2 * half.time.total)
    assert half.kwh == pytest.approx(1.4 * half.time.total)
    assert [one.name for one in half.milestones] == ["next checkpoint", "100%"]
    assert half.milestones[-1].hours == pytest.approx(half.time.total)
    assert [one.name for one in whole.findings] == []
    assert (
        planned(PRESET="d16-2xh100", TARGET_HOURS="3").findings == []
    )  # the half that is left takes 2.2 hours
    folder.rename(folder.with_name("step_0012800"))
    assert (
        planned(PRESET="d16-2xh100", TARGET_HOURS="0.01", TARGET_TOKENS_PER_S="1e7").findings == []
    )
    through = planned(PRESET="d16-2xh100", PRICE_GPU_HOUR="1")
    assert (through.done, through.time.total, through.cost, through.milestones) == (
        12_800,
        0,
        0,
        [],
    )


# ---- JSON


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize(
    "settings",
    [
        {"PRESET": "d16-2xh100"},
        {"PRESET": "d16-2xh100", "CARDS": "8xv100-32gb-sxm"},
        {"PRESET": "tiny", "CARDS": "cpu", "NPROC": "2", "DTYPE": "bfloat16"},
        {"PRESET": "tiny", "CARDS": "cpu"},
        {
            "PRESET": "xlarge-8xa100",
            "NODES": "4",
            "SITES": "4",
            "TARGET_HOURS": "48",
            "SAVE_EVERY": "0",
        },
    ],
)
def test_json_has_the_keys_that_are_promised_and_no_nan(
    planned: Any, settings: dict[str, str]
) -> None:
    p = planned(**settings)
    text = json.dumps(as_json(p), allow_nan=False)
    found = json.loads(text, parse_constant=refuse)
    assert list(found) == [key for names in KEYS for key in names.split(", ")]
    assert json.loads(json.dumps(as_json(p))) == found


def keys_of(value: Any) -> set[str]:
    """Of an object, or of the first in a list."""
    if isinstance(value, list):
        return keys_of(value[0]) if value else set()
    return set(value) if isinstance(value, dict) else set()


def test_what_is_said_of_a_key_names_all_that_it_holds(planned: Any) -> None:
    c = planned(PRESET="xlarge-8xa100", NODES="4", SITES="4").c
    place = Place(("RUNS_DIR",), Path("/disk"), {"checkpoints": 1e9}, 5e9)
    found = as_json(plan(c, fleet_of(c), NOW, [place]))
    for key in (
        "settings",
        "devices",
        "parameters",
        "speed",
        "time",
        "milestones",
        "memory",
        "disk",
        "network",
        "data",
        "findings",
    ):
        assert keys_of(found[key]), key
        assert not [name for name in keys_of(found[key]) if name not in KEYS[key]], key
    for key, inner in (("devices", "cards"), ("memory", "ways"), ("disk", "places")):
        assert not [name for name in keys_of(found[key][inner]) if name not in KEYS[key]], inner


def test_json_is_in_base_units(planned: Any) -> None:
    found = as_json(planned(PRESET="d16-2xh100", PRICE_GPU_HOUR="2.5"))
    assert found["parameters"]["total"] == 336_630_784 and found["flops_per_token"] == 2_019_557_376
    assert found["speed"]["peak_flops_per_s"] == pytest.approx(1.978e15)
    assert found["speed"]["tokens_per_s"] == pytest.approx(RATE)
    assert found["time"]["total_seconds"] == pytest.approx(3600 * 4.386, rel=1e-3)
    assert found["cost"] == pytest.approx(21.93, abs=0.01) and found["from_step"] == 0
    assert found["disk"]["save_seconds"] == pytest.approx(found["disk"]["checkpoint_bytes"] / 500e6)
    assert found["devices"]["cards"][0]["memory_bytes"] == 79.1 * 2**30
    assert found["milestones"][-1]["seconds"] == pytest.approx(found["time"]["total_seconds"])
    ddp = next(one for one in found["memory"]["ways"] if one["chosen"])
    assert ddp["bytes"]["weights"] == 4 * 336_630_784 and ddp["total_bytes"] == sum(
        ddp["bytes"].values()
    )
