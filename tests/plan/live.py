"""How many bytes of tensors live while code runs: what the plan's memory is compared with."""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plan.memory import Memory
from plan.planned_step import Step
from plan.run import own_model
from settings.config import Config
from train.model import cpu_kernels, loss, model


class Live(TorchDispatchMode):
    """Follows the storage of every tensor that an operation returns. Works on tensors without data (FakeTensorMode)."""

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        """there: what lives already."""
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.peak = 0
        self.count(there)

    def count(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = getattr(
                    value, "_local_tensor", value
                ).untyped_storage()  # a DTensor has its part inside
                key = storage._cdata
                self.storages.setdefault(
                    key, weakref.ref(storage, lambda _, k=key: self.storages.pop(k, None))
                )
        self.peak = max(self.peak, self.now)

    @property
    def now(self) -> int:
        """Bytes that live; sizes are asked for anew, since FSDP2 empties the storage of what it gathered."""
        alive = (reference() for reference in list(self.storages.values()))
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.count(tree_leaves(result))
        return result


class NormOfGPU(torch.autograd.Function):
    """What torch's kernel for GPUs keeps: its input, and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        x, _ = ctx.saved_tensors
        return torch.empty_like(x), None


def norm_of_gpu(self: Any, x: Tensor) -> Tensor:
    """model.RMSNorm.forward as it goes on a GPU."""
    return self.weight.to(x.dtype) * NormOfGPU.apply(x.float(), self.eps).to(x.dtype)


def add_product_of_gpu(x: Tensor, grad: Tensor, dw: Tensor) -> None:
    """loss.add_product as it goes on a GPU."""
    dw.add_(torch.mm(grad.t(), x))


def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of the CPU go through what is written for a GPU."""
    monkeypatch.setattr(model.RMSNorm, "forward", norm_of_gpu)
    monkeypatch.setattr(loss, "CHUNK_TOKENS_ON_CPU", loss.CHUNK_TOKENS)
    monkeypatch.setattr(loss, "add_product", add_product_of_gpu)
    monkeypatch.setattr(cpu_kernels, "softmax_part", loss.softmax_part)
    monkeypatch.setattr(cpu_kernels, "COLUMNS", 10**9)


def step_of(config: Config, on_cpu: bool, processes: int = 1, node_processes: int = 1) -> Step:
    """Return a step of pretraining."""
    return Step(own_model(config), True, processes, node_processes, on_cpu)


def tensors(memory: Memory) -> float:
    """Return the bytes without what no tensor of the model explains."""
    return memory.total - memory.parts["other"]
