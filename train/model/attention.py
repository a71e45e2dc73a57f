"""Causal self-attention, and the choice of its kernel.

    q (B, T, H, D), k and v (B, T, H_kv, D) -> (B, T, H, D)

    sdpa         torch's scaled_dot_product_attention: on a CPU its flash kernel, on a GPU the first of its list that
                 fits, on Hopper cuDNN's
    math         two batched products (cpu_kernels.py), for short windows in bfloat16 on a CPU
    fa3          FlashAttention-3 (Shah et al. 2024) for Hopper, which torch's own functions then call
    flash-attn   the package of that name (Dao 2023)

The kernel is chosen and logged once, at the start. With DOC_MASK a token attends to earlier ones of its own document
only: through a kernel for sequences of varying length where there is one, else through a mask.
"""

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from settings import SettingsError
from settings.config import Config
from train.model import cpu_kernels

# (q, k, v, bounds) -> y; bounds of documents as document_mask has them, or None
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An attention kernel. by_bounds: whether it keeps documents apart by their bounds; else sdpa does by a mask."""

    name: str
    attend: Attend
    by_bounds: bool = False


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v over earlier and equal positions, or over those in mask (B, 1, T, T).

    H is a multiple of H_kv: query head h reads key head h // (H / H_kv).
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


def by_products(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None = None) -> Tensor:
    """Compute what sdpa does by two batched products. There are no bounds."""
    H = q.shape[2]
    return cpu_kernels.attend_by_products(q, ungrouped(k, H), ungrouped(v, H))


def ungrouped(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads of (..., H_kv, D) for the query heads that share them, to (..., heads, D)."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], dim=-2)


SDPA = Kernel("sdpa", sdpa)
MATH = Kernel("math", by_products)


def with_varlen(whole: Callable[..., Tensor], varlen: Callable[..., Tensor]) -> Attend:
    """Join a kernel for whole windows with one for sequences of varying length, which takes (N, H, D)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> Tensor:
        if bounds is None:
            return whole(q, k, v)
        B, T, H, D = q.shape
        q, k, v = (x.reshape(B * T, -1, D) for x in (q, k, v))
        return varlen(q, k, v, bounds, bounds, T, T).view(B, T, H, D)

    return attend


def torch_varlen() -> Callable[..., Tensor]:
    """Return torch's causal attention for sequences of varying length, on a GPU.

    It takes q (N, H, D), k and v (N, H_kv, D), their bounds and longest lengths. scale is that of the scores, window
    how many positions a query looks at, its own included.
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch has changed both, in different releases from 2.11 on
    parameters = inspect.signature(varlen_attn).parameters
    knows_groups = "enable_gqa" in parameters
    causal: dict[str, Any] = {"is_causal": True}
    if "window_size" in parameters:
        causal = {"window_size": (-1, 0)}

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *bounds: Tensor | int,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        heads = q.shape[1]
        call: Any = varlen_attn
        options = dict(causal)
        if scale is not None:
            options["scale"] = scale
        if window is not None:
            options["window_size"] = (window - 1, 0)
        if knows_groups:
            return call(q, k, v, *bounds, **options, enable_gqa=k.shape[1] != heads)
        return call(q, ungrouped(k, heads), ungrouped(v, heads), *bounds, **options)

    return varlen


def sdpa_varlen() -> Attend:
    """Return torch's own kernels."""
    return with_varlen(sdpa, torch_varlen())


def flash_attn() -> Attend:
    """Return the kernels of the flash-attn package."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    return with_varlen(
        partial(flash_attn_func, causal=True), partial(flash_attn_varlen_func, causal=True)
    )


def document_mask(bounds: Tensor, B: int, T: int) -> Tensor:
    """Return (B, 1, T, T) bool: whether a query (third) may look at a key (fourth).

    Args:
        bounds: (K + 1,) int32: where each document of the B x T tokens begins, ascending from 0, and at the end B T.
            Windows begin documents too. A bound that is there twice begins an empty document.
    """
    position = torch.arange(B * T, device=bounds.device)
    document = torch.searchsorted(bounds[1:].long(), position, right=True).view(B, T)
    causal = torch.ones(T, T, dtype=torch.bool, device=bounds.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal)[:, None]


# ---------------------------------------------------------------------------------------------------
# The choice
# ---------------------------------------------------------------------------------------------------


class Package(NamedTuple):
    """What brings a kernel: its module, and the cards that it is for, by the first number of their capability."""

    module: str
    capabilities: range
    cards: str


PACKAGES = {
    "fa3": Package("flash_attn_interface", range(9, 10), "Hopper"),
    "flash-attn": Package("flash_attn", range(8, 100), "Ampere or later"),
}


def choose(c: Config, device: torch.device) -> Kernel:
    """Return the kernel that ATTENTION asks for. Raises SettingsError if it cannot be used."""
    problems = {name: find_problem(package, c, device) for name, package in PACKAGES.items()}
    name = c.attention
    if problem := problems.get(name):
        raise SettingsError([f"ATTENTION={name}: {problem}; set ATTENTION=auto or sdpa"])
    if name == "auto":
        if device.type == "cpu" and cpu_kernels.prefers_products(c):
            name = "math"
        elif not problems["fa3"]:
            name = "fa3"
        elif not problems["flash-attn"] and (c.doc_mask or not cudnn_first(device)):
            name = "flash-attn"
        else:
            name = "sdpa"
    if name == "math":
        return MATH
    if name == "flash-attn":
        return Kernel(name, flash_attn(), by_bounds=True)
    if name == "fa3":
        torch.nn.attention.activate_flash_attention_impl("FA3")
        torch.backends.cuda.enable_cudnn_sdp(False)  # torch would prefer it (cudnn_first)
    if device.type == "cuda" and c.dtype == "bfloat16" and c.head_dim % 8 == 0:
        return Kernel(name, sdpa_varlen(), by_bounds=True)
    return SDPA


def find_problem(package: Package, c: Config, device: torch.device) -> str | None:
    """Return what keeps a package's kernel from being used, or None."""
    if device.type != "cuda":
        return f"it runs on NVIDIA GPUs only, and this run is on {device.type}"
    if c.dtype != "bfloat16":
        return f"it has no {c.dtype}; set DTYPE=bfloat16"
    if torch.cuda.get_device_capability(device)[0] not in package.capabilities:
        return f"{torch.cuda.get_device_name(device)} is no {package.cards} card"
    if c.head_dim > 256 or c.head_dim % 8:
        return f"heads are {c.head_dim} wide, and it takes multiples of 8 up to 256"
    if importlib.util.find_spec(package.module) is None:
        return f"the package with the module {package.module} is not installed"
    return None


def cudnn_first(device: torch.device) -> bool:
    """Return whether torch's scaled_dot_product_attention takes cuDNN's kernel before a flash kernel.

    torch does since 2.10, on Hopper and B200 (compute capability 9.0 and 10.0), with a cuDNN later than 9.15.0.
    """
    version = torch.backends.cudnn.version() or 0
    return version > 91500 and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
