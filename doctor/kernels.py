"""What torch sees and would use here, asked of a process that loads it (by_torch.py), and judged."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

from doctor.gpus import Seen, count_of
from settings import ROOT
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding

LIMIT_S = 60.0  # torch is loaded in 2 s from a local disk, and in many times that from a network's for the first time
USES = {
    "sdpa": "torch's scaled_dot_product_attention",
    "math": "two batched products, for short windows in bfloat16",
    "fa3": "FlashAttention-3, through torch's own entry points",
    "flash-attn": "the flash-attn package",
}


@dataclasses.dataclass(frozen=True)
class ByTorch:
    """gpus: names of those that torch computed on; problem: what it said where it could not; kernel: of attention, or
    refused: why there is none; worth_compiling: whether COMPILE=auto would. failed: why torch does not load, late: that
    it was not waited for; nothing else is known then."""

    version: str = ""
    gpus: tuple[str, ...] = ()
    problem: str = ""
    kernel: str = ""
    refused: str = ""
    worth_compiling: bool = False
    failed: str = ""
    late: str = ""


def by_torch(limit_s: float = LIMIT_S) -> ByTorch:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "doctor.by_torch"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ByTorch(late=f"torch was not loaded within {limit_s:.0f} s")
    except OSError as error:
        return ByTorch(failed=f"no process could be started ({error.strerror})")
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return ByTorch(**found | {"gpus": tuple(found["gpus"])})
    except (ValueError, KeyError, IndexError, TypeError):
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        return ByTorch(failed=f"torch does not load: {last[:300]}")


def loaded(b: ByTorch) -> Finding | None:
    """That torch does not load, which the versions of packages do not show; None where it does."""
    if b.failed:
        return Finding(
            "torch",
            FAIL,
            b.failed,
            "make setup; where that says that all is in place, remove .venv first",
        )
    if b.late:
        return Finding(
            "torch",
            WARN,
            f"{b.late}: the machine is busy, or the disk of .venv slow",
            "put VENV on a disk of this machine",
        )
    return None


def seen_alike(c: Config, seen: Seen, b: ByTorch) -> Finding | None:
    """Whether torch computes on what nvidia-smi lists; None where no GPU is wanted or listed, or nothing is known."""
    if c.device == "cpu" or not seen.visible or not b.version:
        return None
    level = FAIL if c.device == "cuda" else WARN
    listed = count_of(seen.visible)
    if b.problem:
        return Finding(
            "gpus-torch",
            level,
            f"torch {b.version} computed on {len(b.gpus)} of {listed}: {b.problem}",
            "look at the driver line; error 802 is NVIDIA's fabric manager, which must run beside NVSwitch",
        )
    if len(b.gpus) != len(seen.visible):
        return Finding(
            "gpus-torch",
            level,
            f"torch {b.version} sees {len(b.gpus)} GPUs, and nvidia-smi {listed}",
            "see the driver line; of slices of a card (MIG) a process sees one",
        )
    return Finding(
        "gpus-torch", PASS, f"torch computed on {'it' if len(b.gpus) == 1 else 'each of them'}"
    )


def stronger(driver: Finding | None, alike: Finding | None) -> list[Finding]:
    """Of what versions and what torch itself say: a torch that computes is right, and a driver that does not fit is
    why it does not."""
    if alike and driver and driver.level != PASS:
        return [alike if alike.level == PASS else driver]
    return [finding for finding in (driver, alike) if finding]


def attention(c: Config, b: ByTorch) -> Finding | None:
    """The kernel that the run would really use; None where torch does not tell, or the GPUs are not there."""
    if not b.version or (c.device == "cuda" and not b.gpus):
        return None
    if b.refused:
        text, _, fix = b.refused.rpartition("; ")
        return Finding("attention", FAIL, text, fix, 64)
    where = b.gpus[0] if b.gpus else "the CPU"
    return Finding("attention", PASS, f"{b.kernel} on {where}: {USES[b.kernel]}")
