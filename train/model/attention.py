"""Causal self-attention through one function, which alone knows the kernels there are.

    q (B, T, H, D), k and v (B, T, H_kv, D) -> (B, T, H, D)

    sdpa         torch's scaled_dot_product_attention: on CPU its flash kernel, on a GPU the first of its list that
                 fits, on Hopper cuDNN's
    math         the formula as it stands, two batched products: in bfloat16 on a CPU twice as fast as sdpa for short
                 windows, and as precise as bfloat16 scores are
    fa3          FlashAttention-3 (Shah et al. 2024) for Hopper, which torch's own entry points then call
    flash-attn   the package of that name (Dao 2023)

The choice is made once, at the start, and logged once. With DOC_MASK a token attends to earlier ones of its own
document only: through a kernel for sequences of varying length where there is one, else through a mask.
"""

import dataclasses
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from settings import SettingsError
from settings.config import Config
from train.console import LOG_ONLY

log = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An attention kernel that was chosen. attend(q, k, v, apart): apart is None, or what `apart` returns."""

    name: str
    attend: Attend
    by_bounds: bool

    def apart(self, bounds: Tensor, B: int, T: int) -> Tensor:
        """What keeps documents apart in this kernel: their bounds, or the mask (B, 1, T, T) made of them."""
        return bounds if self.by_bounds else document_mask(bounds, B, T)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax(q k^T / sqrt(D)) v over earlier and equal positions, or over those that mask (B, 1, T, T) allows.

    H is a multiple of H_kv: query head h reads key head h // (H / H_kv).
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


SDPA = Kernel("sdpa", sdpa, by_bounds=False)


def by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same, with all T x T scores in memory; with a mask as sdpa does it."""
    if mask is not None:
        return sdpa(q, k, v, mask)
    B, T, H, D = q.shape
    q, k, v = (
        x.transpose(1, 2).reshape(B * H, T, D) for x in (q, ungrouped(k, H), ungrouped(v, H))
    )
    future = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=D**-0.5)
    return (scores.softmax(dim=-1) @ v).view(B, H, T, D).transpose(1, 2)


MATH = Kernel("math", by_products, by_bounds=False)
SHORT = 512  # tokens, up to which MATH was measured to be the faster on a CPU


def ungrouped(x: Tensor, heads: int) -> Tensor:
    """Keys or values (B, T, H_kv, D) with each head repeated for the query heads that share it: (B, T, H, D)."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def sdpa_varlen() -> Attend:
    """torch's own kernels: the one for sequences of varying length where there are bounds."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(
        varlen_attn
    ).parameters  # the flag for causal was renamed in torch 2.12
    options: dict[str, Any] = (
        {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    )
    grouped = "enable_gqa" in known

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> Tensor:
        if bounds is None:
            return sdpa(q, k, v)
        B, T, H, D = q.shape
        more = options | ({"enable_gqa": True} if grouped and k.shape[2] != H else {})
        if not grouped:
            k, v = ungrouped(k, H), ungrouped(v, H)
        q, k, v = (x.reshape(B * T, -1, D) for x in (q, k, v))
        return cast(Tensor, varlen_attn(q, k, v, bounds, bounds, T, T, **more)).view(B, T, H, D)

    return attend


def flash_attn() -> Attend:
    """The flash-attn package."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> Tensor:
        if bounds is None:
            return flash_attn_func(q, k, v, causal=True)
        B, T, H, D = q.shape
        q, k, v = (x.reshape(B * T, -1, D) for x in (q, k, v))
        return flash_attn_varlen_func(q, k, v, bounds, bounds, T, T, causal=True).view(B, T, H, D)

    return attend


def document_mask(bounds: Tensor, B: int, T: int) -> Tensor:
    """(B, 1, T, T) bool: whether a query (third) may look at a key (fourth).

    bounds (K + 1,) int32: where each document of the B x T tokens begins, ascending from 0, and at the end B T;
    windows begin documents too. A bound that is there twice begins an empty document.
    """
    position = torch.arange(B * T, device=bounds.device)
    document = torch.searchsorted(bounds[1:].long(), position, right=True).view(B, T)
    causal = torch.ones(T, T, dtype=torch.bool, device=bounds.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal)[:, None]


# ---------------------------------------------------------------------------------------------------
# The choice
# ---------------------------------------------------------------------------------------------------


def choose(c: Config, device: torch.device) -> Kernel:
    """The kernel that ATTENTION asks for. Raises SettingsError where it cannot be used."""
    if c.attention == "math" or (
        c.attention == "auto"
        and device.type == "cpu"
        and c.dtype == "bfloat16"
        and c.seq_len <= SHORT
    ):
        return MATH
    name = "sdpa"
    if c.attention != "sdpa":
        problems = {other: why_not(other, c, device) for other in ("fa3", "flash-attn")}
        if problem := problems.get(c.attention):
            raise SettingsError([f"ATTENTION={c.attention}: {problem}; set ATTENTION=auto or sdpa"])
        if device.type == "cuda" and cudnn_first(device) and not c.doc_mask:
            problems["flash-attn"] = "torch has cuDNN's"
        name = (
            c.attention
            if c.attention != "auto"
            else next((n for n, p in problems.items() if p is None), "sdpa")
        )
    if name == "flash-attn":
        return Kernel(name, flash_attn(), by_bounds=True)
    if name == "fa3":
        torch.nn.attention.activate_flash_attention_impl("FA3")
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # which is before every flash kernel, by cudnn_first
    if name == "fa3" or (
        device.type == "cuda" and c.dtype == "bfloat16" and has_varlen() and c.head_dim % 8 == 0
    ):
        return Kernel(name, sdpa_varlen(), by_bounds=True)
    return SDPA


def why_not(name: str, c: Config, device: torch.device) -> str | None:
    """What keeps an optional kernel from being used, or None."""
    module = {"fa3": "flash_attn_interface", "flash-attn": "flash_attn"}[name]
    if device.type != "cuda":
        return f"it runs on NVIDIA GPUs only, and this run is on {device.type}"
    if c.dtype != "bfloat16":
        return f"it has no {c.dtype}; set DTYPE=bfloat16"
    generation = torch.cuda.get_device_capability(device)[0]
    if generation != 9 if name == "fa3" else generation < 8:
        return f"{torch.cuda.get_device_name(device)} is no {'Hopper' if name == 'fa3' else 'Ampere or later'} card"
    if c.head_dim > 256 or c.head_dim % 8:
        return f"heads are {c.head_dim} wide, and it takes multiples of 8 up to 256"
    if importlib.util.find_spec(module) is None:
        return f"the package with the module {module} is not installed"
    if name == "fa3" and not (
        hasattr(torch.nn.attention, "activate_flash_attention_impl") and has_varlen()
    ):
        return f"torch {torch.__version__} cannot be given another kernel"
    return None


def cudnn_first(device: torch.device) -> bool:
    """Whether torch's scaled_dot_product_attention takes cuDNN's kernel before a flash kernel: from torch 2.10 on, on
    Hopper and B200 (compute capability 9.0 and 10.0), with a cuDNN later than 9.15.0."""
    version = torch.backends.cudnn.version() or 0
    return version > 91500 and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def has_varlen() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def log_choice(kernel: Kernel, c: Config, device: torch.device) -> None:
    """Say which kernel attention uses, and how documents are kept apart."""
    chosen = {
        "cpu": "torch's flash kernel for CPU",
        "cuda": "torch chooses flash, efficient or math by shape",
    }
    if device.type == "cuda" and cudnn_first(device):
        chosen["cuda"] = f"torch takes cuDNN's first, version {torch.backends.cudnn.version()}"
    detail = {
        "sdpa": chosen.get(device.type, "torch chooses"),
        "fa3": "through torch's own entry points",
        "flash-attn": "the package",
        "math": "two batched products",
    }[kernel.name]
    apart = ""
    if c.doc_mask:
        apart = f", documents kept apart by {'their bounds' if kernel.by_bounds else 'a mask'}"
    log.info("attention=%s (%s)%s", kernel.name, detail, apart, extra=LOG_ONLY)
