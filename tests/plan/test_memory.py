"""plan/memory.py against the tensors that live while torch takes the same step, and by hand."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from hardware.gpu_specs import load_gpu_specs
from hardware.model_size import parameters
from plan import activations, memory, planned_step
from plan.activations import kept_bytes
from plan.fleet import Fleet
from plan.memory import GIB, usable_bytes
from plan.run import Run, own_model, pretraining_memory
from settings import load_config
from settings.checks import find_batch_problem
from settings.config import Config
from tests.plan.live import Live, as_on_gpu, step_of, tensors
from train.distributed import parallel
from train.distributed.world import World
from train.model import attention, compilation, cpu_kernels, loss
from train.model.model import Transformer, rotary_table
from train.optim import build_optimizer

CPU = torch.device("cpu")


def small(**changes: Any) -> Config:
    """Steps of two micro-batches, eager."""
    shape = {
        "vocab_size": 8192,
        "n_layer": 3,
        "n_embd": 256,
        "n_head": 4,
        "seq_len": 256,
        "micro_batch_size": 4,
        "batch_tokens": 2048,
        "compile": "0",
    }
    return dataclasses.replace(Config(), **(shape | changes)).derived()


def preset(name: str, **changes: Any) -> Config:
    return dataclasses.replace(load_config({"PRESET": name, "ENV_FILE": ""}), **changes).derived()


def peak(net: Any, c: Config, processes: int = 1) -> int:
    """Bytes of tensors at the most, in an update, which makes the moments, and a step behind it."""
    optimizer, micro = build_optimizer(net, c), c.micro_batch(processes)
    several = c.batch_windows // processes // micro
    tokens = torch.zeros(micro, c.seq_len + 1, dtype=torch.int64)
    with Live(net.parameters()) as live:
        for weight in net.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        for i in range(several):
            with parallel.grad_sync(net, enabled=i == several - 1):
                total, _ = net(tokens[:, :-1], tokens[:, 1:])
                (total * 1e-3).backward()
            del total
        optimizer.step()
    return live.peak


def on(device: str, *marks: pytest.MarkDecorator, **changes: Any) -> Any:
    return pytest.param(device == "cpu", changes, marks=marks, id=f"{device}-{changes}")


QUICK = [
    on("cpu", dtype="bfloat16", qk_norm=True, n_kv_head=2, tie_embeddings=False),
    on("cpu", dtype="bfloat16", micro_batch_size=1, batch_tokens=256),
    on("cpu", n_embd=1024, seq_len=64, batch_tokens=512, micro_batch_size=8, tie_embeddings=False),
    on("gpu"),
    on("gpu", activation_checkpointing="selective", dtype="bfloat16"),
]
CASES: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"micro_batch_size": 8},
    {"activation_checkpointing": "full", "n_layer": 8},
    {"attention": "math"},
    {"dtype": "bfloat16", "vocab_size": 65536},
    {"optimizer": "muon", "n_layer": 1, "seq_len": 64},
]
REST = [
    on("cpu", pytest.mark.slow),
    on("cpu", pytest.mark.slow, activation_checkpointing="selective", dtype="bfloat16"),
    on("gpu", pytest.mark.slow, dtype="bfloat16", qk_norm=True, n_kv_head=2, tie_embeddings=False),
    on("gpu", pytest.mark.slow, dtype="bfloat16", micro_batch_size=1, batch_tokens=256),
    on(
        "gpu",
        pytest.mark.slow,
        n_embd=1024,
        seq_len=64,
        batch_tokens=512,
        micro_batch_size=8,
        tie_embeddings=False,
    ),
    *(on(device, pytest.mark.slow, **changes) for device in ("cpu", "gpu") for changes in CASES),
]


@pytest.mark.parametrize(("on_cpu", "changes"), QUICK + REST)
def test_the_peak_of_a_step_is_that_of_its_tensors(
    on_cpu: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = small(**changes)
    assert measured(c, on_cpu, monkeypatch) == pytest.approx(
        tensors(pretraining_memory(c, 1, 1, on_cpu)), rel=0.03
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": "full"}], ids=str)
def test_the_peak_of_a_preset_is_that_of_its_tensors(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU does it, at full shape, without any data."""
    c = preset("gpt2-124m", compile="0", batch_tokens=2 * 16 * 1024, **changes)
    assert measured(c, False, monkeypatch) == pytest.approx(
        tensors(pretraining_memory(c, 1, 1, False)), rel=0.03
    )


def measured(c: Config, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Without data: on tensors of the CPU, through what is written for a GPU if that is asked for."""
    if not on_cpu:
        as_on_gpu(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        kernel = attention.choose(c, CPU) if on_cpu or c.attention == "math" else attention.SDPA
        return peak(Transformer(c, kernel), c)


# ---- Spread over processes


@pytest.fixture
def four() -> Iterator[World]:
    """The first of four processes, of which the others are not there."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield World(0, 0, 0, 4, CPU, "CPU", "here", 2)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": "hsdp", "dtype": "bfloat16"},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"dtype": "bfloat16"},
                {"dtype": "bfloat16", "grad_sync": "micro-batch", "tie_embeddings": False},
                {"dtype": "bfloat16", "batch_tokens": 1024, "n_layer": 8},
            )
        ),
    ],
    ids=str,
)
def test_the_peak_of_a_process_that_holds_a_part_is_that_of_its_tensors(
    four: World, changes: dict[str, Any]
) -> None:
    c = small(**({"parallel": "fsdp", "vocab_size": 2048, "n_layer": 4, "seq_len": 64} | changes))
    with torch.device("meta"):
        net = Transformer(c, attention.choose(c, CPU))
    parallel.Sharding(c, four).split(net)
    net.to_empty(device=CPU)
    for weight in net.parameters():
        weight.data.fill_(0.01)
    net.rotary.copy_(rotary_table(c.seq_len, c.head_dim, c.rope_theta))
    assert peak(net, c, 4) == pytest.approx(tensors(pretraining_memory(c, 4, 2, True)), rel=0.05)


# ---- By hand


def test_constants_are_those_of_the_modules_that_import_torch() -> None:
    for name in ("CHUNK_TOKENS_ON_CPU", "ROWS_IN_CACHE", "COLUMNS"):
        assert getattr(memory, name) == getattr(cpu_kernels, name)
    assert memory.CHUNK_TOKENS == loss.CHUNK_TOKENS
    assert memory.ROWS_AT_ONCE == compilation.ROWS_AT_ONCE
    assert activations.SHORT == cpu_kernels.SHORT
    assert planned_step.FLOPS_WORTH_COMPILING_ON_CPU == compilation.FLOPS_WORTH_COMPILING_ON_CPU


def test_parts_of_a_preset_by_hand() -> None:
    """xlarge: 1,336,248,320 float32 weights on each of 8 GPUs. A token keeps in each of 24 compiled blocks 16 C + 6 M
    bytes with C = 2,048 and M = 5,632, 8 of two norms and 4 for each of 16 heads; casts of the 51,380,224 numbers of
    a block and of the table."""
    c = preset("xlarge-8xa100")
    found = pretraining_memory(c, 8, 2, False)
    names = ("weights", "gradients", "optimizer", "activations", "casts", "logits", "other")
    assert tuple(found.parts) == names and found.moment == "loss"
    weights, tokens = 1_336_248_320, 8 * 2048
    assert found.parts["weights"] == found.parts["gradients"] == 4 * weights
    assert found.parts["optimizer"] == 8 * weights
    last_norm = tokens * (8 * 2048 + 4)
    assert found.parts["activations"] == 24 * tokens * (16 * 2048 + 6 * 5632 + 8 + 64) + last_norm
    table = 50_304 * 2048
    assert found.parts["casts"] == 2 * (24 * 51_380_224 + table)
    chunk = 2048
    assert found.parts["logits"] == 6 * table + 2 * chunk * 50_304 + 2 * (tokens + chunk) * 2048
    assert found.total == sum(found.parts.values())


def test_each_way_to_save_memory_saves_what_it_says() -> None:
    c = preset("xlarge-8xa100")
    whole = pretraining_memory(c, 8, 2, False)
    fsdp = pretraining_memory(dataclasses.replace(c, parallel="fsdp"), 8, 2, False)
    hsdp = pretraining_memory(dataclasses.replace(c, parallel="hsdp"), 8, 2, False)
    for part in ("weights", "optimizer"):
        assert (
            fsdp.parts[part] == whole.parts[part] / 8 and hsdp.parts[part] == whole.parts[part] / 2
        )
    by_how = []
    for how in ("none", "selective", "full"):
        one = step_of(dataclasses.replace(c, activation_checkpointing=how), False)
        (block,) = one.model.shape.blocks
        kept = c.n_layer * kept_bytes(one, block) + memory.last_norm_bytes(one)
        by_how.append(kept / one.tokens)
    assert by_how[0] > by_how[1] > 5 * by_how[2]
    # each block its input, and compiled a number a row and a head; the last norm
    assert by_how[2] == 24 * (2 * 2048 + 8 + 4 * 16) + 8 * 2048 + 4
    muon = pretraining_memory(preset("d16-2xh100"), 2, 2, False)
    p = parameters(preset("d16-2xh100"))
    assert muon.parts["optimizer"] == 4 * p.hidden + 8 * (p.total - p.hidden)


def test_the_lab_s_depth_16_needs_what_it_saw() -> None:
    """20.8 and 28.5 GB were used of 2 H100, by another code with this shape: compiled too, but with the logits of all
    tokens at once, 16,384 x 65,536: as its loss wants them in float32, in bfloat16 as the head gave them, and while
    backward runs their gradient in float32. This code has a chunk of them instead, so it needs less."""
    ours = pretraining_memory(preset("d16-2xh100"), 2, 2, False).total
    logits = 8 * 2048 * 65_536
    assert 15e9 < ours < 17.5e9
    assert 20e9 < ours + (4 + 2) * logits < ours + (4 + 2 + 4) * logits < 28.5e9


# ---- What fits


def run_of(c: Config, processes: int = 1, nodes: int = 1) -> Run:
    card = load_gpu_specs()["a100-80gb-sxm"]
    return Run(c, Fleet(((processes, card),), processes, nodes), own_model(c))


def test_the_largest_micro_batch_fits_and_divides_and_the_next_does_not() -> None:
    card = load_gpu_specs().get("a100-80gb-sxm")
    assert (
        card is not None
        and 0.9 * card.memory_gib * GIB < usable_bytes(card) < card.memory_gib * GIB - GIB
    )
    c, capacity = preset("xlarge-8xa100"), usable_bytes(card)
    found = run_of(c, 8, 4).largest_micro_batch(capacity)
    sizes = {
        n: pretraining_memory(dataclasses.replace(c, micro_batch_size=n), 8, 2, False).total
        for n in range(1, 33)
        if find_batch_problem(dataclasses.replace(c, micro_batch_size=n), 8) is None
    }
    assert list(sizes) == [1, 2, 4, 8, 16, 32]
    assert found == max(n for n, size in sizes.items() if size <= capacity) >= 8
    less = dataclasses.replace(c, activation_checkpointing="full")
    assert run_of(less, 8, 4).largest_micro_batch(capacity) == 32
    assert run_of(c, 8, 4).largest_micro_batch(20e9) == 0


def test_of_a_very_large_share_only_what_divides_it_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2^19 sequences of 128 tokens have 20 divisors; 360 have 24, of which all sizes from 1 to 360 agree."""
    tried: list[int] = []
    monkeypatch.setattr(
        "plan.run.find_batch_problem",
        lambda c, n: tried.append(c.micro_batch_size) or find_batch_problem(c, n),
    )
    c = dataclasses.replace(preset("gpt2-124m"), seq_len=128, batch_tokens=2**26)
    assert run_of(c).largest_micro_batch(1.0) == 0
    assert tried == [2**n for n in range(19, -1, -1)]
    c = dataclasses.replace(c, batch_tokens=360 * 128)
    sizes = {
        n: pretraining_memory(dataclasses.replace(c, micro_batch_size=n), 1, 1, False).total
        for n in range(1, 361)
        if find_batch_problem(dataclasses.replace(c, micro_batch_size=n), 1) is None
    }
    assert len(sizes) == 24
    assert [run_of(c).largest_micro_batch(size) for size in sizes.values()] == list(sizes)


def test_on_a_cpu_a_process_has_python_its_holes_and_the_copy_of_a_checkpoint() -> None:
    c = preset("tiny", optimizer="adamw", batch_tokens=1024, micro_batch_size=8, train_tokens=10**6)
    saving = pretraining_memory(c, 1, 1, True)
    without = pretraining_memory(dataclasses.replace(c, save_every=0), 1, 1, True)
    assert saving.total - without.total == pytest.approx(12 * parameters(c).total)
    kept = without.parts["activations"] - memory.last_norm_bytes(step_of(c, True))
    holes = without.parts["other"] - memory.PYTHON_AND_TORCH
    assert holes == pytest.approx(memory.HOLES * kept, rel=0.02)
    compiled = dataclasses.replace(c, compile="1")
    assert (
        pretraining_memory(compiled, 1, 1, True).parts["activations"] < saving.parts["activations"]
    )
