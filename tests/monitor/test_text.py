"""monitor/text.py: plain text of made runs, line by line."""

import dataclasses
import re

from monitor import phrases
from monitor.facts import Cluster, Expected, Fault, Gpu, Node, Pod, Progress, Seen
from monitor.text import text
from tests.monitor import scenes


def test_a_run_of_this_machine_fact_by_fact() -> None:
    assert text(scenes.here(), [scenes.HANG], "failing: it hangs").splitlines() == [
        "run: d16, preset d16-2xh100, seen 2026-11-22 14:00:00",
        f"fault hang: {scenes.HANG.text}; next: {scenes.HANG.next}",
        "verdict: failing: it hangs",
        "phase: training for 12:30",
        "step: 300 of 1,200, 25.0%, attempt 1",
        "tokens: 19.7M",
        "loss: 3.5800 nats/token, median of the last steps 3.6000",
        "validation: 3.9222 nats/token at step 250",
        "speed: 32,768 tokens/s, 80% of the plan's 40,960",
        "mfu: 43.8%, the plan's 50.0%",
        "step time: 2,000.0 ms (median; speed is a mean), waiting for data 0.5%",
        "memory of a process: 61.25 GiB at its peak, the plan's 60.00",
        "eta: 36:00, at 14:36, planned 14:16",
        "goodput: training 50.0%, start-up 20.0%, evaluation 6.0%, checkpoint 4.0%, down 20.0%",
        "checkpoint: step 200, 5:01 ago, 4 GB",
        "plan: 40,960 tokens/s, computed: known of h100-sxm",
        "energy: about 2.68 kJ a step",  # 670 and 671 W for 2 s
        "node 0: host-0, seen 1 s ago",
        "disk 0: 212 GB left, for 53 checkpoints",
        "host memory 0: 48.0 of 96.0 GiB",
        "gpu 0/0: NVIDIA H100 80GB HBM3, utilisation 98%, memory 64.0 of 80.0 GiB, power 670 of 700 W, 60 C, throttled "
        "by nothing",
        "gpu 0/1: NVIDIA H100 80GB HBM3, utilisation 98%, memory 64.5 of 80.0 GiB, power 671 of 700 W, 61 C, throttled "
        "by nothing",
        "link 0/eth0: in 1.2 GB/s, out 1.1 GB/s of 3.12 GB/s",
        "link 0/eth1: in 0 B/s, out 0 B/s of 1.25 GB/s",
    ]


def test_a_job_of_the_cluster() -> None:
    lines = text(scenes.in_cluster(2, 1), []).splitlines()
    assert lines[-5:] == [
        "job: pure-transformer-8xa100 in namespace lab of nrp: waiting for pods: 1 of 2 run",
        "pod 0: Running, node gpu-0.site0.example.org, site site0, restarts 0, pure-transformer-8xa100-0-x7k2p",
        "last line 0: 3 s ago: step=300/1200 loss=3.5800 lr=6.000e-04 grad_norm=0.410 step_ms=2000.0 "
        "tokens_per_s=32768 mfu=43.8",
        "pod 1: pulling its image for 2:10, node n/a, site n/a, restarts 0, pure-transformer-8xa100-1-x7k2p",
        "event: 20s ago x Pulling: image",
    ]
    assert "network: the plan sends 8 GB a step, 5 GB/s, through 3.12 GB/s" in lines
    assert not [line for line in lines if line.startswith("fault")]


def test_every_line_begins_with_what_it_is_about_and_none_holds_controls() -> None:
    pod = Pod(
        0,
        "p",
        "Pending",
        waiting="ErrImagePull",
        trouble="its image\ncannot be fetched",
        last_line="\x1b[31mx\r",
    )
    seen = scenes.here(
        cluster=Cluster(
            "ns", "job", "waiting", pods=(pod,), quota="used 8\tof 8", problem="no answer"
        ),
        nodes=(scenes.node(complaint="RuntimeError: \x1b[1mNCCL\x1b[0m"),),
    )
    found = text(seen, [scenes.HANG, scenes.DISK], "so")
    assert found.endswith("\n") and all(
        re.match(r"[a-z][a-z ]*[^:]*: .", line) for line in found.splitlines()
    )
    assert not set(found) & {chr(n) for n in (*range(10), *range(11, 32), 127)}
    for line in (
        "fault disk node 0: 3.1 GB are left",
        "trouble 0: its image cannot be fetched",
        "last line 0: x\n",
        "quota: used 8 of 8",
        "cluster: no answer",
        "complaint 0: RuntimeError: NCCL\n",
        "pod 0: Pending (ErrImagePull), node n/a, site n/a, restarts 0, p\n",
    ):
        assert f"\n{line}" in found, line


def test_what_is_not_known_is_na_or_left_out() -> None:
    node = Node(0, "host", scenes.NOW, progress=Progress(step=3), gpus=(Gpu(0), Gpu(1, lost=True)))
    lines = text(
        Seen(scenes.NOW, "r", "tiny", (node,), expected=Expected(why="nothing is measured")), []
    ).splitlines()
    assert lines[1:] == [
        "phase: n/a: STATUS.json is not there or damaged",
        "step: 3, attempt 1",
        "tokens: 0",
        "loss: n/a nats/token, median of the last steps n/a",
        "validation: n/a",
        "speed: n/a",
        "mfu: n/a",
        "step time: n/a",
        "memory of a process: n/a GiB at its peak",
        "goodput: n/a",
        "checkpoint: none yet",
        "plan: n/a: nothing is measured",
        "node 0: host, seen 0 s ago",
        "disk 0: n/a",
        "gpu 0/0: utilisation n/a, memory n/a GiB, power n/a W, n/a, throttled by nothing",
        "gpu 0/1: a GPU is lost: it no longer answers",
    ]


def energy_of(*nodes: Node) -> str:
    found = [
        line
        for line in text(scenes.here(nodes=nodes), []).splitlines()
        if line.startswith("energy: ")
    ]
    return found[0].removeprefix("energy: ") if found else ""


def test_what_the_run_took_and_what_a_step_takes() -> None:
    counted = scenes.node(energy_j=1.8e7, energy_since=scenes.NOW - 3600)
    assert energy_of(counted) == (
        "5 kWh by the counters of 2 GPUs, since their sampler began at 13:00; about 2.68 kJ a step"
    )
    usual = tuple(dataclasses.replace(gpu, training_w=600.0, power_w=100.0) for gpu in counted.gpus)
    assert energy_of(dataclasses.replace(counted, gpus=usual)).endswith("; about 2.4 kJ a step")
    late = dataclasses.replace(
        scenes.PROGRESS, step_time=scenes.NOW - 1 - 9.5
    )  # the present power is of no step
    assert energy_of(dataclasses.replace(counted, progress=late)).endswith("at 13:00")
    quick = dataclasses.replace(scenes.PROGRESS, step_s=0.1)
    assert energy_of(dataclasses.replace(counted, progress=quick)).endswith("about 134 J a step")
    some = scenes.node(1, energy_j=None)
    assert energy_of(counted, some).startswith(
        "5 kWh by the counters of 2 GPUs on 1 of 2 nodes, since"
    )
    assert energy_of(counted, some).endswith("about 5.36 kJ a step")
    other = scenes.node(1, 1, energy_j=3.6e6, energy_since=scenes.NOW - 7200)
    assert energy_of(counted, other).startswith(
        "6 kWh by the counters of 3 GPUs, since their sampler began at 12:00"
    )
    unknown = dataclasses.replace(some, gpus=(*some.gpus, scenes.gpu(2, power_w=None)))
    assert energy_of(scenes.node(), unknown) == ""
    large = dataclasses.replace(
        counted, energy_j=1234.4 * 3.6e6, progress=dataclasses.replace(quick, step_s=1.0)
    )
    assert energy_of(large) == (
        "1,234 kWh by the counters of 2 GPUs, since their sampler began at 13:00; about "
        "1.34 kJ a step"
    )
    only_one = dataclasses.replace(
        counted, progress=dataclasses.replace(scenes.PROGRESS, processes=1)
    )
    assert energy_of(only_one) == (
        "5 kWh by the counters of 2 GPUs, of which the run has 1, since their sampler began "
        "at 13:00; about 1.34 kJ a step"
    )  # 671 W, of the GPU with more in its memory
    assert (
        phrases.energy(scenes.here(nodes=(only_one,)), short=True)
        == "5 kWh of 2 GPUs, of which the run has 1, since 13:00; about 1.34 kJ a step"
    )
    assert energy_of(scenes.node(0, 0)) == "" == energy_of(scenes.node(status={"phase": "done"}))


def test_damaged_lines_of_the_record_are_told() -> None:
    for number, words in ((1, "1 damaged line in"), (3, "3 damaged lines in")):
        progress = dataclasses.replace(scenes.PROGRESS, damaged_lines=number)
        found = text(scenes.here(nodes=(scenes.node(progress=progress),)), [])
        assert f"\nrecord: {words} metrics.jsonl left out\n" in found
    assert "\nrecord: " not in text(scenes.here(), [])


def test_half_a_character_is_no_crash() -> None:
    odd = Fault("crashed", "crashed: FileNotFoundError: /data/caf\udce9.txt", "make logs \ud800")
    found = text(scenes.here(), [odd], odd.text)
    assert "caf\ufffd.txt; next: make logs \ufffd\n" in found and found.encode()


def test_skipped_steps_and_a_second_attempt_are_told() -> None:
    progress = dataclasses.replace(
        scenes.PROGRESS, attempt=1, skipped_steps=3, nonfinite_steps=2, rollbacks=1
    )
    found = text(scenes.here(nodes=(scenes.node(progress=progress),)), [])
    assert "\nstep: 300 of 1,200, 25.0%, attempt 2\n" in found
    assert "\nskipped: 3 of the last steps, of which 2 not finite; 1 rollbacks\n" in found
