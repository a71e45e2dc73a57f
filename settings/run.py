"""Settings of a run: its name, the machine, checkpoints, and what happens when something fails."""

from typing import Annotated

from settings import addresses
from settings.declare import (
    DERIVED,
    FREE,
    PRINTABLE,
    TRACKED,
    Count,
    Format,
    PathText,
    Positive,
    Seconds,
    Section,
    Steps,
    section,
    setting,
)
from settings.targets import COMPUTE, DRY_RUN, EVERY, LAUNCH, NODE, OPEN, TRAIN

Name = Annotated[
    str,
    (
        "format",
        Format(
            r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
            "at most 63 letters, digits, '.', '_' or '-', starting with a letter or digit",
        ),
    ),
]
NAMES = Format(r"[a-z0-9-]+(,[a-z0-9-]+)*", "names with commas between them")
MASTER_PORT = 29500


@section
class Sources(Section):
    """Where settings come from."""

    USED_BY = EVERY

    preset: str = setting(
        "tiny",
        "Recipe to use: a file presets/PRESET.env with values for the other settings.",
        format=Format(PRINTABLE, "the name of a file in presets/"),
    )
    env_file: PathText = setting(".env", "File with your own settings, one NAME=value per line.")
    name: Name = setting(
        "",
        "Setting that `make settings` explains. Default: it lists all of them.",
        example="BATCH_TOKENS",
        used_by={"settings"},
    )


@section
class Run(Section):
    """Which run a command is about."""

    USED_BY = EVERY

    run_name: Name = setting(
        DERIVED,
        "Name of the run: its folder in RUNS_DIR and its name in W&B. "
        "Training a name that exists resumes that run. "
        "Default: PRESET, or PRESET-NAME with DATA: tiny-novels for novels.txt. "
        "Commands about a run that exists choose the one that is running, else the newest.",
        example="tiny-lr3e-3-seed1",
        used_by=EVERY - {"compare", "runs"},
    )
    runs_dir: PathText = setting("runs", "Folder that holds all runs.")
    step: Count | None = setting(
        None,
        "Step of the checkpoint to use. Default: the newest checkpoint.",
        used_by={"sample", "chat", "eval", "export", "fetch-run"},
    )
    gguf: bool = setting(False, "Also export model.gguf, for llama.cpp.", used_by={"export"})
    detach: bool = setting(
        False,
        "Return at once and keep training in the background.",
        used_by=TRAIN - {"pipeline"},
    )
    dry_run: bool = setting(
        False,
        "Print what would be applied to the cluster, uploaded or run, and do nothing else. "
        "For the cost of a run there is `make plan`.",
        used_by=DRY_RUN,
    )


@section
class Machine(Section):
    """Devices, precision and parallelism."""

    USED_BY = COMPUTE
    RESUME = TRACKED

    device: str = setting(
        "auto",
        "Device to compute on. `auto` uses the GPUs if there are any.",
        choices=("auto", "cpu", "cuda"),
        used_by=COMPUTE | {"bench", "monitor", "certify"},
    )
    nproc: Count | None = setting(
        None,
        "Number of processes on this machine, one per GPU. Default: all visible GPUs, or 1 on CPU.",
        maximum=1024,
        used_by=TRAIN | {"eval", "bench", "certify"},
    )
    nodes: Count = setting(
        1,
        "Number of machines (nodes) that train together. Each runs NPROC processes.",
        maximum=4096,
        used_by=TRAIN | {"net-probe"},
        finds_run=True,
    )
    node_rank: int = setting(
        0,
        "Rank of this node, counted from 0. `make logs` prints the log of this node.",
        resume=FREE,
        used_by=NODE | {"doctor", "logs", "attach"},
        finds_run=True,
    )
    master_addr: str = setting(
        "",
        "Host name or IP address of node 0. Every other node must be able to reach it. "
        "HOST:PORT uses another port than 29500. The port after it must be reachable, too.",
        format=Format(
            addresses.PATTERN,
            "a host name or IP address, or HOST:PORT with a port from 1024 to 65534",
        ),
        example="10.0.0.5",
        resume=FREE,
        needs="NODES!=1",
        used_by=NODE,
    )
    run_secret: str = setting(
        "",
        "Secret by which the machines of a run know each other. Needed where they do not share "
        "RUNS_DIR: node 0 or `make lighthouse` prints it. "
        "Default: a file in the run folder, made by node 0.",
        format=Format(r"[A-Za-z0-9_-]{16,128}", "16 to 128 letters, digits, '_' or '-'"),
        example="what-node-0-prints",
        resume=FREE,
        secret=True,
        used_by=NODE | LAUNCH | {"lighthouse"},
    )
    dtype: str = setting(
        "float32",
        "Precision of activations and matrix multiplications, and of exported weights. "
        "During training, parameters, optimizer state and reductions stay in float32. "
        "`auto` is bfloat16 on a GPU since Ampere and on a processor with AMX or AVX-512 BF16, else "
        "float32.",
        choices=("float32", "bfloat16", "auto"),
        used_by=COMPUTE | {"export", "certify"},
    )
    compile: str = setting(
        "auto",
        "Compile the model with torch.compile. `auto` compiles on a GPU, "
        "and on a CPU if the run is long enough to repay it.",
        choices=("auto", "1", "0"),
        used_by=COMPUTE | {"certify"},
    )
    attention: str = setting(
        "auto",
        "Attention kernel. `auto` chooses the fastest one that is installed and suits the model.",
        choices=("auto", "sdpa", "math", "flash-attn", "fa3"),
        used_by=COMPUTE | {"certify"},
    )
    activation_checkpointing: str = setting(
        "none",
        "Activation checkpointing: recompute nothing (`none`), everything except matmuls and "
        "attention (`selective`), or whole blocks (`full`) in the backward pass.",
        choices=("none", "selective", "full"),
        used_by=TRAIN | {"certify"},
    )
    parallel: str = setting(
        "ddp",
        "Parallelism: replicate the model on every process (`ddp`), shard it across all of them "
        "(`fsdp`), or shard it within groups of processes and replicate it across them (`hsdp`).",
        choices=("ddp", "fsdp", "hsdp"),
        used_by=TRAIN | {"eval", "certify"},
    )
    shard_ranks: Count | None = setting(
        None,
        "Number of processes that share one copy of the model. Default: the processes of a node.",
        needs="PARALLEL=hsdp",
        used_by=TRAIN | {"eval", "certify"},
    )
    grad_sync: str = setting(
        "step",
        "When FSDP reduces gradients: once per step, or after every micro-batch, "
        "which uses less memory but more bandwidth.",
        choices=("step", "micro-batch"),
        needs="PARALLEL=fsdp|hsdp",
        used_by=TRAIN | {"certify"},
    )

    @property
    def registry_port(self) -> int:
        """Port at which node 0 serves the registry: torchrun has MASTER_ADDR's own."""
        return self.master_port + 1

    @property
    def master_host(self) -> str:
        """Where node 0 is."""
        return addresses.split_address(self.master_addr, MASTER_PORT)[0]

    @property
    def master_port(self) -> int:
        """Port at which node 0 listens."""
        return addresses.split_address(self.master_addr, MASTER_PORT)[1]


@section
class Checkpoints(Section):
    """When checkpoints are saved, and which are kept."""

    USED_BY = TRAIN

    save_every: Steps | None = setting(
        None,
        "Number of steps between checkpoints, in addition to SAVE_MINUTES. "
        "Default: SAVE_MINUTES alone. 0 turns both off: a run that is killed is lost.",
    )
    save_minutes: Positive = setting(
        15, "Wall time between checkpoints.", unit="minutes", needs="SAVE_EVERY!=0"
    )
    keep_last: int = setting(
        3,
        "Number of checkpoints to keep. The two newest that verify are always kept.",
        minimum=2,
        needs="SAVE_EVERY!=0",
    )
    keep_every: Steps = setting(
        0,
        "Keep every checkpoint whose step is a multiple of this. "
        "With CHECKPOINT_MODE=lite, these checkpoints are full. 0 keeps none of them.",
        needs="SAVE_EVERY!=0",
    )
    keep_best: bool = setting(
        False,
        "Save a checkpoint whenever the validation loss improves, and keep the best one.",
        needs="EVAL_EVERY!=0",
    )


@section
class Faults(Section):
    """Restarts, timeouts, and steps that diverge."""

    USED_BY = TRAIN

    max_restarts: int = setting(
        3,
        "How many times a failed trainer is restarted without a new checkpoint in between. "
        "0 never restarts it.",
    )
    start_timeout_s: Seconds = setting(
        300,
        "Timeout for all nodes to join, and for each stage before the first step. "
        "Other commands end if a checkpoint's disk does not answer for that long.",
        minimum=10,
        used_by=TRAIN | OPEN | {"checkpoints"},
    )
    train_timeout_s: Seconds = setting(
        120,
        "Timeout for a collective operation during training. If a step takes half of it and ten "
        "times as long as usual, every process writes its stack trace and training restarts.",
        minimum=4,
    )
    grace_period_s: Seconds = setting(
        180,
        "Time between SIGTERM and SIGKILL on the cluster. "
        "The trainer has 60 seconds less than this to save a checkpoint.",
        minimum=61,
    )
    spike_sigmas: float = setting(
        8,
        "Skip a step if its loss or gradient norm exceeds the median of the last 128 steps by this "
        "many robust standard deviations. 0 skips only steps that are not finite.",
        resume=TRACKED,
    )

    @property
    def shutdown_timeout_s(self) -> int:
        """Seconds that a trainer has for its checkpoint once it was told to stop."""
        return self.grace_period_s - 60
