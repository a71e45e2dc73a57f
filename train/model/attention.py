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
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from settings import SettingsError
from settings.config import Config
from train.console import LOG_ONLY
from train.model import cpu_kernels

log = logging.getLogger(__name__)

# (q, k, v, apart) -> y; apart is None, or what Kernel.apart returns
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An attention kernel. by_bounds: whether it keeps documents apart by their bounds, and not by a mask."""

    name: str
    attend: Attend
    by_bounds: bool

    def apart(self, bounds: Tensor, B: int, T: int) -> Tensor:
        """Return what keeps documents apart in this kernel: their bounds, or a mask (B, 1, T, T)."""
        return bounds if self.by_bounds else document_mask(bounds, B, T)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v over earlier and equal positions, or over those in mask (B, 1, T, T).

    H is a multiple of H_kv: query head h reads key head h // (H / H_kv).
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


def by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute what sdpa does by two batched products; with a mask by sdpa itself."""
    if mask is not None:
        return sdpa(q, k, v, mask)
    H = q.shape[2]
    return cpu_kernels.attend_by_products(q, ungrouped(k, H), ungrouped(v, H))


def ungrouped(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads of (B, T, H_kv, D) for the query heads that share them, to (B, T, heads, D)."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


SDPA = Kernel("sdpa", sdpa, by_bounds=False)
MATH = Kernel("math", by_products, by_bounds=False)


def sdpa_varlen() -> Attend:
    """Return torch's own kernels: the one for sequences of varying length where there are bounds."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    knows_groups = "enable_gqa" in parameters  # from torch 2.12 on
    causal: dict[str, Any] = {"is_causal": True}  # the name before torch 2.12
    if "window_size" in parameters:
        causal = {"window_size": (-1, 0)}

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> Tensor:
        if bounds is None:
            return sdpa(q, k, v)
        B, T, H, D = q.shape
        options = causal
        if k.shape[2] != H and knows_groups:
            options = causal | {"enable_gqa": True}
        if not knows_groups:
            k, v = ungrouped(k, H), ungrouped(v, H)
        q, k, v = (x.reshape(B * T, -1, D) for x in (q, k, v))
        return cast(Tensor, varlen_attn(q, k, v, bounds, bounds, T, T, **options)).view(B, T, H, D)

    return attend


def flash_attn() -> Attend:
    """Return the kernels of the flash-attn package."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> Tensor:
        if bounds is None:
            return flash_attn_func(q, k, v, causal=True)
        B, T, H, D = q.shape
        q, k, v = (x.reshape(B * T, -1, D) for x in (q, k, v))
        return flash_attn_varlen_func(q, k, v, bounds, bounds, T, T, causal=True).view(B, T, H, D)

    return attend


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


def choose(c: Config, device: torch.device) -> Kernel:
    """Return the kernel that ATTENTION asks for. Raises SettingsError if it cannot be used."""
    name = c.attention
    if name == "auto":
        name = find_fastest(c, device)
    elif problem := find_problem(name, c, device):
        raise SettingsError([f"ATTENTION={name}: {problem}; set ATTENTION=auto or sdpa"])
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


def find_fastest(c: Config, device: torch.device) -> str:
    """Return the name of the fastest kernel that can be used."""
    if device.type == "cpu" and cpu_kernels.prefers_products(c):
        return "math"
    if not find_problem("fa3", c, device):
        return "fa3"
    if not find_problem("flash-attn", c, device) and (c.doc_mask or not cudnn_first(device)):
        return "flash-attn"
    return "sdpa"


def find_problem(name: str, c: Config, device: torch.device) -> str | None:
    """Return what keeps a kernel from being used, or None."""
    if name not in ("fa3", "flash-attn"):
        return None
    module, oldest, newest, kind = "flash_attn", 8, 99, "Ampere or later"
    if name == "fa3":
        module, oldest, newest, kind = "flash_attn_interface", 9, 9, "Hopper"
    if device.type != "cuda":
        return f"it runs on NVIDIA GPUs only, and this run is on {device.type}"
    if c.dtype != "bfloat16":
        return f"it has no {c.dtype}; set DTYPE=bfloat16"
    if not oldest <= torch.cuda.get_device_capability(device)[0] <= newest:
        return f"{torch.cuda.get_device_name(device)} is no {kind} card"
    if c.head_dim > 256 or c.head_dim % 8:
        return f"heads are {c.head_dim} wide, and it takes multiples of 8 up to 256"
    if importlib.util.find_spec(module) is None:
        return f"the package with the module {module} is not installed"
    return None


def cudnn_first(device: torch.device) -> bool:
    """Return whether torch's scaled_dot_product_attention takes cuDNN's kernel before a flash kernel.

    torch does since 2.10, on Hopper and B200 (compute capability 9.0 and 10.0), with a cuDNN later than 9.15.0.
    """
    version = torch.backends.cudnn.version() or 0
    return version > 91500 and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def log_choice(kernel: Kernel, c: Config) -> None:
    """Log which kernel attention uses, and how documents are kept apart."""
    apart = ""
    if c.doc_mask:
        apart = f", documents kept apart by {'their bounds' if kernel.by_bounds else 'a mask'}"
    log.info("attention=%s%s", kernel.name, apart, extra=LOG_ONLY)
