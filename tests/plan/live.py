"""How many bytes of tensors live while code runs: what the plan's memory is compared with."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
    """What torch's kernel for GPUs keeps: its input, a number a row, and the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(x, scale, *([] if weight is None else [weight]))
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, _, *weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight[0]) if weight else None, None


def norm_of_gpu(self: Any, x: Tensor) -> Tensor:
    """model.RMSNorm.forward as it goes on a GPU."""
    if x.dtype == torch.float32:
        return NormOfGPU.apply(x, self.weight, self.eps)
    return self.weight.to(x.dtype) * NormOfGPU.apply(x.float(), None, self.eps).to(x.dtype)
