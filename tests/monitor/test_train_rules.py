"""monitor/rules/train_rules.py: loss, data, checkpoints, disk, memory, speed, just beyond each threshold and just within."""

import dataclasses
from typing import Any

import pytest

from monitor.facts import Seen
from monitor.rules import gpu_rules, run_rules, train_rules
from monitor.rules.sift import found_by
from tests.monitor.moments import (
    GIB,
    NOW,
    PLAN,
    SETTINGS,
    TRAINING,
    at_phase,
    cluster,
    gpus,
    node,
    only,
    progress,
    seen,
    status,
)

c = SETTINGS


def names(of: Seen) -> list[str]:
    return [fault.name for fault in found_by(train_rules.RULES, of, c)]


def beside(
    first: dict[str, Any] | None = None, second: dict[str, Any] | None = None, **changes: Any
) -> Seen:
    """The run in training, with other facts of its first and second node."""
    return seen(node(0, **(first or {})), node(1, **(second or {})), **changes)


# ---- The loss


def test_a_loss_that_is_no_number_is_said_at_the_first_one() -> None:
    assert names(progress(nonfinite_steps=0)) == []
    fault = only(train_rules.not_finite(progress(nonfinite_steps=1, skipped_steps=1), c))
    assert "not finite in 1 step up to step 12,345" in fault.text and not fault.failing
    assert (
        "make restart LEARNING_RATE=0.0005 PRESET=xlarge-8xa100 RUN_NAME=big resumes from step 12,000"
        in fault.next
    )


def test_steps_that_are_skipped_again_and_again() -> None:
    assert names(progress(skipped_steps=2)) == []  # SKIPPED_STEPS=2
    fault = only(train_rules.skips(progress(skipped_steps=3), c))
    assert (
        fault.text
        == "the updates of 3 steps up to step 12,345 were left out for a loss or gradient out of bounds"
    )
    assert names(progress(rollbacks=1)) == []  # and it has come further
    fault = only(train_rules.skips(progress(skipped_steps=1, rollbacks=2), c))
    assert "gone back 2 times of 3" in fault.text and not fault.failing
    assert only(train_rules.skips(progress(skipped_steps=1, rollbacks=3), c)).failing


def test_a_loss_that_jumps() -> None:
    assert names(progress(loss=3.37)) == []  # 1.3 x 2.60 = 3.38
    assert (
        "jumped to 3.390 at step 12,345; the median of the last steps is 2.600"
        in only(train_rules.spike(progress(loss=3.39), c)).text
    )
    jumped = dataclasses.replace(TRAINING, loss=3.39)
    assert names(at_phase("evaluating", 20, jumped)) == ["spike"]
    for phase in ("done", "stopped"):  # nobody can do anything about it any more
        assert names(at_phase(phase, 20, jumped)) == []
    assert names(at_phase("training", 20, jumped, at_work=False)) == []
    assert names(progress(loss=None)) == names(progress(loss=9.0, median_loss=None)) == []


# ---- Data


def test_the_first_steps_of_an_attempt_are_no_measure_of_its_pace() -> None:
    """Slow and waiting for data: said of 10 steps, 30 s after it could train, or where nobody told how many."""
    slow = {"tokens_per_s": 50_000.0, "data_wait_fraction": 0.3}
    assert names(progress(**slow)) == ["starved", "below-plan"]
    for steps, ready, said in (
        (9, NOW - 500, False),
        (10, NOW - 500, True),
        (100, NOW - 31, False),
        (100, NOW - 32, True),
    ):  # the last step was 2 s ago
        assert bool(names(progress(**slow, recent_steps=steps, ready=ready))) is said, (
            steps,
            ready,
        )


def test_steps_that_wait_for_data() -> None:
    assert names(progress(data_wait_fraction=0.10)) == []
    fault = only(train_rules.starved(progress(data_wait_fraction=0.25, step_s=2.0), c))
    assert (
        fault.text == "25% of the last steps' time was spent waiting for data, 0.5 s of 2 s a step"
    )
    assert (
        "DATA_DIR=data on a local disk; make data PRESET=xlarge-8xa100 prepares all shards"
        in fault.next
    )
    prepared = dataclasses.replace(c, data_stream="0")
    assert (
        "make data"
        not in only(train_rules.starved(progress(data_wait_fraction=0.25), prepared)).next
    )


# ---- Checkpoints and disk


def saved(ago: float, **changes: Any) -> Seen:
    return beside({"progress": dataclasses.replace(TRAINING, checkpoint_time=NOW - ago)}, **changes)


def test_a_checkpoint_that_is_long_overdue() -> None:
    assert names(saved(3 * 900 - 1)) == []
    fault = only(train_rules.no_checkpoint(saved(3 * 900 + 1), c))
    assert fault.text == (
        "the last checkpoint, of step 12,000, is from 45:01 ago, and one is due every 15:00: a crash "
        "now would lose 45:01 of training"
    )
    assert fault.next == "make checkpoints RUN_NAME=big; make logs ONLY=errors RUN_NAME=big"
    assert train_rules.no_checkpoint(saved(9999), dataclasses.replace(c, save_every=0)) == []


def test_how_often_one_is_due_without_a_plan() -> None:
    no_plan = dataclasses.replace(PLAN, save_every_s=None)
    often, never_so_often = (
        dataclasses.replace(c, save_every=100),
        dataclasses.replace(c, save_minutes=0.01),
    )
    for plan in (
        no_plan,
        PLAN,
        dataclasses.replace(PLAN, save_every_s=100.0),
    ):  # by which steps are quicker
        assert train_rules.save_every_s(saved(1, expected=plan), c) == 900  # SAVE_MINUTES=15
        assert train_rules.save_every_s(saved(1, expected=plan), often) == pytest.approx(
            290
        )  # 100 steps of 2.9 s
        assert train_rules.save_every_s(saved(1, expected=plan), never_so_often) == 2.9
    before = seen(
        node(0, status={}, progress=None), expected=dataclasses.replace(PLAN, save_every_s=100.0)
    )
    assert train_rules.save_every_s(before, often) == 100


def test_an_attempt_that_has_made_none_yet_counts_from_its_start_and_a_failed_save_is_quoted() -> (
    None
):
    first = dataclasses.replace(
        TRAINING, checkpoint_time=None, checkpoint_step=None, attempt_started=NOW - 2701
    )
    why = "checkpoint failed: /runs: No space left on device. Training goes on"
    fault = only(train_rules.no_checkpoint(beside({"progress": first, "complaint": why}), c))
    assert fault.text.startswith(
        "no checkpoint in 45:01, and one is due every 15:00 (checkpoint failed: /runs: No"
    )
    resumed = dataclasses.replace(
        TRAINING, checkpoint_time=NOW - 90_000, attempt_started=NOW - 2000
    )
    assert names(beside({"progress": resumed})) == []


def test_neither_a_start_up_nor_an_evaluation_makes_a_checkpoint_late() -> None:
    """SAVE_MINUTES=1: three minutes are too long for one, whatever came before."""
    each_minute = dataclasses.replace(c, save_minutes=1.0)
    compiled = dataclasses.replace(
        TRAINING, checkpoint_time=None, checkpoint_step=None, attempt_started=NOW - 900
    )
    assert only(train_rules.no_checkpoint(beside({"progress": compiled}), each_minute))
    for ready, late in ((NOW - 170, False), (NOW - 190, True)):
        p = dataclasses.replace(compiled, ready=ready)
        assert bool(train_rules.no_checkpoint(beside({"progress": p}), each_minute)) is late
    for ago, late in ((779, False), (781, True)):
        evaluated = dataclasses.replace(TRAINING, checkpoint_time=NOW - ago, eval_s=600.0)
        assert bool(train_rules.no_checkpoint(beside({"progress": evaluated}), each_minute)) is late


def test_a_disk_without_room_for_the_next_checkpoint() -> None:
    assert names(beside({"disk_free_bytes": 22.5 * GIB})) == []  # 1.5 x 15
    fault = only(train_rules.disk(beside({"disk_free_bytes": 22.0 * GIB}), c))
    assert not fault.failing and fault.text == (
        "23.6 GB of disk are free for the next checkpoint, due in 5:00, of "
        "16.1 GB, and then no other"
    )
    fault = only(train_rules.disk(beside({"disk_free_bytes": 14.9 * GIB}, cluster=cluster()), c))
    assert (
        fault.failing and "which does not fit" in fault.text and "a larger VOLUME_GB" in fault.next
    )


def test_the_checkpoint_that_is_being_written_is_the_next_one_itself() -> None:
    """25 GiB are free before, of which 10 of 15 are written: two thirds of it, and no disk that is too full."""
    writing = beside({"disk_free_bytes": 15.0 * GIB, "disk_passing_bytes": 10.0 * GIB})
    assert train_rules.disk(writing, c) == []
    fault = only(
        train_rules.disk(beside({"disk_free_bytes": 0.0, "disk_passing_bytes": 14.0 * GIB}), c)
    )
    assert fault.failing and fault.text.startswith("15 GB of disk are free for the next checkpoint")


# ---- Memory


def test_memory_that_is_nearly_full() -> None:
    assert names(beside(second={"memory_bytes": 91.0 * GIB})) == []  # 95% of 96 are 91.2
    fault = only(train_rules.memory(beside(second={"memory_bytes": 91.4 * GIB}), c))
    assert (
        fault.about == "node 1" and "node 1 (gpu-b) is nearly full, 91.4 of 96.0 GiB" in fault.text
    )
    assert names(seen(node(0, memory_bytes=96.0 * GIB, status=status("done")))) == []


# ---- Speed


def test_fewer_tokens_than_planned() -> None:
    assert names(progress(tokens_per_s=108_000)) == []  # 80% of 135,000
    fault = only(train_rules.below_plan(progress(tokens_per_s=107_000), c))
    assert (
        fault.text == "107,000 tokens/s, 79% of the plan's 135,000"
        and "make doctor PROBE=1" in fault.next
    )
    no_plan = dataclasses.replace(PLAN, tokens_per_s=None)
    assert (
        train_rules.below_plan(dataclasses.replace(progress(tokens_per_s=1), expected=no_plan), c)
        == []
    )


# ---- A run in which all is well


@pytest.mark.parametrize(
    "phase",
    [
        "waiting for peers 1/2",
        "data",
        "model",
        "compiling",
        "first step",
        "training",
        "evaluating",
        "saving",
        "sampling",
        "done",
        "stopped",
    ],
)
def test_a_run_that_is_well_has_no_fault_in_any_phase(phase: str) -> None:
    rules = (*train_rules.RULES, *gpu_rules.RULES, *run_rules.RULES)
    for past in (TRAINING, None):
        well = at_phase(phase, 20, past)
        assert [fault.text for fault in found_by(rules, well, c)] == []
        assert found_by(rules, dataclasses.replace(well, cluster=cluster()), c) == []
    quiet = gpus(
        utilisation_percent=0, power_w=60, throttle=()
    )  # in a save, or before the first step
    assert found_by(rules, at_phase("saving", 20, TRAINING, gpus=quiet), c) == []
