"""hardware/gpus.toml against figures that were written down a second time (data_sheets.csv).

name          torch's name
bf16          as printed; "sparse": with sparsity, which doubles it
fp32          cores x clock in GHz, at two operations a cycle; else as printed
memory_gb     as sold
link          NVLink in GB/s, both ways; else the generation of PCIe, or of PCIe through the host
seen_mib      total_memory as torch printed it on one machine
"""

import csv
import re
from pathlib import Path

import pytest

from hardware.gpu_specs import find_gpu, load_gpu_specs

with open(Path(__file__).with_name("data_sheets.csv"), newline="") as file:
    SHEETS = list(csv.DictReader(file))
each_sheet = pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet["name"])


@each_sheet
def test_a_gpu_is_as_fast_as_its_data_sheet_says(sheet):
    spec = find_gpu(sheet["name"])
    assert spec and spec.key == sheet["key"] and spec.watts == float(sheet["watts"])
    bf16, sparse, _ = sheet["bf16"].partition(" sparse")
    expected = None
    if sparse:
        expected = pytest.approx(float(bf16) / 2, rel=1e-3)
    elif bf16:
        expected = pytest.approx(float(bf16), rel=1e-3)
    assert spec.peak("bfloat16") == expected
    first, _, clock_ghz = sheet["fp32"].partition(" x ")
    fp32 = float(first)
    if clock_ghz:
        fp32 *= 2e-3 * float(clock_ghz)
    assert spec.peak("float32") == pytest.approx(fp32, rel=0.01)
    bandwidth = float(sheet["bandwidth_gb_s"])
    assert spec.bandwidth_gb_s == pytest.approx(bandwidth, rel=0.01)
    assert spec.peak("float16") is None


@each_sheet
def test_a_gpu_has_a_little_less_memory_than_it_is_sold_as(sheet):
    spec = find_gpu(sheet["name"])
    sold = float(sheet["memory_gb"])
    # ECC takes 1/16 of GDDR6, and data sheets count in GB what is GiB elsewhere.
    assert spec and 0.9 * sold <= spec.memory_gib < sold
    if sheet["seen_mib"]:
        seen_gib = float(sheet["seen_mib"]) / 1024
        assert 0.985 * seen_gib <= spec.memory_gib <= seen_gib


@each_sheet
def test_a_link_is_half_of_nvlink_or_what_pcie_achieves(sheet):
    spec = find_gpu(sheet["name"])
    kind, number = sheet["link"].split()
    assert spec
    if kind == "NVLink":
        assert spec.link_gb_s == float(number) / 2
        return
    raw_gb_s = 2 ** int(number) * 16 / 8 * 128 / 130  # 16 lanes, 128 bits in 130
    low, high = {"PCIe": (0.7, 0.9), "host": (0.2, 0.4)}[kind]
    assert low < spec.link_gb_s / raw_gb_s < high


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA",
        "NVIDIA H100",
        "NVIDIA H20-3e",
        "NVIDIA RTX A500",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "AMD Instinct MI300X",
        "nvidia l4",
    ],
)
def test_another_device_is_never_taken_for_a_gpu_of_the_table(name):
    assert find_gpu(name) is None


def test_every_gpu_has_a_source_names_of_its_own_and_a_data_sheet_here():
    specs = load_gpu_specs()
    names = [name for spec in specs.values() for name in spec.names]
    assert len({*names}) == len(names)
    assert {*names} == {sheet["name"].removeprefix("NVIDIA ") for sheet in SHEETS}
    for key, spec in specs.items():
        assert spec.key == key and re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", key)
        assert re.search("data sheet|white paper|specification", spec.source)
