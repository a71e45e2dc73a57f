"""plan/limits.py, plan/checks.py, plan/choices.py: what is refused, by which number, and that what they propose to type
does what they say, loaded as a user's settings are."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hardware.model_size import flops_of, parameters
from plan import limits
from plan.checks import capacity_bytes, full_when, memory_of
from plan.choices import choice, more_cards, shape, smaller_models
from plan.fleet import Fleet, fleet_of
from plan.hours import hours_of, pace_of
from plan.measured import Probe, Step, shape_of
from plan.storage import Place, checkpoint_bytes, disk, disk_of_checkpoints
from record.number_formats import size
from settings import ROOT
from settings.config import Config
from settings.finding import FAIL, WARN, Finding
from tests.plan.conftest import D16, WAN, XLARGE, Given, Load

STEPS, BATCH, FLOPS = 190_735, 524_288, 9_224_847_360  # of xlarge, as its preset states them
SCORED = (190 + 20) * 4_194_304 / 3  # evaluations, a third of a training step's work each
SIZED = re.compile(r"(?<![A-Z_])[A-Z][A-Z_]+=\S+(?: [A-Z][A-Z_]+=\S+)*")


def found(
    c: Config,
    fleet: Fleet,
    name: str,
    probe: Probe | None = None,
    capacity: float | None = None,
    free: float | None = None,
) -> Finding | None:
    places = [] if free is None else [place(c, free)]
    found = limits.problems(
        c, fleet, probe, capacity_bytes(fleet) if capacity is None else capacity, places
    )
    return next((one for one in found if one.name == name), None)


def place(c: Config, free: float, there: float = 0.0) -> Place:
    """One disk for everything; there: bytes of checkpoints that it has already."""
    needs = disk(c)
    return Place(
        ("RUNS_DIR", "DATA_DIR"),
        Path("/disk"),
        needs | {"checkpoints": needs["checkpoints"] - there},
        free,
    )


def proposed(finding: Finding) -> list[Given]:
    """What a finding says would do, as NAME -> value."""
    listed = finding.fix.partition("what would do: ")[2]
    return [
        dict(pair.split("=", 1) for pair in typed.rstrip(",;)").split())
        for part in listed.split("; ")
        if part.startswith("or ") or part == listed.split("; ")[0]
        for typed in SIZED.findall(part.removeprefix("or "))[:1]
    ]


# ---------------------------------------------------------------------------------------------------
# Targets
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "level"),
    [("206.5", None), ("150", WARN), ("120", WARN), ("118", FAIL), ("27", FAIL)],
)
def test_the_labs_hours_on_eight_a100(load: Load, target: str, level: str | None) -> None:
    """9.22e20 FLOPs and 0.3% for evaluation at 50% of 2,496 TFLOP/s: 206 hours; 86.9% is what products reach."""
    finding = found(*load(XLARGE, {"TARGET_HOURS": target}), "target-hours")
    assert (finding.level if finding else None) == level
    if finding:
        needs = 100 * (STEPS * BATCH + SCORED) * FLOPS / (float(target) * 3600) / 2496e12
        assert f"{needs:,.3g}% of its peak of 312" in finding.text
        assert f"{needs / 100 * 312:,.0f} TFLOP/s of each GPU" in finding.text
        assert "at the planned 50% MFU it takes 206 h" in finding.text
        assert finding.code == 64


def test_more_than_was_ever_published_is_said(load: Load) -> None:
    beyond, within = (
        found(*load(XLARGE, {"TARGET_HOURS": hours}), "target-hours") for hours in ("150", "180")
    )
    assert beyond and "the most that was published for such a card is 60%" in beyond.text  # 68.7%
    assert within and "published" not in within.text  # 57.2%


@pytest.mark.parametrize(("target", "percent"), [("1200000", 444), ("400000", 148)])
def test_the_labs_tokens_a_second(load: Load, target: str, percent: int) -> None:
    """150,000 on each of eight A100, and 400,000 on all: 4.4 and 1.5 times what their peak allows."""
    finding = found(*load(XLARGE, {"TARGET_TOKENS_PER_S": target}), "target-tokens-per-s")
    assert finding and finding.level == FAIL
    assert round(100 * float(target) * FLOPS / 2496e12) == percent
    assert f"{percent}% of its peak of 312" in finding.text
    assert "on a100-80gb-sxm matrix products alone reach 86.9%" in finding.text


def test_what_was_measured_of_the_run_is_the_limit(load: Load) -> None:
    """120,000 tokens/s, measured: a tenth more may be, and a fifth more cannot, though 60% were published."""
    c, fleet = load({name: value for name, value in XLARGE.items() if name != "MFU"})
    probe = Probe(
        "NVIDIA A100-SXM4-80GB", 0.0, "2.13.0", {}, steps=(Step(shape_of(c), 8, 120_000, 50.0),)
    )
    levels = [
        found(dataclasses.replace(c, target_tokens_per_s=rate), fleet, "target-tokens-per-s", probe)
        for rate in (120_000, 130_000, 144_000)
    ]
    assert [one and one.level for one in levels] == [None, WARN, FAIL]
    assert levels[2] and "a step of just this run was measured at 44.4%" in levels[2].text


def test_measured_products_are_the_limit_of_their_card(load: Load) -> None:
    c, fleet = load(XLARGE, {"TARGET_HOURS": "150"})  # 68.7% of the peak: 214 TFLOP/s
    for tflops, level in ((200.0, FAIL), (220.0, WARN)):
        finding = found(c, fleet, "target-hours", Probe("", 0.0, "", {"bfloat16": tflops}))
        assert finding and finding.level == level


def test_the_network_alone_may_take_longer(load: Load) -> None:
    """At four sites each step waits 64 s for 1 Gbit/s: 3,400 hours, whatever the chips do."""
    c, fleet = load(WAN, {"TARGET_HOURS": "1000"})
    finding = found(c, fleet, "target-hours")
    assert finding and finding.level == FAIL
    assert (
        "each step waits 64 s for the network" in finding.text
        and "% of its peak" not in finding.text
    )
    assert pace_of(c, fleet, None).wait_s == pytest.approx(
        6 * (4 * 1_336_248_320 / 4 * 8 / 1e9 + 0.015), rel=0.01
    )


def test_what_is_needed_while_the_network_is_waited_for(load: Load) -> None:
    c, fleet = load(WAN, {"WAN_GBIT": "100", "TARGET_HOURS": "220"})
    finding, wait_s = found(c, fleet, "target-hours"), pace_of(c, fleet, None).wait_s
    needs = 100 * (STEPS * BATCH + SCORED) * FLOPS / (220 * 3600 - STEPS * wait_s) / 2496e12
    assert finding and f"{needs:.3g}% of its peak" in finding.text and needs > 55


def test_a_speed_that_is_not_known_is_no_reason_to_refuse(load: Load) -> None:
    c, fleet = load(
        {"PRESET": "tiny", "CARDS": "cpu", "TARGET_HOURS": "0.001", "TARGET_TOKENS_PER_S": "1e9"}
    )
    for name in ("target-hours", "target-tokens-per-s"):
        finding = found(c, fleet, name, capacity=1e12)
        assert finding and finding.level == WARN and "cannot be checked" in finding.text


def test_a_cpu_is_held_to_its_own_products(load: Load) -> None:
    """0.2 TFLOP/s: 16,515,072 FLOPs a token are at most 12,110 tokens/s, and 70% of it is planned."""
    probe = Probe("cpu", 0.0, "", {"float32": 0.2})
    for rate, level in (("8400", None), ("12000", WARN), ("12200", FAIL)):
        c, fleet = load({"PRESET": "tiny", "CARDS": "cpu", "TARGET_TOKENS_PER_S": rate})
        finding = found(c, fleet, "target-tokens-per-s", probe, capacity=1e12)
        assert (finding and finding.level) == level


# ---------------------------------------------------------------------------------------------------
# What would do, does
# ---------------------------------------------------------------------------------------------------

TARGETS = [
    (XLARGE, {"TARGET_HOURS": "27"}, {"TRAIN_TOKENS", "N_LAYER", "CARDS"}),
    (XLARGE, {"TARGET_HOURS": "150"}, {"TRAIN_TOKENS", "N_LAYER", "CARDS"}),
    (WAN, {"TARGET_HOURS": "48"}, {"TRAIN_TOKENS", "N_LAYER", "CARDS"}),
    (D16, {"TARGET_HOURS": "2"}, {"TRAIN_TOKENS", "N_LAYER", "CARDS"}),
    (
        D16,
        {"TARGET_HOURS": "2", "MAX_STEPS": "12000", "DECAY_TOKENS": "2000000000"},
        {"MAX_STEPS", "CARDS"},
    ),
    (D16, {"TARGET_HOURS": "0.02"}, {"TRAIN_TOKENS"}),  # fewer tokens than the warm-up has
    (
        {"PRESET": "gpt2-124m", "CARDS": "1xa100-40gb-pcie"},
        {"TARGET_HOURS": "10"},
        {"TRAIN_TOKENS", "CARDS"},
    ),
    (XLARGE, {"TARGET_TOKENS_PER_S": "400000"}, {"N_LAYER", "CARDS", "TARGET_TOKENS_PER_S"}),
    (D16, {"TARGET_TOKENS_PER_S": "1e6"}, {"N_LAYER", "CARDS", "TARGET_TOKENS_PER_S"}),
]


@pytest.mark.parametrize(("base", "target", "kinds"), TARGETS)
def test_what_would_meet_a_target_does(
    load: Load, base: Given, target: Given, kinds: set[str]
) -> None:
    name = "target-hours" if "TARGET_HOURS" in target else "target-tokens-per-s"
    finding = found(*load(base, target), name)
    assert finding
    typed = proposed(finding)
    assert kinds <= {next(iter(given)) for given in typed}
    for given in typed:
        assert found(*load(base, target, given), name) is None, given


def test_no_more_tokens_and_no_larger_model_and_no_fewer_cards_would_do(load: Load) -> None:
    c, fleet = load(D16, {"TARGET_HOURS": "2"})
    pace = pace_of(c, fleet, None)
    tokens = limits.most_tokens(c, fleet, pace, 2.0)
    assert tokens
    one_more = dataclasses.replace(tokens.c, train_tokens=tokens.c.train_tokens + BATCH)
    assert hours_of(tokens.c, fleet, None) <= 2.0 < hours_of(one_more, fleet, None)
    finding = found(c, fleet, "target-hours")
    assert finding
    typed = proposed(finding)
    depth = max(
        int(given["N_LAYER"])
        for given in typed
        if "N_LAYER" in given and "TRAIN_TOKENS" not in given
    )
    assert (
        hours_of(
            *load(
                D16,
                {
                    "N_LAYER": str(depth + 2),
                    "N_HEAD": str(depth // 2 + 1),
                    "N_EMBD": str(64 * (depth + 2)),
                },
            ),
            None,
        )
        > 2.0
    )
    cards = next(given["CARDS"] for given in typed if "CARDS" in given)
    assert cards == "8xh100-sxm"  # 4.57 hours on two: 2.3 on four
    assert hours_of(*load(D16, {"CARDS": "4xh100-sxm"}), None) > 2.0


def test_a_model_of_the_family_keeps_its_proportions(load: Load) -> None:
    d16, _ = load(D16)
    assert shape(d16, 20) == {
        "n_layer": 20,
        "n_head": 10,
        "n_embd": 1280,
    }  # as presets/d20-2xh100.env
    xlarge, _ = load(XLARGE)
    assert shape(xlarge, 18) == {
        "n_layer": 18,
        "n_head": 12,
        "n_embd": 1536,
        "mlp_dim": 4224,
    }  # 5632 / 2048 of it
    grouped, fleet = load(XLARGE, {"N_KV_HEAD": "4"})
    assert shape(grouped, 12) == {
        "n_layer": 12,
        "n_head": 8,
        "n_embd": 1024,
        "n_kv_head": 2,
        "mlp_dim": 2816,
    }
    sizes = [parameters(model.c).total for model in smaller_models(grouped, fleet)]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 2


def test_what_a_preset_names_is_typed_though_it_is_what_would_be_filled_in(load: Load) -> None:
    """presets/gpt2-124m.env says MLP_DIM=2048, which 768 would give by itself, and so no smaller model loses it."""
    c, fleet = load({"PRESET": "gpt2-124m", "CARDS": "1xa100-40gb-pcie"})
    smaller = next(smaller_models(c, fleet))
    assert smaller.typed == "N_LAYER=11 N_HEAD=11 N_EMBD=704 MLP_DIM=1856"


def test_cards_come_in_numbers_that_split_the_batch_and_fill_their_nodes(load: Load) -> None:
    c, fleet = load(XLARGE)
    assert [(one.fleet.processes, one.fleet.nodes) for one in more_cards(c, fleet)] == [
        (16, 2),
        (32, 4),
        (64, 8),
        (128, 16),
        (256, 32),
    ]
    c, fleet = load(WAN)
    assert [(one.fleet.nodes, one.fleet.sites) for one in more_cards(c, fleet)][:2] == [
        (8, 4),
        (16, 4),
    ]
    assert choice(c, fleet, nodes=4, parallel="fsdp", optimizer="muon") is None  # a rule forbids it


# ---------------------------------------------------------------------------------------------------
# Memory, types
# ---------------------------------------------------------------------------------------------------

MEMORY = [
    (
        XLARGE,
        {"MICRO_BATCH_SIZE": "32"},
        {"MICRO_BATCH_SIZE", "ACTIVATION_CHECKPOINTING", "N_LAYER"},
    ),
    (XLARGE, {"CARDS": "8xa100-40gb-sxm"}, {"MICRO_BATCH_SIZE", "N_LAYER"}),
    (
        {"PRESET": "d32-8xh100", "CARDS": "8xa100-40gb-sxm"},
        {"MICRO_BATCH_SIZE": "32"},
        {"MICRO_BATCH_SIZE"},
    ),
    (
        XLARGE,
        {"N_LAYER": "96", "N_EMBD": "4096", "N_HEAD": "32", "MLP_DIM": "11264"},
        {"ACTIVATION_CHECKPOINTING", "N_LAYER"},
    ),
]


@pytest.mark.parametrize(("base", "more", "kinds"), MEMORY)
def test_memory_that_does_not_hold_it_and_what_does(
    load: Load, base: Given, more: Given, kinds: set[str]
) -> None:
    c, fleet = load(base, more)
    finding, need = found(c, fleet, "memory"), memory_of(c, fleet).total
    assert finding and finding.level == FAIL and finding.code == 64
    assert (
        need > capacity_bytes(fleet) and f"needs {need / 2**30:.1f} GiB a process" in finding.text
    )
    typed = proposed(finding)
    assert typed and kinds & {next(iter(given)) for given in typed}
    for given in typed:
        assert found(*load(base, more, given), "memory") is None, given


def test_memory_that_holds_it_is_no_problem(load: Load) -> None:
    assert found(*load(XLARGE), "memory") is None and found(*load(D16), "memory") is None
    assert found(*load(D16), "memory", capacity=2.0**30) is not None


def test_a_card_without_bfloat16(load: Load) -> None:
    """V100: 15.7 TFLOP/s in float32, by NVIDIA's data sheet."""
    c, fleet = load(D16, {"CARDS": "2xv100-32gb-sxm"})
    finding = found(c, fleet, "bf16")
    assert (
        finding and finding.level == FAIL and "v100-32gb-sxm has no bfloat16 units" in finding.text
    )
    assert "DTYPE=float32 (at most 15.7 TFLOP/s a card)" in finding.fix
    assert found(*load(D16, {"CARDS": "2xv100-32gb-sxm", "DTYPE": "float32"}), "bf16") is None
    mixed = found(*load(XLARGE, {"CARDS": "4xa100-80gb-sxm,4xv100-32gb-sxm"}), "bf16")
    assert mixed and "CARDS=4xa100-80gb-sxm alone" in mixed.fix
    assert found(*load(XLARGE, {"CARDS": "4xa100-80gb-sxm"}), "bf16") is None


# ---------------------------------------------------------------------------------------------------
# Disk
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "share", "kinds"),
    [
        ({"KEEP_EVERY": "1000"}, 0.1, {"KEEP_EVERY"}),
        ({"KEEP_LAST": "9"}, 0.9, {"KEEP_LAST", "DATA_CACHE_GB"}),
        ({"KEEP_LAST": "9", "DATA_STREAM": "0"}, 0.5, {"DATA_STREAM"}),
        ({"KEEP_EVERY": "1000", "KEEP_LAST": "9"}, 0.03, {"KEEP_LAST"}),
    ],
)
def test_a_disk_that_fills_and_what_would_not(
    load: Load, more: Given, share: float, kinds: set[str]
) -> None:
    c, fleet = load(XLARGE, more)
    total = sum(disk(c).values())
    finding = found(c, fleet, "disk", free=share * total)
    assert finding and finding.level == FAIL and f"up to {size(total)} are" in finding.text
    typed = proposed(finding)
    assert kinds <= {next(iter(given)) for given in typed}
    for given in typed:
        assert found(*load(XLARGE, more, given), "disk", free=share * total) is None, given


def test_a_disk_is_enough_or_is_not_known(load: Load) -> None:
    c, fleet = load(XLARGE)
    total = sum(disk(c).values())
    assert found(c, fleet, "disk", free=total) is None and found(c, fleet, "disk") is None
    finding = found(c, fleet, "disk", free=total - 1)
    assert finding and f"RUNS_DIR and DATA_DIR on a disk with {size(total)}" in finding.fix


def test_a_disk_for_data_alone_is_not_mended_by_fewer_checkpoints(load: Load) -> None:
    c, fleet = load(XLARGE, {"KEEP_LAST": "9"})
    needs = {part: size for part, size in disk(c).items() if part != "checkpoints"}
    data = Place(("DATA_DIR",), Path("/data"), needs, sum(needs.values()) - 5e9)
    finding = limits.problems(c, fleet, None, capacity_bytes(fleet), [data])[0]
    assert (
        finding.name == "disk"
        and "the data alone fill it" in finding.text
        and "DATA_DIR: up to" in finding.text
    )
    assert proposed(finding) == [{"DATA_CACHE_GB": "45"}]


def test_when_it_is_full_by_hand(load: Load) -> None:
    """A save each 100 steps of 3.6 s; room for the data and five checkpoints and a half. Without KEEP_EVERY 4 are there
    at most; with it one more each 200 steps: at step 400 there are 4 + 2, the sixth of which fills the disk. With two
    there already, and room for three more, it is the same step."""
    c, _ = load(
        D16, {"SAVE_EVERY": "100", "KEEP_LAST": "3", "KEEP_EVERY": "200", "SAVE_MINUTES": "1000"}
    )
    data, one = sum(disk(c).values()) - disk_of_checkpoints(c), checkpoint_bytes(c)
    full = "it is full at step 400 of 12,800, after 24 min of training"
    assert full_when(c, 3.6, place(c, data + 5.5 * one)) == full
    assert full_when(c, 3.6, place(c, data + 3.5 * one, there=2 * one)) == full
    assert full_when(c, 3.6, place(c, data - 1)) == "the data alone fill it"
    unsaid = dataclasses.replace(c, save_every=None)
    assert full_when(unsaid, None, place(c, data + 5.5 * one)) == "checkpoint 6 fills it"


def test_nothing_is_wrong_with_what_is_planned_well(load: Load) -> None:
    for base in (XLARGE, D16):
        c, fleet = load(base, {"TARGET_HOURS": "210", "TARGET_TOKENS_PER_S": "100000"})
        assert limits.problems(c, fleet, None, capacity_bytes(fleet), [place(c, 1e15)]) == []
        assert pace_of(c, fleet, None).tokens_per_s == pytest.approx(
            float(base["MFU"])
            / 100
            * sum(n * card.bf16_tflops for n, card in fleet.cards)
            * 1e12
            / flops_of(c)
        )


def test_amounts_are_said_as_in_the_rest_of_the_plan(load: Load) -> None:
    """record/number_formats.py has one form for each: 4:23 h as the table above it says, whole per cents, terabytes."""
    hours = found(*load(D16, {"TARGET_HOURS": "0.001"}), "target-hours")
    assert hours and "it takes 4:23 h" in hours.text and "e+" not in hours.text
    c, fleet = load(D16, {"KEEP_LAST": "1000"})  # 1,001 checkpoints of 3.2 GB
    room = found(c, fleet, "disk", free=75.6e9)
    assert (
        room
        and f"up to {1001 * checkpoint_bytes(c) / 1e12 + 0.0184:.3g} TB are still to be written"
        in room.text
    )


# ---------------------------------------------------------------------------------------------------
# The batch
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "more", "typed"),
    [
        (
            D16,
            {"CARDS": "3xh100-sxm"},
            ["BATCH_TOKENS=540672", "CARDS=2xh100-sxm", "CARDS=4xh100-sxm"],
        ),
        (
            XLARGE,
            {"CARDS": "12xa100-80gb-sxm", "NODES": "4"},
            ["BATCH_TOKENS=589824", "CARDS=8xa100-80gb-sxm", "CARDS=16xa100-80gb-sxm"],
        ),
        (D16, {"CARDS": "2xh100-sxm,1xa100-80gb-sxm"}, ["BATCH_TOKENS=540672"]),
    ],
)
def test_a_batch_that_processes_cannot_share(
    load: Load, base: Given, more: Given, typed: list[str]
) -> None:
    """256 sequences in micro-batches of 8 are 32 of these, which 3 or 12 processes cannot have as many of each."""
    c, fleet = load(base, more)
    finding = found(c, fleet, "batch")
    assert finding and finding.level == FAIL and finding.code == 64
    assert f"x {fleet.processes}) = {8 * 2048 * fleet.processes}, on " in finding.text
    proposals = proposed(finding)
    assert [
        next(f"{name}={value}" for name, value in given.items()) for given in proposals
    ] == typed
    for given in proposals:
        assert found(*load(base, more, given), "batch") is None, given


def test_a_batch_on_this_machine_is_mended_by_fewer_processes(load: Load) -> None:
    c = dataclasses.replace(load(D16)[0], cards="here")
    finding = found(c, fleet_of(c, here=("NVIDIA H100 80GB HBM3",) * 3), "batch")
    assert finding and "what would do: BATCH_TOKENS=540672; or NPROC=2" in finding.fix


def test_processes_are_those_of_the_cards(tmp_path: Path) -> None:
    """NODES=3 is refused for the eight cards that three nodes cannot share, not for a batch of three processes."""
    done = subprocess.run(
        [sys.executable, "-m", "plan"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        env={
            "PATH": os.environ["PATH"],
            "PRESET": "xlarge-8xa100",
            "NODES": "3",
            "SITES": "2",
            "RUNS_DIR": str(tmp_path),
        },
    )
    assert done.returncode == 64 and "8 cards cannot be spread evenly over NODES=3" in done.stderr
    assert "SITES=2: NODES=3 cannot be spread" in done.stderr and "BATCH_TOKENS" not in done.stderr
