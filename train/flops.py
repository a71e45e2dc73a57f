"""FLOPs of a training step, and what a device could do in its time. Standard library only.

Model FLOPs per token, forward and backward (Kaplan et al. 2020, 2.1; PaLM 2022, appendix B):

    6 N           each matmul weight: a multiply and an add forward, twice that backward
    12 L d T      attention's two products, Q K^T and A V, over all T positions: 2 * 2 d T forward, twice
                  that backward, in each of L layers; d = heads * head_dim

N counts matmul weights: the head once, the embedding table never (it is read, not multiplied), no norms.
The causal count takes half the second term, since half the positions are masked. Recomputation is not counted.
"""

import re

# Dense bfloat16 peak in TFLOP/s with sums in float32, the devices as torch.cuda.get_device_name prints them without
# the "NVIDIA " in front, and the source, NVIDIA's where it names no other. Data sheets that give the peak with
# sparsity give twice this. The whole name must fit: a laptop's card, a Ti, a SUPER, a slice of a card (MIG) is
# another device. One that is not here has an unknown peak, and its MFU is n/a: GeForce RTX 3080, for one, is the
# name of two cards.
BF16_PEAK_TFLOPS = (
    (2500.0, r"GB200", "GB200 NVL72 data sheet, a GPU's own figures: 5 PFLOPS with sparsity"),
    (2250.0, r"B200", "HGX B200 data sheet: 4.5 PFLOPS with sparsity"),
    (989.0, r"H100 80GB HBM3", "H100 Tensor Core GPU data sheet, H100 SXM"),
    (989.0, r"H200", "H200 Tensor Core GPU data sheet, H200 SXM"),
    (989.0, r"GH200 (120GB|480GB|144G HBM3e)", "GH200 Grace Hopper Superchip data sheet"),
    (989.0, r"H800", "H100 Tensor Core GPU data sheet, H100 SXM: the H800 has less NVLink and FP64, all else the same"),
    (835.0, r"H100 NVL", "H100 Tensor Core GPU data sheet, H100 NVL"),
    (835.0, r"H200 NVL", "H200 Tensor Core GPU data sheet, H200 NVL"),
    (756.0, r"H[18]00 PCIe", "H100 Tensor Core GPU data sheet, H100 PCIe; for the H800 see above"),
    (364.2, r"RTX 6000 Ada Generation", "RTX 6000 Ada Generation data sheet: 1457 TFLOPS of FP8 with sparsity, / 4"),
    (362.0, r"L40S", "L40S data sheet"),
    (312.0, r"A100-SXM4-[48]0GB|A100-PCI[eE]-40GB|A100 80GB PCIe", "A100 Tensor Core GPU data sheet"),
    (312.0, r"A800-SXM4-80GB|A800 80GB PCIe", "A100 Tensor Core GPU data sheet: the A800 has less NVLink, all else "
                                              "the same"),
    (209.5, r"GeForce RTX 5090", "RTX Blackwell GPU Architecture white paper"),
    (181.0, r"L40", "L40 data sheet"),
    (165.2, r"GeForce RTX 4090", "Ada GPU Architecture white paper"),
    (165.0, r"A30", "A30 Tensor Core GPU data sheet"),
    (154.8, r"RTX A6000", "Ampere GA102 GPU Architecture white paper, appendix C"),
    (149.7, r"A40", "A40 data sheet"),
    (148.0, r"H20", "HGX H20 specification, not NVIDIA's own print: as SemiAnalysis published it in 2023"),
    (125.0, r"A10", "A10 Tensor Core GPU data sheet"),
    (121.0, r"L4", "L4 Tensor Core GPU data sheet: 242 TFLOPS with sparsity"),
    (111.1, r"RTX A5000", "RTX A5000 data sheet: 222.2 TFLOPS with sparsity"),
    (97.5, r"GeForce RTX 4080", "Ada GPU Architecture white paper"),
    (71.0, r"GeForce RTX 3090", "Ampere GA102 GPU Architecture white paper"),
    (70.0, r"A10G", "A10G data sheet for AWS, 2022"),
    (40.6, r"GeForce RTX 3070", "Ampere GA102 GPU Architecture white paper, appendix A"),
)


def flops_per_token(matmul_weights: int, n_layer: int, attention_width: int, seq_len: int,
                    causal: bool = False) -> float:
    """FLOPs of forward and backward for one token; attention_width is n_head * head_dim."""
    return 6.0 * matmul_weights + (6.0 if causal else 12.0) * n_layer * attention_width * seq_len


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak of one device in TFLOP/s, or None where it is not known (CPUs, float32, cards not in the table)."""
    if dtype != "bfloat16":
        return None
    name = device_name.removeprefix("NVIDIA ")
    return next((peak for peak, names, _ in BF16_PEAK_TFLOPS if re.fullmatch(names, name)), None)


def mfu(tokens_per_s: float, flops: float, devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation in per cent of the peak (TFLOP/s) of all devices, or None where that is unknown."""
    return None if peak is None else 100.0 * tokens_per_s * flops / (devices * peak * 1e12)
