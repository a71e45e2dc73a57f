"""plan/checks.py: what is refused, by which number, and that what it proposes does what it says, when it is typed."""

import dataclasses
import re
from pathlib import Path

import pytest

from hardware.model_size import parameters
from plan.checks import capacity_of, find_problems
from plan.measured import Probe, Step, shape_of
from plan.run import run_of
from plan.storage import Place, checkpoint_bytes, disk
from plan.time import pace_of, time_of
from settings.finding import FAIL, WARN, Finding
from tests.plan.conftest import D16, DILOCO, WAN, XLARGE, Given
from train import timeouts

FLOPS, SIZE = 9_224_847_360, 1_336_248_320  # of xlarge
TOKENS = 190_735 * 524_288 + (190 + 20) * 4_194_304 / 3  # evaluation is a third of training's work
SETTING = re.compile(r"([A-Z_]+)=(\S+)")


@pytest.fixture
def find(run):
    """find("wan", WAN, {"WAN_GBIT": "1"}, capacity=..): the finding of that name, or None."""

    def found(name, *typed: Given, probe=None, capacity=None, places=(), done=0) -> Finding | None:
        planned = run(*typed)
        if capacity is None:
            capacity = capacity_of(planned.fleet)
        pace = pace_of(planned, probe)
        problems = find_problems(planned, probe, pace, capacity, places, done)
        return next((one for one in problems if one.name == name), None)

    return found


def proposals(finding: Finding) -> list[Given]:
    """What a finding proposes, as NAME -> value."""
    texts = finding.fix.removeprefix("Try: ").split("; or ")
    return [dict(SETTING.findall(text.split(" (")[0])) for text in texts]


# ---- Targets


@pytest.mark.parametrize(
    ("target", "level"),
    [("206.5", None), ("150", WARN), ("120", WARN), ("118", FAIL), ("27", FAIL)],
)
def test_the_labs_hours_on_eight_a100(find, target: str, level: str | None) -> None:
    """206 hours at 50% of 2,496 TFLOP/s; matrix products alone reach 86.9%."""
    finding = find("target-hours", XLARGE, {"TARGET_HOURS": target})
    assert (finding.level if finding else None) == level
    if finding:
        needed = 100 * TOKENS * FLOPS / (float(target) * 3600) / 2496e12
        assert f"needs {needed:,.3g}% MFU" in finding.text
        assert "Planned: 206 h at 50% MFU" in finding.text
        assert ("reach 86.9%" in finding.text) == (level == FAIL)


@pytest.mark.parametrize(("target", "percent"), [("1200000", 444), ("400000", 148)])
def test_the_labs_tokens_per_second(find, target: str, percent: int) -> None:
    """150,000 on each of eight A100, and 400,000 on all."""
    finding = find("target-tokens-per-s", XLARGE, {"TARGET_TOKENS_PER_S": target})
    assert finding.level == FAIL
    assert round(100 * float(target) * FLOPS / 2496e12) == percent
    assert f"needs {percent}% MFU" in finding.text


@pytest.mark.parametrize(("rate", "level"), [(120_000, None), (130_000, WARN), (144_000, FAIL)])
def test_a_measured_step_is_the_limit(run, find, rate: int, level: str | None) -> None:
    lab = {"PRESET": "xlarge-8xa100"}
    step = Step(shape_of(run(lab).config), 8, 120_000, 50.0)
    probe = Probe("NVIDIA A100-SXM4-80GB", 0.0, "2.13.0", {}, steps=(step,))
    finding = find("target-tokens-per-s", lab, {"TARGET_TOKENS_PER_S": str(rate)}, probe=probe)
    assert (finding and finding.level) == level


@pytest.mark.parametrize(("tflops", "level"), [(200.0, FAIL), (220.0, WARN)])
def test_measured_matrix_products_are_the_limit(find, tflops: float, level: str) -> None:
    """TARGET_HOURS=150 needs 68.7% of 312: 214 TFLOP/s."""
    probe = Probe("", 0.0, "", {"bfloat16": tflops})
    assert find("target-hours", XLARGE, {"TARGET_HOURS": "150"}, probe=probe).level == level


@pytest.mark.parametrize(("rate", "level"), [("8400", None), ("12000", WARN), ("12200", FAIL)])
def test_a_cpu_is_held_to_its_own_products(find, rate: str, level: str | None) -> None:
    """0.2 TFLOP/s over 16.5 MFLOP per token are at most 12,110 tokens/s."""
    typed = {"PRESET": "tiny", "CARDS": "cpu", "DTYPE": "float32", "TARGET_TOKENS_PER_S": rate}
    finding = find("target-tokens-per-s", typed, probe=Probe("cpu", 0.0, "", {"float32": 0.2}))
    assert (finding and finding.level) == level


def test_the_network_alone_may_take_longer(find) -> None:
    finding = find("target-hours", WAN, {"TARGET_HOURS": "1000"})
    assert finding.level == FAIL
    assert "waits 64 s" in finding.text and "% MFU. Planned" not in finding.text


def test_an_unknown_speed_is_no_reason_to_refuse(find) -> None:
    typed = {"PRESET": "tiny", "CARDS": "cpu", "TARGET_HOURS": "1", "TARGET_TOKENS_PER_S": "1e9"}
    for name in ("target-hours", "target-tokens-per-s"):
        assert find(name, typed).level == WARN


def test_a_complete_run_misses_no_target(find) -> None:
    typed = XLARGE | {"TARGET_HOURS": "1"}
    assert find("target-hours", typed) and find("target-hours", typed, done=190_735) is None


@pytest.mark.parametrize(
    ("base", "target", "kinds"),
    [
        (XLARGE, {"TARGET_HOURS": "27"}, {"TRAIN_TOKENS", "N_LAYER"}),
        (XLARGE, {"TARGET_HOURS": "150"}, {"TRAIN_TOKENS", "N_LAYER"}),
        (WAN, {"TARGET_HOURS": "300"}, {"SYNC", "TRAIN_TOKENS", "N_LAYER"}),
        (D16, {"TARGET_HOURS": "2"}, {"TRAIN_TOKENS", "N_LAYER"}),
        (D16, {"TARGET_HOURS": "2", "MAX_STEPS": "12000"}, {"MAX_STEPS", "N_LAYER"}),
        (D16, {"TARGET_HOURS": "0.02"}, {"TRAIN_TOKENS"}),  # fewer tokens than the warm-up has
        (XLARGE, {"TARGET_TOKENS_PER_S": "400000"}, {"N_LAYER", "TARGET_TOKENS_PER_S"}),
        (WAN, {"TARGET_TOKENS_PER_S": "100000"}, {"SYNC", "TARGET_TOKENS_PER_S"}),
    ],
)
def test_what_would_meet_a_target_does(find, run, base: Given, target: Given, kinds) -> None:
    name = "target-hours" if "TARGET_HOURS" in target else "target-tokens-per-s"
    proposed = proposals(find(name, base, target))
    assert kinds <= {name for one in proposed for name in one}
    for one in proposed:
        assert find(name, base, target, one) is None, one
        planned = run(base, target, one)
        assert planned.fleet == run(base).fleet  # the GPUs that there are
        if "N_LAYER" in one:
            assert parameters(planned.config).total >= 70e6  # which the loss law covers


def test_a_target_is_for_what_is_left(find, run) -> None:
    planned = run(XLARGE)
    half = planned.config.last_step // 2
    assert find("target-hours", XLARGE, {"TARGET_HOURS": "110"})
    assert find("target-hours", XLARGE, {"TARGET_HOURS": "110"}, done=half) is None
    (fewer,) = proposals(find("target-hours", XLARGE, {"TARGET_HOURS": "90"}, done=half))
    steps = int(fewer["TRAIN_TOKENS"]) // planned.config.batch_tokens
    time = time_of(planned.config.replace(max_steps=steps), pace_of(planned, None), half)
    assert half < steps and time.total_seconds == pytest.approx(90 * 3600, rel=1e-3)


# ---- Memory


@pytest.mark.parametrize(
    ("base", "names"),
    [
        (XLARGE | {"MICRO_BATCH_SIZE": "32"}, {"MICRO_BATCH_SIZE", "ACTIVATION_CHECKPOINTING"}),
        ({"PRESET": "d32-8xh100", "CARDS": "8xrtx4090"}, {"PARALLEL", "OPTIMIZER", "N_LAYER"}),
        (XLARGE | {"CARDS": "8xa100-40gb-sxm"}, {"MICRO_BATCH_SIZE", "ACTIVATION_CHECKPOINTING"}),
        (DILOCO | {"CARDS": "4xrtx4090", "MFU": "50"}, {"N_LAYER"}),
        (
            {
                "PRESET": "glm-4.5-air-16xh200",
                "MICRO_BATCH_SIZE": "4",
                "ACTIVATION_CHECKPOINTING": "none",
            },
            {"MICRO_BATCH_SIZE", "ACTIVATION_CHECKPOINTING"},
        ),
        ({"PRESET": "glm-4.5-air-16xh200", "PARALLEL": "ddp"}, {"PARALLEL"}),
        (
            {"MODEL": "x/GLM-4.5-Air", "CARDS": "16xh200", "NODES": "2", "DTYPE": "bfloat16"},
            {"PARALLEL", "LORA_RANK"},
        ),
        ({"MODEL": "x/Qwen3-1.7B", "CARDS": "1xrtx4090"}, {"LORA_RANK", "DTYPE"}),
    ],
)
def test_what_would_fit_does(find, run, base: Given, names: set[str]) -> None:
    finding = find("memory", base)
    assert finding.level == FAIL and finding.code == 64
    proposed = proposals(finding)
    assert names <= {name for one in proposed for name in one}
    told = re.findall(r"\(([0-9.]+) GiB", finding.fix)
    for one, gib in zip(proposed, told, strict=True):
        assert find("memory", base, one) is None, one
        assert float(gib) == pytest.approx(run(base, one).memory.total / 2**30, abs=0.06)


def test_what_nothing_holds_says_so(find) -> None:
    assert "No setting makes it fit" in find("memory", XLARGE, capacity=1e7).fix


# ---- Disk


def place(run, typed: Given, free: float, there: float = 0.0) -> Place:
    """One disk for everything, which has some bytes of the checkpoints already."""
    needs = disk(run(typed).config)
    checkpoints = needs["checkpoints"] - there
    return Place(("RUNS_DIR",), Path("/disk"), needs | {"checkpoints": checkpoints}, free)


def test_a_disk_that_checkpoints_fill(find, run) -> None:
    typed = D16 | {"KEEP_LAST": "5"}
    needs = disk(run(typed).config)
    each = checkpoint_bytes(run(typed).config)
    assert needs["checkpoints"] == pytest.approx(6 * each)
    enough = sum(needs.values())
    assert find("disk", typed, places=[place(run, typed, enough)]) is None
    tight = place(run, typed, enough - each)
    fewer, *_ = proposals(find("disk", typed, places=[tight]))
    assert fewer == {"KEEP_LAST": "2"}
    assert find("disk", typed | fewer, places=[place(run, typed | fewer, tight.free)]) is None
    # What is on the disk already stays, and counts.
    assert find("disk", typed, places=[place(run, typed, enough - each, there=each)]) is None


def test_a_disk_that_data_fill(find, run) -> None:
    needs = disk(run(D16).config)
    free = sum(needs.values()) - 5e9
    finding = find("disk", D16, places=[place(run, D16, free)])
    streamed = next(one for one in proposals(finding) if "DATA_CACHE_GB" in one)
    assert streamed["DATA_STREAM"] == "1"
    again = place(run, D16 | streamed, free)
    assert again.missing == 0


# ---- Batch and dtype


def test_a_batch_that_gpus_cannot_share(find, run) -> None:
    finding = find("batch", XLARGE | {"CARDS": "7xa100-80gb-sxm"})
    assert finding.level == FAIL
    (other,) = proposals(finding)
    assert find("batch", XLARGE | {"CARDS": "7xa100-80gb-sxm"}, other) is None


def test_a_gpu_without_bfloat16(find) -> None:
    finding = find("bf16", XLARGE | {"CARDS": "4xt4,4xa6000"})
    share = 8.1 / 154.8  # TFLOP/s
    assert finding.text == (
        "DTYPE=bfloat16: t4 has no bfloat16 units, and in float32 would add "
        f"{100 * share:.1f}% to the peak of the others"
    )
    assert proposals(finding) == [{"CARDS": "4xa6000"}, {"DTYPE": "float32"}]
    for other in proposals(finding):
        assert find("bf16", XLARGE | {"CARDS": "4xt4,4xa6000"}, other) is None
    only = find("bf16", XLARGE | {"CARDS": "8xt4"})
    assert only.text == "DTYPE=bfloat16: t4 has no bfloat16 units"
    assert proposals(only) == [{"DTYPE": "float32"}]


# ---- Sites


def test_ddp_that_waits_for_the_wan(find) -> None:
    finding = find("wan", WAN)
    assert finding.level == WARN and "busy 5.7% of the time" in finding.text
    (diloco,) = proposals(finding)
    assert diloco == {"SYNC": "diloco", "PARALLEL": "fsdp"}
    assert find("wan", WAN, diloco) is None
    assert find("wan", WAN, {"WAN_GBIT": "100"}) is None and find("wan", XLARGE) is None
    (slow,) = proposals(find("wan", WAN, {"WAN_GBIT": "0.3"}))
    assert (slow["SYNC_FRAGMENTS"], slow["SYNC_DELAY"]) == ("6", "4")
    (muon,) = proposals(find("wan", WAN, {"OPTIMIZER": "muon"}))
    assert muon["OPTIMIZER"] == "adamw"


@pytest.mark.parametrize(
    ("typed", "level", "words"),
    [
        ({"SYNC_EVERY": "5"}, WARN, "takes 32 s, and the steps between two take 19 s"),
        ({"SYNC_FRAGMENTS": "6", "WAN_GBIT": "0.2"}, WARN, "takes 37 s"),
        ({"PARALLEL": "ddp"}, FAIL, "each of the 2 processes of a site would send the whole"),
        ({"PARALLEL": "hsdp", "SHARD_RANKS": "1"}, FAIL, "would send the whole model"),
    ],
)
def test_what_is_wrong_with_diloco(find, typed: Given, level: str, words: str) -> None:
    finding = find("wan", DILOCO, typed)
    assert finding.level == level and words in finding.text
    for one in proposals(finding):
        again = find("wan", DILOCO, typed, one)
        assert again is None or again.text != finding.text


def test_a_batch_too_small_to_be_divided_among_sites(find, run) -> None:
    """Each advice, typed, satisfies the rule: that of the check, and that of `make plan` with SYNC=ddp."""
    tiny = {"PRESET": "tiny", "CARDS": "4xa6000", "NODES": "4", "SITES": "4", "DTYPE": "bfloat16"}
    diloco = {"SYNC": "diloco"}
    finding = find("sites", tiny, diloco)
    assert finding.level == WARN and "1,024 tokens per step" in finding.text
    assert "arXiv 2503.09799" in finding.text and "17.8%" in finding.text
    (larger,) = proposals(finding)
    assert find("sites", tiny, diloco, larger) is None and find("batch", tiny, larger) is None
    assert 22_528 <= int(larger["BATCH_TOKENS"]) < 22_528 + 128 * 32 * 4
    (proposed,) = proposals(find("wan", tiny))
    assert proposed["SYNC"] == "diloco" and find("sites", tiny, proposed) is None
    few = {"MICRO_BATCH_SIZE": "1024"} | diloco  # more than a process has of such a batch
    (larger,) = proposals(find("sites", tiny, few))
    assert larger == {"BATCH_TOKENS": "22528"} and find("batch", tiny, few, larger) is None
    assert find("sites", DILOCO) is None


def test_a_link_too_slow_to_rejoin(find, run) -> None:
    whole = checkpoint_bytes(run(DILOCO).config)
    gbit = 8e-9 * whole / timeouts.SYNC_TIMEOUT_S
    slow = {"WAN_GBIT": f"{gbit / 2:.3g}", "SYNC_EVERY": "500"}
    finding = find("wan", DILOCO, slow)
    assert "a site that rejoins" in finding.text and f"{gbit:.2g} Gbit/s" in finding.fix
    assert find("wan", DILOCO, slow | {"WAN_GBIT": f"{2 * gbit:.3g}"}) is None


def test_memory_of_diloco(run) -> None:
    """8 bytes more per weight, over the two processes of a site; SYNC_DELAY holds the transfer too."""
    need = run(DILOCO).memory
    assert need.parts["outer"] == 8 * SIZE / 2
    assert "outer" not in run(WAN).memory.parts
    embedding = 50_304 * 2048
    largest = 4 / 24 * (SIZE - embedding) + embedding
    delayed = run(DILOCO, {"SYNC_FRAGMENTS": "5", "SYNC_DELAY": "1"}).memory
    assert delayed.parts["outer"] == pytest.approx((8 * SIZE + 8 * largest) / 2)


def test_proposals_are_those_of_the_settings_rules(run) -> None:
    planned = run(XLARGE)
    uneven = dataclasses.replace(planned.config, batch_tokens=planned.config.batch_tokens + 1)
    assert run_of(planned.config, planned.fleet) == planned
    assert (
        find_problems(run_of(uneven, planned.fleet), None, pace_of(planned, None), 1e15)[0].name
        == "batch"
    )
