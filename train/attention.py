"""Causal self-attention through one function, which alone knows the kernels there are.

The choice is made once, at the start, and logged once; further kernels are added here.
"""

import logging

import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax(q k^T / sqrt(D)) v over earlier and equal positions.

    q (B, H, T, D); k, v (B, H_kv, T, D), H a multiple of H_kv: query head h reads key head h // (H / H_kv).
    Returns (B, H, T, D).
    """
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def log_choice(device_type: str) -> None:
    """Say which kernel attention will use."""
    kernels = {"cpu": "torch's flash kernel for CPU", "cuda": "torch chooses flash, efficient or math by shape"}
    log.info("attention=sdpa (%s)", kernels.get(device_type, "torch chooses"))
