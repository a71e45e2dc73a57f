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
    ("flags", "device", "gpu", "dtype"),
    [
        ({"avx2"}, "cpu", False, "float32"),
        (None, "auto", False, "float32"),
        ({"amx_bf16"}, "cpu", False, "bfloat16"),
        ({"avx512_bf16"}, "auto", False, "bfloat16"),
        ({"avx2"}, "auto", True, "bfloat16"),
        ({"avx2"}, "cuda", True, "bfloat16"),
        ({"avx2"}, "cpu", True, "float32"),
    ],
)
def test_bfloat16_is_chosen_where_something_has_units_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: set[str] | None,
    device: str,
    gpu: bool,
    dtype: str,
) -> None:
    node = tmp_path / "nvidiactl"
    if gpu:
        node.touch()
    monkeypatch.setattr(precision, "GPU_NODES", (node,))
    monkeypatch.setattr(precision, "read_cpu_flags", lambda: flags)
    monkeypatch.setattr("settings.config.choose_dtype", choose_dtype)
    assert choose_dtype(device) == dtype
    config = Config.of_preset(DTYPE="auto", DEVICE=device)
    assert config.dtype == dtype
    assert config.stored()["DTYPE"] == dtype  # what a run keeps, wherever it is resumed


@pytest.mark.parametrize(
    ("name", "visible", "dtype"),
    [
        ("NVIDIA GeForce RTX 4090", None, "bfloat16"),
        ("NVIDIA H100 80GB HBM3", "0,1", "bfloat16"),
        ("NVIDIA A100-PCIE-40GB", None, "bfloat16"),
        ("NVIDIA RTX A6000", None, "bfloat16"),
        ("NVIDIA L4", None, "bfloat16"),
        ("NVIDIA RTX 2000 Ada Generation", None, "bfloat16"),
        ("NVIDIA GeForce MX150", None, "float32"),
        ("NVIDIA GeForce GT 1030", None, "float32"),
        ("Tesla T4", None, "float32"),
        ("Tesla V100-SXM2-32GB", None, "float32"),
        ("Tesla P40", None, "float32"),
        ("NVIDIA GeForce RTX 2080 Ti", None, "float32"),
        ("NVIDIA GeForce GTX 1080", None, "float32"),
        ("Quadro RTX 8000", None, "float32"),
        ("NVIDIA GeForce RTX 4090", "", "float32"),
        ("NVIDIA GeForce RTX 4090", "-1", "float32"),
    ],
)
def test_a_gpu_is_judged_by_its_name_and_only_if_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, visible: str | None, dtype: str
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    text = f"Model: \t\t {name}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-T4-V100\n"
    (tmp_path / "0000:01:00.0" / "information").write_text(text)
    monkeypatch.setattr(precision, "GPU_NODES", (tmp_path,))
    monkeypatch.setattr(precision, "GPU_FILES", tmp_path)
    monkeypatch.setattr(precision, "read_cpu_flags", lambda: {"avx2"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_dtype("auto") == dtype
