"""FLOPs of training, and the share of a device's peak that they are (MFU). Standard library only.

Model FLOPs per token, forward and backward (Kaplan et al. 2020, 2.1; PaLM 2022, appendix B):

    6 N           each matmul weight: a multiply and an add forward, twice that backward
    12 L d T      attention's two products, Q K^T and A V, over all T positions: 2 * 2 d T forward, twice that
                  backward, in each of L layers; d = heads * head_dim

N counts matmul weights: the head once, the embedding table never (it is read, not multiplied), no norms. The causal
count takes half of the second term, since half of the positions are masked. Recomputation is not counted.
"""

from hardware.gpu_specs import card_of


def flops_per_token(
    matmul_weights: int, n_layer: int, attention_width: int, seq_len: int, causal: bool = False
) -> float:
    """Return the FLOPs of forward and backward for one token; attention_width is n_head * head_dim."""
    per_position = 6.0 if causal else 12.0
    return 6.0 * matmul_weights + per_position * n_layer * attention_width * seq_len


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the peak of a device in TFLOP/s (gpu_specs.py), or None where it is not known.

    It is not known for CPUs, for GPUs that are not in the table, and for bfloat16 on those without units for it.
    float32 products run outside of tensor cores, since the trainer asks for precision "highest" (assemble.py), and so
    does this peak. One kernel does not: memory-efficient attention in float32 from compute capability 8.0 on makes
    three TF32 products of each, so MFU is a little too high where attention is much of the work.
    """
    card = card_of(device_name)
    return card.peak(dtype) if card else None


def mfu(tokens_per_s: float, flops: float, devices: int, peak: float | None) -> float | None:
    """Return model FLOPs utilization, in percent of the peak (TFLOP/s) of all devices; None without a peak.

    Args:
        flops: per token.
    """
    if peak is None:
        return None
    return 100.0 * tokens_per_s * flops / (devices * peak * 1e12)
