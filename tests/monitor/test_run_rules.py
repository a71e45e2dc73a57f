"""monitor/rules/run_rules.py: what keeps a run from its next step, just beyond each limit and just within it."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from k8s.cluster.words import MEANING
from monitor.facts import Fault, Seen
from monitor.rules import run_rules
from monitor.rules.sift import found_by
from monitor.snapshot import no_step_s
from record.status import Status
from settings import ROOT
from tests.monitor.moments import (
    GPU,
    NOW,
    SETTINGS,
    TRAINING,
    at_phase,
    cluster,
    gpus,
    node,
    only,
    pod,
    progress,
    seen,
    status,
)
from tests.train.faults.test_watchdog import HANGS
from train.distributed import rendezvous

c = SETTINGS
BEFORE = dataclasses.replace(
    TRAINING, step_time=None, attempt_started=NOW - 5000, step_s=None
)  # no step so far


def names(of: Seen) -> list[str]:
    return [fault.name for fault in found_by(run_rules.RULES, of, c)]


# ---- Waiting for peers


def waiting(ago: float, **changes: object) -> Seen:
    return seen(
        node(0, status=status("waiting for peers 2/4", ago, missing=[1, 3]), progress=None),
        **changes,
    )


def test_who_is_waited_for_is_named_when_it_takes_long() -> None:
    assert run_rules.peers(waiting(179), c) == []
    fault = only(run_rules.peers(waiting(181), c))
    assert fault.text == (
        "waiting for node 1, node 3 for 3:01: 2/4 nodes have joined; they give up after "
        "START_TIMEOUT_S=300"
    )
    assert "make train-node with NODE_RANK=1, 3" in fault.next


def test_in_the_cluster_the_pods_of_those_are_named() -> None:
    pods = cluster(pod(0), pod(1, phase="Pending", node=""), pod(2), wanted_pods=4)
    fault = only(run_rules.peers(waiting(200, cluster=pods), c))
    assert "node 1 (its pod is Pending), node 3 (it has no pod)" in fault.text
    assert "make logs NODE_RANK=1 RUN_NAME=big WHERE=cluster" in fault.next


def test_the_rendezvous_itself_tells_who_is_missing(tmp_path: Path) -> None:
    state = Status(tmp_path / "STATUS.json", active=True)
    call = SimpleNamespace(say=lambda **facts: {"missing": [1, 2], "roll": "", "verdict": None})
    facts = {"nodes": 3, "node_rank": 0, "host": "a"}
    rendezvous.call(call, facts, 1.0, iter([False, True]).__next__, state)
    told = state.facts | {"since": NOW - 999}
    fault = only(run_rules.peers(seen(node(0, status=told, progress=None)), c))
    assert fault.text.startswith("waiting for node 1, node 2 for 16:39: 1/3 nodes")


# ---- Phases


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("data", 900, "still at its data after 15:01; the trainer allows 15:00"),
        ("model", 600, "still at its model after 10:01; the limit is 10:00"),
        (
            "rehearsing",
            1200 + 15 * 2**30 / 20e6,
            "still at its dry run of a step after 33:26; the limit is 33:25",
        ),
        (
            "compiling",
            1200 + 15 * 2**30 / 20e6,
            "still compiling",
        ),  # and the checkpoint is read, of 15 GiB
        ("first step", 600, "still waiting for its first step after 10:01"),
        ("evaluating", 600 + 120 + 15, "still evaluating after 12:16; EVAL_MINUTES allows 12:15"),
        (
            "saving",
            2 * 300 + 15 * 2**30 / 20e6 + 15,
            "still saving after 23:41; the trainer allows 23:40",
        ),
        ("sampling", 600 + 160, "still sampling"),
    ],
)
def test_each_phase_has_its_own_limit(name: str, limit: float, words: str) -> None:
    past = TRAINING if name in ("evaluating", "saving", "sampling") else BEFORE
    assert run_rules.phase(at_phase(name, limit - 1, past), c) == []
    fault = only(run_rules.phase(at_phase(name, limit + 1, past), c))
    assert fault.text.startswith(words) and fault.about == name


def test_a_first_attempt_that_compiles_reads_no_checkpoint() -> None:
    fresh = dataclasses.replace(BEFORE, checkpoint_bytes=None)
    assert run_rules.phase(at_phase("compiling", 1199, fresh), c) == []
    assert "the limit is 20:00" in only(run_rules.phase(at_phase("compiling", 1201, fresh), c)).text


def test_the_evaluation_at_the_end_may_take_as_much_longer_as_it_is_larger() -> None:
    (there,) = re.findall(
        r"^FULL_SET = (\d+)",
        (ROOT / "train" / "evaluate" / "validation.py").read_text(),
        re.MULTILINE,
    )
    assert run_rules.FULL_SET == int(there) == 20
    ending = dataclasses.replace(TRAINING, step=TRAINING.last_step)
    assert run_rules.phase(at_phase("evaluating", 20 * 600 + 130, ending), c) == []
    assert run_rules.phase(at_phase("evaluating", 20 * 600 + 140, ending), c)


def test_plots_that_are_drawn_too_long_are_a_fault_of_a_run_that_is_done() -> None:
    def drawing(ago: float) -> Seen:
        return seen(node(0, status=status("done", ago), stage="drawing plots"))

    assert names(drawing(590)) == []
    assert "still drawing plots after 10:10" in only(run_rules.phase(drawing(610), c)).text


def test_preparing_data_has_no_limit_and_training_none_by_its_phase() -> None:
    assert names(seen(node(0, status={}, stage="preparing data", progress=None))) == []
    assert run_rules.phase(at_phase("training", 1e6), c) == []


# ---- Not begun


def test_less_memory_than_weights_gradients_and_moments_take_means_that_no_step_was_made() -> None:
    def first_step(gib: float, ago: float = 301.0) -> Seen:
        found = gpus(memory_gib=gib, utilisation_percent=100)
        return seen(
            node(0, status=status("first step", ago), progress=BEFORE, gpus=found),
            node(1, gpus=found),
        )

    assert run_rules.not_begun(first_step(19.0), c) == []  # within 5% of 19.9
    assert run_rules.not_begun(first_step(17.0, 299), c) == []
    fault = only(run_rules.not_begun(first_step(17.0), c))
    assert fault.text == (
        "training has not begun: less memory is in use on 8 GPUs (17.0 of 80 GiB on GPU 0 of node 0 "
        "(gpu-a)) than the 19.9 GiB of weights, gradients and moments, 5:01 into the first step, "
        "though they show 100% utilisation"
    )


def test_a_run_that_has_made_a_step_has_begun() -> None:
    assert run_rules.not_begun(seen(node(0, gpus=gpus(memory_gib=17.0))), c) == []


# ---- Hanging


def still(waited: float, **gpu: object) -> Seen:
    """No step for so long."""
    facts = {"utilisation_percent": 100.0, "power_w": 140.0} | gpu
    past = dataclasses.replace(TRAINING, step_time=NOW - waited)
    return seen(node(0, progress=past, gpus=gpus(**facts)), node(1, gpus=gpus(**facts)))


def test_no_step_at_full_utilisation_and_low_power_is_a_hang() -> None:
    assert run_rules.hanging(still(29), c) == []  # 8 times 2.9 s are 23 s, and HANG_S is 30
    fault = only(run_rules.hanging(still(250), c))
    assert (
        fault.text
        == "hanging: 8 GPUs at 100% utilisation and 140 of 400 W, no step for 4:10 (a step takes 2.9 s)"
    )
    assert fault.next == (
        "make logs ONLY=errors RUN_NAME=big; make restart PRESET=xlarge-8xa100 RUN_NAME=big resumes "
        "from step 12,000"
    )


@pytest.mark.parametrize(
    ("usual", "waited", "hangs"),
    [(10.0, 79, False), (10.0, 81, True), (0.05, 29, False), (0.05, 31, True)],
)
def test_slow_steps_have_more_time(usual: float, waited: float, hangs: bool) -> None:
    assert bool(run_rules.hanging(progress(step_s=usual, step_time=NOW - waited), c)) is hangs


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (
            {"power_w": 239.0},
            "hanging: 8 GPUs at 100% utilisation and 239 of 400 W, no step for 4:10",
        ),
        ({"power_w": 241.0}, "they compute"),
        ({"power_w": 241.0, "training_w": 390.0}, "no step for 4:10"),  # 62% of the usual
        (
            {"power_w": 241.0, "training_w": 410.0},
            "and 241 of 400 W (410 W in training), no step",
        ),  # 59%
        ({"power_w": 380.0}, "8 GPUs at 100% utilisation and 380 of 400 W: they compute"),
        ({"power_w": None}, "hanging: 8 GPUs at 100% utilisation, no step"),
        (
            {"utilisation_percent": 0.0},
            "8 GPUs are idle: a process waits for a disk, for data, or in Python",
        ),
        ({"utilisation_percent": 50.0}, "hanging: no step for 4:10"),
    ],
)
def test_what_gpus_do_meanwhile_tells_hanging_from_computing_and_from_nothing(
    gpu: dict, words: str
) -> None:
    assert words in only(run_rules.hanging(still(250, **gpu), c)).text


def test_the_gpu_that_is_idle_while_others_wait_is_named() -> None:
    found = (
        *gpus(3, utilisation_percent=100, power_w=140),
        dataclasses.replace(GPU, index=3, utilisation_percent=0),
    )
    past = dataclasses.replace(TRAINING, step_time=NOW - 250)
    text = only(run_rules.hanging(seen(node(0, progress=past, gpus=found)), c)).text
    assert text.endswith("; GPU 3 of node 0 is idle") and text.startswith("hanging: 3 GPUs")


def test_an_evaluation_before_counts_for_no_hang_and_old_readings_of_gpus_for_nothing() -> None:
    back = seen(
        node(
            0,
            status=status("training", 5),
            progress=dataclasses.replace(TRAINING, step_time=NOW - 500),
        )
    )
    assert no_step_s(back) == 5 and names(back) == []
    old = still(250)
    old = dataclasses.replace(
        old, nodes=tuple(dataclasses.replace(n, gpus_time=NOW - 61) for n in old.nodes)
    )
    assert only(run_rules.hanging(old, c)).text == "hanging: no step for 4:10 (a step takes 2.9 s)"


def test_a_step_of_the_attempt_before_is_no_hang_of_this_one() -> None:
    old = dataclasses.replace(TRAINING, attempt=1, step_time=NOW - 5000, attempt_started=NOW - 20)
    for facts in (status("training", 15), {"phase": "training"}):  # which may not say since when
        assert names(seen(node(0, status=facts, progress=old))) == []
    late = dataclasses.replace(old, attempt_started=NOW - 40)
    assert no_step_s(seen(node(0, status={"phase": "training"}, progress=late))) == 40
    assert no_step_s(seen(node(0, status=status("training", 35), progress=late))) == 35


def test_ages_are_by_the_clock_of_the_node_that_tells_them() -> None:
    told = node(0, progress=dataclasses.replace(TRAINING, step_time=NOW - 2))
    late = dataclasses.replace(seen(told, node(1)), now=NOW + 100, cluster=cluster())
    assert names(late) == []


def test_training_that_waits_for_data_says_so() -> None:
    waits = at_phase("data", 31)
    fault = only(run_rules.waits_for_data(waits, c))
    assert (
        "stands still for 31 s and waits for data" in fault.text
        and "no progress for 900 s" in fault.text
    )
    assert names(at_phase("data", 29)) == [] and names(at_phase("data", 500, BEFORE)) == []


# ---- Gone


@pytest.mark.parametrize(
    ("saved", "goodput", "said"),
    [
        (12_000, {}, "resumes from step 12,000"),
        (None, {"training": 1.0}, "starts again from step 0, since there is no checkpoint yet"),
        (None, {}, "resumes from its last checkpoint, if there is one"),  # the end of a long record
    ],
)
def test_where_a_killed_run_goes_on_is_said(saved, goodput, said) -> None:
    known = dataclasses.replace(TRAINING, checkpoint_step=saved, goodput=goodput)
    there = seen(node(0, at_work=False, progress=known))
    named = dataclasses.replace(there, named="RUNS_DIR=/data RUN_NAME=big")
    fault = only(run_rules.killed(named, c))
    assert f"RUNS_DIR=/data RUN_NAME=big {said}" in fault.next


def test_a_process_that_is_gone_was_killed() -> None:
    gone = seen(node(0, at_work=False, memory_bytes=95.0 * 2**30))
    fault = only(run_rules.killed(gone, c))
    assert fault.failing and fault.text == (
        "the process was killed while training at step 12,345. 95.0 of 96.0 GiB of memory were in use"
    )
    assert fault.next == (
        "make train PRESET=xlarge-8xa100 RUN_NAME=big resumes from step 12,000. If memory ran out, "
        "dmesg | tail shows it"
    )
    for phase in ("done", "stopped"):
        assert names(seen(node(0, at_work=False, status=status(phase)))) == []
    assert names(seen(node(0, at_work=None))) == []


def test_a_run_that_is_gone_with_its_status_is_no_run_that_has_not_begun() -> None:
    fault = only(run_rules.killed(seen(node(0, at_work=False, status={})), c))
    assert fault.failing and fault.text.startswith(
        "the run stopped at step 12,345 without finishing, and STATUS.json is missing or corrupt"
    )
    for changes in ({"end_reason": "done"}, {"step": 0}):
        ended = dataclasses.replace(TRAINING, **changes)  # type: ignore[arg-type]
        assert names(seen(node(0, at_work=False, status={}, progress=ended))) == []
    assert names(seen(node(0, at_work=True, status={}))) == []


@pytest.mark.parametrize("code", sorted(set(MEANING) - {0, 75, 143}))
def test_a_crash_says_what_the_exit_code_means_and_the_last_complaint(code: int) -> None:
    crash = seen(
        node(
            0,
            at_work=False,
            status=status("crashed", exit_code=code),
            complaint="2027-01-15 08:00:00,123 BATCH_TOKENS=5: too small",
        )
    )
    fault = only(run_rules.crashed(crash, c))
    assert (
        fault.text
        == f"crashed at step 12,345 (exit code {code}: {MEANING[code]}): BATCH_TOKENS=5: too small"
    )
    assert fault.failing and "make restart PRESET=xlarge-8xa100 RUN_NAME=big resumes" in fault.next


def test_a_crash_is_told_in_the_trainer_s_own_words() -> None:
    """They need not look like a complaint, and another process may have complained since."""
    why = "/runs/big/checkpoints: a checkpoint takes 15 GiB and the disk has 2 GiB free; make room"
    ended = seen(
        node(
            0,
            at_work=False,
            status=status("crashed", 5, exit_code=78, why=why),
            complaint="Error: later",
        )
    )
    fault = only(run_rules.crashed(ended, c))
    assert fault.text == f"crashed at step 12,345 (exit code 78: {MEANING[78]}): {why}"


def test_a_crash_that_the_launcher_mends_is_not_the_end() -> None:
    fault = only(
        run_rules.crashed(seen(node(0, at_work=True, status=status("crashed", exit_code=1))), c)
    )
    assert not fault.failing and fault.next.startswith("the launcher starts it again")
    fault = only(
        run_rules.crashed(seen(node(0, at_work=True, status=status("crashed", exit_code=70))), c)
    )
    assert fault.failing


def test_a_job_that_has_failed_is_a_crash_wherever_its_status_stands() -> None:
    failed = cluster(job="failed: more pods failed than backoffLimit=6 allows", ended="Failed")
    fault = only(run_rules.crashed(seen(cluster=failed), c))
    assert (
        fault.failing
        and "the Job has failed, more pods failed than backoffLimit=6 allows" in fault.text
    )


def test_a_pod_that_runs_and_tells_nothing_is_named() -> None:
    def quiet(seconds: float, phase: str = "Running") -> Seen:
        late = dataclasses.replace(node(1), time=NOW - seconds)
        return seen(node(0), late, cluster=cluster(pod(0), pod(1, phase=phase)))

    assert run_rules.silent(quiet(179), c) == [] == run_rules.silent(quiet(999, "Pending"), c)
    fault = only(run_rules.silent(quiet(181), c))
    assert fault.about == "node 1" and fault.text.startswith(
        "node 1 (machine-1, site sdsc) has told nothing for 3:01"
    )


# ---- NCCL and gloo

# as torch 2.x and gloo say it; hosts and numbers are ours
TIMED_OUT = (
    "[rank5]:[E1122 01:24:02.123 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=6553600, NumelOut=6553600, Timeout(ms)=120000) "
    "ran for 120035 milliseconds before timing out."
)
CLOSED = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"
GLOO = "[rank1]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:41021"


def lost_sight(line: str, number: int = 1, **changes: object) -> Seen:
    """No step for 4 minutes, and a pod whose last lines hold this one."""
    pods = cluster(pod(0), pod(1, lines=("step=1/2 loss=3", line, "end")) if number else pod(1))
    return dataclasses.replace(still(250), cluster=pods, **changes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            TIMED_OUT,
            "rank 5 on node 1 (machine-1, site sdsc) waited in vain for another process (a collective timed out)",
        ),
        (
            CLOSED,
            "a process on node 1 (machine-1, site sdsc) lost the connection to another process",
        ),
        (GLOO, "rank 1 on node 1 (machine-1, site sdsc) lost the connection"),
        (
            "RuntimeError: Timed out waiting 8000ms for recv operation to complete",
            "a process on node 1",
        ),
    ],
)
def test_a_collective_that_fails_names_rank_and_host(line: str, words: str) -> None:
    fault = only(run_rules.nccl(lost_sight(line), c))
    assert (
        fault.text.startswith(words)
        and "make logs ONLY=errors NODE_RANK=1 RUN_NAME=big WHERE=cluster" in fault.next
    )


def test_what_was_said_before_training_went_on_is_no_fault() -> None:
    assert run_rules.nccl(dataclasses.replace(lost_sight(TIMED_OUT), nodes=seen().nodes), c) == []
    assert run_rules.nccl(lost_sight("NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>"), c) == []


@pytest.mark.parametrize("phase", ["data", "evaluating", "saving"])
def test_a_download_whose_connection_broke_is_no_process_that_is_lost(phase: str) -> None:
    """It is tried again; in a run that stands still, or is gone, it may be what the others wait for."""
    broke = "reading part 3 of 9 again: ConnectionResetError: [Errno 104] Connection reset by peer"
    assert run_rules.nccl(at_phase(phase, 20, complaint=broke), c) == []
    assert run_rules.nccl(at_phase(phase, 20, BEFORE, complaint=broke), c) == []
    assert only(run_rules.nccl(at_phase(phase, 20, BEFORE, complaint=GLOO), c)).about == "rank 1"
    assert (
        only(run_rules.nccl(at_phase(phase, 20, complaint=broke, at_work=False), c)).name == "nccl"
    )


OLD = "the attempt before: HANGS: rank 1 on gpu-b, in forward for 600 s at step 12"


@pytest.mark.parametrize("phase", ["training", "data", "evaluating", "saving", "sampling"])
def test_an_old_line_is_no_fault_of_a_run_that_goes_on(phase: str) -> None:
    """Neither one that NCCL survived, nor what the watchdog said of the attempt before."""
    for line in (OLD, f"rank=0 {OLD}", GLOO, TIMED_OUT):
        well = at_phase(phase, 20, complaint=line)
        assert (
            names(well)
            == []
            == names(dataclasses.replace(well, cluster=cluster(pod(0), pod(1, lines=(line,)))))
        )
    limits = {"evaluating": 740, "saving": 1500, "sampling": 800, "data": 250, "training": 250}
    late = dataclasses.replace(TRAINING, step_time=NOW - 1600)
    too_long = at_phase(phase, limits[phase], late, complaint=TIMED_OUT)
    assert only(run_rules.nccl(too_long, c)).about == "rank 5"
    assert run_rules.nccl(at_phase(phase, limits[phase], late, complaint=OLD), c) == []
    gone = at_phase(phase, 20, complaint=OLD, at_work=False)
    assert run_rules.nccl(gone, c) == [] and names(gone) == ["killed"]


def test_between_two_attempts_and_before_the_first_step_it_is_said() -> None:
    assert (
        only(run_rules.nccl(at_phase("evaluating", 20, complaint=GLOO, stage="training"), c)).about
        == "rank 1"
    )
    assert only(run_rules.nccl(at_phase("model", 20, BEFORE, complaint=OLD), c)).about == "rank 1"


def test_the_watchdog_s_own_words_name_who_hangs_and_where(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, tmp_path / "hang", "0", "asleep"],
        cwd=ROOT,
        text=True,
        timeout=120,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    lines = [re.sub(r"\bhere\b", "gpu-b", line) for line in done.stdout.splitlines()]
    (hangs,) = [line for line in lines if line.startswith("HANGS")]
    (says,) = [line for line in lines if line.startswith("rank=0")]
    assert "no progress in step 7" in says
    for line, words, past in (
        (hangs, "does not come on", TRAINING),
        (says, "made no progress", TRAINING),
        (
            hangs.replace("HANGS", "waits for others"),
            "only waits for another one, which hangs",
            TRAINING,
        ),
        (f"the attempt before: {hangs}", "does not come on", BEFORE),
    ):
        late = dataclasses.replace(past, step_time=past.step_time and NOW - 250)
        fault = only(run_rules.nccl(seen(node(0, progress=late, complaint=line), node(1)), c))
        assert (
            fault.text.startswith(f"rank 0 on node 1 (gpu-b) {words}") and fault.about == "rank 0"
        )


def test_who_hangs_is_said_before_who_complains_of_it() -> None:
    hangs = "HANGS: rank 2 on gpu-a: no progress in step 9 for 61 s (see TRAIN_TIMEOUT_S); it is at loop.py:9"
    both = seen(
        node(0, status=status("crashed", 5, exit_code=1), complaint=TIMED_OUT),
        node(1, complaint=hangs),
    )
    assert only(run_rules.nccl(both, c)).about == "rank 2"


# ---- A run in which all is well

PHASES = [
    ("waiting for peers 1/2", BEFORE),
    ("data", BEFORE),
    ("model", BEFORE),
    ("compiling", BEFORE),
    ("first step", BEFORE),
    ("training", TRAINING),
    ("evaluating", TRAINING),
    ("saving", TRAINING),
    ("data", TRAINING),
    ("sampling", TRAINING),
    ("done", TRAINING),
    ("stopped", TRAINING),
]


@pytest.mark.parametrize("in_cluster", [False, True])
@pytest.mark.parametrize(("name", "past"), PHASES)
def test_a_run_that_is_well_has_no_fault_in_any_phase(
    name: str, past: object, in_cluster: bool
) -> None:
    well = at_phase(name, 20, past)  # type: ignore[arg-type]
    assert names(dataclasses.replace(well, cluster=cluster() if in_cluster else None)) == []
    assert (
        names(Seen(NOW, "big", "tiny")) == []
        and names(seen(node(0, status={}, progress=None, at_work=False))) == []
    )


def test_commands_are_targets_of_the_makefile() -> None:
    found: list[Fault] = [
        *run_rules.killed(seen(node(0, at_work=False)), c),
        *run_rules.hanging(still(250), c),
        *run_rules.peers(waiting(999, cluster=cluster(pod(0))), c),
        *run_rules.phase(at_phase("model", 9999), c),
        *run_rules.waits_for_data(at_phase("data", 99), c),
    ]
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = {target for fault in found for target in re.findall(r"make ([a-z-]+)", fault.next)}
    assert said >= {"logs", "restart", "data", "describe"} and said <= targets
