"""DTYPE=auto: which precision a machine gets, and that a run keeps it."""

from pathlib import Path

import pytest

from settings import precision
from settings.config import Config
from settings.precision import choose_dtype, read_cpu_flags

FLAGS = "processor\t: 0\nflags\t\t: fpu avx2 {}\nbugs\t: x\n\nprocessor\t: 1\nflags\t: fpu\n"


def test_the_flags_of_the_first_processor_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(FLAGS.format("avx512_bf16"))
    assert read_cpu_flags(path) == {"fpu", "avx2", "avx512_bf16"}
    path.write_text("processor : 0\nFeatures : fp asimd\n")
    assert read_cpu_flags(path) is None
    assert read_cpu_flags(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("device", "gpu", "visible", "flags", "dtype"),
    [
        ("cpu", "", "0", {"avx2"}, "float32"),
        ("auto", "", "0", None, "float32"),
        ("cpu", "", "0", {"amx_bf16"}, "bfloat16"),
        ("auto", "", "0", {"avx512_bf16"}, "bfloat16"),
        ("auto", "NVIDIA GeForce RTX 4090", "0", {"avx2"}, "bfloat16"),
        ("cuda", "NVIDIA GeForce RTX 4090", "0", {"avx2"}, "bfloat16"),
        ("cpu", "NVIDIA GeForce RTX 4090", "0", {"avx2"}, "float32"),
        ("auto", "NVIDIA GeForce RTX 4090", "", {"avx2"}, "float32"),
        ("auto", "NVIDIA GeForce RTX 4090", "-1", {"avx2"}, "float32"),
        ("auto", "NVIDIA H100 80GB HBM3", "0,1", {"avx2"}, "bfloat16"),
        ("auto", "NVIDIA A100-PCIE-40GB", "0", {"avx2"}, "bfloat16"),
        ("auto", "NVIDIA RTX A6000", "0", {"avx2"}, "bfloat16"),
        ("auto", "NVIDIA L4", "0", {"avx2"}, "bfloat16"),
        ("auto", "NVIDIA RTX 2000 Ada Generation", "0", {"avx2"}, "bfloat16"),
        ("auto", "NVIDIA GeForce MX150", "0", {"avx2"}, "float32"),
        ("auto", "NVIDIA GeForce GT 1030", "0", {"avx2"}, "float32"),
        ("auto", "Tesla T4", "0", {"avx512_bf16"}, "float32"),
        ("auto", "Tesla V100-SXM2-32GB", "0", {"avx2"}, "float32"),
        ("auto", "Tesla P40", "0", {"avx2"}, "float32"),
        ("auto", "NVIDIA GeForce RTX 2080 Ti", "0", {"avx2"}, "float32"),
        ("auto", "NVIDIA GeForce GTX 1080", "0", {"avx2"}, "float32"),
        ("auto", "Quadro RTX 8000", "0", {"avx2"}, "float32"),
    ],
)
def test_bfloat16_is_chosen_where_what_computes_has_units_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    gpu: str,
    visible: str,
    flags: set[str] | None,
    dtype: str,
) -> None:
    node = tmp_path / "nvidiactl"
    if gpu:
        node.touch()
        (tmp_path / "0000:01:00.0").mkdir()
        text = f"Model: \t\t {gpu}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-T4-V100\n"
        (tmp_path / "0000:01:00.0" / "information").write_text(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(precision, "GPU_NODES", (node,))
    monkeypatch.setattr(precision, "GPU_FILES", tmp_path)
    monkeypatch.setattr(precision, "read_cpu_flags", lambda: flags)
    monkeypatch.setattr("settings.config.choose_dtype", choose_dtype)
    config = Config.of_preset(DTYPE="auto", DEVICE=device)
    assert config.dtype == dtype
    assert config.stored()["DTYPE"] == dtype  # what a run keeps, wherever it is resumed
