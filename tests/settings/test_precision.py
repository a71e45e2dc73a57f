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
