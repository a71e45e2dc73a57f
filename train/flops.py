"""FLOPs of a training step, and what a device could do in its time. Standard library only.

Model FLOPs per token, forward and backward (Kaplan et al. 2020, 2.1; PaLM 2022, appendix B):

    6 N           each matmul weight: a multiply and an add forward, twice that backward
    12 L d T      attention's two products, Q K^T and A V, over all T positions: 2 * 2 d T forward, twice
                  that backward, in each of L layers; d = heads * head_dim

N counts matmul weights: the head once, the embedding table never (it is read, not multiplied), no norms.
The causal count takes half the second term, since half the positions are masked. Recomputation is not counted.
"""

import re

# Dense bfloat16 peak in TFLOP/s by what torch calls the device, from NVIDIA's data sheets; the first name that is
# part of the device's name counts. A device that is not here has an unknown peak, and its MFU is n/a.
BF16_PEAK_TFLOPS = (
    ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("H200 NVL", 835.0), ("H200", 989.0), ("B200", 2250.0),
    ("A100", 312.0), ("L40S", 362.0), ("RTX A6000", 154.8), ("RTX 4090", 165.2), ("RTX 3090", 71.0),
)


def flops_per_token(matmul_weights: int, n_layer: int, attention_width: int, seq_len: int,
                    causal: bool = False) -> float:
    """FLOPs of forward and backward for one token; attention_width is n_head * head_dim."""
    return 6.0 * matmul_weights + (6.0 if causal else 12.0) * n_layer * attention_width * seq_len


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak of one device in TFLOP/s, or None where it is not known (CPUs, float32, cards not in the table)."""
    if dtype != "bfloat16":
        return None
    if re.search(r"Laptop| D$| Ti\b|SUPER|Max-Q", device_name):  # other cards with the start of a name in the table
        return None
    return next((peak for name, peak in BF16_PEAK_TFLOPS if name in device_name), None)


def mfu(tokens_per_s: float, flops: float, devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation in per cent of the peak (TFLOP/s) of all devices, or None where that is unknown."""
    return None if peak is None else 100.0 * tokens_per_s * flops / (devices * peak * 1e12)
