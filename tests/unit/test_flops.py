"""train/flops.py against products counted one by one, and against figures that others have published."""

import pytest

from train.flops import flops_per_token, mfu, peak_tflops


def counted(matrices: list[tuple[int, int]], heads: int, head_dim: int, layers: int, seq_len: int) -> int:
    """FLOPs of forward and backward for a whole window: each product (m, k) x (k, n) is 2 m k n."""
    forward = sum(2 * seq_len * rows * columns for rows, columns in matrices)
    for _ in range(layers * heads):
        forward += 2 * seq_len * head_dim * seq_len  # Q K^T
        forward += 2 * seq_len * seq_len * head_dim  # A V
    return 3 * forward  # backward: one product for the input and one for the weight, of the same size


def test_flops_are_those_of_the_products_counted_one_by_one() -> None:
    width, layers, vocab, seq_len, mlp = 12, 3, 50, 7, 32
    block = [(width, width)] * 2 + [(width, 4)] * 2 + [(width, mlp)] * 2 + [(mlp, width)]
    matrices = block * layers + [(width, vocab)]
    weights = sum(rows * columns for rows, columns in matrices)
    assert seq_len * flops_per_token(weights, layers, width, seq_len) == counted(matrices, 3, 4, layers, seq_len)


def test_the_causal_count_has_half_of_attention() -> None:
    whole, causal = (flops_per_token(1000, 2, 8, 16, causal) for causal in (False, True))
    assert whole - 6000 == 2 * (causal - 6000) == 12 * 2 * 8 * 16


@pytest.mark.parametrize(("depth", "tokens_per_s", "expected"), [(16, 430_600, 43.8), (24, 178_000, 50.3)])
def test_mfu_gives_the_figures_that_the_lab_logged(depth: int, tokens_per_s: float, expected: float) -> None:
    """Its models are 64 x depth wide, with 12 width^2 weights a block and a vocabulary of 65,536; T is 2,048."""
    width = 64 * depth
    weights = 12 * width**2 * depth + 65536 * width
    flops = flops_per_token(weights, depth, width, 2048)
    peak = peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16")
    assert mfu(tokens_per_s, flops, 2, peak) == pytest.approx(expected, abs=0.05)


def test_a_whole_peak_is_a_hundred_per_cent() -> None:
    assert mfu(312e12 * 8 / 1e9, 1e9, 8, 312.0) == pytest.approx(100)


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0), ("NVIDIA H100 80GB HBM3", 989.0),
    ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.0), ("NVIDIA H200", 989.0), ("NVIDIA L40S", 362.0),
    ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 3090", 71.0)])
def test_the_peak_of_a_device_is_that_of_its_data_sheet(name: str, peak: float) -> None:
    assert peak_tflops(name, "bfloat16") == peak


@pytest.mark.parametrize(("name", "dtype"), [
    ("cpu", "bfloat16"), ("Tesla T4", "bfloat16"), ("NVIDIA A100-SXM4-80GB", "float32"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"), ("NVIDIA GeForce RTX 4090 D", "bfloat16"),
    ("NVIDIA GeForce RTX 3090 Ti", "bfloat16")])
def test_an_unknown_peak_gives_no_mfu_and_never_that_of_another_card(name: str, dtype: str) -> None:
    assert peak_tflops(name, dtype) is None
    assert mfu(1e6, 1e9, 1, peak_tflops(name, dtype)) is None
