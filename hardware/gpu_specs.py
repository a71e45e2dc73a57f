"""What GPUs can do, from their data sheets (gpus.toml). Standard library only."""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("gpus.toml")


@dataclass(frozen=True)
class GpuSpec:
    """A GPU of gpus.toml, which says what each figure means and where it is from.

    Attributes:
        key: its name in the setting CARDS.
        names: its names in torch, without "NVIDIA " in front.
        memory_gib: total memory in GiB.
        bandwidth_gb_s: memory bandwidth in GB/s (10^9 bytes).
        link_gb_s: GB/s to the other GPUs of its machine, one way.
        bf16_tflops: dense TFLOP/s in bfloat16; None without units for it.
    """

    key: str
    names: tuple[str, ...]
    fp32_tflops: float
    memory_gib: float
    bandwidth_gb_s: float
    link_gb_s: float
    watts: float
    source: str
    bf16_tflops: float | None = None

    def peak(self, dtype: str) -> float | None:
        """Return the TFLOP/s of matrix products in this type, or None without units for it."""
        peaks = {"bfloat16": self.bf16_tflops, "float32": self.fp32_tflops}
        return peaks.get(dtype)


@functools.cache
def load_gpu_specs() -> dict[str, GpuSpec]:
    """Return the GPUs of gpus.toml by key, in the order of the file."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    specs = {}
    for key, table in tables.items():
        names = tuple(table.pop("names"))
        specs[key] = GpuSpec(key=key, names=names, **table)
    return specs


def find_gpu(device_name: str) -> GpuSpec | None:
    """Return the GPU that torch calls by this name, or None."""
    name = device_name.removeprefix("NVIDIA ")
    for spec in load_gpu_specs().values():
        if name in spec.names:
            return spec
    return None
