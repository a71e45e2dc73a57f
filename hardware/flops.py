"""FLOPs of training, and the share of a GPU's peak that they are (MFU). Standard library only.

Model FLOPs per token, forward and backward (Kaplan et al. 2020, 2.1; PaLM 2022, appendix B):

    6 N           each matmul weight: a multiply and an add forward, twice that backward
    12 L d T      attention's two products, Q K^T and A V, over all T positions: 2 * 2 d T forward,
                  twice that backward, in each of L layers; d = heads * head_dim

N counts matmul weights: the head once, no norms, and no embedding table, which is read and not
multiplied. The causal count takes half of the second term, since half of the positions are masked.
Recomputation does not count.
"""

from hardware.gpu_specs import find_gpu


def flops_per_token(
    matmul_weights: int,
    n_layer: int,
    attention_width: int,
    seq_len: int,
    causal: bool = False,
) -> float:
    """Return the FLOPs of forward and backward for one token; attention_width is n_head * head_dim."""
    attention = 12.0 * n_layer * attention_width * seq_len
    if causal:
        attention /= 2
    return 6.0 * matmul_weights + attention


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s (gpus.toml), or None where it is unknown.

    It is unknown for CPUs, for GPUs that are not in the table, and for bfloat16 on those without
    units for it. The float32 peak is that outside of tensor cores, since the trainer asks for
    precision "highest" (assemble.py). One kernel differs: memory-efficient attention in float32
    makes three TF32 products of each one from compute capability 8.0 on, so MFU is a little too
    high where attention is much of the work.
    """
    gpu = find_gpu(device_name)
    if gpu is None:
        return None
    return gpu.peak(dtype)


def mfu(tokens_per_s: float, flops: float, devices: int, peak: float | None) -> float | None:
    """Return model FLOPs utilization, in percent of the peak of all devices; None without a peak.

    Args:
        flops: per token.
        peak: of one device, in TFLOP/s.
    """
    if peak is None:
        return None
    return 100.0 * tokens_per_s * flops / (devices * peak * 1e12)
