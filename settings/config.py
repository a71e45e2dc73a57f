"""Every setting, once: name, type, unit, default, help, and what a change means when a run is resumed.

Those of evaluation are in evaluation.py, of fine-tuning in finetuning.py, of a pipeline in pipeline.py, of a
WAN between sites in sites.py, of what is round a run, image and cluster, in tools.py.
`.env.example` is written from all by env_example.py, and a test holds them equal. declare.py tells where values come
from; everything below is about what they mean.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from settings.declare import (
    FREE,
    FROZEN,
    ROOT,
    TRACKED,
    Declared,
    SettingsError,
    declared_fields,
    format_value,
    resolve,
    setting,
)
from settings.rules import CHECKS, OF_PRETRAINING
from settings.sections.evaluation import OfEvaluation


@dataclasses.dataclass(frozen=True)
class Config(OfEvaluation):
    """The resolved settings of a run. Built by `Config.load`, then passed; nothing else reads settings."""

    # ---- Run
    preset: str = setting(
        "tiny", help="the recipe: presets/PRESET.env", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
    )
    env_file: str = setting(".env", help="the file that holds your own settings")
    run_name: str = setting(
        "",
        help="the run's folder and W&B name; the same name resumes. Default: the preset's",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
        example="tiny-lr3e-3-s1",
    )
    runs_dir: str = setting("runs", help="the folder that holds the runs")
    seed: int = setting(
        1337,
        help="of the weights and of the data order",
        minimum=0,
        maximum=2**31 - 1,
        resume=FROZEN,
    )

    # ---- Machine
    device: str = setting(
        "auto",
        help="auto takes the GPUs if there are any",
        choices=("auto", "cpu", "cuda"),
        resume=TRACKED,
    )
    nproc: int | None = setting(
        None,
        help="processes on this machine, one a GPU. Default: all visible GPUs, or 1 on CPU",
        minimum=1,
        maximum=1024,
        resume=TRACKED,
        example="2",
    )
    detach: bool = setting(
        False, help="make train returns at once and the run goes on without the terminal"
    )
    torch_backend: str = setting(
        "auto",
        help="the torch build that make setup installs: auto fits the driver; else "
        "cpu, cu126, cu130 and so on",
        pattern=r"[a-z0-9.]+",
        example="cpu",
    )
    dtype: str = setting(
        "float32",
        help="of activations and matrix products; weights, moments and reductions stay float32",
        choices=("float32", "bfloat16"),
        resume=TRACKED,
        hint="float16 is not offered: it would need its losses scaled",
    )
    compile: str = setting(
        "auto",
        help="torch.compile, block by block; auto takes it on a GPU, and on CPU where the "
        "run is long enough to repay it",
        choices=("auto", "1", "0"),
        resume=TRACKED,
    )
    attention: str = setting(
        "auto",
        help="the kernel; auto takes the fastest that is installed and fits",
        choices=("auto", "sdpa", "math", "flash-attn", "fa3"),
        resume=TRACKED,
    )
    activation_checkpointing: str = setting(
        "none",
        help="what backward computes anew to save memory: nothing, all but matrix products and attention, or "
        "whole blocks",
        choices=("none", "selective", "full"),
        resume=TRACKED,
    )

    # ---- Parallel
    parallel: str = setting(
        "ddp",
        help="how weights and moments lie: a copy on each process (ddp), split over all "
        "(fsdp: FSDP2), or split within groups that are copies of each other (hsdp)",
        choices=("ddp", "fsdp", "hsdp"),
        resume=TRACKED,
    )
    shard_ranks: int | None = setting(
        None,
        help="processes that share one copy under PARALLEL=hsdp. Default: those of a node",
        minimum=1,
        resume=TRACKED,
        example="2",
    )
    grad_sync: str = setting(
        "step",
        help="when fsdp and hsdp reduce gradients: once a step, or in each micro-batch, "
        "which sends more and holds less",
        choices=("step", "micro-batch"),
        resume=TRACKED,
    )
    nodes: int = setting(
        1, help="machines of the run, of equal NPROC each", minimum=1, maximum=4096, resume=TRACKED
    )
    node_rank: int = setting(
        0, help="which of them this is, or whose lines make logs shows; 0 is the first", minimum=0
    )
    master_addr: str = setting(
        "",
        help="name or address of the first, at which the others reach it",
        pattern=r"[A-Za-z0-9][A-Za-z0-9.:-]*",
        example="10.0.0.5",
    )
    master_port: int = setting(
        29500,
        help="a port of the first that is free and open to the others",
        minimum=1024,
        maximum=65535,
    )

    # ---- Model
    vocab_size: int = setting(
        4096,
        help="entries of the vocabulary; a trained tokenizer gets as many. The embedding "
        "is padded to a multiple of 128",
        unit="tokens",
        minimum=300,
        maximum=2**24,
        resume=FROZEN,
    )
    n_layer: int = setting(4, help="transformer blocks", minimum=1, maximum=4096, resume=FROZEN)
    n_head: int = setting(4, help="attention heads", minimum=1, maximum=4096, resume=FROZEN)
    n_kv_head: int | None = setting(
        None,
        help="key and value heads, shared by groups of heads. Default: N_HEAD",
        minimum=1,
        resume=FROZEN,
        example="2",
    )
    n_embd: int = setting(
        256, help="width of the residual stream", minimum=2, maximum=2**18, resume=FROZEN
    )
    mlp_dim: int | None = setting(
        None,
        help="width inside the SwiGLU. Default: 8/3 of N_EMBD, rounded up to a multiple of 64",
        minimum=1,
        resume=FROZEN,
        example="704",
    )
    qk_norm: bool = setting(
        False, help="RMS-normalise queries and keys by head (as Qwen3)", resume=FROZEN
    )
    tie_embeddings: bool = setting(True, help="the head is the embedding table", resume=FROZEN)
    rope_theta: float = setting(
        10000.0, help="base of the rotary wavelengths", above=0, resume=FROZEN
    )
    init_from: str = setting(
        "",
        help="a folder with config.json and safetensors of a Llama or Qwen3, whose weights a "
        "new run starts from. Default: random ones",
        resume=FROZEN,
        example="models/qwen3-1.7b",
    )

    # ---- Batch and schedule
    seq_len: int = setting(256, help="context length", unit="tokens", minimum=2, resume=FROZEN)
    batch_tokens: int = setting(
        8192,
        help="of an optimizer step, over all processes",
        unit="tokens",
        minimum=2,
        resume=FROZEN,
    )
    micro_batch_size: int = setting(
        16,
        help="sequences in one forward pass of a process, at most; accumulation follows from it",
        unit="sequences",
        minimum=1,
        resume=TRACKED,
    )
    train_tokens: int = setting(
        10_000_000,
        help="horizon of the schedule; past it the rate stays at its minimum",
        unit="tokens",
        minimum=1,
        resume=TRACKED,
    )
    max_steps: int | None = setting(
        None,
        help="stop after this step. Default: at TRAIN_TOKENS",
        minimum=1,
        unit="steps",
        example="1000",
    )
    learning_rate: float = setting(1e-3, help="at its peak", above=0, maximum=10, resume=TRACKED)
    min_learning_rate: float | None = setting(
        None,
        help="at the end of the schedule. Default: a tenth of the peak",
        minimum=0,
        maximum=10,
        resume=TRACKED,
        example="1e-4",
    )
    warmup_tokens: int = setting(
        0, help="linear warm-up from zero", unit="tokens", minimum=0, resume=TRACKED
    )
    lr_schedule: str = setting(
        "cosine",
        help="behind the warm-up: a cosine down to the minimum, or wsd, constant and "
        "then straight down",
        choices=("cosine", "wsd"),
        resume=TRACKED,
    )
    decay_tokens: int | None = setting(
        None,
        help="length of wsd's way down, which ends at TRAIN_TOKENS. Default: a "
        "fifth of TRAIN_TOKENS",
        unit="tokens",
        minimum=1,
        resume=TRACKED,
        example="2000000",
    )

    # ---- Optimizer
    optimizer: str = setting(
        "adamw",
        help="of all weights; or muon on the matrices inside blocks and AdamW on the "
        "rest, both with LEARNING_RATE",
        choices=("adamw", "muon"),
        resume=FROZEN,
    )
    adam_beta1: float = setting(
        0.9, help="decay of the first moment", minimum=0, maximum=0.9999, resume=TRACKED
    )
    adam_beta2: float = setting(
        0.95, help="decay of the second moment", minimum=0, maximum=0.99999, resume=TRACKED
    )
    weight_decay: float = setting(
        0.1, help="decoupled, on matrices only", minimum=0, maximum=10, resume=TRACKED
    )
    grad_clip: float = setting(
        1.0, help="largest norm of the whole gradient; 0 does not clip", minimum=0, resume=TRACKED
    )

    # ---- Data
    data_mix: str = setting(
        "python-stdlib:1",
        help="sources and their integer weights, by token; each is declared in "
        "sources/NAME.toml or DATA_DIR/sources/NAME.toml",
        resume=FROZEN,
        pattern=r"[a-z0-9-]+:[1-9][0-9]{0,5}(,[a-z0-9-]+:[1-9][0-9]{0,5})*",
    )
    data_dir: str = setting("data", help="the folder that holds token shards", resume=FREE)
    data_stream: str = setting(
        "auto",
        help="make shards while training: 1; or all of them before: 0; auto streams "
        "where a source is on the hub and its shards are not there",
        choices=("auto", "0", "1"),
    )
    data_cache_gb: float = setting(
        50,
        help="of training shards on disk while streaming; groups that are through are "
        "deleted beyond it",
        unit="GB",
        above=0,
    )
    doc_mask: bool = setting(
        False,
        help="a token attends within its own document only, where a window holds several",
        resume=FROZEN,
    )
    tokenizer: str = setting(
        "train",
        help="train one on the mixture; or the path of a tokenizer.json, or a "
        "repository on the Hugging Face hub",
        resume=FROZEN,
    )

    # ---- Checkpoints
    save_every: int | None = setting(
        None,
        help="Number of steps between checkpoints, in addition to SAVE_MINUTES. Default: SAVE_MINUTES alone. 0 "
        "turns both off: a run that is killed is lost",
        unit="steps",
        minimum=0,
        example="1000",
    )
    save_minutes: float = setting(
        15, help="checkpoint after so much wall time", unit="minutes", above=0
    )
    keep_last: int = setting(
        3, help="checkpoints kept; the two newest that verify always are", minimum=2
    )
    keep_every: int = setting(
        0,
        help="Checkpoints at multiples of this step are kept for good, and with CHECKPOINT_MODE=lite they are full "
        "ones. 0: none",
        unit="steps",
        minimum=0,
    )
    keep_best: bool = setting(
        False,
        help="save behind each evaluation that is better than those of all checkpoints, "
        "and keep the checkpoint with the lowest validation loss",
    )

    # ---- Failures
    max_restarts: int = setting(
        3,
        help="a trainer that fails is started again, this often without a new checkpoint "
        "in between; 0: never",
        minimum=0,
    )
    start_timeout_s: int = setting(
        300,
        help="for all nodes to join, and for anything before the first step",
        unit="seconds",
        minimum=10,
    )
    train_timeout_s: int = setting(
        120,
        help="for a collective in training. A step that takes half of it, and ten "
        "times what steps took, hangs: all processes write their stacks and start again",
        unit="seconds",
        minimum=4,
    )
    shutdown_timeout_s: int = setting(
        120, help="a trainer that was told to stop has this long to save", minimum=1, unit="seconds"
    )
    grace_period_s: int = setting(
        180,
        help="what the cluster leaves between telling a pod to stop and ending it",
        unit="seconds",
        minimum=2,
    )
    spike_sigmas: float = setting(
        8,
        help="a step whose loss or gradient norm exceeds the median of the last 128 by so "
        "many robust standard deviations is skipped; 0: only what is not finite",
        minimum=0,
        resume=TRACKED,
    )

    # ---- Benchmark
    bench_shapes: str = setting(
        "s4k,s50k,checkpoint",
        help="for make bench. Steps: shapes of doctor/gpu_probe/shapes.py, "
        "s50k-bfloat16-compiled one cell, run- before it a whole run; else: checkpoint, "
        "data, sampler (of GPUs), plan (predicted beside measured), logs, text (make sample), "
        "core (evaluation), waste (all that is no training)",
        pattern=r"[a-z0-9-]+(,[a-z0-9-]+)*",
    )

    # ---- Log
    log_every: int = setting(
        10,
        help="console line every so many steps; the record has them all",
        unit="steps",
        minimum=1,
    )

    profile: bool = setting(
        False,
        help="have torch's profiler record some steps behind the start: a trace, and where "
        "their time went, in the run's folder; docs/profile.md",
    )

    # ---- W&B, a mirror of the record
    wandb_mode: str = setting(
        "auto",
        help="mirror the run at Weights & Biases; auto: online where there is a key, else disabled",
        choices=("auto", "online", "offline", "disabled"),
    )
    wandb_project: str = setting(
        "pure-transformer", help="the project there", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
    )
    wandb_entity: str = setting(
        "",
        help="the team or user there. Default: that of the key",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        example="my-team",
    )

    # ---- Other trackers
    trackers: str = setting(
        "",
        help="Trackers next to W&B, in files of the run's folder: tensorboard, trackio or both, "
        "separated by a comma. Their packages are optional (docs/trackers.md)",
        pattern="tensorboard|trackio|tensorboard,trackio|trackio,tensorboard",
        example="tensorboard",
    )

    # ---- Secrets: from the environment or the env file only, never written anywhere
    hf_token: str = setting("", help="Hugging Face token, for gated data sets", secret=True)
    wandb_api_key: str = setting(
        "", help="Weights & Biases key; what wandb login left in .netrc serves too", secret=True
    )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, root: Any = ROOT) -> "Config":
        """Resolve the settings of this process. Raises SettingsError with every problem found."""
        return cls.load_with_remarks(environ, root)[0]

    @classmethod
    def load_with_remarks(
        cls,
        environ: Mapping[str, str] | None = None,
        root: Any = ROOT,
        defaults: Mapping[str, str] | None = None,
        without: Collection[Callable[[Any], str | None]] = (),
    ) -> tuple["Config", list[str]]:
        """The settings, and what the start of a run should say about where they came from.

        without: rules that are not asked, by who judges their matter better.
        """
        resolved = resolve(cls, environ, root, defaults)
        config = cls(**{name.lower(): value for name, value in resolved.values.items()}).derived()
        problems = list(resolved.problems)
        for names, check in CHECKS:
            if check in without:
                continue
            if not resolved.refused & {*names, "PRESET", "ENV_FILE"} and (problem := check(config)):
                problems.append(problem)
        if problems:
            raise SettingsError(problems, resolved.remarks)
        return config, resolved.remarks

    @classmethod
    def of_preset(cls, **settings: str) -> "Config":
        """A preset as it stands, with these settings, whatever is in the environment and in .env."""
        return cls.load_with_remarks(settings, ROOT, {"ENV_FILE": "of-no-user"})[0]

    def derived(self) -> "Config":
        """The same with the defaults that follow from other settings filled in."""
        fill: dict[str, Any] = {}
        if self.run_name == "":
            fill["run_name"] = self.preset
        if self.n_kv_head is None:
            fill["n_kv_head"] = self.n_head
        if self.mlp_dim is None:
            fill["mlp_dim"] = -(-8 * self.n_embd // (3 * 64)) * 64
        if self.min_learning_rate is None:
            fill["min_learning_rate"] = self.learning_rate / 10
        if self.decay_tokens is None and self.lr_schedule == "wsd":
            fill["decay_tokens"] = self.train_tokens // 5
        return dataclasses.replace(self, **fill)

    # ---- What follows from the settings

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: VOCAB_SIZE up to a multiple of 128, which suits matrix units."""
        return -(-self.vocab_size // 128) * 128

    @property
    def replicas(self) -> int:
        """Sites that each train on a part of the batch of their own, under SYNC=diloco; else 1."""
        return self.sites if self.sync == "diloco" else 1

    @property
    def site_nodes(self) -> int:
        """Nodes that a run's processes join: those of a site under SYNC=diloco, else all."""
        return max(1, self.nodes // self.replicas)

    @property
    def site_rank(self) -> int:
        """Which of the replicas this node is a part of."""
        return self.node_rank // self.site_nodes

    @property
    def rank_in_site(self) -> int:
        """Which of the site_nodes this is."""
        return self.node_rank % self.site_nodes

    @property
    def run_folder(self) -> str:
        """The folder of this site's part of the run: of the first the run's own, of each other a whole one in it."""
        return f"{self.runs_dir}/{self.run_name}" + (
            f"/site_{self.site_rank}" if self.site_rank else ""
        )

    @property
    def batch_windows(self) -> int:
        """Sequences of one optimizer step, over all processes."""
        return self.batch_tokens // self.seq_len

    @property
    def last_step(self) -> int:
        """The step after which the run is done."""
        return self.max_steps or math.ceil(self.train_tokens / self.batch_tokens)

    @property
    def mixture(self) -> dict[str, int]:
        """Source -> integer weight."""
        return {
            name: int(weight)
            for name, weight in (part.split(":") for part in self.data_mix.split(","))
        }

    def micro_batch(self, world_size: int) -> int:
        """Sequences of one forward pass: MICRO_BATCH_SIZE, or all that a process has where that is less.

        world_size: processes, over all sites.
        """
        return min(self.micro_batch_size, self.batch_windows // world_size)

    def ranks_of_a_copy(self, processes: int, of_a_node: int) -> int:
        """Processes that share one copy of the weights under PARALLEL=hsdp. Raises SettingsError where they cannot."""
        ranks = self.shard_ranks or of_a_node
        if processes % ranks:
            fits = [n for n in range(1, processes + 1) if processes % n == 0]
            raise SettingsError(
                [
                    f"SHARD_RANKS={ranks} does not divide {processes} processes; for example "
                    f"SHARD_RANKS={min(fits, key=lambda n: abs(n - ranks))}"
                ]
            )
        return ranks

    def stored(self) -> dict[str, Any]:
        """Setting -> value for config.json, without secrets."""
        return {
            name: getattr(self, field.name)
            for name, field in declared_fields(Config).items()
            if not field.metadata["declared"].secret
        }


# ---------------------------------------------------------------------------------------------------
# Resuming, and what the shell asks for
# ---------------------------------------------------------------------------------------------------


def compare_for_resume(stored: dict[str, Any], config: Config) -> tuple[list[str], dict[str, list]]:
    """(complaints about frozen settings, tracked differences as NAME -> [before, now]).

    A setting that the stored run did not know yet counts as having had its default.
    """
    complaints: list[str] = []
    tracked: dict[str, list] = {}
    known = {
        name.lower(): value for name, value in stored.items() if name in declared_fields(Config)
    }
    earlier = Config(**known).derived().stored()
    for name, field in declared_fields(Config).items():
        declared: Declared = field.metadata["declared"]
        before, now = earlier.get(name), getattr(config, field.name)
        if declared.resume == FREE or before == now:
            continue
        if declared.resume == TRACKED:
            tracked[name] = [before, now]
            continue
        complaints.append(
            f"{name}={format_value(now)}: the run was started with {name}={format_value(before)} and "
            f"cannot change it; go on with {name}={format_value(before)}, or choose another RUN_NAME"
        )
    return complaints, tracked


def main(argv: list[str]) -> int:
    """`python -m settings.config check|show|get [NAME=default]... NAME...`; exit code 64 on a bad setting.

    NAME=default: what a target puts in the place of the declared default.
    """
    command, names = (argv or ["check"])[0], [word for word in argv[1:] if "=" not in word]
    defaults = dict(word.split("=", 1) for word in argv[1:] if "=" in word)
    try:
        tunes = bool(resolve(Config, defaults=defaults).values.get("MODEL"))
        config, remarks = Config.load_with_remarks(
            defaults=defaults, without=OF_PRETRAINING if tunes else ()
        )
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 64
    if command == "get":
        sys.stdout.write("".join(f"{format_value(getattr(config, n.lower()))}\n" for n in names))
    elif command == "show":
        sys.stdout.write("".join(f"{n}={format_value(v)}\n" for n, v in config.stored().items()))
    else:
        sys.stderr.write("".join(f"{r}\n" for r in remarks))
        sys.stdout.write(
            f"settings are good: preset {config.preset}, run {config.run_name}, "
            f"{config.last_step} steps\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
