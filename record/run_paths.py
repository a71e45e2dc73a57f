"""Every path under runs/RUN_NAME/, and the names of checkpoints. Standard library only."""

import os
import re
from pathlib import Path
from typing import Any

# and a number from 1 on: the folder of another site than the first, inside the run's (Config.run_folder)
SITE = "site_"
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


class RunPaths:
    """Where a run keeps what. Nothing here creates anything.

    `node` is the one that asks, of several that may share the folder: each has its own job and console in it.
    """

    def __init__(self, folder: Path, node: int = 0):
        self.folder = folder
        self.node = node
        own = f"_node_{node}" if node else ""

        # What the run is and did
        self.config = folder / "config.json"  # the resolved settings and the provenance
        self.tokenizer = folder / "tokenizer.json"  # with which it was trained
        self.plan = folder / "plan.json"  # what was predicted of it (account.py)
        self.metrics = folder / "metrics.jsonl"  # the record: one JSON object per line (metrics.py)
        self.status = folder / "STATUS.json"  # what it is doing now, and a heartbeat
        self.sent = folder / "cluster.json"  # where it was sent, if that is a cluster
        self.checkpoints = folder / "checkpoints"
        self.plots = folder / "plots"
        self.sample = folder / "sample.txt"  # generated at the end of the run
        self.hang = folder / "hang"  # the stacks of processes that made no progress

        # What its processes printed
        self.logs = folder / "logs"
        self.train_log = folder / "train.log"  # rank 0
        self.console_log = folder / f"console{own}.log"  # a detached job
        self.producer_log = self.logs / "producer.log"  # of a run that streams its data
        self.gpu_log = self.logs / f"gpu_sampler{own}.log"  # a sampler that training started

        # Held by a process, which wrote its pid into it
        self.lock = folder / ".lock"  # node 0, while it trains or calls the roll
        # train/start_node.py, from preparing data to plots, and its stage
        self.job = folder / f".job{own}"
        self.last_word = folder / ".over"  # exit code of a site's pod, for the lighthouse's pod
        self.gpu_lock = folder / f".gpu_sampler{own}"  # the sampler of this node's GPUs

        self.wandb = folder / "wandb"  # W&B's own files
        # the run's id and URL at W&B, and its last step there
        self.wandb_state = folder / "wandb.json"

    @classmethod
    def of(cls, runs_dir: str, run_name: str, root: Path) -> "RunPaths":
        """Return the paths of a run; a relative RUNS_DIR starts at the repository's root."""
        return cls((root / runs_dir / run_name).absolute())

    @classmethod
    def of_node(cls, c: Any, root: Path) -> "RunPaths":
        """Return those of the node that a Config is for."""
        return cls((root / c.run_folder).absolute(), c.rank_in_site)

    def of_site(self, site: int) -> "RunPaths":
        """Return those of another site of this run; called on the first's."""
        if site == 0:
            return self
        return RunPaths(self.folder / f"{SITE}{site}", self.node)

    @property
    def name(self) -> str:
        """The run's name, with its site where that is not the first."""
        name = self.folder.name
        if re.fullmatch(SITE + "[1-9][0-9]*", name):
            return f"{self.folder.parent.name}/{name}"
        return name

    def node_log(self, node: int) -> Path:
        """Return the log of a node's first process; each file has one writer."""
        return self.logs / f"node_{node}.log"

    def rank_log(self, rank: int) -> Path:
        """Return the log of any other process, which exists once something went wrong in it."""
        return self.logs / f"rank_{rank}.log"

    def evaluation(self, name: str) -> Path:
        """Return what make eval measured of the weights of that name."""
        return self.folder / "eval" / f"{name}.json"

    def profile(self, step: int) -> Path:
        """Return what torch's profiler recorded from this step on; the table of operators is next to it."""
        return self.folder / "profile" / f"{name_checkpoint(step)}.json.gz"

    def gpu_metrics(self, stamp: str) -> Path:
        """Return power and temperature of the GPUs from a moment YYYYMMDD_HHMMSS on."""
        return self.folder / f"gpu_metrics_{stamp}.csv"

    def gpu_slow(self, stamp: str) -> Path:
        """Return their memory, utilization and clocks, and the network, once a second."""
        return self.folder / f"gpu_slow_{stamp}.csv"

    def gpu_sidecar(self, stamp: str) -> Path:
        """Return what describes both files."""
        return self.folder / f"gpu_metrics_{stamp}.json"
