"""plan/network/traffic.py against worked numbers, hand-made ones and what torch itself sends."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hardware.gpu_specs import GpuSpec, load_gpu_specs
from hardware.model_size import parameters
from plan.fleet import Fleet
from plan.hours import waiting_s
from plan.network.outer import Outer
from plan.network.traffic import (
    Level,
    Sync,
    buckets,
    group_of,
    levels_of,
    micro_batches,
    ring,
    sent_of,
    split_over,
    syncs,
)
from plan.network.wan import sync_efficiency
from settings import SettingsError, load_config
from settings.checks import count_shard_ranks
from settings.config import Config
from train.distributed.parallel import Sharding, grad_sync
from train.distributed.world import World
from train.model.model import Transformer, build


@pytest.fixture
def xlarge() -> Config:
    return load_config({"PRESET": "xlarge-8xa100", "ENV_FILE": ""})


def card(key: str) -> GpuSpec:
    found = load_gpu_specs().get(key)
    assert found
    return found


def fleet(processes: int, nodes: int, sites: int, key: str = "a100-80gb-sxm") -> Fleet:
    return Fleet(((processes, card(key)),), processes, nodes, sites)


def by_name(found: list[Sync]) -> dict[str, Sync]:
    """By what each name begins with: DDP, float32; FSDP2 over all; HSDP; DiLoCo, H=30."""
    return {
        way.name.removesuffix(" gradients") if "HSDP" not in way.name else "HSDP": way
        for way in found
    }


# ---- Rings


@pytest.mark.parametrize(
    ("gbit", "seconds", "efficiency"), [(1, 62.5, 5.3), (5, 12.6, 21.9), (10, 6.3, 35.8)]
)
def test_the_labs_gradients_between_four_sites(
    gbit: float, seconds: float, efficiency: float
) -> None:
    """1.3B float32 gradients, 30 ms, 3.53 s of computing a step: as was computed apart from this."""
    sent = ring(4 * 1.3e9, [Level(1, math.nan), Level(1, 25), Level(4, gbit, 0.03)])
    assert sent.sizes == (0, 0, 1.5 * 4 * 1.3e9)
    assert round(sent.total_s, 1) == seconds
    assert round(100 * 3.53 / (3.53 + sent.total_s), 1) == efficiency


def test_each_level_has_its_own_ring() -> None:
    # by hand, 8 GB: 2 processes at 80 Gbit/s 2 x 0.4 s; 4 nodes at 8 Gbit/s 6 x 2 s; 2 sites at 16 Gbit/s 2 x (2 + 0.1)
    sent = ring(8e9, [Level(2, 80), Level(4, 8), Level(2, 16, 0.2)])
    assert sent.seconds == pytest.approx((0.8, 12, 4.2))
    assert sent.sizes == pytest.approx((8e9, 12e9, 8e9))
    # five pieces make five times the round trips, of the same bytes
    pieces = ring(8e9, [Level(2, 80), Level(4, 8), Level(2, 16, 0.2)], messages=5)
    assert pieces.seconds == pytest.approx((0.8, 12, 5.0))


def test_the_fleet_as_levels(xlarge: Config) -> None:
    c = dataclasses.replace(xlarge, wan_gbit=2.0, wan_rtt_ms=50.0, lan_gbit=10.0)
    mixed = Fleet(((8, card("a100-80gb-sxm")), (8, card("a100-80gb-pcie"))), 16, 8, 4)
    assert levels_of(c, mixed) == [Level(2, 8 * 24), Level(2, 10), Level(4, 2, 0.05)]
    assert levels_of(c, mixed, link_gb_s=20)[0] == Level(2, 160)
    assert math.isnan(levels_of(c, Fleet((), 4, 2))[0].gbit_per_s)


@pytest.mark.parametrize(
    ("members", "ranks", "inside", "across"),
    [
        ((2, 2, 4), 2, (2, 1, 1), (1, 2, 4)),
        ((2, 2, 4), 4, (2, 2, 1), (1, 1, 4)),
        ((2, 2, 4), 16, (2, 2, 4), (1, 1, 1)),
        ((8, 1, 1), 4, (4, 1, 1), (2, 1, 1)),
        ((2, 1, 4), 4, (2, 1, 2), (1, 1, 2)),
    ],
)
def test_a_copy_fills_a_node_first_and_then_a_site(
    members: tuple[int, ...], ranks: int, inside: tuple[int, ...], across: tuple[int, ...]
) -> None:
    pairs = list(group_of([Level(n, 1) for n in members], ranks))
    assert (
        tuple(a.members for a, _ in pairs) == inside
        and tuple(b.members for _, b in pairs) == across
    )


# ---- Ways


def test_ddp_of_the_labs_run_by_hand(xlarge: Config) -> None:
    found = by_name(syncs(xlarge, fleet(8, 4, 4), 3.875))
    full = found["DDP, float32"]
    inside_s = 2 * 0.5 * 4 * 1_336_248_320 / 300e9
    wan_s = 1.5 * 4 * 1_336_248_320 * 8 / 1e9 + 6 * 0.015
    assert full.bytes_per_step == 1.5 * 4 * 1_336_248_320
    assert full.seconds_per_step == pytest.approx(inside_s + wan_s)
    assert full.between_nodes_s == pytest.approx(wan_s)
    assert full.efficiency == pytest.approx(3.875 / (3.875 + inside_s + wan_s))
    assert full.efficiency == pytest.approx(
        sync_efficiency(3.875, 4 * 1_336_248_320, 4, 1), abs=1e-4
    )
    # beside the last of 4 micro-batches' backward passes, 2/3 of a quarter of the step
    assert full.overlapped == pytest.approx(3.875 / (3.875 * (1 - 1 / 6) + inside_s + wan_s))
    assert (full.offered, full.chosen) == (True, True)
    half = found["DDP, bfloat16"]
    assert half.bytes_per_step == full.bytes_per_step / 2 and (half.offered, half.chosen) == (
        False,
        False,
    )
    assert (half.seconds_per_step or 0) - 0.09 == pytest.approx(
        ((full.seconds_per_step or 0) - 0.09) / 2
    )


@pytest.mark.parametrize(("gbit", "per_cent"), [(1.0, 6), (5.0, 26), (10.0, 47)])
def test_gradients_that_hide_behind_a_whole_backward_pass(
    xlarge: Config, gbit: float, per_cent: float
) -> None:
    """One micro-batch a step, 3.53 s: as was computed apart from this for 1.3B, which is 3% less."""
    c = dataclasses.replace(xlarge, wan_gbit=gbit, micro_batch_size=64)
    lone = syncs(c, fleet(4, 4, 4), 3.53 * 1_336_248_320 / 1.3e9)[0]
    assert round(100 * (lone.overlapped or 0)) == per_cent


@pytest.mark.parametrize(
    ("dtype", "outer", "per_cents"),
    [
        ("float32", 30, (62.9, 89.4, 94.4)),
        ("float32", 100, (85.0, 96.6, 98.2)),
        ("float32", 500, (96.6, 99.3, 99.6)),
        ("bfloat16", 30, (77.2, 94.4, 97.1)),
        ("bfloat16", 100, (91.9, 98.2, 99.1)),
    ],
)
def test_diloco_as_it_was_computed_apart_from_this(
    xlarge: Config, dtype: str, outer: int, per_cents: tuple[float, ...]
) -> None:
    # bytes and seconds of the preset are 2.8% more than those of 1.3B parameters, and their ratio is the same; there a
    # ring was computed, whose hops take 0.06 s more
    for gbit, per_cent in zip((1.0, 5.0, 10.0), per_cents, strict=True):
        c = dataclasses.replace(xlarge, wan_gbit=gbit, sync_dtype=dtype)
        way = by_name(syncs(c, fleet(4, 4, 4), 3.53 * 1_336_248_320 / 1.3e9))[f"DiLoCo, H={outer}"]
        assert 100 * (way.efficiency or 0) == pytest.approx(per_cent, abs=0.06)
        assert (way.offered, way.chosen) == (True, False)
        width = {"float32": 4, "bfloat16": 2}[dtype]
        assert way.bytes_per_step == pytest.approx(1.5 * width * 1_336_248_320 / outer)


@pytest.mark.parametrize(
    ("dtype", "delay", "per_cents"),
    [
        ("bfloat16", 1, (99.0, 100.0, 100.0)),
        ("bfloat16", 5, (100.0, 100.0, 100.0)),
        ("float32", 1, (91.0, 100.0, 100.0)),
    ],
)
def test_streaming_as_it_was_computed_apart_from_this(
    xlarge: Config, dtype: str, delay: int, per_cents: tuple[float, ...]
) -> None:
    """Eight fragments of a hundred steps, and training goes on for 1 or 5 of them beside each exchange. There all were
    of one size and in rings; here one has the embedding too, and with 5 steps it alone is not quite hidden."""
    for gbit, per_cent in zip((1.0, 5.0, 10.0), per_cents, strict=True):
        c = dataclasses.replace(
            xlarge,
            sync="diloco",
            sync_every=100,
            sync_fragments=8,
            sync_delay=delay,
            sites=4,
            nodes=4,
            wan_gbit=gbit,
            sync_dtype=dtype,
        )
        way = by_name(syncs(c, fleet(4, 4, 4), 3.53 * 1_336_248_320 / 1.3e9))[
            "DiLoCo, H=100, streaming"
        ]
        assert way.chosen and way.outer == Outer(100, 8, delay)
        assert 100 * (way.efficiency or 0) == pytest.approx(per_cent, abs=0.16)


def test_diloco_splits_a_site_and_sends_each_part_once(xlarge: Config) -> None:
    """Four sites of two nodes of two: weights fetched within a site, of which each process sends a quarter on."""
    c = dataclasses.replace(
        xlarge, sync="diloco", sync_every=100, sites=4, nodes=8, parallel="fsdp"
    )
    way, p = by_name(syncs(c, fleet(16, 8, 4), 2.0))["DiLoCo, H=100"], parameters(c)
    assert way.chosen and way.bytes_per_step == pytest.approx(1.5 * 2 * p.total / 100)
    outside = 50_304 * 2048 + 2048
    # 16 of 8 x 2,048 tokens make 2 micro-batches; both levels of a site have 2 members: a half of all crosses each
    fetched = 0.5 * (2 * (2 * p.total + 2 * (p.total - outside)) + 4 * p.total)
    wan_s = (1.5 * 2 * p.total * 8 / 1e9 + 0.03) / 100
    assert way.seconds_per_step == pytest.approx(fetched / 300e9 + fetched * 8 / 25e9 + wan_s)
    assert way.between_nodes_s == pytest.approx(fetched * 8 / 25e9 + wan_s)
    # a copy on each process would be split all the same: the plan says so, and PARALLEL=fsdp (across.py)
    copies = by_name(syncs(dataclasses.replace(c, parallel="ddp"), fleet(16, 8, 4), 2.0))[
        "DiLoCo, H=100"
    ]
    assert copies.seconds_per_step == way.seconds_per_step


def test_only_one_way_is_chosen_whatever_is_set(xlarge: Config) -> None:
    for sites, how, name in (
        (4, {"sync_every": 50}, "DiLoCo, H=50"),
        (4, {"sync_every": 30}, "DiLoCo, H=30"),
        (4, {"sync_every": 30, "sync_delay": 2}, "DiLoCo, H=30, streaming"),
        (1, {"sync_every": 30}, "FSDP2 over all"),
    ):
        c = dataclasses.replace(xlarge, sync="diloco", sites=sites, parallel="fsdp", **how)
        found = syncs(c, fleet(8, 4, sites), 3.875)
        assert [way.name for way in found if way.chosen] == [name]
        assert len({way.name for way in found}) == len(found)
    muon = dataclasses.replace(xlarge, optimizer="muon")
    assert [
        by_name(syncs(muon, fleet(n, 4, 4), 3.875))["DiLoCo, H=30"].offered for n in (8, 4)
    ] == [False, True]


def test_fsdp_over_sites_is_absurd_and_said_to_be(xlarge: Config) -> None:
    found = by_name(syncs(xlarge, fleet(8, 4, 4), 3.875))
    way, p = found["FSDP2 over all"], parameters(xlarge)
    outside = 50_304 * 2048 + 2048
    passes = 4 * (
        2 * p.total + 2 * (p.total - outside)
    )  # 4 micro-batches, bfloat16, there and back
    assert way.bytes_per_step == pytest.approx(0.75 * (passes + 4 * p.total))
    rounds_s = 0.045 * (
        4 * (25 + 24) + 25
    )  # 3 hops of 15 ms, for each gather and each reduce-scatter
    inside_s = 0.5 * (passes + 4 * p.total) / 300e9
    assert way.seconds_per_step == pytest.approx(way.bytes_per_step * 8 / 1e9 + rounds_s + inside_s)
    assert way.note.startswith("each of 8 passes of a step waits for the WAN, which 15.4 GB cross")
    assert 1 - (way.overlapped or 0) > 0.95
    assert way.offered and not way.chosen
    muon = dataclasses.replace(xlarge, optimizer="muon")
    assert not by_name(syncs(muon, fleet(8, 4, 4), None))["FSDP2 over all"].offered


def test_hsdp_keeps_weights_inside_a_node_and_sends_gradients_on(xlarge: Config) -> None:
    c = dataclasses.replace(xlarge, parallel="hsdp")
    way, p = by_name(syncs(c, fleet(8, 4, 4), 3.875))["HSDP"], parameters(c)
    outside = 50_304 * 2048 + 2048
    passes = 4 * (2 * p.total + 2 * (p.total - outside))
    inside_s = 0.5 * (passes + 4 * p.total) / 300e9
    wan_s = 1.5 * 4 * p.total * 8 / 1e9 + 6 * 0.015
    # 24 blocks and the rest: 24 more rounds of 6 hops
    assert way.chosen and way.note == (
        "goes in 25 pieces: where each waits for the one before, round trips take another 2.2 s"
    )
    assert way.bytes_per_step == 1.5 * 4 * p.total
    assert way.seconds_per_step == pytest.approx(inside_s + wan_s)
    # weights hide behind each pass; gradients behind the last backward pass, 2/3 of a quarter of 3.875 s
    assert way.overlapped == pytest.approx(
        3.875 / (3.875 * 5 / 6 + 0.5 * (2 * (p.total - outside) + 4 * p.total) / 300e9 + wan_s)
    )


def test_gradients_reduced_in_each_micro_batch_cost_a_copy_only(xlarge: Config) -> None:
    c = dataclasses.replace(xlarge, parallel="hsdp", shard_ranks=4)
    once, each = (
        by_name(syncs(dataclasses.replace(c, grad_sync=how), fleet(8, 1, 1), 1.0))["HSDP"]
        for how in ("step", "micro-batch")
    )
    p = parameters(c)
    assert once.name == "HSDP, 4 a copy"
    assert each.bytes_per_step - once.bytes_per_step == pytest.approx(3 * 0.75 * 4 * p.total)
    reduced = (
        2 * 0.5 * p.total
    )  # between 2 copies: of 4 bytes a parameter each process holds a quarter
    passes = 4 * (2 * p.total + 2 * (p.total - 50_304 * 2048 - 2048))
    assert once.bytes_per_step == pytest.approx(0.75 * (passes + 4 * p.total) + reduced)


@pytest.mark.parametrize(
    ("sites", "ranks", "same_as"),
    [(8, None, "DDP, float32"), (8, 1, "DDP, float32"), (4, 8, "FSDP2 over all")],
)
def test_hsdp_with_copies_of_one_or_of_all_is_waited_for_as_well(
    xlarge: Config, sites: int, ranks: int | None, same_as: str
) -> None:
    """With one GPU a node a copy is one GPU's, and gradients go round as with DDP; one copy of all is FSDP2."""
    c = dataclasses.replace(xlarge, parallel="hsdp", shard_ranks=ranks)
    found = by_name(syncs(c, fleet(8, sites, sites), 3.875))
    assert [way.name for way in found.values() if way.chosen] == [f"HSDP, {ranks or 1} a copy"]
    assert waiting_s(list(found.values())) == pytest.approx(found[same_as].between_nodes_s)
    if same_as.startswith(
        "DDP"
    ):  # by hand: 14 hops of an eighth of float32 gradients at 1 Gbit/s, 15 ms each
        assert waiting_s(list(found.values())) == pytest.approx(
            14 * (4 * 1_336_248_320 / 8 * 8 / 1e9 + 0.015)
        )


def test_a_fleet_of_which_no_way_is_chosen_is_an_error_and_not_free(xlarge: Config) -> None:
    found = syncs(xlarge, fleet(8, 4, 4), 3.875)
    with pytest.raises(ValueError, match=r"^0 of DDP, bfloat16 gradients, .* are chosen$"):
        waiting_s([way for way in found if not way.chosen])
    assert waiting_s(syncs(xlarge, fleet(1, 1, 1), 3.875)) == 0.0


def test_one_site_has_no_wan_and_one_process_nothing(xlarge: Config) -> None:
    nodes = by_name(syncs(xlarge, fleet(8, 4, 1), 3.875))["DDP, float32"]
    assert nodes.between_nodes_s == pytest.approx(1.5 * 4 * 1_336_248_320 * 8 / 25e9)
    assert (
        nodes
        == by_name(syncs(dataclasses.replace(xlarge, wan_gbit=0.001), fleet(8, 4, 1), 3.875))[
            "DDP, float32"
        ]
    )
    assert nodes.note == ""
    node = syncs(xlarge, fleet(8, 1, 1), 3.875)
    assert [way.between_nodes_s for way in node] == [
        0.0
    ] * 3  # neither HSDP nor DiLoCo: there is nothing between
    assert node[0].seconds_per_step == pytest.approx(1.75 * 4 * 1_336_248_320 / 300e9)
    assert syncs(xlarge, fleet(1, 1, 1), 3.875) == []


def test_what_is_not_known_is_not_guessed(xlarge: Config) -> None:
    without_step = syncs(xlarge, fleet(8, 4, 4), None)
    assert all(
        way.seconds_per_step and way.efficiency is None and way.overlapped is None
        for way in without_step
    )
    on_cpu = syncs(xlarge, Fleet((), 8, 4, 4), 100.0)
    assert all(way.seconds_per_step is None and way.efficiency is None for way in on_cpu)
    assert on_cpu[0].between_nodes_s == pytest.approx(1.5 * 4 * 1_336_248_320 * 8 / 1e9 + 0.09)
    assert syncs(xlarge, Fleet((), 4, 4, 4), 100.0)[
        0
    ].efficiency  # a process on each node has no link inside one
    assert syncs(xlarge, Fleet((), 8, 4, 4), 100.0, link_gb_s=5)[0].efficiency


def test_copies_that_do_not_come_out_even_are_refused(xlarge: Config) -> None:
    with pytest.raises(
        SettingsError,
        match=r"SHARD_RANKS=3: Must divide the number of processes, 8\. For example SHARD_RANKS=2\.",
    ):
        count_shard_ranks(dataclasses.replace(xlarge, parallel="hsdp", shard_ranks=3), 8, 2)


def test_micro_batches_are_counted_as_the_trainer_makes_them(xlarge: Config) -> None:
    assert micro_batches(xlarge, fleet(8, 4, 4)) == 4  # 256 windows over 8 x 8
    assert micro_batches(xlarge, fleet(64, 8, 1)) == 1
    assert (
        micro_batches(dataclasses.replace(xlarge, micro_batch_size=100), fleet(8, 1, 1)) == 1
    )  # it has but 32


# ---- Against torch


@pytest.mark.parametrize("preset", ["xlarge-8xa100", "tiny", "d20-2xh100", "gpt2-124m"])
def test_buckets_are_those_of_torch(preset: str) -> None:
    c = load_config({"PRESET": preset, "ENV_FILE": ""})
    with torch.device("meta"):
        weights = [w for w in Transformer(c).parameters() if w.requires_grad]
    found, _ = dist._compute_bucket_assignment_by_size(list(reversed(weights)), [2**20, 25 * 2**20])
    assert buckets(c) == len(found)
    said = syncs(c, fleet(8, 4, 4), None)[0].note
    assert said.startswith(f"goes in {len(found)} pieces: ")


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group of four in which nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


class Counting(TorchDispatchMode):
    """The bytes of whole tensors that go into collectives, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = {"_allgather_base_": 0, "_reduce_scatter_base_": 0, "allreduce_": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            output, input = args[:2]
            tensors = {
                "_allgather_base_": [output],
                "_reduce_scatter_base_": [input],
                "allreduce_": output,  # in place
            }[name]
            self.sent[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "how",
    [
        {"parallel": "fsdp"},
        {"parallel": "fsdp", "grad_sync": "micro-batch"},
        {"parallel": "hsdp", "shard_ranks": 2},
        {"parallel": "fsdp", "dtype": "bfloat16"},
        {"parallel": "hsdp", "shard_ranks": 2, "grad_sync": "micro-batch"},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_fsdp_sends_what_is_counted(tiny: Config, four_ranks: None, how: dict) -> None:
    """Three micro-batches of torch's FSDP2 on four ranks."""
    c = dataclasses.replace(tiny, tie_embeddings=False, **how).derived()
    ranks = count_shard_ranks(c, 4, 4)
    model = build(
        c,
        torch.device("cpu"),
        sharding=Sharding(c, World(0, 0, 0, 4, torch.device("cpu"), "CPU", "here")),
    )
    tokens = torch.zeros(2, c.seq_len, dtype=torch.int64)
    with Counting() as counting:
        for i in range(3):
            with grad_sync(model, enabled=i == 2):
                model(tokens, tokens)[0].backward()
    way = split_over(
        c, sent_of(c), [Level(ranks, 8.0), Level(4 // ranks, 8.0), Level(1, 8.0)], ranks, 3
    )
    # each sends (n - 1) / n of what n gather or scatter, and all of what 2 all-reduce; a node has `ranks` of them
    gathered, scattered, reduced = counting.sent.values()
    assert way.total.sizes[0] == pytest.approx((ranks - 1) / ranks * (gathered + scattered))
    assert way.total.sizes[1] == ranks * reduced * (ranks < 4)
    assert bool(reduced) == (ranks < 4)
