"""What only a GPU can show: the same numbers there, and one read by the host in a step."""

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch

from tests.running import environment, losses, train
from tests.unit.test_parity import batches
from train.batch import Batch
from train.config import Config
from train.distributed import World
from train.model import build
from train.optim import build_optimizer, set_rate
from train.schedule import lr_at
from train.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


def world(kind: str) -> World:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    return World(0, 0, 0, 1, device, kind, "here")


def steps(c: Config, kind: str, count: int) -> list[float]:
    """Losses of a short training on a device."""
    here = world(kind)
    model = build(c, here.device)
    optimizer = build_optimizer(model, c)
    found = []
    for step, windows in enumerate(batches(c, count), 1):
        on = windows.to(here.device)
        set_rate(optimizer, lr_at(step, c), c)
        batch = Batch([(part[:, :-1], part[:, 1:]) for part in on.split(4)], c.batch_tokens, range(len(windows)))
        found.append(train_step(model, optimizer, batch, c.grad_clip, here).loss)
    return found


@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 1, "qk_norm": True, "tie_embeddings": False}], ids=str)
def test_a_gpu_trains_as_a_cpu_does(tiny: Config, changes: dict) -> None:
    torch.set_float32_matmul_precision("highest")
    c = dataclasses.replace(tiny, **changes)
    assert steps(c, "cuda", 30) == pytest.approx(steps(c, "cpu", 30), rel=1e-3)


def test_bfloat16_follows_float32(tiny: Config) -> None:
    c = dataclasses.replace(tiny, n_embd=128, mlp_dim=384)
    half = steps(dataclasses.replace(c, dtype="bfloat16"), "cuda", 30)
    assert half == pytest.approx(steps(c, "cuda", 30), rel=0.02)


def test_the_host_reads_the_device_once_in_a_step(tiny: Config) -> None:
    here = world("cuda")
    model = build(tiny, here.device)
    optimizer = build_optimizer(model, tiny)
    windows = batches(tiny, 1)[0].to(here.device)
    batch = Batch([(part[:, :-1], part[:, 1:]) for part in windows.split(4)], tiny.batch_tokens, range(len(windows)))
    train_step(model, optimizer, batch, 1.0, here)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(model, optimizer, batch, 1.0, here)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reads = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    assert len(reads) == 1, reads


def test_a_run_on_a_gpu_goes_on_where_it_stopped(tmp_path: Path, data: dict[str, str]) -> None:
    env = environment(tmp_path, data, DEVICE="cuda", DTYPE="bfloat16")
    train(env | {"RUN_NAME": "whole", "MAX_STEPS": "20"})
    train(env | {"MAX_STEPS": "9"})
    train(env | {"MAX_STEPS": "20"})
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert [parts[s][0] for s in whole] == pytest.approx([whole[s][0] for s in whole], rel=1e-3)
