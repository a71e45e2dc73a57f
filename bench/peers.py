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
from pathlib import Path
from typing import Any

from settings.declare import ROOT, SettingsError

# Variables by which scripts/lib.sh (tune) has glibc keep large blocks, in large pages, on CPUs with Linux.
ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
WITH_OURS = " + allocator"  # behind a peer's name: with these


@dataclasses.dataclass(frozen=True)
class Peer:
    """module: in bench/, a process as worker.py says. setting: holds the path of a checkout; "": an installed package.
    holds: a file of the checkout by which it is known. source, tried: where it comes from, what it was tried with.
    dtype_in: a variable that it reads the type from. differs: in what its work is not ours, for the table's notes.
    """

    name: str
    module: str
    setting: str
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
        "PEER_NANOGPT",
        "model.py",
        "https://github.com/karpathy/nanoGPT",
        "3adf61e",
        "learned positions, LayerNorm, GELU; bfloat16 by autocast, on a CPU too, where its train.py has none",
    ),
    Peer(
        "nanochat",
        "nanochat",
        "PEER_NANOCHAT",
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
        "PEER_TORCHTITAN",
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
        "",
        "pip install transformers",
        "5.23",
        "transformers' LlamaForCausalLM; bfloat16 by autocast, as its Trainer has it",
    ),
)


def given(paths: Mapping[str, str]) -> tuple[dict[Peer, str], dict[str, str]]:
    """(peer -> the path of its checkout, "" of a package; name of each that was not given -> why it is not there).

    paths: by setting. Raises SettingsError for all those that hold no checkout.
    """
    found, absent, problems = dict[Peer, str](), dict[str, str](), []
    for peer in PEERS:
        if not peer.setting:
            found[peer] = ""
        elif not (said := paths[peer.setting]):
            absent[peer.name] = f"{peer.setting} is not set"
        elif not (path := (ROOT / Path(said).expanduser()).absolute() / peer.holds).is_file():
            problems.append(
                f"{peer.setting}={said}: is no checkout of {peer.name} ({path} is not there); git clone "
                f"{peer.source} and give the path of what it made; tried with {peer.tried}"
            )
        else:
            found[peer] = str((ROOT / Path(said).expanduser()).absolute())
    if problems:
        raise SettingsError(problems)
    return found, absent


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
        elif peer.setting:
            problems.append(
                f"{peer.setting}={path}: this checkout of {peer.name} does not take a step here ({why}); "
                f"tried with {peer.tried}; or leave {peer.setting} empty"
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
