"""PROBE=1 on a GPU: its figures beside products and copies that are timed here, and a whole measurement."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from doctor import gpu_state, probed, probing
from doctor.gpu_probe import probe, probe_step
from hardware.gpu_specs import find_gpu
from plan.measured import read
from settings.config import Config
from settings.finding import format_findings
from train.distributed.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


@pytest.fixture
def here() -> World:
    device = torch.device("cuda", 0)
    return World(0, 0, 0, 1, device, torch.cuda.get_device_name(device), "here")


def seconds(work: Callable[[], object], calls: int) -> float:
    """Of one call, by the GPU's own clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_as_fast_as_those_timed_by_the_gpu(here: World, dtype: str) -> None:
    a, b = (torch.randn(8192, 8192, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    torch.set_float32_matmul_precision("highest")
    theirs = 2 * 8192**3 / seconds(lambda: a @ b, 20) / 1e12
    found = probe.products(here, dtype, 1.0)
    assert 0.8 * theirs < found < 2 * theirs
    if (card := find_gpu(here.device_name)) and (peak := card.peak(dtype)):
        assert found < peak


def test_the_triad_is_near_a_copy(here: World) -> None:
    """A copy reads one array and writes one."""
    a, b = (torch.zeros(2**28, device="cuda") for _ in range(2))
    theirs = 8 * 2**28 / seconds(lambda: a.copy_(b), 20) / 1e9
    found = probe.triad_gb_s(here, 0.5)
    assert 0.7 * theirs < found < 1.4 * theirs
    if card := find_gpu(here.device_name):
        assert found < card.bandwidth_gb_s


def test_a_composed_step_takes_as_long_as_a_whole_one(here: World) -> None:
    c = dataclasses.replace(
        Config(),
        n_layer=4,
        n_embd=1024,
        n_head=8,
        vocab_size=32768,
        seq_len=1024,
        micro_batch_size=4,
        batch_tokens=12 * 4 * 1024,
        dtype="bfloat16",
        compile="0",
    ).derived()
    step = probe_step.Stepper(c, here)
    for micro_batches in (1, 2, 12):
        step.take(micro_batches)
    first, whole = (sorted(step.take(k) for _ in range(5))[2] for k in (1, 12))
    further = sorted(step.take_passes(4) for _ in range(5))[2]
    assert probe_step.composed_s(first, further, 12) == pytest.approx(whole, rel=0.1)
    assert 0.1 < step.peak_gib < torch.cuda.get_device_properties(0).total_memory / 2**30


def test_nvidia_smi_knows_the_gpu_by_the_name_that_torch_has(here: World) -> None:
    uuid = str(torch.cuda.get_device_properties(here.device).uuid)
    assert gpu_state.states()[uuid].most_mhz


def test_a_whole_measurement_of_all_gpus(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    c = dataclasses.replace(
        Config(),
        n_layer=4,
        n_embd=1024,
        n_head=8,
        vocab_size=32768,
        seq_len=1024,
        micro_batch_size=4,
        dtype="bfloat16",
        runs_dir=str(tmp_path),
        batch_tokens=8 * 4 * 1024 * torch.cuda.device_count(),
    ).derived()
    began = time.monotonic()
    found = probing.measure(c, lambda words: None)
    assert time.monotonic() - began < 90
    probing.keep(c, found)
    known = read(c, torch.cuda.get_device_name(0))
    assert (
        known is not None
        and known.memory_gb_s
        and known.disk_mb_s
        and known.matmul_tflops["bfloat16"] > 0
    )
    assert (known.link_gb_s is None) == (torch.cuda.device_count() == 1)
    taken = known.step(c, torch.cuda.device_count())
    assert taken is not None and taken.tokens_per_s > 0, "\n".join(
        format_findings(probed.findings(c, found))
    )
