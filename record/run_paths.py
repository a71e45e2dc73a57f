"""Every path under runs/RUN_NAME/. Standard library only: the monitor and the plots read it too."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

SITE = "site_"  # and a number from 1 on: the folder of another site than the first, in the run's (Config.run_folder)
CHECKPOINT = re.compile(r"step_([0-9]{7,})")


def name_checkpoint(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step_{step:07d}"


def step_of_checkpoint(name: str) -> int | None:
    """Return the step of a checkpoint's folder; None for any other name, such as that of an unfinished one."""
    match = CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[int]:
    """Return the steps that have a folder under its final name, ascending; nothing is verified.

    Raises OSError where the folder cannot be read.
    """
    if not folder.is_dir():
        return []
    steps = map(step_of_checkpoint, os.listdir(folder))
    return sorted(step for step in steps if step is not None)


@dataclasses.dataclass(frozen=True)
class RunPaths:
    """Where a run keeps what. Nothing here creates anything.

    node: which of several machines asks. They may share the folder, and each has its own job and console in it.
    """

    folder: Path
    node: int = 0

    @classmethod
    def of(cls, runs_dir: str, run_name: str, root: Path, node: int = 0) -> "RunPaths":
        """The run's paths; a relative RUNS_DIR is taken from the repository's root."""
        return cls((root / runs_dir / run_name).absolute(), node)

    @classmethod
    def of_node(cls, c: Any, root: Path) -> "RunPaths":
        """Those of the node that a Config is of."""
        return cls((root / c.run_folder).absolute(), c.rank_in_site)

    @property
    def name(self) -> str:
        """What the run is called; with its site, where it is not the first."""
        inner = re.fullmatch(SITE + "[1-9][0-9]*", self.folder.name)
        return f"{self.folder.parent.name}/{self.folder.name}" if inner else self.folder.name

    def of_site(self, site: int) -> "RunPaths":
        """Those of another site of this run, asked of the first's."""
        return dataclasses.replace(self, folder=self.folder / f"{SITE}{site}") if site else self

    @property
    def config(self) -> Path:
        """The resolved settings and the provenance of the run."""
        return self.folder / "config.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that the run was trained with."""
        return self.folder / "tokenizer.json"

    @property
    def metrics(self) -> Path:
        """The record: one JSON object per line (metrics.py)."""
        return self.folder / "metrics.jsonl"

    @property
    def train_log(self) -> Path:
        """What rank 0 said, in words."""
        return self.folder / "train.log"

    def node_log(self, node: int) -> Path:
        """What a node's first process said; one writer a file."""
        return self.folder / "logs" / f"node_{node}.log"

    def rank_log(self, rank: int) -> Path:
        """What went wrong in a process that is not its node's first; absent as long as nothing did."""
        return self.folder / "logs" / f"rank_{rank}.log"

    @property
    def console_log(self) -> Path:
        """What a detached job said."""
        return self.folder / (f"console_node_{self.node}.log" if self.node else "console.log")

    @property
    def status(self) -> Path:
        """What the run is doing now, and a heartbeat."""
        return self.folder / "STATUS.json"

    @property
    def lock(self) -> Path:
        """Held by the process of node 0 that trains this run, or calls the roll before it does."""
        return self.folder / ".lock"

    @property
    def hang(self) -> Path:
        """The stacks of processes that made no progress."""
        return self.folder / "hang"

    def evaluation(self, name: str) -> Path:
        """What make eval found, of the weights of that name."""
        return self.folder / "eval" / f"{name}.json"

    @property
    def wandb(self) -> Path:
        """W&B's own files."""
        return self.folder / "wandb"

    @property
    def wandb_state(self) -> Path:
        """The run's id at W&B, its URL, and the last step there."""
        return self.folder / "wandb.json"

    @property
    def wandb_log(self) -> Path:
        """What the mirror said, and W&B beside it."""
        return self.folder / "logs" / "wandb.log"

    @property
    def producer_log(self) -> Path:
        """What the producer of a run that streams said."""
        return self.folder / "logs" / "producer.log"

    @property
    def wandb_lock(self) -> Path:
        """Held by the process that mirrors this run."""
        return self.folder / ".wandb.lock"

    def gpu_metrics(self, stamp: str) -> Path:
        """Power and temperature of the GPUs, from a moment YYYYMMDD_HHMMSS on."""
        return self.folder / f"gpu_metrics_{stamp}.csv"

    def gpu_slow(self, stamp: str) -> Path:
        """Their memory, utilisation and clocks, and the network, once a second."""
        return self.folder / f"gpu_slow_{stamp}.csv"

    def gpu_sidecar(self, stamp: str) -> Path:
        """What is known of both files."""
        return self.folder / f"gpu_metrics_{stamp}.json"

    @property
    def gpu_lock(self) -> Path:
        """Held by the process that samples this node's GPUs into the folder."""
        return self.folder / (f".gpu_sampler_node_{self.node}" if self.node else ".gpu_sampler")

    @property
    def gpu_log(self) -> Path:
        """What a sampler said that was started beside training."""
        return (
            self.folder
            / "logs"
            / (f"gpu_sampler_node_{self.node}.log" if self.node else "gpu_sampler.log")
        )

    @property
    def job(self) -> Path:
        """Held by scripts/train.sh from before data is prepared until the plots are drawn; says what it does."""
        return self.folder / (f".job_node_{self.node}" if self.node else ".job")

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def profile(self, step: int) -> Path:
        """What torch's profiler recorded from this step on; the summary is beside it."""
        return self.folder / "profile" / f"{name_checkpoint(step)}.json.gz"

    @property
    def plots(self) -> Path:
        return self.folder / "plots"

    @property
    def sample(self) -> Path:
        """The text sample of the end of the run."""
        return self.folder / "sample.txt"
