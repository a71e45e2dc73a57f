"""What `make doctor PROBE=1` measured on a machine, for the plan to stand on.

RUNS_DIR/.probe/DEVICE.json     one file a kind of device, the last measurement; DEVICE as torch calls it
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from hardware.gpu_specs import GpuSpec, find_gpu
from settings import ROOT
from settings.config import Config
from settings.json_file import read_small

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Step:
    """A real training step. shape: of what it was (shape_of); processes: that took part."""

    shape: str
    processes: int
    tokens_per_s: float
    peak_gib: float


@dataclasses.dataclass(frozen=True)
class Probe:
    """matmul_tflops: type -> TFLOP/s of one device; memory_gb_s, link_gb_s (between two processes), disk_mb_s: None
    where it could not be measured. time: Unix seconds."""

    device: str
    time: float
    torch: str
    matmul_tflops: dict[str, float]
    memory_gb_s: float | None = None
    link_gb_s: float | None = None
    disk_mb_s: float | None = None
    steps: tuple[Step, ...] = ()

    def step(self, c: Config, processes: int) -> Step | None:
        """The step that was measured of just this shape, on so many processes."""
        return next(
            (s for s in self.steps if s.shape == shape_of(c) and s.processes == processes), None
        )


# What decides how fast and how large a step is; batch_tokens, since an update costs the more the fewer its tokens are.
DECIDES = (
    "dtype",
    "compile",
    "attention",
    "activation_checkpointing",
    "parallel",
    "vocab_size",
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "mlp_dim",
    "qk_norm",
    "tie_embeddings",
    "seq_len",
    "micro_batch_size",
    "batch_tokens",
    "grad_sync",
    "shard_ranks",
    "optimizer",
    "doc_mask",
)


def shape_of(c: Config) -> str:
    """12 hex digits of the settings that decide it."""
    return hashlib.sha256(repr([getattr(c, name) for name in DECIDES]).encode()).hexdigest()[:12]


def path_of(c: Config, device: str) -> Path:
    return (
        (ROOT / c.runs_dir).absolute()
        / ".probe"
        / f"{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.json"
    )


def cpu_name() -> str:
    """What a CPU is called here: its model, and the threads that this process may use."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    threads = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}"


def read(c: Config, device: str) -> Probe | None:
    """What was last measured of a device; None where nothing was, or it cannot be read."""
    try:
        content: Any = json.loads(read_small(path_of(c, device)))
        if not isinstance(content, dict) or content.pop("schema") != SCHEMA:
            return None
        return Probe(
            **content | {"steps": tuple(Step(**step) for step in content.get("steps", ()))}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def to_json(probe: Probe) -> str:
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(probe)}, indent=1) + "\n"


def of_card(c: Config, card: GpuSpec) -> Probe | None:
    """The newest measurement of a card of this kind, whatever its driver calls it; none where the folder cannot be
    looked into."""
    try:
        paths = sorted(path_of(c, "x").parent.glob("*.json"))
    except OSError:
        return None
    probes = [read(c, path.stem) for path in paths]
    return max(
        (probe for probe in probes if probe and find_gpu(probe.device) == card),
        key=lambda probe: probe.time,
        default=None,
    )
