"""monitor/rules/gpu_rules.py: GPUs that are lost, held back, idle or unequal, slow processes and links that are full."""

import dataclasses
import re
from typing import Any

import pytest

from monitor.facts import Gpu, Link, Seen
from monitor.gpu_sampler.readings import REASONS
from monitor.rules import gpu_rules
from monitor.rules.judge import judge
from monitor.rules.sift import found_by
from monitor.verdict import verdict
from tests.monitor.moments import (
    GPU,
    LINK,
    NOW,
    PLAN,
    SETTINGS,
    TRAINING,
    cluster,
    gpus,
    node,
    only,
    pod,
    progress,
    seen,
    status,
)
from train.hooks.stragglers import AGAIN, STEPS, Stragglers

c = SETTINGS
SETTINGS_OF_ONE = dataclasses.replace(c, nodes=1, nproc=None)
SLOW = dataclasses.replace(TRAINING, tokens_per_s=70_000)  # 52% of the plan


def names(of: Seen) -> list[str]:
    return [fault.name for fault in found_by(gpu_rules.RULES, of, c)]


def with_gpu(past: Any = TRAINING, **changes: Any) -> Seen:
    """The run in training, with another GPU 2 in its second node."""
    found = list(gpus())
    found[2] = dataclasses.replace(found[2], **changes)
    return seen(node(0, progress=past), node(1, gpus=tuple(found)))


def test_a_gpu_with_something_else_on_it_is_not_of_the_run() -> None:
    """One process here, and a second GPU with a desktop or a notebook: it idles, is hot, and concerns nobody."""
    other = dataclasses.replace(
        GPU, index=1, utilisation_percent=2.0, memory_gib=6.0, throttle=("sw_thermal",)
    )
    for processes, found in (
        (1, []),
        (2, ["throttled-heat", "imbalance"]),
        (None, ["throttled-heat", "imbalance"]),
    ):
        run = dataclasses.replace(TRAINING, processes=processes)
        for there in ((GPU, other), (other, GPU)):
            faults = found_by(
                gpu_rules.RULES, seen(node(0, gpus=there, progress=run)), SETTINGS_OF_ONE
            )
            assert [fault.name for fault in faults] == found


# ---- Lost and held back

STILL = dataclasses.replace(TRAINING, step_time=NOW - 250)


def test_a_gpu_that_no_longer_answers() -> None:
    fault = only(gpu_rules.lost(with_gpu(STILL, lost=True, utilisation_percent=None), c))
    assert (
        fault.text == "GPU 2 (NVIDIA A100-SXM4-80GB) of node 1 (gpu-b) no longer answers its driver"
    )
    assert (
        fault.failing
        and "dmesg | grep -i xid" in fault.next
        and "resumes from step 12,000" in fault.next
    )


def test_a_lost_gpu_that_the_run_does_without_is_said_and_hides_nothing() -> None:
    """4 GPUs, and the run is on 3 of them: steps come. The verdict is on its pace, and a slow rank is still told."""
    past = dataclasses.replace(
        TRAINING,
        processes=7,
        tokens_per_s=130_000,
        step_s=4.0,
        recent_steps=100,
        straggler={"rank": 1, "host": "gpu-a", "times": 2.0, "step": TRAINING.step},
    )
    moment = with_gpu(past, lost=True, utilisation_percent=None)
    faults = judge(moment, c)
    assert [(fault.name, fault.failing) for fault in faults] == [
        ("gpu-lost", False),
        ("straggler", False),
    ]
    assert (
        faults[0].next
        == "the run goes on without it; dmesg | grep -i xid names the cause; reset it when the run "
        "is over"
    )
    word = verdict(moment, c, faults)
    assert word and (word.word, word.is_bad) == ("on plan", False)
    stands = with_gpu(dataclasses.replace(past, step_time=NOW - 250), lost=True)
    assert [(fault.name, fault.failing) for fault in judge(stands, c)] == [("gpu-lost", True)]
    word = verdict(stands, c, judge(stands, c))
    assert word and word.word == "failing"


def test_a_lost_gpu_is_nothing_to_a_run_that_is_over_and_saves_do_not_make_it_grave() -> None:
    lost = tuple(dataclasses.replace(gpu, lost=gpu.index == 3) for gpu in gpus())
    for phase, failing in (
        ("done", []),
        ("stopped", []),
        ("saving", [False]),
        ("evaluating", [False]),
    ):
        moment = seen(node(0, status=status(phase, 20), gpus=lost), node(1))
        assert [fault.failing for fault in gpu_rules.lost(moment, c)] == failing


@pytest.mark.parametrize(
    ("throttle", "name", "words"),
    [
        (
            ("sw_thermal",),
            "throttled-heat",
            "is throttled by heat: 88 C, 1,110 of 1,410 MHz, 310 of 400 W",
        ),
        (("hw_slowdown", "hw_thermal"), "throttled-heat", "is throttled by heat"),
        (
            ("power_brake", "hw_slowdown"),
            "throttled-supply",
            "the machine's power supply (power brake)",
        ),
        (("hw_slowdown",), "throttled-hardware", "slowed down by the hardware, for heat or power"),
    ],
)
def test_clocks_that_are_lowered(throttle: tuple[str, ...], name: str, words: str) -> None:
    held = with_gpu(throttle=throttle, temp_c=88, clock_mhz=1110, power_w=310)
    assert names(held) == [name]
    fault = only(found_by(gpu_rules.RULES, held, c))
    assert (
        words in fault.text
        and fault.text.startswith("GPU 2 of node 1 (gpu-b)")
        and fault.about == "node 1"
    )


def test_every_reason_of_the_library_is_either_a_fault_or_known_to_be_none() -> None:
    harmless = {"idle", "application_clocks", "sync_boost", "display_clocks", "power_cap"}
    found = {reason for reason in REASONS.values() if names(with_gpu(throttle=(reason,)))}
    assert found == set(REASONS.values()) - harmless


def test_the_power_limit_counts_only_where_it_costs_speed() -> None:
    capped = {"throttle": ("power_cap",), "clock_mhz": 1050.0}  # 74.5% of 1410
    assert names(with_gpu(**capped)) == []  # on plan
    assert "throttled-power" in names(with_gpu(SLOW, **capped))
    assert "throttled-power" not in names(with_gpu(SLOW, **capped | {"clock_mhz": 1060.0}))  # 75.2%
    assert "throttled-power" not in names(with_gpu(SLOW, **capped | {"throttle": ()}))
    without_most = capped | {"clock_max_mhz": None}  # then beside the others' 1350
    assert "throttled-power" not in names(with_gpu(SLOW, **without_most))  # 78%
    assert "throttled-power" in names(with_gpu(SLOW, **without_most | {"clock_mhz": 1000.0}))  # 74%


def test_heat_after_the_run_is_somebody_else_s() -> None:
    hot = gpus(throttle=("sw_thermal",))
    for first in (node(0, status=status("done"), gpus=hot), node(0, at_work=False, gpus=hot)):
        assert names(seen(first)) == []


# ---- Unequal


def test_an_idle_gpu_among_busy_ones() -> None:
    assert names(with_gpu(utilisation_percent=50)) == []
    assert names(with_gpu(utilisation_percent=48)) == ["imbalance"]  # 99 - 48 > 50
    assert names(with_gpu(utilisation_percent=5)) == ["imbalance"]
    assert names(with_gpu(utilisation_percent=4)) == ["idle-gpu", "imbalance"]
    fault = only(gpu_rules.idle(with_gpu(utilisation_percent=0), c))
    assert fault.text == "GPU 2 of node 1 (gpu-b) is idle, and the others are at 99%"
    fault = only(gpu_rules.imbalance(with_gpu(utilisation_percent=30), c))
    assert fault.text.startswith(
        "GPU 2 of node 1 (gpu-b) is at 30% and GPU 0 of node 0 (gpu-a) at 99%"
    )


def test_a_gpu_that_holds_nothing_of_the_run_is_another_s_unless_nproc_asks_for_it() -> None:
    empty = with_gpu(utilisation_percent=0, memory_gib=0.4)
    assert names(empty) == ["idle-gpu"]  # NPROC=4, and three are in use
    for nproc in (None, 3):
        assert found_by(gpu_rules.RULES, empty, dataclasses.replace(c, nproc=nproc)) == []


def test_gpus_that_are_all_little_used_are_not_unequal() -> None:
    assert (
        names(
            seen(
                node(0, gpus=gpus(utilisation_percent=20)),
                node(1, gpus=gpus(utilisation_percent=2)),
            )
        )
        == []
    )


def straggling(own_s: list[float], steps_since: int = 0, **changes: Any) -> Seen:
    """A run whose record has what train/hooks/stragglers.py itself says of these times."""
    stragglers = Stragglers(["gpu-a", "gpu-a", "gpu-b", "gpu-b"])
    (found, *_) = [*filter(None, (stragglers.find(step, own_s) for step in range(STEPS))), {}]
    told = found | {"step": TRAINING.step - steps_since} if found else {}
    return dataclasses.replace(progress(straggler=told), **changes)


def test_a_slow_process_is_named_with_its_node_and_site() -> None:
    assert names(straggling([0.1, 0.1, 0.1, 0.12])) == []
    fault = only(gpu_rules.straggler(straggling([0.1, 0.1, 0.1, 0.2]), c))
    assert (
        fault.text
        == "rank 3 on node 1 (gpu-b) takes 2.0 times as long as the others, who wait for it at every step"
    )
    assert fault.about == "rank 3" and "make doctor PROBE=1 on that machine" in fault.next
    fault = only(gpu_rules.straggler(straggling([0.1, 0.1, 0.1, 0.2], cluster=cluster()), c))
    assert "rank 3 on node 1 (machine-1, site sdsc)" in fault.text
    assert (
        "make sites, then make restart SITE=ZONE PRESET=xlarge-8xa100 RUN_NAME=big WHERE=cluster"
        in fault.next
    )


def test_one_that_was_not_named_again_is_slow_no_more() -> None:
    assert names(straggling([0.1, 0.1, 0.1, 0.2], AGAIN + STEPS)) == ["straggler"]
    assert names(straggling([0.1, 0.1, 0.1, 0.2], AGAIN + STEPS + 1)) == []


# ---- The network


def linked(past: Any = SLOW, *, first: Link = LINK, second: Link = LINK) -> Seen:
    return seen(node(0, progress=past, links=(first,)), node(1, links=(second,)))


def test_a_link_that_is_full_in_a_run_below_plan() -> None:
    full = dataclasses.replace(LINK, out_bytes_per_s=2.51e9)  # of 3.125: 80.3%
    assert names(linked(TRAINING, second=full)) == []  # on plan
    assert names(linked(second=dataclasses.replace(LINK, out_bytes_per_s=2.49e9))) == []
    fault = only(gpu_rules.network(linked(second=full), c))
    assert fault.text == (
        "the network of node 1 (gpu-b) is full: 20.1 of 25 Gbit/s go through eth0; each step sends "
        "5.30 GB, and the run has 52% of the planned tokens/s"
    )
    assert "make logs" in fault.next
    assert names(linked(second=dataclasses.replace(LINK, in_bytes_per_s=2.51e9))) == ["network"]
    assert names(linked(second=dataclasses.replace(full, speed_bytes_per_s=None))) == []


def test_a_link_that_is_slower_than_the_plan_needs() -> None:
    # 5.3 GB in 3.9 s are 1.36 GB/s, or 10.9 Gbit/s
    def of_speed(speed: float) -> Link:
        return Link("eth1", in_bytes_per_s=1e6, out_bytes_per_s=1e6, speed_bytes_per_s=speed)

    assert names(linked(second=of_speed(1.37e9))) == []
    fault = only(gpu_rules.network(linked(second=of_speed(1.25e9)), c))
    assert fault.about == "node 1" and "eth1 has 10 Gbit/s, and the plan needs 10.9" in fault.text
    beside = dataclasses.replace(linked(second=of_speed(1.25e9)), cluster=cluster(pod(0), pod(1)))
    assert "with all pods at one site" in only(gpu_rules.network(beside, c)).next
    two = seen(
        node(0, progress=SLOW), node(1, links=(of_speed(0.1e9), LINK))
    )  # its other link is fast enough
    assert names(two) == []
    assert (
        names(seen(node(0, progress=SLOW, links=(of_speed(0.1e9),)))) == []
    )  # one node sends nothing
    no_need = dataclasses.replace(PLAN, bytes_per_step=None)
    assert names(dataclasses.replace(linked(second=of_speed(0.1e9)), expected=no_need)) == []


def test_unknown_readings_are_no_fault() -> None:
    blank = tuple(Gpu(index) for index in range(4))
    assert (
        names(seen(node(0, progress=SLOW, gpus=blank, links=(Link("eth0"),)), node(1, gpus=blank)))
        == []
    )
    assert names(Seen(NOW, "big", "tiny")) == []
    old = dataclasses.replace(GPU, throttle=("hw_thermal",))
    assert names(seen(node(0, gpus=(old,), gpus_time=NOW - 61))) == []


def test_commands_that_are_told_exist() -> None:
    found = [
        *gpu_rules.straggler(straggling([1, 1, 1, 9], cluster=cluster()), c),
        *gpu_rules.imbalance(with_gpu(utilisation_percent=1), c),
        *gpu_rules.idle(with_gpu(utilisation_percent=1), c),
    ]
    said = {target for fault in found for target in re.findall(r"make ([a-z-]+)", fault.next)}
    assert said == {"logs", "sites", "restart"}
