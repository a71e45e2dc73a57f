"""Whose training steps are taken beside ours, where they come from, and in what they differ. Standard library only.

The same for all: layers, width, heads, vocabulary, windows of tokens, and what a step does: forward, the loss of every
token, backward, clipping at 1.0 and torch's fused AdamW; bfloat16 as their own trainers have it. FLOPs of a token are
counted by the shape alone (shapes.py), whatever a peer computes besides.
"""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from settings import ROOT, SettingsError

# Variables by which train/tune.py has glibc keep large blocks, in large pages, on CPUs with Linux.
ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
WITH_OURS = " + allocator"  # behind a peer's name: with these

CHECKOUTS = ROOT / "peers"  # each peer's own repository, cloned by the user; git ignores it


@dataclasses.dataclass(frozen=True)
class Peer:
    """module: in bench/, a process as worker.py says. holds: a file of its checkout in CHECKOUTS by which that is
    known; "": an installed package. source, tried: where it comes from, what it was tried with. dtype_in: a variable
    that it reads the type from. differs: in what its work is not ours, for the table's notes.
    """

    name: str
    module: str
    holds: str
    source: str
    tried: str
    differs: str
    dtype_in: str = ""

    def environment(self, dtype: str, allocator: bool) -> list[str]:
        """Words for env(1): how a process of this peer differs from one of ours."""
        without = [] if allocator else [word for name in ALLOCATOR for word in ("-u", name)]
        return without + ([f"{self.dtype_in}={dtype}"] if self.dtype_in else [])


PEERS = (
    Peer(
        "nanoGPT",
        "nanogpt",
        "model.py",
        "https://github.com/karpathy/nanoGPT",
        "3adf61e",
        "learned positions, LayerNorm, GELU; bfloat16 by autocast, on a CPU too, where its train.py has none",
    ),
    Peer(
        "nanochat",
        "nanochat",
        "nanochat/gpt.py",
        "https://github.com/karpathy/nanochat",
        "92d63d4",
        "untied head, value embeddings in every second layer, QK-norm, squared ReLU, tanh on the logits; no window "
        "shorter than the sequence; AdamW for all weights and clipping, where its trainer has Muon for matrices and "
        "no clipping; FlashAttention-3 only where it finds it",
        "NANOCHAT_DTYPE",
    ),
    Peer(
        "torchtitan",
        "torchtitan",
        "torchtitan/models/llama3/__init__.py",
        "https://github.com/pytorch/torchtitan",
        "963c20c, with the package tyro",
        "its llama3 with the attention of torch, one product for queries, keys and values; blocks and loss compiled; "
        "bfloat16 by autocast, where its trainer has fully_shard on one GPU too",
    ),
    Peer(
        "HF Llama",
        "llama",
        "",
        "pip install transformers",
        "5.23",
        "transformers' LlamaForCausalLM; bfloat16 by autocast, as its Trainer has it",
    ),
)


def find_checkouts() -> tuple[dict[Peer, str], dict[str, str]]:
    """Return the peers that are there and the folder of each ("" for a package), and why others are not, by name.

    Raises:
        SettingsError: a folder holds something other than the peer's repository.
    """
    present = dict[Peer, str]()
    missing = dict[str, str]()
    problems = []
    for peer in PEERS:
        folder = CHECKOUTS / peer.name
        how = f"git clone {peer.source} peers/{peer.name} (tried with {peer.tried})"
        if not peer.holds:
            present[peer] = ""
        elif (folder / peer.holds).is_file():
            present[peer] = str(folder)
        elif folder.exists():
            problems.append(
                f"{folder} is not a checkout of {peer.name}: it has no {peer.holds}. Remove it, or "
                f"replace it: {how}"
            )
        else:
            missing[peer.name] = f"peers/{peer.name} is missing; {how}"
    if problems:
        raise SettingsError(problems)
    return present, missing


def fitting(found: Mapping[Peer, str]) -> tuple[dict[Peer, str], dict[str, str]]:
    """Each takes a step of the shape tiny: (those that could, why a package could not), before hours are spent.

    Raises SettingsError where a checkout does not work with the packages that are installed.
    """
    fit, absent, problems = dict[Peer, str](), dict[str, str](), []
    for peer, path in found.items():
        tried = subprocess.run(
            [
                "env",
                *peer.environment("float32", allocator=True),
                *command(peer.module, "tiny", "float32", "eager", *([path] if path else [])),
            ],
            cwd=ROOT,
            text=True,
            input="",
            capture_output=True,
            check=False,
        )
        why = next(
            (line for line in reversed(tried.stderr.splitlines()) if line.strip()),
            f"{tried.returncode}",
        )
        if tried.returncode == 0:
            fit[peer] = path
        elif path:
            problems.append(
                f"{path}: this checkout of {peer.name} cannot take a step here ({why}). Check out the "
                f"version that was tried, {peer.tried}, or move the folder away."
            )
        else:
            absent[peer.name] = why
    if problems:
        raise SettingsError(problems)
    return fit, absent


def command(module: str, shape: str, dtype: str, mode: str, *more: str) -> list[str]:
    """What starts a process of worker.py; it is told when that was."""
    return [sys.executable, "-m", f"bench.{module}", shape, dtype, mode, str(time.time()), *more]


def notes(cells: list[dict[str, Any]]) -> list[str]:
    """What is to be said below a table: of each peer that is in it, in what it differs."""
    names = {name.removesuffix(WITH_OURS) for cell in cells for name in cell["peak_mib"]}
    said = [f"{peer.name}: {peer.differs}." for peer in PEERS if peer.name in names]
    if any(name.endswith(WITH_OURS) for cell in cells for name in cell["peak_mib"]):
        said.append(
            f"{WITH_OURS.strip()}: the same with {', '.join(ALLOCATOR)} as our training has them."
        )
    return [
        "A step is forward, backward, clipping at 1.0 and fused AdamW. FLOPs of a token are counted alike for all: "
        "6 N + 12 L d T of the shape, for MFU, which is n/a where the peak is not known, and for the share of the "
        "ceiling, a matrix product alone in the same round.",
        *said,
    ]
