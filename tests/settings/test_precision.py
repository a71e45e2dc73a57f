"""DTYPE=auto: which precision a machine gets, and that a run keeps it."""

import os

import pytest

from settings import load_preset, precision, visible_gpus
from settings.precision import choose_dtype, read_cpu_flags

FLAGS = "processor\t: 0\nflags\t\t: fpu avx2 {}\nbugs\t: x\n\nprocessor\t: 1\nflags\t: fpu\n"


def test_the_flags_of_the_first_processor_are_read(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(FLAGS.format("avx512_bf16"))
    assert read_cpu_flags(path) == {"fpu", "avx2", "avx512_bf16"}
    path.write_text("processor : 0\nFeatures : fp asimd\n")
    assert read_cpu_flags(path) is None
    assert read_cpu_flags(tmp_path / "none") is None


SMI = """#!/bin/sh
case "$*" in
    *--id=0,1*) echo 8.6; echo 7.0 ;;
    *--id=0*) echo 8.6 ;;
    *--id=1*) echo 7.0 ;;
    *--id=*) echo "No devices were found"; exit 6 ;;
    *) echo 8.6; echo 7.0 ;;
esac
"""


@pytest.mark.parametrize(
    ("device", "visible", "flags", "dtype"),
    [
        ("cpu", "0", {"avx2"}, "float32"),
        ("cpu", "0", {"amx_bf16"}, "bfloat16"),
        ("auto", "", None, "float32"),
        ("auto", "-1", {"avx2"}, "float32"),
        ("auto", "", {"avx512_bf16"}, "bfloat16"),
        ("auto", "0", {"avx2"}, "bfloat16"),
        ("cuda", "0", {"avx2"}, "bfloat16"),
        ("auto", "1", {"avx512_bf16"}, "float32"),
        ("auto", "0,1", {"avx2"}, "float32"),
        ("auto", None, {"avx2"}, "float32"),
        ("auto", "MIG-1", {"avx2"}, "float32"),
        ("auto", "GPU-unknown", {"avx2"}, "bfloat16"),
    ],
)
def test_bfloat16_is_chosen_where_what_computes_has_units_for_it(
    tmp_path,
    monkeypatch,
    device,
    visible,
    flags,
    dtype,
):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(visible_gpus, "GPU_NODES", (tmp_path / "none", smi))
    monkeypatch.setattr(precision, "read_cpu_flags", lambda: flags)
    monkeypatch.setattr("settings.config.choose_dtype", choose_dtype)
    precision.read_capabilities.cache_clear()
    config = load_preset(DTYPE="auto", DEVICE=device)
    precision.read_capabilities.cache_clear()
    assert config.dtype == dtype
    assert config.stored()["DTYPE"] == dtype  # what a run keeps, wherever it is resumed


def test_a_driver_is_known_by_its_nodes_on_linux_and_in_windows():
    assert [str(node) for node in visible_gpus.GPU_NODES] == ["/dev/nvidiactl", "/dev/dxg"]
