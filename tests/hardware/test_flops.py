"""hardware/flops.py against products counted one by one, and against figures that others have published."""

import pytest

from hardware.flops import flops_per_token, mfu, peak_tflops


def counted(
    matrices: list[tuple[int, int]], heads: int, head_dim: int, layers: int, seq_len: int
) -> int:
    """FLOPs of forward and backward for a whole window: each product (m, k) x (k, n) is 2 m k n."""
    forward = sum(2 * seq_len * rows * columns for rows, columns in matrices)
    for _ in range(layers * heads):
        forward += 2 * seq_len * head_dim * seq_len  # Q K^T
        forward += 2 * seq_len * seq_len * head_dim  # A V
    return (
        3 * forward
    )  # backward: one product for the input and one for the weight, of the same size


def test_flops_are_those_of_the_products_counted_one_by_one() -> None:
    width, layers, vocab, seq_len, mlp = 12, 3, 50, 7, 32
    block = [(width, width)] * 2 + [(width, 4)] * 2 + [(width, mlp)] * 2 + [(mlp, width)]
    matrices = block * layers + [(width, vocab)]
    weights = sum(rows * columns for rows, columns in matrices)
    assert seq_len * flops_per_token(weights, layers, width, seq_len) == counted(
        matrices, 3, 4, layers, seq_len
    )


def test_the_causal_count_has_half_of_attention() -> None:
    whole, causal = (flops_per_token(1000, 2, 8, 16, causal) for causal in (False, True))
    assert whole - 6000 == 2 * (causal - 6000) == 12 * 2 * 8 * 16


@pytest.mark.parametrize(
    ("depth", "tokens_per_s", "expected"), [(16, 430_600, 43.8), (24, 178_000, 50.3)]
)
def test_mfu_gives_the_figures_that_the_lab_logged(
    depth: int, tokens_per_s: float, expected: float
) -> None:
    """Its models are 64 x depth wide, with 12 width^2 weights a block and a vocabulary of 65,536; T is 2,048."""
    width = 64 * depth
    weights = 12 * width**2 * depth + 65536 * width
    flops = flops_per_token(weights, depth, width, 2048)
    peak = peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16")
    assert mfu(tokens_per_s, flops, 2, peak) == pytest.approx(expected, abs=0.05)


def test_a_whole_peak_is_a_hundred_per_cent() -> None:
    assert mfu(312e12 * 8 / 1e9, 1e9, 8, 312.0) == pytest.approx(100)


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("Tesla V100-SXM2-32GB", None, 15.7),
        ("Tesla T4", None, 8.1),
        ("cpu", None, None),
        ("", None, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, None),
        ("NVIDIA GeForce RTX 3080", None, None),
    ],
)
def test_a_peak_is_that_of_the_type_and_unknown_is_no_guess(
    name: str, bfloat16: float | None, float32: float | None
) -> None:
    assert (peak_tflops(name, "bfloat16"), peak_tflops(name, "float32")) == (bfloat16, float32)
    assert peak_tflops(name, "float16") is None and peak_tflops(name, "") is None
    assert mfu(1e6, 1e9, 1, peak_tflops(name, "bfloat16")) == (
        bfloat16 and pytest.approx(1e5 / bfloat16)
    )
