"""PROBE=1: what it measures beside measurements of our own, what it composes, and that it ends whatever happens."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from doctor import probing
from doctor.gpu_probe import free_memory, probe, probe_disk, probe_step
from doctor.probing import Measured
from hardware.model_size import parameters
from hardware.out_of_memory import is_out_of_memory
from plan.measured import shape_of
from settings import ROOT
from settings.config import Config
from train.distributed.world import World

HERE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")


# ---- Products, memory, links


def a_hundredth(once: Callable[[], object], seconds: float) -> list[float]:
    """In place of probe.times: a call took 0.01 s."""
    once()
    return [0.01]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_speed_of_products_counts_every_multiplication_and_addition(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(probe, "times", a_hundredth)
    with FlopCounterMode(display=False) as counter:
        found = probe.products(HERE, dtype, 1.0)
    small, large = 2 * 64**3, 2 * 128**3
    assert counter.get_total_flops() == small + large
    assert found == pytest.approx(large / 0.01 / 1e12)  # of both sizes took the same


def test_no_size_is_tried_that_its_time_does_not_suffice_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, clock = (
        [],
        iter([0.02, 0.2, 1.6]),
    )  # eight times as long each: the third would take 1.6 of 1 s
    monkeypatch.setattr(probe, "SIZES", {"cpu": (64, 128, 256)})
    monkeypatch.setattr(
        probe, "times", lambda once, seconds: [sizes.append(seconds) or next(clock)]
    )
    assert probe.products(HERE, "float32", 1.0) == pytest.approx(2 * 64**3 / 0.02 / 1e12)
    assert len(sizes) == 2


class Moved(TorchDispatchMode):
    """Counts bytes of what operations read and write."""

    bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.add.out:
            tensors = [
                value
                for value in (*args, *(kwargs or {}).values())
                if isinstance(value, torch.Tensor)
            ]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **kwargs or {})


def test_the_triad_is_counted_as_stream_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arrays are read and one is written, in 0.01 s."""
    monkeypatch.setattr(probe, "OF_A_CORE", 0)  # arrays of 256 MiB
    monkeypatch.setattr(probe, "times", a_hundredth)
    with Moved() as moved:
        found = probe.triad_gb_s(HERE, 1.0)
    assert moved.bytes == 3 * 2**28
    assert found == pytest.approx(moved.bytes / 0.01 / 1e9)


def test_calls_are_timed_in_groups_behind_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 0.01 s by a clock of our own: the first, one that is timed, and groups of 0.05 s, of which 0.1 s would
    be two."""
    clock, calls = [0.0], []

    def once() -> None:
        calls.append(0)
        clock[0] += 0.01

    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])
    assert probe.times(once, 0.1) == pytest.approx([0.01] * 3)
    assert len(calls) == 2 + 5 * 3


def test_what_is_slow_is_timed_no_oftener_than_its_time_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of 1 s: with 0.9 s two groups of one, since behind them twice as much has gone; with 4 s four of them."""
    clock = [0.0]

    def took(once: object, calls: int) -> float:
        clock[0] += calls
        return 1.0

    monkeypatch.setattr(probe, "took", took)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])
    assert [len(probe.times(lambda: None, seconds)) for seconds in (0.9, 1.5, 4.0)] == [2, 3, 4]


def test_bus_bandwidth_does_not_fall_with_the_number_of_processes() -> None:
    """1 GB in a ring over links of 1 GB/s: 2 processes send half of it twice, 4 a quarter six times."""
    assert probe.bus_gb_s(10**9, 1.0, 2) == 1.0
    assert probe.bus_gb_s(10**9, 1.5, 4) == 1.0


def test_processes_whose_clocks_differ_call_each_other_equally_often(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that calls once more would wait for another that has left."""
    said: list[int] = []
    calls = []
    monkeypatch.setattr(probe, "took", lambda send, count: [send() for _ in range(count)] and 0.01)
    for agree, seconds in (
        (lambda value: said.append(value) or value, 2.0),
        (lambda value: said.pop(0), 1.0),
    ):
        sent: list[int] = []
        monkeypatch.setattr(
            probe, "sum_over_ranks", lambda values, sent=sent: sent.append(values.numel())
        )
        monkeypatch.setattr(probe, "broadcast_object", agree)
        probe.link(tiny, HERE, seconds)
        calls.append(sent)
    assert calls[0] == calls[1] and len(calls[0]) == 2 * (1 + 3) + 50 + 100


# ---- A step


def test_a_step_is_composed_of_its_first_micro_batch_and_the_others() -> None:
    """0.5 s once and 0.2 s for each micro-batch: T(1) = 0.7, T(64) = 13.3."""
    assert probe_step.composed_s(0.7, 0.2, 64) == pytest.approx(13.3)
    assert probe_step.composed_s(0.7, 0.2, 1) == 0.7


@pytest.mark.parametrize(
    ("n", "left", "rounds", "passes"),
    [
        (1, 10.0, 14, 0),  # 0.7 s each
        (1, 0.1, 1, 0),
        (1, 1000.0, 30, 0),
        (4, 10.0, 7, 0),  # 1.3 s each: whole
        (64, 39.9, 3, 0),  # 13.3 s each: just whole
        (64, 30.0, 3, 45),  # a round of 10 s: 0.7 and 46 x 0.2, the first of them not timed
        (64, 1.0, 3, 1),
        (3, 3.2, 3, 1),  # 1.1 s each would be 3.3 s
    ],
)
def test_steps_are_taken_whole_where_there_is_time_for_it(
    n: int, left: float, rounds: int, passes: int
) -> None:
    assert probe_step.planned(0.7, 0.2, n, left + 1e-6) == (rounds, passes)


def test_a_composed_step_takes_as_long_as_a_whole_one(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second with each operation of a product."""
    c = dataclasses.replace(tiny, batch_tokens=8 * 4 * tiny.seq_len)
    step = probe_step.Stepper(c, HERE)
    with FlopCounterMode(display=False) as counter:
        monkeypatch.setattr(
            probe_step, "time", SimpleNamespace(perf_counter=counter.get_total_flops)
        )
        first, further, whole = step.take(1), step.take_passes(3), step.take(8)
    assert 0 < first == further
    assert probe_step.composed_s(first, further, 8) == whole == 8 * first


@pytest.mark.parametrize(("seconds", "composed"), [(100.0, False), (0.0, True)])
def test_a_short_time_makes_a_composed_step(
    tiny: Config,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    composed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 4 micro-batches: 30 whole steps, or as few of each kind as there are."""
    monkeypatch.setattr(
        free_memory, "keep_within", lambda share: None
    )  # it would hold for the tests behind this one
    probe_step.measure(tiny, HERE, time.time() + seconds, time.time() + 100)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["step"]
    assert found["micro_batches"] == 4 and found["composed"] == composed
    assert found["rounds"] == (4 if composed else 30)
    if composed:
        assert found["step_s"] == pytest.approx(found["first_s"] + 3 * found["further_s"])
    assert found["tokens_per_s"] == pytest.approx(512 / found["step_s"])


def in_a_child(work: Callable[[], object]) -> int:
    """How a copy of this process ends that does nothing but this: a code, or less a signal; 77 after an exception."""
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)  # a copy has no other threads
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # and not the time limit of the test
            os._exit(int(bool(work())))
        finally:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_memory_that_does_not_suffice_is_an_error_and_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a process that may have 1 GiB more: 2 GiB are refused, 256 MiB are not."""
    monkeypatch.setattr(free_memory, "free_bytes", lambda: 2**30)

    def refused() -> bool:
        free_memory.keep_within(1.0)
        torch.empty(2**26)
        try:
            torch.empty(2**29)
        except Exception as error:
            return is_out_of_memory(error)
        return False

    assert in_a_child(refused) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_free_memory_is_that_of_the_system() -> None:
    lines = subprocess.run(
        ["free", "-b"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = free_memory.free_bytes()
    assert found is not None and 0 < found <= int(lines[1].split()[6]) * 1.2


# ---- The disk


def test_the_disk_is_written_through_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fsync of 0.25 s bounds 32 MiB, and what follows in the time that is left."""
    sync, size = os.fsync, probe_disk.FIRST
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.25), sync(descriptor)))
    found = probe_disk.measure(tmp_path, time.time())
    assert found["bytes"] == size and 0 < found["write_mb_s"] < size / 0.25 / 1e6
    assert found["read_mb_s"] is None or found["read_mb_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_so_much_is_written_as_half_of_the_time_allows_and_no_more_than_a_tenth_of_the_room() -> (
    None
):
    chunk = probe_disk.CHUNK
    assert probe_disk.fitting(rate=10 * chunk, left_s=4.0, room=10**15) == 20 * chunk
    assert probe_disk.fitting(rate=10 * chunk, left_s=4.0, room=109 * chunk) == 10 * chunk
    assert probe_disk.fitting(rate=1e12, left_s=4.0, room=10**15) == 2**31
    assert probe_disk.fitting(rate=1e12, left_s=-1.0, room=10**15) == 0


def test_a_file_in_memory_has_no_speed_of_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20))
    with open(path, "rb") as file:
        file.read()
        assert probe_disk.kept(file.fileno(), 2**19)


def test_a_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert "problem" in probe_disk.measure(tmp_path / "file" / "runs", time.time())
    monkeypatch.setattr(
        probe_disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * 10**8)
    )
    assert probe_disk.measure(tmp_path, time.time())["problem"].startswith("only 300 MB are free")


def leads_to(link: Path) -> str:
    """What a link names; nothing where it is gone by now."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(link)
    return ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_disk_probe_that_is_killed(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "doctor.gpu_probe.probe_disk",
            str(tmp_path),
            str(time.time() + 30),
            str(time.time() + 60),
        ],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    folder, deadline = Path(f"/proc/{process.pid}/fd"), time.monotonic() + 30
    while not any("(deleted)" in leads_to(link) for link in folder.iterdir()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    process.wait()
    assert list(tmp_path.iterdir()) == []


# ---- Real processes


def part(name: str, c: Config, processes: int, seconds: float = 3.0) -> Measured:
    """A part as it is started for a doctor, but with time for a busy machine."""
    c = dataclasses.replace(c, nproc=processes, device="cpu")
    found = Measured(c, time.time())
    probing.run(found, name, seconds, probing.command(c, name), limit=time.time() + 300)
    return found


def test_a_process_alone_measures_what_it_can_do(
    tiny: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(probe, "triad_gb_s", lambda world, seconds: 10.0 * seconds)
    probe.ceilings(tiny, HERE, time.time() + 5.0)
    found = Measured(tiny, time.time())
    for line in capsys.readouterr().out.splitlines():
        assert probing.take_in(found, "ceilings", json.loads(line)) == ""
    assert found.names == ["CPU"] and found.torch == torch.__version__ and found.link is None
    assert {kind: len(rates) for kind, rates in found.matmul.items()} == {
        "float32": 1,
        "bfloat16": 1,
    }
    assert 0 < found.memory[0] < 10.0 * 0.1 * 5.0  # a tenth of the time that is left


@pytest.mark.slow
def test_two_processes_measure_what_both_do_and_what_is_between_them(tiny: Config) -> None:
    found = part("ceilings", tiny, 2)
    assert found.notes == {} and found.names == ["CPU", "CPU"] and found.torch == torch.__version__
    assert {kind: len(rates) for kind, rates in found.matmul.items()} == {
        "float32": 2,
        "bfloat16": 2,
    }
    assert len(found.memory) == 2 and min(found.memory) > 0
    link = found.link
    assert link is not None and link["bytes"] == 4 * parameters(tiny).total
    assert link["bus_gb_s"] == pytest.approx(
        link["bytes"] / link["seconds"] / 1e9
    )  # of two: 2 (n - 1) / n = 1
    assert link["latency_us"] > 0


@pytest.mark.parametrize(
    ("processes", "parallel", "seconds"),
    [
        (1, "ddp", 0.0),
        pytest.param(2, "ddp", 100.0, marks=pytest.mark.slow),
        pytest.param(2, "fsdp", 0.0, marks=pytest.mark.slow),
    ],
)
def test_processes_take_the_steps_of_a_run(
    tiny: Config, processes: int, parallel: str, seconds: float
) -> None:
    """512 tokens a step: 16 windows of 32, of which two processes take 2 micro-batches of 4 each."""
    found = part("step", dataclasses.replace(tiny, parallel=parallel), processes, seconds)
    assert found.notes == {} and found.step is not None and found.names == ["CPU"] * processes
    step = found.step
    assert (step["micro_batch"], step["micro_batches"], step["composed"]) == (
        4,
        4 // processes,
        seconds == 0,
    )
    assert step["tokens_per_s"] == pytest.approx(512 / step["step_s"])
    assert 0.1 < step["peak_gib"] < 4
    assert not step["compiled"] and step["attention"] == "sdpa"
    assert probing.probes(found)[0].steps[0].shape == shape_of(found.c)


def test_a_batch_that_does_not_divide_is_said(
    tiny: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        free_memory, "keep_within", lambda share: None
    )  # it would hold for the tests behind this one
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: None)
    settings = dataclasses.replace(tiny, batch_tokens=480).stored()
    assert probe.main("step", json.dumps(settings), 1, time.time() + 3, time.time() + 60) == 64
    found = Measured(tiny, time.time())
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "BATCH_TOKENS=480: Must be a multiple" in probing.take_in(found, "step", said)


def test_a_process_ends_itself_at_its_limit(tiny: Config) -> None:
    """Also where who started it is gone, and can end nothing."""
    settings = json.dumps(tiny.stored())
    assert (
        in_a_child(lambda: probe.main("ceilings", settings, 1, time.time() + 9, time.time() - 1))
        == -signal.SIGALRM
    )
