"""plan/network/evidence.py, outer.py, between.py, across.py: which evidence belongs to which run, what is recommended, and that
what is typed for it loads, plans, and does what was said of it."""

import dataclasses
import datetime
import re

import pytest

from monitor.expected import expected, least_gib
from plan.across import problems
from plan.as_json import as_json
from plan.between import Verdict, options, verdict
from plan.checks import capacity_bytes, memory_problem
from plan.hours import pace_of
from plan.memory import memory
from plan.network import evidence
from plan.network.outer import Outer, exchange_s, fragments, inner, stall_s, streaming_of
from plan.planner import Plan, plan
from plan.report import told
from plan.storage import checkpoint_bytes
from settings.finding import FAIL, WARN
from tests.plan.conftest import D16, WAN, Given, Load
from train import timeouts

NOW = datetime.datetime(2026, 11, 22, 9, 0)
SIZE, EMBEDDING = 1_336_248_320, 50_304 * 2048
DILOCO = WAN | {"SYNC": "diloco", "PARALLEL": "fsdp"}


def planned(load: Load, *typed: Given) -> Plan:
    return plan(*load({"RUNS_DIR": "no-runs"}, *typed), NOW)


def found(load: Load, *typed: Given) -> Verdict:
    one = verdict(planned(load, *typed))
    assert one
    return one


def given_by(command: str) -> Given:
    return dict(re.findall(r"([A-Z_]+)=(\S+)", command))


# ---- Evidence


@pytest.mark.parametrize(
    ("size", "sites", "every", "streaming", "percent", "words"),
    [
        (
            1.34e9,
            4,
            30,
            False,
            0.5,
            "1.3B, 4 replicas, H=30: 2.472 against 2.460 (arXiv 2503.09799, table 4)",
        ),
        (1.34e9, 2, 30, False, 0.2, "1.3B, 2 replicas"),
        (1.34e9, 8, 30, False, 1.3, "1.3B, 8 replicas"),
        (1.9e9, 4, 30, False, 0.3, "2.4B, 4 replicas"),  # 2.4 / 1.9 is less than 1.9 / 1.3
        (40e6, 4, 30, False, 2.0, "35M, 4 replicas"),
        (9e9, 4, 30, False, 0.29, "10B"),
        (4e9, 4, 30, False, 0.18, "4B"),
        (1.1e9, 2, 100, True, 0.0, "2.66, 2.51, 2.45 against 2.67, 2.52, 2.45"),
        (
            150e6,
            8,
            500,
            False,
            -0.7,
            "perplexity 15.02 against 15.30 of the same batch (arXiv 2311.08105, second hand)",
        ),
    ],
)
def test_what_was_published_of_such_a_run(
    size: float, sites: int, every: int, streaming: bool, percent: float, words: str
) -> None:
    found, says = evidence.loss(size, sites, every, streaming)
    assert found == percent and words in says and "not published" not in says


@pytest.mark.parametrize(
    ("size", "sites", "every", "streaming", "nearest"),
    [
        (1.34e9, 3, 30, False, "1.3B, 4 replicas, H=30"),  # three sites: nobody
        (
            500e6,
            4,
            30,
            False,
            "1.3B, 4 replicas, H=30",
        ),  # between 35M and 1.3B, nearer to the second
        (
            1.34e9,
            4,
            100,
            False,
            "1B, 2 replicas, H=100, streaming",
        ),  # the only one of that interval
        (1.34e9, 4, 500, False, "150M, 8 replicas, H=500"),
        (1.34e9, 4, 30, True, "1.3B, 4 replicas, H=30"),
        (1.34e9, 4, 50, False, "1.3B, 4 replicas, H=30"),
        (10e9, 14, 100, False, "1B, 2 replicas, H=100, streaming"),
    ],
)
def test_what_was_not_published_is_not_guessed(
    size: float, sites: int, every: int, streaming: bool, nearest: str
) -> None:
    found, says = evidence.loss(size, sites, every, streaming)
    assert found is None
    assert says.startswith(
        f"not published of {evidence.count(size)} at {sites} sites; nearest: {nearest}: "
    )


def test_losses_in_the_table_are_those_of_the_paper() -> None:
    """Per cent by which 2.464, 2.472 and 2.493 are above 2.460, and by which ln 15.02 is below ln 15.30."""
    percents = {one.replicas: one.percent for one in evidence.PUBLISHED if one.parameters == 1.3e9}
    assert percents == {2: 0.2, 4: 0.5, 8: 1.3}
    assert [round(100 * (loss / 2.460 - 1), 1) for loss in (2.464, 2.472, 2.493)] == [0.2, 0.5, 1.3]
    assert [evidence.percent_told(one) for one in (0.5, 0.0, -0.7, None)] == [
        "+0.5%",
        "none",
        "-0.7%",
        "not published",
    ]
    assert all(re.match(r"arXiv \d{4}\.\d{5}", one.source) for one in evidence.PUBLISHED)


# ---- What to take


def test_the_labs_four_sites(load: Load) -> None:
    """3.875 s of computing, and 32.10 s of exchange in 30 steps: 78.4%; of DDP 5.7%."""
    one = found(load, WAN)
    assert one.option.sync.name == "DiLoCo, H=30"
    wait = (1.5 * 2 * SIZE * 8 / 1e9 + 0.03) / 30
    step = 524_288 * 9_224_847_360 / (4 * 312e12)
    assert one.option.share == pytest.approx(step / (step + wait))
    assert one.option.hours == pytest.approx(190_735 * (step + wait) / 3600 + 0.6, rel=0.001)
    assert one.said.startswith(
        "DiLoCo, H=30 computes for 78.4% of the time where DDP does for 5.7%, 263 h in place of "
        "3,609 h; loss +0.5%. Faster: H=30, streaming ("
    )
    assert one.typed.split(" ENV_FILE")[0] == (
        "make train-8xa100 NODES=4 SITES=4 SYNC=diloco SYNC_EVERY=30 PARALLEL=fsdp"
    )


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"WAN_GBIT": "400"}, "DDP, float32 gradients"),
        ({"WAN_GBIT": "10"}, "DiLoCo, H=30"),
        ({"WAN_GBIT": "0.5"}, "DiLoCo, H=30, streaming"),
        ({"WAN_GBIT": "0.3"}, "DiLoCo, H=30, streaming"),
        ({"WAN_GBIT": "0.2"}, "DiLoCo, H=500"),
        ({"WAN_GBIT": "0.1"}, "DiLoCo, H=500"),
        ({"WAN_GBIT": "0.001"}, "DiLoCo, H=500"),
    ],
)
def test_what_is_recommended_hangs_on_the_link(load: Load, more: Given, name: str) -> None:
    one = found(load, WAN, more)
    assert one.option.sync.name == name
    assert ("DDP suffices" in one.said) == name.startswith("DDP")
    assert ("Even so much time is lost to the WAN" in one.said) == (more["WAN_GBIT"] == "0.001")


@pytest.mark.parametrize(
    "typed",
    [
        WAN,
        WAN | {"WAN_GBIT": "0.3"},
        WAN | {"WAN_GBIT": "0.1"},
        DILOCO | {"SYNC_EVERY": "5"},
        DILOCO | {"WAN_GBIT": "400"},
        D16 | {"NODES": "2", "SITES": "2", "WAN_GBIT": "0.5"},
        WAN | {"CARDS": "16xa100-80gb-sxm", "OPTIMIZER": "muon"},
    ],
    ids=lambda typed: " ".join(list(typed.values())[2:]),
)
def test_what_is_typed_gives_what_was_said(load: Load, typed: Given) -> None:
    """Loaded as a user's settings are, it is what is set, and takes as many hours."""
    one = found(load, typed)
    assert one.typed
    command = given_by(one.typed)
    kept = {
        name: value
        for name, value in typed.items()
        if name in ("CARDS", "MFU", "WAN_GBIT", "PRESET", "SITES")
    }
    again = found(
        load,
        kept,
        {
            name: value
            for name, value in command.items()
            if name not in ("NODE_RANK", "LIGHTHOUSE", "MASTER_ADDR", "GPUS_PER_NODE", "ENV_FILE")
        },
    )
    assert again.option.sync.chosen and again.typed == ""
    assert again.option.sync.name == one.option.sync.name and again.option.hours == pytest.approx(
        one.option.hours
    )


def test_the_hours_of_a_plan_stand_on_the_row_that_is_set(load: Load) -> None:
    for every, hours in (("30", 263), ("100", 223)):
        p = planned(load, DILOCO, {"SYNC_EVERY": every})
        chosen = next(one for one in options(p) if one.sync.chosen)
        assert chosen.sync.name == f"DiLoCo, H={every}" and p.time
        assert p.time.total == chosen.hours == pytest.approx(hours, abs=0.5)
        assert f"DiLoCo, H={every} *" in told(p)


def test_one_site_and_an_unknown_speed_have_no_verdict(load: Load) -> None:
    assert verdict(planned(load, WAN, {"SITES": "1"})) is None
    assert "one site, which DDP suffices for" in told(planned(load, WAN, {"SITES": "1"}))
    assert verdict(planned(load, WAN, {"CARDS": "8xv100-32gb-sxm", "MFU": ""})) is None


def test_json_has_the_choice(load: Load) -> None:
    p = planned(load, WAN)
    found = as_json(p)
    row = next(one for one in found["network"] if one["name"] == "DiLoCo, H=30")
    assert row["loss_percent"] == 0.5 and row["outer"] == {"every": 30, "fragments": 1, "delay": 0}
    assert (
        row["total_seconds"] / 3600 == pytest.approx(263, abs=0.5)
        and "2503.09799" in row["loss_evidence"]
    )
    assert found["between_sites"]["name"] == "DiLoCo, H=30"
    assert found["between_sites"]["command"].startswith(
        "make train-8xa100 NODES=4 SITES=4 SYNC=diloco "
    )
    assert as_json(planned(load, WAN, {"SITES": "1"}))["between_sites"] is None


# ---- Fragments


def test_fragments_that_nobody_set_hide_with_as_little_overlap_as_will_do(load: Load) -> None:
    """Four blocks of 51.4M and the embedding are 308.6M weights, and 7.4 s: beside two steps of 3.9 s; at 0.2 Gbit/s
    37 s, for which 4 do not do."""
    c, _ = load(WAN)
    assert streaming_of(c, 4, 3.875) == Outer(30, 6, 2)
    slow = dataclasses.replace(c, wan_gbit=0.2)
    assert streaming_of(slow, 4, 3.875) == Outer(30, 6, 4)
    largest = (SIZE - EMBEDDING) / 6 + EMBEDDING
    assert exchange_s(slow, Outer(30, 6, 4), 4) == pytest.approx(
        1.5 * 2 * largest * 8 / 0.2e9 + 0.03
    )
    # the other five of 205.5M take 24.7 s each: of 15.5 s that hide, 9.2 s are left, and of the largest 21.6 s
    other = (SIZE - EMBEDDING) / 6
    waits = [1.5 * 2 * size * 8 / 0.2e9 + 0.03 - 4 * 3.875 for size in [largest, *5 * [other]]]
    assert stall_s(slow, Outer(30, 6, 4), 4, 3.875) == pytest.approx(sum(waits))
    assert fragments(c, 6) == pytest.approx([largest / SIZE, *5 * [other / SIZE]]) and fragments(
        c, 1
    ) == [1.0]
    assert fragments(c, 5)[-1] == pytest.approx(
        (4 / 24 * (SIZE - EMBEDDING) + EMBEDDING) / SIZE
    )  # the one with fewer
    own = dataclasses.replace(c, sync="diloco", sync_every=100, sync_fragments=4, sync_delay=5)
    assert streaming_of(own, 4, 3.875) == Outer(100, 4, 5)
    for every in range(1, 40):
        one = streaming_of(dataclasses.replace(c, sync="diloco", sync_every=every), 4, 3.875)
        assert one.streaming and one.every % one.fragments == 0


# ---- What it holds and writes


def test_memory_and_checkpoints_of_diloco_by_hand(load: Load) -> None:
    """8 bytes more of each weight, over two processes of a site; 20 in a checkpoint, and 24 numbers of bookkeeping."""
    (ddp, fleet), (c, _) = load(WAN), load(DILOCO)
    need = memory(c, 8, 2, False)
    assert need.parts["outer"] == 8 * SIZE / 2 and need.parts["weights"] == 4 * SIZE / 2
    assert need.parts["optimizer"] == 8 * SIZE / 2 and "outer" not in memory(ddp, 8, 2, False).parts
    beside = memory(dataclasses.replace(c, sync_fragments=5, sync_delay=1), 8, 2, False)
    # of five fragments four have five of 24 blocks, and the last four and the embedding: 308.6M of 1,336M weights
    assert beside.parts["outer"] == pytest.approx(
        (8 * SIZE + 8 * (4 / 24 * (SIZE - EMBEDDING) + EMBEDDING)) / 2
    )
    lone = memory(
        dataclasses.replace(c, nodes=8, sites=8, parallel="ddp"), 8, 1, False
    )  # a process a site
    assert lone.parts["outer"] == 8 * SIZE and lone.parts["weights"] == 4 * SIZE
    # all computed anew, one sequence at once: then an exchange is the peak, with whole gradients or a half still there
    full = dataclasses.replace(c, activation_checkpointing="full", micro_batch_size=1)
    assert memory(full, 8, 2, False).moment == "exchange"
    assert memory(full, 8, 2, False).parts["outer"] == 16 * SIZE / 2
    assert checkpoint_bytes(c) == pytest.approx(20 * SIZE, rel=1e-3)
    assert checkpoint_bytes(c) - checkpoint_bytes(ddp) == pytest.approx(8 * SIZE, rel=1e-3)
    assert fleet.processes == 8


def test_the_monitor_expects_what_diloco_adds(load: Load) -> None:
    """4, 8 and 8 bytes of a half of the weights, and gradients of all, which are summed before they are split."""
    c, fleet = load(DILOCO)
    assert least_gib(c, fleet) == pytest.approx((20 * SIZE / 2 + 4 * SIZE) / 2**30)
    step_s = expected(c, fleet).step_s
    assert step_s == pytest.approx(3.8754 + (1.5 * 2 * SIZE * 8 / 1e9 + 0.03) / 30, rel=1e-3)


def test_the_tables_of_a_plan_have_what_diloco_adds(load: Load) -> None:
    text = told(planned(load, DILOCO))
    assert "optimizer  outer  activations" in text and "fsdp *" in text and "\nddp " not in text
    assert (
        "a checkpoint is 26.7 GB" in text
        and "each of 4 sites writes as many checkpoints, its own" in text
    )
    one = told(planned(load, WAN | {"CARDS": "4xa100-80gb-sxm", "SYNC": "diloco"}))
    assert "ddp *" in one and "\nfsdp" not in one  # a process a site has nothing to split


# ---- What is wrong, and what would do


def findings(load: Load, *typed: Given) -> list:
    c, fleet = load(*typed)
    return problems(c, fleet, pace_of(c, fleet, None))


def test_ddp_that_waits_is_told_and_diloco_mends_it(load: Load) -> None:
    (one,) = findings(load, WAN)
    assert one.level == WARN and "5.7% of the time" in one.text and "waits 64 s" in one.text
    assert one.fix == "what would do: SYNC=diloco PARALLEL=fsdp (78.4%)"
    assert findings(load, WAN, given_by(one.fix)) == []
    assert findings(load, WAN, {"WAN_GBIT": "100"}) == findings(load, WAN, {"SITES": "1"}) == []
    (slow,) = findings(load, WAN, {"WAN_GBIT": "0.3"})
    assert given_by(slow.fix) == {
        "SYNC": "diloco",
        "SYNC_FRAGMENTS": "6",
        "SYNC_DELAY": "4",
        "PARALLEL": "fsdp",
    }
    (muon,) = findings(load, WAN, {"OPTIMIZER": "muon"})
    assert given_by(muon.fix) == {"SYNC": "diloco", "PARALLEL": "fsdp", "OPTIMIZER": "adamw"}
    assert findings(load, WAN, {"OPTIMIZER": "muon"}, given_by(muon.fix)) == []


@pytest.mark.parametrize(
    ("typed", "level", "words"),
    [
        ({"SYNC_EVERY": "5"}, WARN, "takes 32 s, longer than the 19 s of computing between two"),
        (
            {"SYNC_EVERY": "30", "SYNC_FRAGMENTS": "6", "WAN_GBIT": "0.2"},
            WARN,
            "takes 37 s, longer than the 19 s",
        ),
        ({"PARALLEL": "ddp"}, FAIL, "each of 2 processes of a site would send the whole model"),
    ],
)
def test_what_is_wrong_with_diloco_and_what_mends_it(
    load: Load, typed: Given, level: str, words: str
) -> None:
    (one,) = findings(load, DILOCO, typed)
    assert (one.level, one.code) == (level, 64) and words in one.text
    listed = one.fix.removeprefix("what would do: ").split("; or ")
    assert listed and all(findings(load, DILOCO, typed, given_by(fix)) == [] for fix in listed), (
        one.fix
    )


def test_a_site_that_comes_back_must_have_what_it_missed_before_it_gives_up(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings(load, DILOCO) == []
    monkeypatch.setattr(timeouts, "SYNC_TIMEOUT_S", 20)
    (one,) = findings(load, DILOCO)
    assert "26.7 GB from another, 214 s with WAN_GBIT=1, and gives up after 20 s" in one.text
    assert one.fix == "a faster link between the sites; 11 Gbit/s would do"


def test_a_lone_process_of_a_site_may_keep_its_copy(load: Load) -> None:
    c, fleet = load(WAN, {"CARDS": "4xa100-80gb-sxm", "SYNC": "diloco"})
    assert inner(c, 1) == {} and problems(c, fleet, pace_of(c, fleet, None)) == []


def test_memory_that_an_exchange_needs_is_had_by_fragments(load: Load) -> None:
    """24 GB, blocks computed anew: 28 bytes of each of 668M weights, 8 of them while all is exchanged, and gradients of
    4 of all: 22.4 GiB; of two fragments the larger has 54% of the weights."""
    small = DILOCO | {
        "CARDS": "8xrtx4090",
        "MICRO_BATCH_SIZE": "1",
        "ACTIVATION_CHECKPOINTING": "full",
    }
    c, fleet = load(small)
    finding = memory_problem(c, fleet, capacity_bytes(fleet))
    assert finding and finding.fix.startswith("what would do: SYNC_FRAGMENTS=2 (")
    assert memory_problem(*load(small, {"SYNC_FRAGMENTS": "2"}), capacity_bytes(fleet)) is None


def test_what_is_typed_on_machines_has_what_each_needs(load: Load) -> None:
    base = D16 | {"WAN_GBIT": "0.5", "OPTIMIZER": "adamw", "MFU": "43.8"}
    one = planned(load, base, {"NODES": "2", "SITES": "2"})
    typed = " ".join(told(one).split())
    assert "make train-node PRESET=d16-2xh100 NODES=2 SITES=2 SYNC=diloco SYNC_EVERY=30" in typed
    assert (
        "NODE_RANK=i LIGHTHOUSE=host:29510 and once, where all reach it: make lighthouse LIGHTHOUSE="
        in typed
    )
    several = found(load, base, {"NODES": "4", "SITES": "2", "CARDS": "4xh100-sxm"}).typed
    assert (
        "PARALLEL=fsdp" in several
        and "NODE_RANK=i MASTER_ADDR=first-of-the-site LIGHTHOUSE=host:29510" in several
    )


def test_fragments_are_those_of_the_trainer(load: Load) -> None:
    """Sizes by train/diloco, of the model itself; norms at the end are spread over blocks here, a millionth of it."""
    import torch

    from train.diloco.outer_step import divide
    from train.model.model import Transformer

    for typed in (WAN, D16):  # one with a tied head, one without
        c, _ = load(typed)
        with torch.device("meta"):
            sizes = {name: weight.numel() for name, weight in Transformer(c).named_parameters()}
        for count in (1, 2, 5, 6, 8):
            theirs = [
                sum(sizes[name] for name in names) / sum(sizes.values())
                for names in divide(sizes, count)
            ]
            assert fragments(c, count) == pytest.approx(theirs, abs=1e-5)
