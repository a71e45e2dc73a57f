"""k8s/cluster/log_lines.py: which lines of a log are shown. The texts are of real runs of this trainer on two processes, shortened;
those of NCCL are in the words of its own documentation and of the lab's runs."""

import pytest

from k8s.cluster import words
from k8s.cluster.log_lines import chosen, own
from monitor.facts import Node, to_line

QUIET = """\
launch: processes=2 threads=1 allocator=keeps-large-blocks (MALLOC_MMAP_THRESHOLD_=1073741824)
rendezvous: 1 of 2 nodes have joined: 0 (a-0); missing: 1; they are to reach a-0.a:29500
rendezvous: all nodes have joined
node 0: host=a-0 ranks=0-1 of 4 device=CPU torch=2.13.0+cpu nccl=none
4 of 4 processes joined, on a-0 (CPU), a-1 (CPU)
From the environment: DEVICE=cpu RUN_NAME=ok
data=python-stdlib sequences=520 dropped_tail_tokens=26 planned_tokens=0.02M epochs=1.23
attention=sdpa (torch's flash kernel for CPU)
compile=no (a run of 6.5e+09 FLOPs; on a CPU it pays from about 5e+13 on)
run=ok device=CPU processes=4 parallel=ddp dtype=float32 parameters=0.07M steps=40 batch_tokens=512
step=1/40 loss=6.2530 lr=7.500e-04 grad_norm=0.296 step_ms=33.8 tokens_per_s=15157 mfu=n/a mem_gib=0.35 tokens=512
step=20/40 loss=5.9718 lr=1.884e-03 grad_norm=0.295 step_ms=14.1 tokens_per_s=36258 mfu=n/a mem_gib=0.35 tokens=10240
step=20/40 val_loss=5.9606 val_bpb=3.8319 scored_tokens=512 eval_s=0.0
checkpoint step_0000020: 1 MiB in 0.08 s
validation: 3.698 bits per byte on 4561 held-out bytes
sample, step 40:
    raise ValueError("cannot open: error") loss=3 tokens/s NCCL
    step=7/9 loss=1 lr=0
goodput 21.3% of 0:03: training 0:01, start-up 0:02 (import 0:01, model 0:01)
"""

TORCHRUN = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.main FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_01:24:02
  host      : localhost
  rank      : 0 (local_rank: 0)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 8311)
============================================================
"""

TROUBLE = (
    """\
step=1/40 loss=6.2530 lr=7.500e-04 grad_norm=0.296 step_ms=33.8 tokens_per_s=15157
the trainer failed
Traceback (most recent call last):
  File "/app/train/main.py", line 75, in main
    code = run(job)
           ^^^^^^^^
  File "/app/train/step.py", line 90, in train_step
    dist.all_reduce(numbers)

torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
NET/Socket : peer 10.0.0.7 has closed the connection
W1122 01:24:02.781000 8262 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 8310 closing signal
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 1028, in main
    run(args)
"""
    + TORCHRUN
    + """\
launch: attempt 1 ended with code 1; last checkpoint: step 20; starting again in 1 s (restart 1 of 3)
rendezvous: 2 of 2 nodes have joined: 0 (a-0), 1 (a-1)
resumed from step_0000020 at step 20/40
"""
)


def only(text: str, which: str) -> list[str]:
    return [line.rstrip("\n") for line in chosen(text.splitlines(keepends=True), which)]


def test_without_a_choice_all_is_shown() -> None:
    assert only(QUIET, "") == QUIET.splitlines()


def test_metrics_are_the_lines_of_steps_and_evaluations() -> None:
    assert only(QUIET, "metrics") == [
        line for line in QUIET.splitlines() if line.startswith("step=")
    ]
    clocked = "".join(
        line + "\n" if line[0] == " " else f"2026-11-22 00:41:38,682 {line}\n"
        for line in QUIET.splitlines()
    )  # a sample is one record of several lines
    assert [line.split(" ", 2)[2] for line in only(clocked, "metrics")] == only(QUIET, "metrics")


@pytest.mark.parametrize(
    "line",
    [
        "train/loss: 3.2104",
        "step 00010/12800 (0.08%) | loss: 9.123456 | lrm: 1.00 | dt: 1217.30ms | tok/sec: 430,600",
        "INFO:root:step 100 loss 3.21 tokens/sec 400,000",
        "step:  1  loss: 12.2345  grad_norm: 1.2345  tps: 7,890",
    ],
)
def test_metrics_of_other_trainers_are_known_too(line: str) -> None:
    assert only(line, "metrics") == [line]


def test_a_run_without_trouble_has_no_errors_and_its_sample_is_none() -> None:
    assert only(QUIET.replace("; missing: 1", ""), "errors") == []


def test_errors_have_tracebacks_and_torchruns_table_whole() -> None:
    lines = TROUBLE.splitlines()
    assert only(TROUBLE, "errors") == lines[1:-2]


def test_tracebacks_of_several_processes_are_kept_apart() -> None:
    text = """\
[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank0]:   File "/app/train/loop.py", line 1, in train
step=3/40 loss=6.1 lr=1
[rank1]:   File "/app/train/loop.py", line 1, in train
[rank1]: ValueError: one
[rank0]: KeyError: 'zero'

[rank0]: During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "/app/train/main.py", line 2, in main
[rank0]: OSError: again
step=4/40 loss=6.0 lr=1
"""
    assert only(text, "errors") == [line for line in text.splitlines() if line.startswith("[rank")]


@pytest.mark.parametrize(
    "line",
    [
        "straggler: rank 3 on c takes 2.1 times as long as the median",
        "checkpoint failed: No space left on device. Training continues, the last good one is untouched",
        "the evaluation at step 20 failed, and training continues: TimeoutError",
        "HANGS: rank 1 on b: no progress in step 7 for 60 s (see TRAIN_TIMEOUT_S); it is at /app/train/step.py:90",
        "2026-11-22 00:41:31,000 rank=4 rank=4 host=c: told to stop 90 s ago, and still in step 7; not known",
        "checkpoint step_0000002: MANIFEST.json is missing or damaged; falling back to step_0000001",
        "loss of 3 steps in a row: went back to step_0000020 (rollback 1 of 3)",
        "rendezvous: node 1 (b) has left (the connection broke: Connection reset by peer)",
        "rendezvous: MASTER_ADDR=a-0.a does not resolve on a-1 (Name or service not known); trying on",
        "the producer of data has stopped: it ended with code 1. Training continues with what there is",
        "STATUS.json: cannot be written (No space left on device); what it says is old",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "step=7/40 loss=n/a lr=1.0e-03",
        "W&B: cannot be reached (timeout) Trying again now and then; the run goes on",
        "Fatal Python error: Segmentation fault",
        "/app/train/x.py:3: UserWarning: lazy",
    ],
)
def test_a_complaint_is_an_error(line: str) -> None:
    assert only(f"{line}\n", "errors") == [line]


def test_all_problems_of_settings_are_shown() -> None:
    text = "2 problems in the settings:\n  BATCH_TOKENS=500 is no multiple; nearest: 512\n  SEED=x: a number\nrun=ok\n"
    assert only(text, "errors") == text.splitlines()[:3]


def test_of_several_files_those_with_errors_are_named() -> None:
    text = (
        "==> train.log <==\nrun=ok\n==> logs/rank_3.log <==\nrank=3 cannot go on\nfine\n"
        "==> logs/rank_4.log <==\nfine\n"
    )
    assert only(text, "errors") == ["==> logs/rank_3.log <==", "rank=3 cannot go on"]


def test_lines_come_one_by_one() -> None:
    """A log that is followed shows a line as soon as it is there."""
    taken = []

    def endless():
        for number in range(10**9):
            taken.append(number)
            yield f"step={number}/9 loss=1 lr=1\n"

    for which in ("", "metrics", "errors"):
        taken.clear()
        found = chosen(
            endless() if which != "errors" else (f"error {n}\n" for n in range(10**9)), which
        )
        assert next(found).strip() and next(found).strip() and len(taken) <= 2


# ---- What pods tell of their nodes

NODE = (
    to_line(
        Node(0, "a-0", 1.0, complaint="checkpoint step_0000900: No space left on device, an error")
    )
    + "\n"
)


@pytest.mark.parametrize("only", ["", "metrics", "nccl", "ranks", "errors"])
@pytest.mark.parametrize("text", [QUIET, TROUBLE, TORCHRUN])
def test_what_a_pod_tells_of_its_node_is_shown_to_nobody(only: str, text: str) -> None:
    lines = text.splitlines(keepends=True)
    among = [NODE]
    for line in lines:
        among += [line, NODE]
    assert list(chosen(iter(among), only)) == list(chosen(lines, only))


def test_a_line_in_which_it_came_is_whole_again_and_words_like_it_stay() -> None:
    assert list(
        own(["a\n", "rank 1 has " + NODE, "failed\n", "the node-facts of it\n", "no end " + NODE])
    ) == ["a\n", "rank 1 has failed\n", "the node-facts of it\n", "no end "]


def test_the_last_words_of_a_pod_are_its_own() -> None:
    """Of a longer log Kubernetes keeps the last 2048 bytes, which begin within a line."""
    message = (
        NODE[30:] + NODE + "the trainer failed\n" + NODE + "launch: exit code 70: NaN in a row\n"
    )
    assert (
        words.failed({"exitCode": 70, "message": message})
        == "exit code 70 (restarts or rollbacks made no progress): NaN in a row"
    )
    full = NODE[30:] + "launch: exit code 1: No space left on device\n"
    assert words.failed({"exitCode": 1, "message": full}).startswith(
        "the volume or the pod's own disk is full"
    )
    assert (
        words.failed({"exitCode": 1, "message": '{"odd": 1}'})
        == 'exit code 1 (the trainer failed): {"odd": 1}'
    )
