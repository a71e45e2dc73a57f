"""monitor/rules/sift.py: one sentence for one cause, and the gravest first."""

import dataclasses
from pathlib import Path

from monitor.facts import Fault
from monitor.rules import gpu_rules, run_rules, train_rules
from monitor.rules.sift import BY_PODS, EXPLAINS, found_by, sift
from tests.monitor.moments import GIB, NOW, SETTINGS, TRAINING, gpus, node, seen

RULES = (*run_rules.RULES, *gpu_rules.RULES, *train_rules.RULES)


def fault(name: str, failing: bool = False, about: str = "") -> Fault:
    return Fault(name, name, "", about, failing)


def names(faults: list[Fault]) -> list[str]:
    return [found.name for found in faults]


def test_what_another_fault_explains_is_left_out() -> None:
    found = [
        fault("hanging"),
        fault("starved"),
        fault("no-checkpoint"),
        fault("below-plan"),
        fault("memory"),
    ]
    assert names(sift(found)) == ["hanging", "memory"]
    assert names(sift([fault("nccl"), fault("crashed"), fault("hanging"), fault("disk")])) == [
        "nccl",
        "disk",
    ]
    assert names(sift([fault("below-plan")])) == ["below-plan"]


def test_those_that_do_not_mend_themselves_come_first() -> None:
    assert names(sift([fault("spike"), fault("memory"), fault("disk", failing=True)])) == [
        "disk",
        "spike",
        "memory",
    ]


def test_pods_explain_waiting_and_are_never_left_out() -> None:
    pending = Fault("pod-pending", "pod 1 finds no node", "", "pod 1")
    assert sift([fault("peers"), fault("disk")], [pending]) == [pending, fault("disk")]
    assert names(sift([fault("peers")])) == ["peers"]
    for name in ("cluster", "logs-unread"):  # what could not be asked explains nothing
        assert names(sift([fault("hanging")], [fault(name)])) == [name, "hanging"]
    twice = [
        fault("crashed", about="pod 0"),
        fault("crashed", about="pod 1"),
    ]  # of a name that rules have too
    assert sift([fault("crashed")], twice) == twice


def test_no_fault_explains_itself_and_no_two_each_other() -> None:
    assert not [name for name, others in EXPLAINS.items() if name in others]
    assert not [
        (one, other)
        for one, others in EXPLAINS.items()
        for other in others
        if one in EXPLAINS.get(other, ())
    ]


def test_every_name_in_the_tables_is_that_of_a_rule() -> None:
    sources = "".join(
        Path(module.__file__).read_text() for module in (run_rules, gpu_rules, train_rules)
    )
    assert {
        name
        for name in {*EXPLAINS, *BY_PODS}.union(*EXPLAINS.values())
        if f'"{name}"' not in sources
    } == set()


def test_a_run_that_hangs_says_so_and_nothing_else() -> None:
    past = dataclasses.replace(
        TRAINING,
        step_time=NOW - 3000,
        checkpoint_time=NOW - 5000,
        tokens_per_s=50_000,
        data_wait_fraction=0.4,
    )
    stuck = gpus(utilisation_percent=100, power_w=120)
    moment = seen(node(0, progress=past, gpus=stuck), node(1, gpus=stuck, memory_bytes=95.9 * GIB))
    assert {"hanging", "starved", "memory"} <= set(names(found_by(RULES, moment, SETTINGS)))
    assert names(sift(found_by(RULES, moment, SETTINGS))) == ["hanging", "memory"]


def test_a_run_that_is_slow_for_heat_is_told_the_cause_only() -> None:
    slow = dataclasses.replace(TRAINING, tokens_per_s=80_000)
    moment = seen(node(0, progress=slow, gpus=gpus(throttle=("hw_thermal",), temp_c=91)), node(1))
    assert names(sift(found_by(RULES, moment, SETTINGS))) == ["throttled-heat"]
