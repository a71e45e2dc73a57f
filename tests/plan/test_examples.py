"""docs/plans.md: it is what plan/examples/examples.py prints, and its key figures are those of hand-worked numbers."""

import re
from pathlib import Path

import pytest

from hardware.gpu_specs import load_gpu_specs
from plan.examples import examples, lab
from settings import ROOT

PAGE = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
XLARGE = 1_336_248_320
FLOPS = 9_224_847_360  # of a token of xlarge
D16 = 16 * (4 * 1024**2 + 3 * 1024 * 2752) + 2 * 65_536 * 1024 + 16 * (2 * 1024 + 2 * 128) + 1024


def cells(first: str) -> list[str]:
    """The row of a table whose first cell begins so."""
    found = [line for line in PAGE.splitlines() if line.startswith(f"| {first}")]
    assert len(found) == 1, first
    return [cell.strip() for cell in found[0].strip("| ").split(" | ")]


def prose() -> str:
    return re.sub(r"\s+", " ", PAGE)


def test_the_page_is_what_is_computed_now() -> None:
    assert examples.page() == PAGE, (
        "write it again: python -m plan.examples.examples > docs/plans.md"
    )


def test_no_line_but_those_of_tables_is_wider_than_a_page() -> None:
    assert [
        line for line in PAGE.splitlines() if len(line) > 120 and not line.startswith("|")
    ] == []


def test_it_names_no_folder_of_a_machine() -> None:
    assert str(ROOT) not in PAGE and str(Path.home()) not in PAGE and "no-runs" not in PAGE


# ---- 1. Eight A100


def test_what_a_chip_does() -> None:
    """312 TFLOP/s by 9.2248 GFLOP are 33,822 tokens/s; eight at half are 135,287, and 10^11 of them 205.3 hours."""
    peak = 312e12 / FLOPS
    assert round(peak) == 33_822 and round(150_000 / peak, 1) == 4.4
    assert (
        cells("one A100")[1]
        == "34k at 100% MFU, 17k at 50%: the claim is 4.4 times the chip's peak"
    )
    assert round(1e11 / (4 * peak) / 3600) == 205 and round(1e11 / (8 * peak) / 3600) == 103
    assert cells("eight: ")[1] == "271k at 100% MFU (103 hours), 135k at 50% (205 hours)"
    assert [round(claim / (8 * peak), 1) for claim in (400_000, 1_200_000, 500_000)] == [
        1.5,
        4.4,
        1.8,
    ]
    assert cells("later")[1].startswith("1.5 times") and cells("with InfiniBand")[1].startswith(
        "4.4 times"
    )
    assert cells("worst case")[1] == "1.8 times the peak" and "gets past 271k" in cells("rule")[1]
    assert f"{4 * peak * 48 * 3600 / 1e9:.1f}B" == "23.4B" and cells("two days")[1].startswith(
        "23.4B tokens"
    )


def test_what_a_synchronization_takes() -> None:
    """Six hops of a quarter of 5.34 GB, 8 bits at 1 Gbit/s, and 15 ms each: 64.2 s; 3.88 s of computing beside it."""
    whole = 6 * (XLARGE * 8 / 1e9 + 0.015)
    assert round(whole) == 64 and round(6 * (XLARGE / 2 * 8 / 1e9 + 0.015)) == 32
    assert (
        "8.02 GB, 64 s; of bfloat16 32 s" in cells("a synchronization")[1]
        and round(6 * XLARGE / 1e9, 2) == 8.02
    )
    computing = 524_288 / (4 * 312e12 / FLOPS)
    fast = 6 * (XLARGE * 8 / 1e10 + 0.015)
    assert (
        cells("steps of")[1]
        == f"{computing + whole:.0f} s at 1 Gbit/s, {computing + fast:.0f} s at 10, of which "
        f"{computing:.1f} s are computing"
    )
    assert [round(100 * computing / (computing + wait)) for wait in (whole, fast)] == [6, 37]
    assert cells("over the WAN")[1].startswith(
        "6% with 1 Gbit/s between the sites (8k), 37% with 10 (51k)"
    )
    assert f"{12 * XLARGE / 1e9:.1f} {16 * XLARGE / 1e9:.1f}" == "16.0 21.4"
    assert "moments alone are 16 GB, with gradients 21.4 GB" in cells("measured: 17.3 GB")[1]


@pytest.mark.parametrize(
    ("where", "gpus", "gbit", "hours"),
    [
        ("4 sites x 2, DDP, 1 Gbit/s", 8, 1, "3,608"),
        ("4 sites x 2, DDP, 10 Gbit/s", 8, 10, "550"),
        ("one node of 8", 8, None, "205"),
        ("one node of 4", 4, None, "411"),
    ],
)
def test_the_alternatives(where: str, gpus: int, gbit: int | None, hours: str) -> None:
    """A step computes for 3.88 s on eight and 7.75 s on four, and waits for 64.2 or 6.5 s."""
    found = cells(f"{where} |")
    wait = 6 * (XLARGE * 8 / (gbit * 1e9) + 0.015) if gbit else 0
    rate = 524_288 / (524_288 / (gpus / 2 * 312e12 / FLOPS) + wait)
    assert found[1:4] == [
        f"{rate / 1000:.0f}k",
        f"{1e11 / rate / 3600:,.0f}",
        f"{rate * 48 * 3600 / 1e9:.3g}B",
    ]
    assert found[2] == hours


def test_a_mixed_fleet_runs_at_its_slowest() -> None:
    """8 x 154.8 TFLOP/s, 40% less 4% for what is computed anew; 8 x 15.7 in float32, 40% of three quarters."""
    assert (
        cells("one node: 4 A100 and 4 A6000")[1]
        == f"{8 * 154.8e12 * 0.4 * 0.96 / FLOPS / 1000:.0f}k"
        == "52k"
    )
    assert (
        cells("one node: 4 A100, 2 A6000")[1]
        == f"{8 * 15.7e12 * 0.4 * 0.75 / FLOPS / 1000:.0f}k"
        == "4k"
    )
    assert "eight have 1,238 TFLOP/s, and the four A100 alone 1,248" in prose()


def test_what_is_said_of_it() -> None:
    assert (
        "compute-optimal 26.7B tokens take 55 hours" in prose()
        and round(20 * XLARGE / 1e9, 1) == 26.7
    )
    assert round(20 * XLARGE / (4 * 312e12 / FLOPS) / 3600) == 55
    assert "may wait 205 hours for eight" in prose()
    # 0.0376 s of what two GPUs of a site fetch, and 32.16 s of exchange in 30 or 100 steps of 3.875 s
    assert (
        "DDP computes for 6% of its time at 1 Gbit/s; SYNC=diloco makes that 78% with SYNC_EVERY=30 and 91% with "
        "100, at a loss" in prose()
    )
    assert "215% of its peak of 312" in prose()
    assert (
        "plan of xlarge-8xa100 on 8 x a100-80gb-sxm on 4 nodes at 4 sites: computed, not measured\n"
        in PAGE
    )


# ---- 2. Two H100


def test_what_depths_have() -> None:
    assert f"{D16:,}" == "336,630,784" == cells("d16 | 336")[1]
    assert [cells(f"d{n} | {size}")[1] for n, size in ((20, 564), (24, 880), (32, "1,887"))] == [
        "564,322,560",
        "880,885,248",
        "1,887,578,112",
    ]


def test_where_the_470m_are_from() -> None:
    """Two tables of 65,536 x 1,024 more; from there by the square of the depth. d24's blocks are 24 x 12 x 1,536^2."""
    assert D16 + 2 * 65_536 * 1024 == 470_848_512
    assert [round(470 * (n / 16) ** 2) for n in (20, 24, 32)] == [734, 1058, 1880]
    assert "counted twice (471M)" in prose()
    assert "734M for d20 (738M), 1.06B for d24 (1.06B), 1.88B for d32 (1.9B)" in prose()
    assert 24 * 12 * 1536**2 + 2 * 65_536 * 1536 == 880_803_840 == 880_885_248 - 81_408
    assert 24 * (2 * 1536 + 2 * 128) + 1536 == 81_408
    assert "880,803,840; the 880,885,248 here are that and 81,408 in norms" in prose()


def test_what_was_measured() -> None:
    """The lab's blocks are 12 d^2 each: 6 x (201.3M + 67.1M) + 12 x 16 x 1,024 x 2,048 FLOP a token."""
    theirs = 6 * (16 * 12 * 1024**2 + 65_536 * 1024) + 12 * 16 * 1024 * 2048
    assert round(100 * 430_600 * theirs / (2 * 989e12), 1) == 43.8
    assert round(100 * 430_600 * 2_019_557_376 / (2 * 989e12), 1) == 44.0
    assert f"{0.438 * 2 * 989e12 / 2_019_557_376:,.0f}" == "428,987"
    assert cells("d16 | 430,600")[1:] == ["430,600", "43.8%", "43.8%", "44.0%", "428,987", "1.22 s"]
    deep = 6 * (24 * 12 * 1536**2 + 65_536 * 1536) + 12 * 24 * 1536 * 2048
    assert round(100 * 178_000 * deep / (2 * 989e12), 1) == 50.3
    assert cells("d24 | 178,000")[1:5] == ["178,000", "50.3%", "50.3%", "50.3%"]


def test_hours_and_memory_of_the_depths() -> None:
    assert (
        f"{33_600 * 2.94 / 3600:.1f}" == "27.4" and "33,600 steps of 2.94 s, 27.4 hours" in prose()
    )
    assert cells("d16 | 336")[5] == f"{6_710_886_400 / 428_987 / 3600:.1f}" == "4.3"
    assert f"{7.7 / 4.3:.1f}" == "1.8" and "their estimate grew 1.8 times" in prose()
    assert "Computed: weights 1.3, gradients 1.3 (four bytes), moments 1.9 " in prose()
    assert (round(4 * D16 / 1e9, 1), round((8 * D16 - 4 * 202_375_168) / 1e9, 1)) == (1.3, 1.9)
    assert (
        "8 x 2,048 x 65,536 in float32 are 4.3 GB" in prose()
        and round(8 * 2048 * 65_536 * 4 / 1e9, 1) == 4.3
    )


# ---- 3. Sixteen H200


def test_what_crosses_between_two_nodes() -> None:
    """108B weights of two bytes; half of them in each pass at 63 Gbit/s: 13.7 s, and 27.4 of 85 s for both."""
    once = 108e9 * 8 / 63e9
    assert cells("measured: 30, then 63")[1].endswith(
        f"at 63 Gbit/s {once:.0f} s a pass, {2 * once:.0f} s for forward and backward"
    )
    assert "216 GB, 13.5 GB a GPU" in cells("measured: 138.2")[1] and 2 * 108 / 16 == 13.5
    assert (round(500 * 85 / 3600, 1), round(100 * 2 * once / 85)) == (11.8, 32)
    assert "11.8 hours; fetching at 63 Gbit/s is 32%" in cells("80 to 90 s")[1]
    assert "10.1 GB in bfloat16, 1.3 s at 63 Gbit/s" in cells("measured: a checkpoint")[1]
    assert (round(2 * 5_032_216_576 / 1e9, 1), round(16 * 5_032_216_576 / 63e9, 1)) == (10.1, 1.3)


def test_what_the_sixteen_do_here() -> None:
    """42% of 16 x 989 TFLOP/s compute 720k tokens/s; all-reducing 5.34 GB between two nodes is two hops of half."""
    computing = 524_288 / (0.42 * 16 * 989e12 / FLOPS)
    for gbit, hours in ((63, "74.5"), (400, "44.2")):
        step = computing + 2 * XLARGE * 4 / 2 * 8 / (gbit * 1e9)
        assert f"{190_735 * step / 3600:.1f}" == hours == cells(f"xlarge-8xa100 | {gbit} |")[4]
    assert "what would meet the two days" in prose() and 44.2 < 48 < 74.5


# ---- 4. Fine-tuning


def test_glm_on_sixteen_by_hand() -> None:
    """106.85B of two bytes over 8 GPUs are 24.9 GiB; 4 a frozen weight that a token passes, and attention's 12 L d T;
    42% of 16 x 989 TFLOP/s, of which computing forward anew takes some."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith("hsdp * "))
    assert row.split()[3] == f"{2 * 106_852_245_504 / 8 / 2**30:.1f}" == "24.9"
    attention = 12 * 46 * 96 * 128 * 4096
    work = 4 * 12_802_326_528 + 6 * 44_264_448 + attention
    again = work + 2 * (12_802_326_528 + 44_264_448) + attention / 3
    rate = 0.42 * 16 * 989e12 / again
    assert f"{work / 1e9:.1f} GFLOP a token" in PAGE
    assert f"{float(f'{rate:.3g}'):,.0f} tokens/s, {262_144 / rate:.1f} s a step" in PAGE
    assert (
        "HSDP, 8 a copy *               177 MB" in PAGE and f"{4 * 44_264_448 / 1e6:.0f}" == "177"
    )


# ---- The rest


def test_all_cards_are_there() -> None:
    assert [
        card.key for card in load_gpu_specs().values() if f"\n| {card.key} | " not in PAGE
    ] == []
    assert cells("v100-32gb-sxm |")[1:6] == ["none", "15.7", "31.7", "900", "150"]


def test_paragraphs_are_filled_and_all_else_is_left() -> None:
    text = "# Head\nsome words\nand more\n\n| a | b |\n```\ncode  as\nit is\n```\nend\n"
    assert (
        examples.filled(text)
        == "# Head\nsome words and more\n\n| a | b |\n```\ncode  as\nit is\n```\nend\n"
    )


def test_markdown_rows() -> None:
    assert lab.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert [lab.rate(value) for value in (7698, 135_287, 999_400, 1_082_000)] == [
        "8k",
        "135k",
        "999k",
        "1.08M",
    ]
