"""What is done with a measurement: smaller steps where one does not fit, a file that keeps what was known, words."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from doctor import gpu_state, probed, probing
from doctor.gpu_state import State
from doctor.probing import Measured
from hardware.model_size import flops_of
from plan.measured import Probe, Step, cpu_name, path_of, read, shape_of
from plan.storage import checkpoint_bytes
from settings import ROOT
from settings.config import Config
from settings.finding import PASS, WARN, Finding

STEP = {
    "step_s": 0.5,
    "tokens_per_s": 1024.0,
    "peak_gib": 1.5,
    "micro_batch": 4,
    "micro_batches": 4,
    "composed": False,
    "rounds": 3,
    "compiled": False,
    "attention": "sdpa",
}
DISK = {"write_mb_s": 200.0, "read_mb_s": 900.0, "bytes": 10**9}


def measured(c: Config, name: str = "", count: int = 1, **values: Any) -> Measured:
    """Of so many GPUs of a name, or processes on this CPU."""
    uuids = [f"uuid-{i}" for i in range(count)] if name else [""] * count
    return Measured(
        c, 1000.0, threads=2, torch="2.13.0", names=[name or "CPU"] * count, uuids=uuids, **values
    )


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# ---- Which step is tried


@pytest.mark.parametrize(
    ("windows", "micro", "processes", "sizes"),
    [
        (16, 16, 1, [16, 8, 4, 2, 1]),
        (24, 12, 1, [12, 6, 3, 1]),
        (24, 16, 2, [12, 6, 3, 1]),  # a process has 12
        (7, 16, 1, [7, 1]),
    ],
)
def test_smaller_micro_batches_divide_what_a_process_has(
    tiny: Config, windows: int, micro: int, processes: int, sizes: list[int]
) -> None:
    c = dataclasses.replace(tiny, micro_batch_size=micro, batch_tokens=windows * tiny.seq_len)
    assert list(probing.micro_batches(c, processes)) == sizes


class Parts:
    """In the place of `run`: takes the micro-batches that steps are asked for, and has those that fit measured."""

    def __init__(self, fits: int, why: str):
        self.fits, self.why = fits, why
        self.tried: list[int] = []

    def run(
        self,
        found: Measured,
        part: str,
        seconds: float,
        words: list[str],
        limit: float | None = None,
    ) -> None:
        size = json.loads(words[-1]).get("MICRO_BATCH_SIZE", 16)
        self.tried.append(size)
        if size > self.fits:
            found.notes[part] = self.why
        else:
            found.step = {**STEP, "micro_batch": size}


def tried(
    monkeypatch: pytest.MonkeyPatch, parts: Parts, found: Measured, seconds: float = 60
) -> list[int]:
    monkeypatch.setattr(probing, "run", parts.run)
    probing.take_step(
        found, lambda words: None, time.time() + seconds, time.time() + 1.45 * seconds
    )
    return parts.tried


def test_what_does_not_fit_into_memory_is_tried_smaller_and_only_that_is_recorded(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = dataclasses.replace(tiny, micro_batch_size=16)
    found = measured(c)
    assert tried(monkeypatch, Parts(4, f"{probing.NO_ROOM} (so it is)"), found) == [16, 8, 4]
    assert found.notes == {"smaller": f"{probing.NO_ROOM} (so it is)"}
    steps = probing.probes(found)[0].steps
    assert [step.shape for step in steps] == [shape_of(dataclasses.replace(c, micro_batch_size=4))]
    said = by_name(probed.findings(c, found))["probe-step"]
    assert (
        said.level == WARN
        and said.fix == "MICRO_BATCH_SIZE=4"
        and "memory does not suffice" in said.text
    )


def test_another_failure_is_not_tried_again(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(dataclasses.replace(tiny, micro_batch_size=16))
    assert tried(monkeypatch, Parts(0, "it was cut short after 9 s (compiling)"), found) == [16]
    assert (
        probed.findings(tiny, found)[-1].text
        == "not measured: it was cut short after 9 s (compiling)"
    )
    assert probing.probes(found)[0].steps == ()


def test_a_step_that_would_take_too_long_is_not_tried(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 passes of 16 windows at 0.3 of a rate with which they take 64 s, in 30 s of which 5 go into the start."""
    c = dataclasses.replace(tiny, micro_batch_size=16)
    found = measured(c, matmul={"float32": [5 * 16 * 32 * flops_of(c) / 0.3 / 64 / 1e12]})
    assert probing.least_s(found, c) == pytest.approx(69)
    assert tried(monkeypatch, Parts(16, ""), found, seconds=30) == [4]  # 16 s and the start
    assert found.notes == {
        "smaller": "MICRO_BATCH_SIZE=16 would take 69 s to measure (computed), and 30 s are left"
    }
    slow = measured(c, matmul={"float32": [1e-9]})
    assert (
        tried(monkeypatch, Parts(16, ""), slow) == []
        and "MICRO_BATCH_SIZE=1 would take" in slow.notes["step"]
    )


def test_a_machine_among_several_takes_its_share_of_the_batch(tiny: Config) -> None:
    c = probing.alone(dataclasses.replace(tiny, nodes=4, node_rank=2, master_addr="10.0.0.5"))
    assert (c.nodes, c.node_rank, c.master_addr, c.batch_tokens) == (
        1,
        0,
        "",
        tiny.batch_tokens // 4,
    )


# ---- A part


def test_what_a_part_said_before_it_was_ended_counts(tiny: Config) -> None:
    found = Measured(tiny, time.time())
    began = time.monotonic()
    script = 'echo \'{"names": ["CPU"], "uuids": [""]}\'; echo noise; echo \'{"matmul": {"float32": [0.1]}}\'; sleep 60'
    probing.run(found, "ceilings", 3, ["bash", "-c", script])
    assert time.monotonic() - began < 25
    assert found.matmul == {"float32": [0.1]} and found.notes["ceilings"].startswith(
        "it was cut short after "
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "echo Killed; echo '{\"ended\": 137}'",
            "memory does not suffice (the system ended it): Killed",
        ),
        ('echo \'{"out_of_memory": "2 GiB"}\'', "memory does not suffice (2 GiB)"),
        ('echo \'{"failed": "RuntimeError: no"}\'', "RuntimeError: no"),
        ('echo "No module"; echo \'{"ended": 1}\'', "it ended with code 1: No module"),
        ('echo \'{"refused": "BATCH_TOKENS=3"}\'', "BATCH_TOKENS=3"),
    ],
)
def test_a_process_that_fails_ends_the_others(tiny: Config, line: str, said: str) -> None:
    found = Measured(tiny, time.time())
    began = time.monotonic()
    probing.run(found, "step", 30, ["bash", "-c", f"sleep 60 & {line}; wait"])
    assert time.monotonic() - began < 25
    assert found.notes == {"step": said}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_started_ends_with_the_doctor(tmp_path: Path, number: int) -> None:
    code = (
        "import sys\nfrom doctor import probing\nfrom settings.config import Config\n"
        f"probing.command = lambda c, part: ['bash', '-c', 'echo $$ > {tmp_path}/pid; sleep 60']\n"
        "real = probing.run\n"
        "probing.run = lambda found, part, *rest: part == 'disk' or real(found, part, *rest)\n"
        f"c = Config(runs_dir={str(tmp_path)!r}, device='cpu').derived()\n"
        "probing.measure(c, lambda words: None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=120) != 0
    group = (tmp_path / "pid").read_text().strip()
    rows = subprocess.run(
        ["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [
        row for row in rows if row.split()[0] == group and not row.split()[1].startswith("Z")
    ] == []


# ---- The file


def test_what_was_known_of_a_device_is_kept(tiny: Config, tmp_path: Path) -> None:
    c = dataclasses.replace(tiny, runs_dir=str(tmp_path))
    other = dataclasses.replace(c, n_layer=3)
    first = measured(
        other,
        count=2,
        matmul={"float32": [0.1, 0.2], "bfloat16": [0.3, 0.3]},
        memory=[4.0, 5.0],
        link={"bus_gb_s": 1.5},
        disk=DISK,
        step=STEP,
    )
    probing.keep(c, first)
    probing.keep(
        c,
        measured(
            c,
            matmul={"float32": [0.25]},
            memory=[8.0],
            disk={**DISK, "write_mb_s": 300.0},
            step={**STEP, "tokens_per_s": 2048.0},
        ),
    )
    found = read(c, cpu_name())
    assert found is not None
    assert found.matmul_tflops == {
        "float32": 0.25,
        "bfloat16": 0.6,
    }  # a CPU is one device, for all processes
    assert (found.memory_gb_s, found.link_gb_s, found.disk_mb_s) == (8.0, 1.5, 300.0)
    assert found.steps == (Step(shape_of(c), 1, 2048.0, 1.5), Step(shape_of(other), 2, 1024.0, 1.5))
    assert found.step(c, 1) == found.steps[0] and found.step(c, 2) is None
    assert [path.name for path in (tmp_path / ".probe").iterdir()] == [path_of(c, cpu_name()).name]


def test_a_step_measured_again_takes_the_place_of_the_earlier_and_fifty_are_kept() -> None:
    old = Probe(
        "CPU", 1.0, "2.13.0", {}, steps=tuple(Step(f"{i:012x}", 1, 1.0, 1.0) for i in range(50))
    )
    new = Probe("CPU", 2.0, "2.13.0", {}, steps=(Step(f"{7:012x}", 1, 9.0, 1.0),))
    steps = probing.merged(new, old).steps
    assert (
        len(steps) == 50
        and steps[0].tokens_per_s == 9.0
        and [s.tokens_per_s for s in steps[1:]] == [1.0] * 49
    )
    newer = dataclasses.replace(new, steps=(Step(f"{7:012x}", 2, 9.0, 1.0),))
    assert [s.shape for s in probing.merged(newer, old).steps] == [
        f"{i:012x}" for i in (7, *range(49))
    ]


def test_of_several_cards_the_slowest_of_each_kind_counts(tiny: Config) -> None:
    found = measured(
        tiny,
        "NVIDIA H200",
        3,
        matmul={"bfloat16": [700.0, 690.0, 150.0]},
        memory=[4000.0, 4100.0, 600.0],
    )
    found.names[2] = "NVIDIA A40"
    fast, slow = probing.probes(found)
    assert (fast.device, fast.matmul_tflops, fast.memory_gb_s) == (
        "NVIDIA H200",
        {"bfloat16": 690.0},
        4000.0,
    )
    assert (slow.device, slow.matmul_tflops, slow.memory_gb_s) == (
        "NVIDIA A40",
        {"bfloat16": 150.0},
        600.0,
    )


# ---- nvidia-smi

SMI = """GPU-aa, 0x0000000000000004, 500, 0, 349.12, 350.00, 700.00, 1200, 1980, 61
GPU-bb, 0x0000000000000000, 30000, 97, 650.00, 700.00, 700.00, 1755, 1980, 55
GPU-cc, [N/A], 0, [N/A], [N/A], [N/A], [N/A], 1755, 1980, 55"""


def test_nvidia_smi_is_understood_and_what_it_does_not_say_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}\nEND\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = gpu_state.states()
    assert found["aa"] == State(4, 500, 0, 349.12, 350, 700, 1200, 1980, 61)
    assert found["cc"] == State(None, 0, None, None, None, None, 1755, 1980, 55)
    assert gpu_state.causes(None, found["aa"]) == [
        "its power is capped at 350 W, of 700 W",
        "held back at 1200 of 1980 MHz by its power limit, 349 W, 61 degrees",
    ]
    assert gpu_state.causes(found["bb"], found["bb"]) == [
        "another process was on it before (30000 MiB in use, 97% busy)"
    ]
    assert gpu_state.causes(found["cc"], found["cc"]) == gpu_state.causes(None, None) == []


def test_no_nvidia_smi_is_no_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state.states() == {}


# ---- Words


@pytest.mark.parametrize(
    ("name", "rate", "level", "words"),
    [
        ("NVIDIA H200", 702.0, PASS, "702 TFLOP/s in bfloat16, 71% of 989 (others reach 794.5)"),
        ("NVIDIA H200", 557.0, PASS, "557 TFLOP/s in bfloat16, 56% of 989"),
        (
            "NVIDIA H200",
            555.0,
            WARN,
            "555 TFLOP/s in bfloat16, 56% of 989",
        ),  # 70% of 794.5 is 556.2
        (
            "NVIDIA A100-SXM4-80GB",
            190.0,
            PASS,
            "190 TFLOP/s in bfloat16, 61% of 312 (others reach 271)",
        ),
        (
            "NVIDIA A100-SXM4-80GB",
            189.0,
            WARN,
            "189 TFLOP/s in bfloat16, 61% of 312",
        ),  # of 271 it is 189.7
        (
            "NVIDIA H100 PCIe",
            424.0,
            PASS,
            "424 TFLOP/s in bfloat16, 56% of 756",
        ),  # 0.7 x 0.8 x 756 = 423.4
        ("NVIDIA H100 PCIe", 423.0, WARN, "423 TFLOP/s in bfloat16, 56% of 756"),
        (
            "NVIDIA GeForce RTX 3080",
            10.0,
            PASS,
            "10 TFLOP/s in bfloat16",
        ),  # not known: nothing to compare with
    ],
)
def test_products_beside_what_others_reach(
    tiny: Config, name: str, rate: float, level: str, words: str
) -> None:
    found = measured(tiny, name, matmul={"float32": [40.0], "bfloat16": [rate]})
    found.busy = {"uuid-0": State(4, 0, 0, 349, 350, 700, 1200, 1980, 61)}
    said = by_name(probed.findings(tiny, found))["probe-matmul"]
    assert said.level == level and words in said.text
    assert ("its power is capped at 350 W, of 700 W" in said.text) == (level == WARN)


def test_a_slow_card_among_several_is_named(tiny: Config) -> None:
    found = measured(tiny, "NVIDIA H200", 4, matmul={"bfloat16": [700.0, 705.0, 610.0, 698.0]})
    said = by_name(probed.findings(tiny, found))["probe-slow-gpu"]
    assert said.level == WARN
    assert said.text.startswith("GPU 2 (uuid-2) does 610 TFLOP/s in bfloat16, and the others 699")
    even = measured(tiny, "NVIDIA H200", 4, matmul={"bfloat16": [700.0, 705.0, 640.0, 698.0]})
    assert "probe-slow-gpu" not in by_name(probed.findings(tiny, even))


def test_memory_and_links_beside_the_data_sheet(tiny: Config) -> None:
    link = {"bus_gb_s": 350.0, "latency_us": 12.3, "bytes": 1e9, "seconds": 0.003}
    found = measured(
        tiny, "NVIDIA H200", 2, matmul={"bfloat16": [700.0] * 2}, memory=[4100.0, 4000.0], link=link
    )
    said = by_name(probed.findings(tiny, found))
    assert said["probe-memory"].level == PASS and "4000 GB/s" in said["probe-memory"].text
    assert "83% of 4800" in said["probe-memory"].text
    assert (
        said["probe-link"].level == PASS
        and "350 GB/s between 2 processes, 78% of 450" in said["probe-link"].text
    )
    slow = dataclasses.replace(found, memory=[4100.0, 3300.0], link={**link, "bus_gb_s": 20.0})
    said = by_name(probed.findings(tiny, slow))
    assert said["probe-memory"].level == said["probe-link"].level == WARN
    assert "nvidia-smi topo -m" in said["probe-link"].fix


def test_a_disk_is_too_slow_where_a_save_takes_a_tenth_of_the_time_between_two(
    tiny: Config,
) -> None:
    """At SAVE_MINUTES=15 it may take 90 s."""
    size = checkpoint_bytes(tiny)
    for seconds, level in ((89, PASS), (91, WARN)):
        found = measured(tiny, disk={**DISK, "write_mb_s": size / seconds / 1e6})
        said = by_name(probed.findings(tiny, found))["probe-disk"]
        assert said.level == level and f"would take {seconds} s (computed)" in said.text
    assert said.fix == "a faster disk (RUNS_DIR), or SAVE_MINUTES=16"


def test_a_step_in_words(tiny: Config) -> None:
    """1024 tokens/s of tiny's FLOPs, half of the products of 2 processes; and MFU where the card is known."""
    rate = 1024 * flops_of(tiny) / 1e12
    found = measured(tiny, count=2, matmul={"float32": [rate] * 2}, step=STEP)
    said = by_name(probed.findings(tiny, found))["probe-step"]
    assert said.level == PASS
    assert said.text == (
        "1024 tokens/s, 50% of the products above, 1.50 GiB at the peak of a process: 500 ms for "
        "4 x 4 sequences a process (3 steps; not compiled, attention=sdpa)"
    )
    half = dataclasses.replace(tiny, dtype="bfloat16")
    tokens_per_s = 0.4 * 2 * 989e12 / flops_of(half)
    gpu = measured(
        half, "NVIDIA H200", 2, step={**STEP, "tokens_per_s": tokens_per_s, "composed": True}
    )
    said = by_name(probed.findings(dataclasses.replace(half, nodes=4), gpu))["probe-step"]
    assert "tokens/s of this machine alone, MFU 40.0%" in said.text
    assert (
        "(composed of the first micro-batch with the update, and the others; not compiled"
        in said.text
    )


def test_what_was_not_measured_is_said_and_why(tiny: Config) -> None:
    found = measured(
        tiny,
        notes={
            "ceilings": "it was cut short after 9 s (starting)",
            "disk": "Permission denied",
            "step": f"{probing.NO_ROOM} (2 GiB)",
        },
    )
    said = by_name(probed.findings(tiny, found))
    assert {name: finding.level for name, finding in said.items()} == dict.fromkeys(
        ("probe-matmul", "probe-disk", "probe-step"), WARN
    )
    assert said["probe-matmul"].text == "not measured: it was cut short after 9 s (starting)"
    assert said["probe-disk"].text == "not measured: Permission denied"
    assert "ACTIVATION_CHECKPOINTING" in said["probe-step"].fix


def test_a_busy_machine_is_said(tiny: Config) -> None:
    found = measured(tiny, matmul={"float32": [0.1]}, memory=[9.0], disk=DISK, step=STEP)
    assert "probe-alone" not in by_name(
        probed.findings(tiny, dataclasses.replace(found, foreign_percent=9.0))
    )
    said = by_name(probed.findings(tiny, dataclasses.replace(found, foreign_percent=40.0)))[
        "probe-alone"
    ]
    assert said.level == WARN and "other processes took 40%" in said.text
