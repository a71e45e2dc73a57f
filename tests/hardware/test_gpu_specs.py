"""hardware/gpu_specs.py against figures written down a second time, from data sheets, cores and clocks."""

import re

import pytest

from hardware.gpu_specs import CARDS, Card, card_called, card_of

# By torch's name: key, bfloat16 as printed (half of it where that is with sparsity), float32 as cores x 2 x GHz,
# memory in GB as sold, GB/s of it, GB/s of NVLink as printed, both ways, or the generation of PCIe (0.x: through the
# host), watts.
A100, H100_SXM, H100_PCIE = 6912 * 2 * 1.41e-3, 16896 * 2 * 1.98e-3, 14592 * 2 * 1.755e-3
V100_SXM, V100_PCIE, AD102 = 5120 * 2 * 1.53e-3, 5120 * 2 * 1.38e-3, 18176 * 2e-3
SHEETS: dict[str, tuple[str, float | None, float, float, float, float, float]] = {
    "NVIDIA GB200": ("gb200", 5000 / 2, 18944 * 2 * 2.112e-3, 186, 16_000 / 2, 1800, 2400 / 2),
    "NVIDIA B200": ("b200", 4500 / 2, 600 / 8, 180, 62_000 / 8, 1800, 1000),
    "NVIDIA GH200 144G HBM3e": ("gh200-144gb", 1979 / 2, H100_SXM, 144, 4900, 900, 1000),
    "NVIDIA GH200 480GB": ("gh200-96gb", 1979 / 2, H100_SXM, 96, 4000, 900, 1000),
    "NVIDIA GH200 120GB": ("gh200-96gb", 1979 / 2, H100_SXM, 96, 4000, 900, 1000),
    "NVIDIA H200": ("h200", 1979 / 2, H100_SXM, 141, 4800, 900, 700),
    "NVIDIA H200 NVL": ("h200-nvl", 1671 / 2, 16896 * 2 * 1.785e-3, 141, 4800, 900, 600),
    "NVIDIA H100 80GB HBM3": ("h100-sxm", 1979 / 2, H100_SXM, 80, 3350, 900, 700),
    "NVIDIA H100 NVL": ("h100-nvl", 1671 / 2, 16896 * 2 * 1.785e-3, 94, 3900, 600, 400),
    "NVIDIA H100 PCIe": ("h100-pcie", 1513 / 2, H100_PCIE, 80, 2000, 5, 350),
    "NVIDIA H800": ("h800-sxm", 1979 / 2, H100_SXM, 80, 3350, 400, 700),
    "NVIDIA H800 PCIe": ("h800-pcie", 1513 / 2, H100_PCIE, 80, 2000, 5, 350),
    "NVIDIA H20": ("h20", 148, 44, 96, 4000, 900, 500),
    "NVIDIA A100-SXM4-80GB": ("a100-80gb-sxm", 312, A100, 80, 2039, 600, 400),
    "NVIDIA A100 80GB PCIe": ("a100-80gb-pcie", 624 / 2, A100, 80, 1935, 4, 300),
    "NVIDIA A100-SXM4-40GB": ("a100-40gb-sxm", 312, A100, 40, 1555, 600, 400),
    "A100-SXM4-40GB": ("a100-40gb-sxm", 312, A100, 40, 1555, 600, 400),  # so before driver 470
    "NVIDIA A100-PCIE-40GB": ("a100-40gb-pcie", 312, A100, 40, 1555, 4, 250),
    "NVIDIA A100-PCIe-40GB": ("a100-40gb-pcie", 312, A100, 40, 1555, 4, 250),
    "NVIDIA A800-SXM4-80GB": ("a800-80gb-sxm", 312, A100, 80, 2039, 400, 400),
    "NVIDIA A800 80GB PCIe": ("a800-80gb-pcie", 312, A100, 80, 1935, 4, 300),
    "NVIDIA A40": ("a40", 299.4 / 2, 10752 * 2 * 1.74e-3, 48, 696, 4, 300),
    "NVIDIA A30": ("a30", 330 / 2, 3584 * 2 * 1.44e-3, 24, 933, 4, 165),
    "NVIDIA A10": ("a10", 250 / 2, 9216 * 2 * 1.695e-3, 24, 600, 4, 150),
    "NVIDIA A10G": ("a10g", 140 / 2, 10240 * 2 * 1.71e-3, 24, 600, 0.4, 300),
    "NVIDIA RTX A6000": ("a6000", 309.7 / 2, 10752 * 2 * 1.8e-3, 48, 768, 4, 300),
    "NVIDIA RTX A5000": ("a5000", 222.2 / 2, 8192 * 2 * 1.695e-3, 24, 768, 4, 230),
    "NVIDIA RTX 6000 Ada Generation": ("rtx6000-ada", 1457 / 4, AD102 * 2.505, 48, 960, 4, 300),
    "NVIDIA L40S": ("l40s", 362.05, AD102 * 2.52, 48, 864, 4, 350),
    "NVIDIA L40": ("l40", 181.05, AD102 * 2.49, 48, 864, 4, 300),
    "NVIDIA L4": ("l4", 242 / 2, 7424 * 2 * 2.04e-3, 24, 300, 4, 72),
    "NVIDIA GeForce RTX 5090": (
        "rtx5090",
        419 / 2,
        21760 * 2 * 2.407e-3,
        32,
        512 / 8 * 28,
        0.5,
        575,
    ),
    "NVIDIA GeForce RTX 4090": (
        "rtx4090",
        330.4 / 2,
        16384 * 2 * 2.52e-3,
        24,
        384 / 8 * 21,
        0.4,
        450,
    ),
    "NVIDIA GeForce RTX 4080": (
        "rtx4080",
        195 / 2,
        9728 * 2 * 2.505e-3,
        16,
        256 / 8 * 22.4,
        0.4,
        320,
    ),
    "NVIDIA GeForce RTX 3090": (
        "rtx3090",
        142 / 2,
        10496 * 2 * 1.695e-3,
        24,
        384 / 8 * 19.5,
        0.4,
        350,
    ),
    "NVIDIA GeForce RTX 3070": (
        "rtx3070",
        81.2 / 2,
        5888 * 2 * 1.725e-3,
        8,
        256 / 8 * 14,
        0.4,
        220,
    ),
    "Tesla V100-SXM2-32GB": ("v100-32gb-sxm", None, V100_SXM, 32, 900, 300, 300),
    "Tesla V100-SXM2-16GB": ("v100-16gb-sxm", None, V100_SXM, 16, 900, 300, 300),
    "Tesla V100-PCIE-32GB": ("v100-32gb-pcie", None, V100_PCIE, 32, 900, 3, 250),
    "Tesla V100-PCIE-16GB": ("v100-16gb-pcie", None, V100_PCIE, 16, 900, 3, 250),
    "Tesla V100S-PCIE-32GB": ("v100s-32gb-pcie", None, 5120 * 2 * 1.597e-3, 32, 1134, 3, 250),
    "Tesla T4": ("t4", None, 2560 * 2 * 1.59e-3, 16, 256 / 8 * 10, 3, 70),
}

# total_memory as torch printed it on one machine, MiB.
SEEN = {
    "h200": 143_156,
    "b200": 182_642,
    "h100-sxm": 81_089,
    "h100-pcie": 81_008,
    "h20": 97_285,
    "a40": 45_416,
    "a10g": 22_587,
    "a6000": 48_676,
    "a5000": 24_138,
    "rtx6000-ada": 48_622,
    "l40s": 45_589,
    "rtx4080": 16_049,
    "rtx3090": 24_259,
    "v100-16gb-sxm": 16_160,
    "v100-16gb-pcie": 16_160,
    "t4": 14_930,
    "a100-40gb-sxm": 40_536,
    "gh200-144gb": 153_008_209_920 / 2**20,
}


def known(name: str) -> Card:
    card = card_of(name)
    assert card, name
    return card


@pytest.mark.parametrize("name", SHEETS)
def test_a_card_is_as_fast_as_its_data_sheet_says(name: str) -> None:
    card, (key, bf16, fp32, _, bandwidth, _, watts) = known(name), SHEETS[name]
    assert card.key == key and card.watts == watts
    assert card.bf16_tflops == (bf16 and pytest.approx(bf16, rel=1e-3))
    assert card.fp32_tflops == pytest.approx(fp32, rel=0.01)
    assert card.bandwidth_gb_s == pytest.approx(bandwidth, rel=0.01)


@pytest.mark.parametrize("name", SHEETS)
def test_a_card_has_a_little_less_memory_than_it_is_sold_as(name: str) -> None:
    memory, sold = known(name).memory_gib, SHEETS[name][3]
    # ECC takes 1/16 of GDDR6, and HBM is sold in GiB; data sheets of Blackwell and the 141 GB of Hopper are no less
    assert 0.9 * sold <= memory < sold
    if seen := SEEN.get(known(name).key):
        assert 0.985 * seen / 1024 <= memory <= seen / 1024


@pytest.mark.parametrize("name", SHEETS)
def test_a_link_is_half_of_what_is_printed_or_what_is_got_of_pcie(name: str) -> None:
    link, printed = known(name).link_gb_s, SHEETS[name][5]
    if printed > 5:
        assert link == printed / 2
    elif printed >= 1:  # 8, 16 or 32 GT/s of 128 bits in 130, on 16 lanes
        assert 0.7 < link / (2**printed * 16 / 8 * 128 / 130) < 0.9
    else:  # to the host and back, through memory that all share
        assert 0.2 < link / (2 ** round(10 * printed) * 16 / 8 * 128 / 130) < 0.4


def test_v100_and_t4_have_no_bfloat16_units_and_all_others_do() -> None:
    assert {card.key for card in CARDS if card.peak("bfloat16") is None} == {
        "v100-32gb-sxm",
        "v100-16gb-sxm",
        "v100-32gb-pcie",
        "v100-16gb-pcie",
        "v100s-32gb-pcie",
        "t4",
    }
    assert known("Tesla T4").peak("float32") == 8.1
    assert {card.peak(dtype) for card in CARDS for dtype in ("float16", "tf32", "")} == {None}


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA",
        "Tesla V100",
        "Tesla V100-SXM3-32GB",
        "Tesla V100-DGXS-32GB",
        "Tesla V100-FHHL-16GB",
        "NVIDIA T4G",
        "Tesla P100-PCIE-16GB",
        "AMD Instinct MI300X",
        "NVIDIA A2",
        "NVIDIA A16",
        "NVIDIA L2",
        "NVIDIA L20",
        "NVIDIA H20-3e",
        "NVIDIA B100",
        "NVIDIA GB10",
        "NVIDIA H100",
        "NVIDIA A10M",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA RTX A500",
        "NVIDIA RTX A5500",
        "NVIDIA RTX A4000",
        "Quadro RTX 6000",
        "NVIDIA RTX 4000 Ada Generation",
        "NVIDIA RTX 6000D",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX A5000 Laptop GPU",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 3070 Ti",
        "NVIDIA GeForce RTX 3070 Laptop GPU",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 4080 with Max-Q Design",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 D v2",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "GRID A100-10C",
        "GRID V100D-32Q",
        "NVIDIA A40-48Q",
    ],
)
def test_another_device_is_never_taken_for_a_card_of_the_table(name: str) -> None:
    assert card_of(name) is None


@pytest.mark.parametrize("name", SHEETS)
def test_no_name_fits_two_rows(name: str) -> None:
    assert (
        len([card for card in CARDS if re.fullmatch(card.names, name.removeprefix("NVIDIA "))]) == 1
    )


def test_every_row_has_a_source_a_key_of_its_own_and_a_device_in_these_tests() -> None:
    kind = re.compile("data sheet|white paper|specification")
    assert [card.key for card in CARDS if not kind.search(card.source)] == []
    assert len({card.key for card in CARDS}) == len(CARDS)
    assert {card.key for card in CARDS} == {known(name).key for name in SHEETS}
    assert [
        card.key for card in CARDS if not re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", card.key)
    ] == []


def test_a_card_is_found_by_its_key() -> None:
    assert all(card_called(card.key) is card for card in CARDS)
    assert [card_called(key) for key in ("", "a100", "A100-80GB-SXM", "h100-sxm ")] == [None] * 4
