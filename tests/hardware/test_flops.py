"""hardware/flops.py against products counted one by one, and against figures that others published."""

import pytest

from hardware.flops import flops_per_token, mfu, peak_tflops


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_those_of_the_products_counted_one_by_one(causal):
    layers = 3
    heads = 3
    head_dim = 4
    width = heads * head_dim
    seq_len = 7
    matrices = [(width, 50)]  # the head
    for _ in range(layers):
        matrices += 2 * [(width, width)]  # queries and the output
        matrices += 2 * [(width, head_dim)]  # keys and values
        matrices += 2 * [(width, 32)]
        matrices += [(32, width)]
    forward = 0.0
    for rows, columns in matrices:
        forward += 2 * seq_len * rows * columns
    product = 2 * seq_len * head_dim * seq_len  # Q K^T; A V has as many
    if causal:
        product /= 2
    forward += layers * heads * 2 * product
    weights = sum(rows * columns for rows, columns in matrices)
    # Backward has two products for each of forward: one for the input, one for the weight.
    expected = pytest.approx(3 * forward)
    assert seq_len * flops_per_token(weights, layers, width, seq_len, causal) == expected


@pytest.mark.parametrize(
    ("depth", "tokens_per_s", "expected"), [(16, 430_600, 43.8), (24, 178_000, 50.3)]
)
def test_mfu_gives_the_figures_that_the_lab_logged(depth, tokens_per_s, expected):
    """Its models are 64 x depth wide, with 12 width^2 weights per block and 65,536 tokens; T is 2,048."""
    width = 64 * depth
    weights = 12 * width**2 * depth + 65536 * width
    flops = flops_per_token(weights, depth, width, 2048)
    peak = peak_tflops("NVIDIA H100 80GB HBM3", "bfloat16")
    assert mfu(tokens_per_s, flops, 2, peak) == pytest.approx(expected, abs=0.05)


def test_there_is_no_mfu_where_the_peak_is_unknown():
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float32") == 19.5
    assert peak_tflops("cpu", "float32") is None
    assert peak_tflops("Tesla T4", "bfloat16") is None
    assert mfu(1e6, 1e9, 1, None) is None
