"""Data sheets of GPUs: compute, memory, links and power. Standard library only.

A card is known by the name that torch.cuda.get_device_name gives, without "NVIDIA " in front. The whole name must fit
one row, since a laptop GPU, a Ti, a SUPER or a slice (MIG) is another device. A card that is not here is unknown, and
nothing is guessed about it: GeForce RTX 3080, for example, is the name of two cards.

Figures are NVIDIA's, from the source that the row names, except:

    bfloat16     dense, with sums in float32: sheets that print the peak with sparsity print twice this
    float32      outside of tensor cores, as the trainer computes it (TF32 is off)
    memory       torch's total_memory as printed in public, the least of several drivers, rounded down, with ECC where
                 the card is delivered with it. H200 NVL, H800 and A800 have that of the card with the same memory, L40
                 that of L40S; GH200 with 96 GB, A30 and A10 are estimates
    link         what a card sends to the others of its machine at once, one way. NVLink: half of the printed figure,
                 which counts both ways; NCCL gets about 80% of it (NVIDIA/nccl-tests issue 212). Bridges that join two
                 cards only, and are sold separately, are not counted. PCIe: what is measured, the constants below
    watts        the limit as delivered; some data sheets allow less
"""

import re
from dataclasses import dataclass

# GB/s one way through 16 lanes. Generation 4 as NCCL itself assumes, 3 half of that; 5 was measured at 51 to 57 between
# cards of one processor.
PCIE3 = 12.0
PCIE4 = 24.0
PCIE5 = 50.0
# The driver gives GeForce no peer access over PCIe, so everything passes through the host's memory. An estimate: NCCL
# assumes 10 where it does so between processors. A10G likewise, as clouds rent it.
BY_HOST4 = 10.0
BY_HOST5 = 20.0

A100 = "A100 Tensor Core GPU data sheet"
H100 = "H100 Tensor Core GPU data sheet"
H200 = "H200 Tensor Core GPU data sheet"
V100 = "V100 Tensor Core GPU data sheet, 2020"
GH200 = "GH200 Grace Hopper Superchip data sheet; watts with its processor"
GA102 = "Ampere GA102 GPU Architecture white paper"
ADA = "Ada GPU Architecture white paper"


@dataclass(frozen=True)
class Card:
    """A GPU; see the top of this file.

    Attributes:
        key: as the setting CARDS has it.
        names: a pattern that torch's name fits.
        bf16_tflops: dense TFLOP/s, None without bfloat16 units; fp32_tflops likewise.
        memory_gib: in GiB.
        bandwidth_gb_s: of the memory, in GB/s (10^9 bytes); link_gb_s likewise, to the other cards.
        watts: power limit.
    """

    key: str
    names: str
    bf16_tflops: float | None
    fp32_tflops: float
    memory_gib: float
    bandwidth_gb_s: float
    link_gb_s: float
    watts: float
    source: str

    def peak(self, dtype: str) -> float | None:
        """Return the TFLOP/s of products of this type, or None where the card has no units for it."""
        return {"bfloat16": self.bf16_tflops, "float32": self.fp32_tflops}.get(dtype)


CARDS = (
    Card(
        "gb200",
        r"GB200",
        2500.0,
        80.0,
        184.3,
        8000,
        900,
        1200,
        "GB200 NVL72 data sheet, a GPU's own figures",
    ),
    Card(
        "b200",
        r"B200",
        2250.0,
        75.0,
        178.3,
        7700,
        900,
        1000,
        "HGX B200 data sheet, an eighth of 8 GPUs'",
    ),
    Card("gh200-144gb", r"GH200 144G HBM3e", 989.0, 67.0, 142.4, 4900, 450, 1000, GH200),
    Card("gh200-96gb", r"GH200 (120GB|480GB)", 989.0, 67.0, 94.5, 4000, 450, 1000, GH200),
    Card("h200", r"H200", 989.0, 67.0, 139.8, 4800, 450, 700, f"{H200}, H200 SXM"),
    Card(
        "h200-nvl",
        r"H200 NVL",
        835.0,
        60.0,
        139.8,
        4800,
        450,
        600,
        f"{H200}, H200 NVL, sold with its bridges",
    ),
    Card("h100-sxm", r"H100 80GB HBM3", 989.0, 67.0, 79.1, 3350, 450, 700, f"{H100}, H100 SXM"),
    Card(
        "h100-nvl",
        r"H100 NVL",
        835.0,
        60.0,
        93.0,
        3900,
        300,
        400,
        f"{H100}, H100 NVL, sold with its bridges",
    ),
    Card(
        "h100-pcie", r"H100 PCIe", 756.0, 51.0, 79.1, 2000, PCIE5, 350, f"{H100}, 2022, H100 PCIe"
    ),
    Card(
        "h800-sxm",
        r"H800",
        989.0,
        67.0,
        79.1,
        3350,
        200,
        700,
        f"{H100}: the H800 has less NVLink and FP64, all else the same",
    ),
    Card(
        "h800-pcie",
        r"H800 PCIe",
        756.0,
        51.0,
        79.1,
        2000,
        PCIE5,
        350,
        f"{H100}, 2022, H100 PCIe; for the H800 see above",
    ),
    Card(
        "h20",
        r"H20",
        148.0,
        44.0,
        95.0,
        4000,
        450,
        500,
        "HGX H20 specification, not NVIDIA's own print: as "
        "SemiAnalysis published it in 2023; watts by nvidia-smi",
    ),
    Card("a100-80gb-sxm", r"A100-SXM4-80GB", 312.0, 19.5, 79.1, 2039, 300, 400, A100),
    Card("a100-80gb-pcie", r"A100 80GB PCIe", 312.0, 19.5, 79.1, 1935, PCIE4, 300, A100),
    Card("a100-40gb-sxm", r"A100-SXM4-40GB", 312.0, 19.5, 39.3, 1555, 300, 400, A100),
    Card("a100-40gb-pcie", r"A100-PCI[eE]-40GB", 312.0, 19.5, 39.3, 1555, PCIE4, 250, A100),
    Card(
        "a800-80gb-sxm",
        r"A800-SXM4-80GB",
        312.0,
        19.5,
        79.1,
        2039,
        200,
        400,
        f"{A100}: the A800 has less NVLink, all else the same",
    ),
    Card(
        "a800-80gb-pcie",
        r"A800 80GB PCIe",
        312.0,
        19.5,
        79.1,
        1935,
        PCIE4,
        300,
        f"{A100}; for the A800 see above",
    ),
    Card("a40", r"A40", 149.7, 37.4, 44.3, 696, PCIE4, 300, "A40 data sheet"),
    Card("a30", r"A30", 165.0, 10.3, 23.5, 933, PCIE4, 165, "A30 Tensor Core GPU data sheet"),
    Card("a10", r"A10", 125.0, 31.2, 22.0, 600, PCIE4, 150, "A10 Tensor Core GPU data sheet"),
    Card("a10g", r"A10G", 70.0, 35.0, 22.0, 600, BY_HOST4, 300, "A10G data sheet for AWS, 2022"),
    Card("a6000", r"RTX A6000", 154.8, 38.7, 47.4, 768, PCIE4, 300, f"{GA102}, appendix C"),
    Card("a5000", r"RTX A5000", 111.1, 27.8, 23.5, 768, PCIE4, 230, "RTX A5000 data sheet"),
    Card(
        "rtx6000-ada",
        r"RTX 6000 Ada Generation",
        364.2,
        91.1,
        47.4,
        960,
        PCIE4,
        300,
        "RTX 6000 Ada Generation data sheet: 1457 TFLOPS of FP8 with sparsity, / 4",
    ),
    Card("l40s", r"L40S", 362.0, 91.6, 44.4, 864, PCIE4, 350, "L40S data sheet"),
    Card("l40", r"L40", 181.0, 90.5, 44.4, 864, PCIE4, 300, "L40 data sheet"),
    Card(
        "l4",
        r"L4",
        121.0,
        30.3,
        22.0,
        300,
        PCIE4,
        72,
        "L4 Tensor Core GPU data sheet: 242 TFLOPS with sparsity",
    ),
    Card(
        "rtx5090",
        r"GeForce RTX 5090",
        209.5,
        104.8,
        31.3,
        1792,
        BY_HOST5,
        575,
        "RTX Blackwell GPU Architecture white paper",
    ),
    Card("rtx4090", r"GeForce RTX 4090", 165.2, 82.6, 23.5, 1008, BY_HOST4, 450, ADA),
    Card("rtx4080", r"GeForce RTX 4080", 97.5, 48.7, 15.6, 716.8, BY_HOST4, 320, ADA),
    Card("rtx3090", r"GeForce RTX 3090", 71.0, 35.6, 23.5, 936, BY_HOST4, 350, GA102),
    Card(
        "rtx3070", r"GeForce RTX 3070", 40.6, 20.3, 7.6, 448, BY_HOST4, 220, f"{GA102}, appendix A"
    ),
    Card("v100-32gb-sxm", r"Tesla V100-SXM2-32GB", None, 15.7, 31.7, 900, 150, 300, V100),
    Card("v100-16gb-sxm", r"Tesla V100-SXM2-16GB", None, 15.7, 15.7, 900, 150, 300, V100),
    Card("v100-32gb-pcie", r"Tesla V100-PCIE-32GB", None, 14.0, 31.7, 900, PCIE3, 250, V100),
    Card("v100-16gb-pcie", r"Tesla V100-PCIE-16GB", None, 14.0, 15.7, 900, PCIE3, 250, V100),
    Card("v100s-32gb-pcie", r"Tesla V100S-PCIE-32GB", None, 16.4, 31.7, 1134, PCIE3, 250, V100),
    Card(
        "t4",
        r"Tesla T4",
        None,
        8.1,
        14.5,
        320,
        PCIE3,
        70,
        "T4 Tensor Core GPU data sheet; Turing GPU Architecture "
        "white paper, appendix B, for its memory",
    ),
)


def card_of(device_name: str) -> Card | None:
    """Return the card that torch calls so, or None."""
    name = device_name.removeprefix("NVIDIA ")
    return next((card for card in CARDS if re.fullmatch(card.names, name)), None)


def card_called(key: str) -> Card | None:
    """Return the card with this key, or None."""
    return next((card for card in CARDS if card.key == key), None)
