"""What only a GPU can show: the same numbers there, every attention kernel, memory, and one read by the host in a step.

`make gpu-check` runs these and the benchmark.
"""

import dataclasses
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from settings import SettingsError
from settings.config import Config
from tests.running import environment, losses, train
from tests.train.test_parity import batches
from train.checkpoint import checkpoint
from train.checkpoint.saver import Saver
from train.data.batch import Batch, document_bounds
from train.distributed.world import World
from train.model import attention, compilation
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.schedule import lr_at
from train.step import clock_of, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def world(kind: str) -> World:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    return World(0, 0, 0, 1, device, kind, "here")


def steps(c: Config, kind: str, count: int) -> list[float]:
    """Losses of a short training on a device, compiled where COMPILE=1."""
    here = world(kind)
    model = build(c, here.device, attention.choose(c, here.device))
    if c.compile == "1":
        compilation.compile_model(model)
    optimizer = build_optimizer(model, c)
    found = []
    for step, windows in enumerate(batches(c, count), 1):
        on = windows.to(here.device)
        set_rate(optimizer, lr_at(step, c), c)
        batch = Batch(
            [(part[:, :-1], part[:, 1:]) for part in on.split(4)],
            c.batch_tokens,
            range(len(windows)),
        )
        found.append(train_step(model, optimizer, batch, c.grad_clip, here).loss)
    return found


@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_head": 1, "qk_norm": True, "tie_embeddings": False}], ids=str
)
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
    batch = Batch(
        [(part[:, :-1], part[:, 1:]) for part in windows.split(4)],
        tiny.batch_tokens,
        range(len(windows)),
    )
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


def test_a_checkpoint_holds_what_training_had_when_it_began_though_it_goes_on(
    tiny: Config, tmp_path: Path
) -> None:
    here = world("cuda")
    c = dataclasses.replace(tiny, n_embd=512, n_head=8, vocab_size=8192, mlp_dim=2048).derived()
    model = build(c, here.device)
    optimizer, saver = build_optimizer(model, c), Saver(tmp_path, c, here, 2**20)
    tokens = torch.randint(c.vocab_size, (16, c.seq_len + 1), device=here.device)
    batch = Batch([(tokens[:, :-1], tokens[:, 1:])], 16 * c.seq_len, range(16))
    train_step(model, optimizer, batch, 1.0, here)
    for step in (1, 2):  # the second copy goes to where the first was
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        saver.start(step, model, optimizer, {"data": {}})
        for _ in range(3):
            train_step(model, optimizer, batch, 1.0, here)
        saver.wait()
        ended = saver.poll()
        assert ended is not None and ended.problem is None
        other = build(c, here.device)
        checkpoint.load_into(ended.folder, other, build_optimizer(other, c))
        assert all(torch.equal(weight, before[name]) for name, weight in other.named_parameters())


def test_the_clock_tells_how_long_the_gpu_worked(tiny: Config) -> None:
    here = world("cuda")
    c = dataclasses.replace(
        tiny, n_embd=1024, n_head=8, n_layer=8, seq_len=512, mlp_dim=4096
    ).derived()
    model = build(c, here.device)
    clock = clock_of(model, here.device)
    optimizer = build_optimizer(model, c)
    tokens = torch.randint(c.vocab_size, (8, c.seq_len + 1), device=here.device)
    batch = Batch([(tokens[:, :-1], tokens[:, 1:])], 8 * c.seq_len, range(8))
    own, took = 0.0, 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        clock.start()
        own = train_step(model, optimizer, batch, 1.0, here, clock=clock).compute_s[0]
        took = time.perf_counter() - began
    assert 0.15 * took < own < 0.7 * took  # forward is a third of a step


# ---- Compiled code, Muon


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.02)])
def test_compiled_code_trains_as_the_written_one(
    tiny: Config, dtype: str, tolerance: float
) -> None:
    torch.set_float32_matmul_precision("highest")
    c = dataclasses.replace(tiny, n_embd=128, mlp_dim=384, dtype=dtype, qk_norm=True)
    compiled = steps(dataclasses.replace(c, compile="1"), "cuda", 30)
    assert compiled == pytest.approx(steps(c, "cuda", 30), rel=tolerance)


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_changes_no_loss(tiny: Config, how: str) -> None:
    c = dataclasses.replace(tiny, n_embd=128, mlp_dim=384, dtype="bfloat16")
    assert steps(dataclasses.replace(c, activation_checkpointing=how), "cuda", 10) == steps(
        c, "cuda", 10
    )


def test_muon_trains_as_on_a_cpu(tiny: Config) -> None:
    c = dataclasses.replace(tiny, optimizer="muon", tie_embeddings=False).derived()
    assert steps(c, "cuda", 30) == pytest.approx(
        steps(c, "cpu", 30), rel=0.02
    )  # its products are in bfloat16


# ---- Attention

END = 0


@pytest.mark.parametrize("apart", [False, True], ids=["one document", "many"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("name", ["sdpa", "math", "flash-attn", "fa3"])
def test_a_kernel_equals_float32(name: str, heads: tuple[int, int], apart: bool) -> None:
    """Result and gradients against a softmax written out in float32."""
    device = torch.device("cuda", 0)
    c = dataclasses.replace(
        Config(), attention=name, dtype="bfloat16", n_embd=512, n_head=8, doc_mask=apart
    ).derived()
    try:
        kernel = attention.choose(c, device)
    except SettingsError as refused:
        pytest.skip(str(refused))
    B, T, D = 2, 512, 64
    g = torch.Generator().manual_seed(0)
    q, k, v, dy = (
        torch.randn(B, T, n, D, generator=g).to(device)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    tokens = np.random.default_rng(1).integers(0, 100, (B, T))  # some five documents in a window
    bounds = torch.from_numpy(document_bounds(tokens, END)).to(device)
    mask = (
        attention.document_mask(bounds, B, T)
        if apart
        else torch.ones(T, T, dtype=torch.bool, device=device).tril()
    )

    half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    if apart and not kernel.by_bounds:
        y = attention.sdpa(*half, mask)
    else:
        y = kernel.attend(*half, bounds if apart else None)
    y.backward(dy.bfloat16())
    whole = [x.bfloat16().float().requires_grad_() for x in (q, k, v)]
    expanded = [x.repeat_interleave(heads[0] // x.shape[2], dim=2).transpose(1, 2) for x in whole]
    scores = (expanded[0] @ expanded[1].transpose(2, 3) / D**0.5).masked_fill(~mask, float("-inf"))
    exact = (scores.softmax(-1) @ expanded[2]).transpose(1, 2)
    exact.backward(dy.bfloat16().float())
    for ours, theirs in [(y, exact), *((a.grad, b.grad) for a, b in zip(half, whole, strict=True))]:
        assert ((ours.float() - theirs).norm() / theirs.norm()).item() < 0.01


# ---- Memory


def peak_gib(c: Config) -> float:
    """Most memory that two steps allocate."""
    here = world("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build(c, here.device, attention.choose(c, here.device))
    optimizer = build_optimizer(model, c)
    tokens = torch.randint(c.vocab_size, (c.micro_batch_size, c.seq_len + 1), device=here.device)
    batch = Batch(
        [(tokens[:, :-1], tokens[:, 1:])], c.micro_batch_size * c.seq_len, range(c.micro_batch_size)
    )
    for _ in range(2):
        train_step(model, optimizer, batch, 1.0, here)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def test_memory_is_what_the_parts_need_and_recomputation_saves_it() -> None:
    c = dataclasses.replace(
        Config(),
        vocab_size=50304,
        n_layer=12,
        n_embd=768,
        n_head=12,
        seq_len=1024,
        micro_batch_size=16,
        dtype="bfloat16",
    ).derived()
    found = {
        how: peak_gib(dataclasses.replace(c, activation_checkpointing=how))
        for how in ("none", "selective", "full")
    }
    assert found["full"] < 0.7 * found["selective"] < 0.7 * found["none"]
    # weights, gradients and moments; a chunk of logits; 45 bytes a token, layer and unit of width
    needed = (16 * 124e6 + 4 * 3 * 2048 * 50304 + 45 * 16 * 1024 * 12 * 768) / 2**30
    assert 0.5 * needed < found["none"] < 1.2 * needed


def test_a_compiled_run_with_every_option_goes_on_where_it_stopped(
    tmp_path: Path, data: dict[str, str]
) -> None:
    env = environment(
        tmp_path,
        data,
        DEVICE="cuda",
        DTYPE="bfloat16",
        COMPILE="1",
        OPTIMIZER="muon",
        DOC_MASK="1",
        ACTIVATION_CHECKPOINTING="selective",
        LR_SCHEDULE="wsd",
    )
    train(env | {"RUN_NAME": "whole", "MAX_STEPS": "12"})
    out = train(env | {"MAX_STEPS": "5"})
    assert (
        "compile=yes" in out
        and "compiled in" in out
        and "documents kept apart by their bounds" in out
    )
    train(env | {"MAX_STEPS": "12"})
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert [parts[s][0] for s in whole] == pytest.approx([whole[s][0] for s in whole], rel=1e-2)
