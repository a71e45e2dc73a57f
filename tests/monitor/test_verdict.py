"""monitor/verdict.py: one word on a run, what it rests on, and what to try."""

import dataclasses
from typing import Any

import pytest

from monitor.facts import Expected, Seen
from monitor.rules import gpu_rules, run_rules, train_rules
from monitor.rules.sift import found_by, sift
from monitor.verdict import (
    BELOW_PLAN,
    DONE,
    FAILING,
    NO_PLAN,
    ON_PLAN,
    STOPPED,
    Verdict,
    pace,
    steps_part,
    trained_s,
    verdict,
)
from settings.config import Config
from tests.monitor.moments import (
    LINK,
    NOW,
    PLAN,
    SETTINGS,
    TRAINING,
    cluster,
    gpus,
    node,
    progress,
    seen,
    status,
)

c = dataclasses.replace(
    SETTINGS, batch_tokens=524_288, seq_len=2048, micro_batch_size=8, dtype="bfloat16"
)
RULES = (*run_rules.RULES, *gpu_rules.RULES, *train_rules.RULES)


def of(moment: Seen, settings: Config = c) -> Verdict:
    found = verdict(moment, settings, sift(found_by(RULES, moment, settings)))
    assert found
    return found


def books(**seconds: float) -> dict[str, Any]:
    return {"goodput": {"training": 9000.0, "start_up": 5000.0, **seconds}}


def test_there_is_none_before_thirty_minutes_of_training() -> None:
    assert verdict(progress(goodput={"training": 1799.0}), c, []) is None
    assert of(progress(goodput={"training": 1800.0})).word == ON_PLAN
    young = {"goodput": {}, "attempt_started": NOW - 1801, "step_time": NOW - 2}
    assert trained_s(progress(**young)) == 1799 and verdict(progress(**young), c, []) is None
    assert verdict(seen(node(0, progress=None)), c, []) is None


def test_on_plan_with_its_numbers() -> None:
    found = of(progress())
    # training and data wait are 34,020 of 34,830 s that are no start-up; 130 of 135 thousand tokens/s are 96.3%
    assert steps_part(progress()) == pytest.approx(34_020 / 34_830)
    assert pace(progress()) == pytest.approx(130 / 135 * 34_020 / 34_830)
    assert found.word == ON_PLAN and not found.is_bad and not found.is_last
    assert found.sentence == (
        "on plan: 130,000 tokens/s, of 135,000 planned, 48.1% MFU of 50.0%; steps have 98% of "
        "the time, so that the run has 94% of the plan's pace, after 9:26:40 of training"
    )


def test_below_plan_begins_at_slow_percent_of_the_pace() -> None:
    assert of(progress(tokens_per_s=108_000, **books())).word == ON_PLAN
    assert of(progress(tokens_per_s=107_900, **books())).word == BELOW_PLAN
    # fast in steps, and a fifth of the time spent elsewhere: 0.963 x 9000 / 11250 = 77%
    elsewhere = of(progress(**books(evaluation=2250.0)))
    assert (
        elsewhere.word == BELOW_PLAN
        and elsewhere.is_bad
        and "steps have 80% of the time" in elsewhere.sentence
    )


SLOW = {"tokens_per_s": 80_000.0, **books()}


@pytest.mark.parametrize(
    ("moment", "settings", "words"),
    [
        (
            progress(**SLOW, data_wait_fraction=0.3),
            {},
            "30% of the last steps' time was spent waiting for data",
        ),
        (
            progress(**SLOW),
            {"compile": "0"},
            "make restart COMPILE=auto PRESET=xlarge-8xa100 RUN_NAME=big resumes",
        ),
        (progress(**SLOW), {"attention": "math"}, "make restart ATTENTION=auto"),
        (
            progress(**SLOW),
            {"dtype": "float32"},
            "a fraction of these GPUs: make restart DTYPE=bfloat16",
        ),
        (
            progress(**SLOW, mem_gib=39.0),
            {},
            "39 of 80 GiB are in use: make restart MICRO_BATCH_SIZE=16",
        ),
        (
            progress(**SLOW, mem_gib=39.0),
            {"activation_checkpointing": "full"},
            "restart ACTIVATION_CHECKPOINTING=none",
        ),
        (
            progress(tokens_per_s=100_000, **books(evaluation=1100.0)),
            {},
            "evaluations take 11% of the time: make restart EVAL_EVERY=2000 EVAL_TOKENS=32768",
        ),
        (
            progress(tokens_per_s=100_000, **books(checkpoint=1100.0)),
            {"save_every": 50},
            "checkpoints take 11% of the time: make restart SAVE_MINUTES=30 SAVE_EVERY=100",
        ),
        (
            progress(tokens_per_s=100_000, **books(lost_work=1100.0)),
            {},
            "11% of the time was lost to crashes and restarts",
        ),
        (progress(**SLOW), {}, "make doctor PROBE=1 measures what is possible"),
    ],
)
def test_what_to_try_follows_from_the_cause(moment: Seen, settings: dict, words: str) -> None:
    found = of(moment, dataclasses.replace(c, **settings))
    assert found.word == BELOW_PLAN and words in found.sentence
    if "doctor" not in words:
        assert "; try: " in found.sentence


def test_what_is_within_bounds_is_not_advised() -> None:
    fine = progress(
        tokens_per_s=95_000,
        mem_gib=41.0,
        data_wait_fraction=0.09,
        **books(evaluation=900.0, checkpoint=900.0),
    )
    assert "try:" not in of(fine).sentence
    packed = dataclasses.replace(
        c, micro_batch_size=32
    )  # 8 GPUs x 32 are all 256 sequences of a step
    assert "MICRO_BATCH_SIZE" not in of(progress(**SLOW, mem_gib=39.0), packed).sentence


def test_throttling_and_the_network_are_named_first() -> None:
    slow = dataclasses.replace(TRAINING, **SLOW)
    full = dataclasses.replace(LINK, out_bytes_per_s=3e9)
    moment = seen(
        node(0, progress=slow, gpus=gpus(throttle=("hw_thermal",), temp_c=90), links=(full,)),
        node(1),
    )
    told = of(moment, dataclasses.replace(c, compile="0")).sentence.partition("try: ")[2]
    assert told.startswith("GPU 0, 1, 2, 3 of node 0 (gpu-a) are throttled by heat: 90 C")
    assert told.index("is full: 24 of 25 Gbit/s") < told.index("COMPILE=auto")


def test_a_night_in_which_it_was_stopped_counts_for_nothing_and_one_in_which_it_lay_crashed_does() -> (
    None
):
    """9,000 s of training, 1,000 s down by a crash, and 30,000 s after make stop: 90% of 10,000 s."""
    night = progress(**books(down=31_000.0), rested_s=30_000.0)
    assert steps_part(night) == pytest.approx(0.9) and of(night).word == ON_PLAN
    crashed = progress(**books(down=31_000.0))
    assert (
        steps_part(crashed) == pytest.approx(9 / 40)
        and "was lost to crashes" in of(crashed).sentence
    )
    assert steps_part(dataclasses.replace(night, cluster=cluster())) == pytest.approx(9 / 40)


def test_failing_is_what_does_not_mend_itself() -> None:
    full = seen(node(0, disk_free_bytes=1e9), node(1))
    assert of(full).word == FAILING and not of(full).is_last
    assert of(full).sentence.startswith("failing: 1 GB of disk are free for the next checkpoint")
    hung = seen(node(0, progress=dataclasses.replace(TRAINING, step_time=NOW - 900)), node(1))
    assert of(hung).sentence.startswith("failing: ")
    early = dataclasses.replace(TRAINING, goodput={"training": 60.0})
    assert (
        verdict(seen(node(0, progress=early, disk_free_bytes=1e9)), c, found_by(RULES, full, c))
        is None
    )
    gone = of(seen(node(0, progress=early, at_work=False)))
    assert (
        gone.word == FAILING
        and gone.is_last
        and gone.is_bad
        and "killed while training" in gone.sentence
    )


def test_without_a_plan_nothing_is_guessed() -> None:
    alone = dataclasses.replace(progress(), expected=Expected(why="the peak of CPU is not known"))
    assert of(alone).word == NO_PLAN and not of(alone).is_bad
    assert of(alone).sentence == (
        "no plan to compare with (the peak of CPU is not known): 130,000 tokens/s after "
        "9:26:40 of training"
    )


def test_on_plan_says_what_is_wrong_all_the_same() -> None:
    hot = seen(node(0, gpus=gpus(throttle=("sw_thermal",))), node(1))
    assert of(hot).word == ON_PLAN and "; but GPU 0, 1, 2, 3 of node 0" in of(hot).sentence


def test_the_last_word_on_a_run_that_is_done() -> None:
    ended = dataclasses.replace(
        TRAINING, step=1000, last_step=1000, tokens=524_288_000, val_loss=2.5
    )
    found = of(seen(node(0, status=status("done"), progress=ended)))
    assert found.word == DONE and found.is_last and not found.is_bad
    # 34,000 of 35,030 s
    assert found.sentence == (
        "done: 1,000 of 1,000 steps, 524M tokens; validation loss 2.5000; 97% of 9:43:50 "
        "was training; on plan, at 94% of its pace"
    )
    bare = of(Seen(NOW, "big", "tiny", (node(0, status=status("done"), progress=None),)))
    assert bare.sentence == "done"
    assert of(seen(node(0), cluster=cluster(ended="Complete"))).word == DONE


def test_one_that_was_stopped_says_how_it_goes_on() -> None:
    found = of(
        seen(
            node(
                0,
                status=status("stopped"),
                progress=dataclasses.replace(TRAINING, tokens_per_s=50_000),
            )
        )
    )
    assert found.word == STOPPED and found.is_last
    assert "below plan, at 36% of its pace" in found.sentence and found.sentence.endswith(
        "make restart PRESET=xlarge-8xa100 RUN_NAME=big resumes from step 12,000"
    )
    assert PLAN.tokens_per_s == 135_000


@pytest.mark.parametrize(
    ("made", "ends"),
    [
        (
            {"step": 1000, "checkpoint_step": 1000},
            "; all steps are made, and the last evaluation was not ended; make "
            "restart PRESET=xlarge-8xa100 RUN_NAME=big does what is left: the last evaluation and the sample",
        ),
        (
            {"step": 999, "checkpoint_step": 999},
            "pace; make restart PRESET=xlarge-8xa100 RUN_NAME=big resumes from step 999",
        ),
        (
            {"step": 1000, "checkpoint_step": 900},
            "; all steps are made, and the last evaluation was not ended; make "
            "restart PRESET=xlarge-8xa100 RUN_NAME=big resumes from step 900",
        ),
    ],
)
def test_one_that_was_stopped_behind_its_last_step_has_no_steps_to_go_on_with(
    made: dict, ends: str
) -> None:
    ended = dataclasses.replace(TRAINING, last_step=1000, **made)
    assert of(seen(node(0, status=status("stopped"), progress=ended))).sentence.endswith(ends)
