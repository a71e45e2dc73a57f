"""train/flops.py against products counted one by one, and against figures that others have published."""

import re

import pytest

from train.flops import BF16_PEAK_TFLOPS, flops_per_token, mfu, peak_tflops


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


SHEETS = {  # by hand, with the figure that each source prints: half of it where it is one with sparsity
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 624 / 2, "A100-SXM4-40GB": 312,  # so before driver 470
    "NVIDIA A800-SXM4-80GB": 312, "NVIDIA A800 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H800": 989,
    "NVIDIA H800 PCIe": 756, "NVIDIA H200": 989, "NVIDIA H200 NVL": 835, "NVIDIA H20": 148,
    "NVIDIA GH200 480GB": 989, "NVIDIA GH200 144G HBM3e": 989, "NVIDIA B200": 4500 / 2, "NVIDIA GB200": 5000 / 2,
    "NVIDIA A30": 330 / 2, "NVIDIA A40": 299.4 / 2, "NVIDIA A10": 250 / 2, "NVIDIA A10G": 140 / 2,
    "NVIDIA L4": 242 / 2, "NVIDIA L40": 181, "NVIDIA L40S": 362, "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA RTX A6000": 154.8, "NVIDIA RTX A5000": 222.2 / 2, "NVIDIA GeForce RTX 3090": 142 / 2,
    "NVIDIA GeForce RTX 3070": 81.2 / 2, "NVIDIA GeForce RTX 4080": 195 / 2, "NVIDIA GeForce RTX 4090": 330.4 / 2,
    "NVIDIA GeForce RTX 5090": 419 / 2}


@pytest.mark.parametrize("name", SHEETS)
def test_the_peak_of_a_device_is_that_of_its_data_sheet(name: str) -> None:
    assert peak_tflops(name, "bfloat16") == pytest.approx(SHEETS[name])


@pytest.mark.parametrize("name", [
    "cpu", "", "NVIDIA", "Tesla T4", "Tesla V100-SXM2-32GB", "AMD Instinct MI300X", "NVIDIA A2", "NVIDIA A16",
    "NVIDIA L2", "NVIDIA L20", "NVIDIA H20-3e", "NVIDIA B100", "NVIDIA GB10", "NVIDIA H100", "NVIDIA A10M",
    "NVIDIA A100-SXM-64GB", "NVIDIA RTX A500", "NVIDIA RTX A5500", "NVIDIA RTX A4000", "Quadro RTX 6000",
    "NVIDIA RTX 4000 Ada Generation", "NVIDIA RTX 6000D", "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX A5000 Laptop GPU", "NVIDIA GeForce RTX 3080", "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 3070 Ti", "NVIDIA GeForce RTX 3070 Laptop GPU", "NVIDIA GeForce RTX 4080 SUPER",
    "NVIDIA GeForce RTX 4080 with Max-Q Design", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 5090 D v2", "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "GRID A100-10C", "NVIDIA A40-48Q"])
def test_an_unknown_peak_gives_no_mfu_and_never_that_of_another_card(name: str) -> None:
    assert peak_tflops(name, "bfloat16") is None
    assert mfu(1e6, 1e9, 1, peak_tflops(name, "bfloat16")) is None


@pytest.mark.parametrize("name", SHEETS)
def test_no_name_fits_two_entries(name: str) -> None:
    assert len([peak for peak, names, _ in BF16_PEAK_TFLOPS if re.fullmatch(names, name.removeprefix("NVIDIA "))]) == 1


def test_other_types_have_no_peak_in_the_table() -> None:
    assert {peak_tflops("NVIDIA A100-SXM4-80GB", dtype) for dtype in ("float32", "float16", "")} == {None}


def test_every_entry_has_a_source_and_a_device_in_these_tests() -> None:
    kind = re.compile("data sheet|white paper|specification")
    assert [source for _, _, source in BF16_PEAK_TFLOPS if not kind.search(source)] == []
    known = [name.removeprefix("NVIDIA ") for name in SHEETS]
    assert [names for _, names, _ in BF16_PEAK_TFLOPS if not any(re.fullmatch(names, name) for name in known)] == []
