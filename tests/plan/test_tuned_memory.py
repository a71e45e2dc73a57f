"""plan/memory.py of a fine-tuning against the tensors that live while transformers' classes take the same step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from plan.finetuning.hf_shape import shape_of
from plan.finetuning.tuned import Tuned, tuned_of
from plan.memory import at_evaluation, peak_memory, standing_bytes
from plan.planned_step import Step
from settings import load_preset
from settings.config import Config
from tests.plan.live import Live, tensors
from train.distributed import parallel
from train.distributed.world import World
from train.optim import build_optimizer

pytest.importorskip("peft", reason="make setup-dev installs it")

CPU = torch.device("cpu")
SIZE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LORA = {"LORA_RANK": "8"}
DROPOUT = LORA | {"LORA_DROPOUT": "0.1"}


def configuration(kind: str) -> Any:
    from transformers import Glm4MoeConfig, GptOssConfig, LlamaConfig, Qwen3Config

    return {
        "llama": lambda: LlamaConfig(**SIZE),
        "qwen3": lambda: Qwen3Config(**SIZE, tie_word_embeddings=True),
        "glm4_moe": lambda: Glm4MoeConfig(**SIZE, **EXPERTS),
        "gpt_oss": lambda: GptOssConfig(**SIZE, num_local_experts=8, num_experts_per_tok=2),
    }[kind]()


def settings(**more: str) -> Config:
    """Steps of two micro-batches of 8 x 128 tokens."""
    return load_preset(
        **{
            "PRESET": "finetune",
            "DEVICE": "cpu",
            "SEQ_LEN": "128",
            "MICRO_BATCH_SIZE": "8",
            "BATCH_TOKENS": "2048",
        }
        | more
    )


def made(kind: str, c: Config, world: World | None = None) -> tuple[Tuned, Any]:
    """(what is planned, the model as finetune/hf_model.py makes it, with weights that mean nothing)"""
    from finetune import hf_model
    from finetune.adapter import Adapters

    config, adapters = configuration(kind), Adapters.of(c)
    dtype = getattr(torch, c.dtype)
    lm = hf_model.on_meta(config, dtype if adapters else torch.float32)
    if adapters:
        adapters.join(lm)
    net = hf_model.Tuned(lm, dtype, c.activation_checkpointing)
    if world:
        parallel.Sharding(c, world).split(net)
    net.to_empty(device=CPU)
    for weight in net.parameters():
        nn.init.constant_(parallel.local(weight.data), 0.01)
    for buffer in net.buffers():
        buffer.zero_()
    lm.tie_weights()
    return tuned_of(c, shape_of(config.to_dict())), net.train()


def peak(net: Any, c: Config, processes: int = 1) -> int:
    """Bytes of tensors at the most, in an update, which makes the moments, and a step behind it."""
    optimizer, B, T = build_optimizer(net, c), c.micro_batch(processes), c.seq_len
    several = c.batch_windows // processes // B
    tokens = torch.arange(B * T).view(B, T)
    batch = (
        tokens,
        tokens,
        torch.arange(T).repeat(B, 1),
        torch.arange(0, B * T + 1, T, dtype=torch.int32),
    )
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    with Live(net.parameters()) as live:
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        for i in range(several):
            with parallel.grad_sync(net, enabled=i == several - 1):
                total, _ = net(*batch)
                (total * 1e-3).backward()
            del total
        optimizer.step()
    return live.peak


def step_of(t: Tuned, processes: int = 1, node_processes: int = 1) -> Step:
    return Step(t, False, processes, node_processes, on_cpu=True)


def planned(t: Tuned, processes: int = 1, node_processes: int = 1) -> float:
    return tensors(peak_memory(step_of(t, processes, node_processes)))


QUICK: list[tuple[str, dict[str, str]]] = [
    ("gpt_oss", LORA),
    ("llama", {}),
    ("llama", LORA),
    ("llama", LORA | {"DTYPE": "bfloat16", "ACTIVATION_CHECKPOINTING": "selective"}),
    ("qwen3", {"DTYPE": "bfloat16", "ACTIVATION_CHECKPOINTING": "full"}),
    ("glm4_moe", {"ACTIVATION_CHECKPOINTING": "selective"}),
    ("glm4_moe", LORA | {"DTYPE": "bfloat16"}),
    ("glm4_moe", LORA | {"LORA_TARGETS": "attention,experts"}),
    ("llama", DROPOUT),
]
REST = [
    (kind, trained | {"DTYPE": dtype, "ACTIVATION_CHECKPOINTING": how})
    for kind in ("llama", "qwen3", "glm4_moe")
    for trained in ({}, LORA, LORA | {"LORA_TARGETS": "attention"})
    for dtype in ("float32", "bfloat16")
    for how in ("none", "selective", "full")
]
REST += [
    ("llama", DROPOUT | {"DTYPE": "bfloat16"}),
    ("llama", DROPOUT | {"ACTIVATION_CHECKPOINTING": "selective"}),
    ("qwen3", DROPOUT | {"LORA_TARGETS": "attention"}),
]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST if one not in QUICK)],
    ids=str,
)
def test_the_peak_of_a_step_is_that_of_its_tensors(kind: str, changes: dict[str, str]) -> None:
    c = settings(**changes)
    t, net = made(kind, c)
    assert planned(t) == pytest.approx(peak(net, c), rel=0.06)


@pytest.fixture
def four() -> Iterator[World]:
    """The first of four processes, of which the others are not there."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield World(0, 0, 0, 4, CPU, "CPU", "here", 2)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("glm4_moe", LORA | {"DTYPE": "bfloat16", "PARALLEL": "hsdp"}),
        ("qwen3", DROPOUT),
        pytest.param(
            "glm4_moe", LORA | {"ACTIVATION_CHECKPOINTING": "full"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_the_peak_of_a_process_that_holds_a_part_is_that_of_its_tensors(
    four: World, kind: str, changes: dict[str, str]
) -> None:
    c = settings(**{"PARALLEL": "fsdp", "BATCH_TOKENS": "8192"} | changes)
    t, net = made(kind, c, four)
    assert planned(t, 4, 2) == pytest.approx(peak(net, c, 4), rel=0.08)


@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {}), ("glm4_moe", LORA | {"LORA_TARGETS": "experts"})], ids=str
)
def test_an_evaluation_takes_no_more_than_is_said(kind: str, changes: dict[str, str]) -> None:
    """What it takes at once is not reckoned more closely."""
    c = settings(**{"MICRO_BATCH_SIZE": "64", "BATCH_TOKENS": "8192"} | changes)
    t, net = made(kind, c)
    B, T = 64, c.seq_len
    tokens = torch.arange(B * T).view(B, T) % 4096
    batch = (
        tokens,
        tokens,
        torch.arange(T).repeat(B, 1),
        torch.arange(0, B * T + 1, T, dtype=torch.int32),
    )
    with torch.no_grad(), Live(net.parameters()) as live:
        net.eval()(*batch)
    step = step_of(t)
    standing = standing_bytes(step)
    del standing["optimizer"]  # whose moments are not there yet
    said = sum(standing.values()) + sum(at_evaluation(step).values())
    assert live.peak <= 1.05 * said <= 2 * live.peak
