"""Settings of training: the model's shape, batch, schedule, optimizer, sites and evaluation."""

from settings import addresses
from settings.declare import (
    DERIVED,
    FREE,
    FROZEN,
    TRACKED,
    Count,
    Format,
    PathText,
    Positive,
    Section,
    Steps,
    Tokens,
    section,
    setting,
)
from settings.targets import COMPUTE, OPEN, PREPARE_DATA, PRETRAIN, TRAIN, TRAIN_HERE

CORE_BUNDLE = (
    "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
    "@sha256:90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
)


@section
class Architecture(Section):
    """Shape of the transformer."""

    USED_BY = PRETRAIN | OPEN
    RESUME = FROZEN

    vocab_size: Tokens = setting(
        4096,
        "Number of tokens in the vocabulary. A tokenizer that is trained here gets this many. "
        "The embedding is padded to a multiple of 128.",
        minimum=300,
        maximum=2**24,
        used_by=PRETRAIN | PREPARE_DATA | OPEN,
    )
    n_layer: Count = setting(4, "Number of transformer blocks.", maximum=1024)
    n_head: Count = setting(4, "Number of attention heads.", maximum=4096)
    n_kv_head: Count = setting(
        DERIVED,
        "Number of key and value heads, each shared by a group of attention heads. "
        "Default: N_HEAD.",
    )
    n_embd: int = setting(256, "Width of the residual stream.", minimum=2, maximum=2**18)
    mlp_dim: Count = setting(
        DERIVED,
        "Hidden width of the SwiGLU. Default: 8/3 of N_EMBD, rounded up to a multiple of 64.",
        maximum=2**20,
    )
    qk_norm: bool = setting(
        False,
        "Apply RMSNorm to the queries and keys of each head, as Qwen3 does.",
        used_by=PRETRAIN | OPEN | {"certify"},
    )
    tie_embeddings: bool = setting(
        True,
        "Tie the output head to the input embedding.",
        used_by=PRETRAIN | OPEN | {"certify"},
    )
    rope_theta: Positive = setting(10000.0, "Base of the rotary position embedding.")
    init_from: PathText = setting(
        "",
        "Folder with config.json and safetensors of a Llama or Qwen3 model. A new run takes its shape "
        "and starts from its weights; `make sample` and `eval` open it. `make chat` opens a model of any "
        "kind. Default: random weights.",
        example="models/qwen3-0.6b",
        used_by=PRETRAIN | OPEN | {"chat"},
    )

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding and the head: VOCAB_SIZE up to a multiple of 128."""
        return -(-self.vocab_size // 128) * 128


@section
class Training(Section):
    """Batch, learning-rate schedule and optimizer."""

    USED_BY = TRAIN
    RESUME = TRACKED

    seed: int = setting(
        1337,
        "Random seed for weight initialization, data order and sampling.",
        maximum=2**31 - 1,
        resume=FROZEN,
        used_by=COMPUTE | {"bench-quality", "certify"},
    )
    seq_len: Tokens = setting(
        256,
        "Context length: number of tokens in a training sequence.",
        minimum=2,
        resume=FROZEN,
        used_by=TRAIN | PREPARE_DATA | OPEN,
    )
    batch_tokens: Tokens = setting(
        8192,
        "Global batch size in tokens: what one optimizer step trains on, over all processes.",
        minimum=2,
        resume=FROZEN,
        used_by=TRAIN | {"data"},
    )
    micro_batch_size: Count = setting(
        16,
        "Largest number of sequences in one forward pass of a process, also in evaluations. "
        "Gradient accumulation follows from it.",
        unit="sequences",
        used_by=COMPUTE,
    )
    train_tokens: Tokens = setting(
        10_000_000,
        "Number of training tokens: the horizon of the learning-rate schedule. "
        "After it, the learning rate stays at its minimum.",
        minimum=1,
        used_by=PRETRAIN | PREPARE_DATA,
    )
    max_steps: Steps | None = setting(
        None,
        "Step after which training stops. The learning rate still follows TRAIN_TOKENS. Default: the "
        "step that reaches TRAIN_TOKENS.",
        minimum=1,
        resume=FREE,
        used_by=TRAIN | {"data"},
    )
    learning_rate: Positive = setting(
        1e-3, "Peak learning rate.", maximum=10, used_by=TRAIN | {"certify"}
    )
    min_learning_rate: float = setting(
        DERIVED,
        "Learning rate at the end of the schedule. Default: a tenth of LEARNING_RATE.",
        maximum=10,
    )
    warmup_tokens: Tokens = setting(
        0,
        "Number of tokens over which the learning rate rises linearly from zero.",
    )
    lr_schedule: str = setting(
        "cosine",
        "Learning rate after the warm-up: a cosine down to the minimum (`cosine`), "
        "or constant and then linear down to it (`wsd`).",
        choices=("cosine", "wsd"),
        used_by=TRAIN | {"certify"},
    )
    decay_tokens: Tokens | None = setting(
        DERIVED,
        "Length of the linear decay, which ends at TRAIN_TOKENS. Default: a fifth of TRAIN_TOKENS.",
        minimum=1,
        needs="LR_SCHEDULE=wsd",
    )
    optimizer: str = setting(
        "adamw",
        "AdamW for all parameters (`adamw`), or Muon for the matrices inside the blocks "
        "and AdamW for the rest (`muon`).",
        choices=("adamw", "muon"),
        resume=FROZEN,
        used_by=PRETRAIN | {"certify"},
    )
    adam_beta1: float = setting(
        0.9, "Decay rate of Adam's first moment.", maximum=0.9999, used_by=TRAIN | {"certify"}
    )
    adam_beta2: float = setting(
        0.95, "Decay rate of Adam's second moment.", maximum=0.99999, used_by=TRAIN | {"certify"}
    )
    weight_decay: float = setting(
        0.1,
        "Decoupled weight decay. It applies to matrices only.",
        maximum=10,
        used_by=TRAIN | {"certify"},
    )
    grad_clip: float = setting(
        1.0,
        "Largest norm of the gradient over all parameters. 0 does not clip.",
        used_by=TRAIN | {"certify"},
    )
    log_every: Steps = setting(
        10,
        "Number of steps between lines on the console. metrics.jsonl always has every step.",
        minimum=1,
        resume=FREE,
    )
    profile: bool = setting(
        False,
        "Record a few steps after the start with the PyTorch profiler, and summarize their time.",
        resume=FREE,
    )

    @property
    def batch_windows(self) -> int:
        """Number of sequences in one optimizer step, over all processes."""
        return self.batch_tokens // self.seq_len

    @property
    def last_step(self) -> int:
        """Step after which a pretraining run is done."""
        return self.max_steps or self.horizon

    @property
    def horizon(self) -> int:
        """Step at which the learning-rate schedule ends."""
        return -(-self.train_tokens // self.batch_tokens)

    @property
    def early_end(self) -> str:
        """Which setting ends a run before its schedule, `MAX_STEPS=50 of 977`; "" if none does."""
        if self.last_step >= self.horizon:
            return ""
        return f"MAX_STEPS={self.last_step} of {self.horizon:,}"


@section
class Wan(Section):
    """Sites that are connected by a WAN."""

    USED_BY = PRETRAIN | {"lighthouse"}
    RESUME = TRACKED

    sync: str = setting(
        "ddp",
        "How sites stay in sync: all-reduce gradients in every step (`ddp`), or average weight "
        "changes every SYNC_EVERY steps (`diloco`).",
        choices=("ddp", "diloco"),
        finds_run=True,
    )
    sites: Count = setting(
        1,
        "Number of sites (clusters connected by a WAN). NODES must be a multiple of it.",
        needs="SYNC=diloco",
        needed_by=PRETRAIN - {"plan", "doctor"},
        used_by=PRETRAIN | {"lighthouse", "net-probe"},
        finds_run=True,
    )
    lighthouse: str = setting(
        "",
        "Address at which `make lighthouse` listens. Sites find each other through it.",
        format=Format(
            f"{addresses.HOST}:{addresses.PORT}",
            "HOST:PORT: an IPv4 address or a name, not IPv6, and a port from 1024 to 65534",
        ),
        example="10.0.0.5:29510",
        needs="SYNC=diloco",
        resume=FREE,
    )
    min_sites: Count = setting(
        1,
        "Smallest number of sites that continue training while the others are away.",
        needs="SYNC=diloco",
        resume=FREE,
    )


@section
class DiLoCo(Section):
    """Synchronization of weights between sites."""

    USED_BY = PRETRAIN
    RESUME = TRACKED
    NEEDS = "SYNC=diloco"

    sync_every: Steps = setting(
        30,
        "Number of local steps between synchronizations (H in the DiLoCo paper). "
        "With SYNC_FRAGMENTS, each fragment is synchronized once in that interval.",
        minimum=1,
    )
    sync_fragments: Count = setting(
        1,
        "Number of parts of the model that are synchronized in turn (streaming DiLoCo).",
    )
    sync_delay: Steps = setting(
        0,
        "Number of steps that training continues while a synchronization is in progress.",
    )
    sync_dtype: str = setting(
        "bfloat16",
        "Data type of the pseudo-gradients on the wire. They are averaged in float32.",
        choices=("bfloat16", "float32"),
    )
    outer_learning_rate: Positive = setting(
        0.7,
        "Learning rate of the outer Nesterov optimizer (Douillard et al. 2023).",
        maximum=2,
    )
    outer_momentum: float = setting(0.9, "Momentum of the outer Nesterov optimizer.", maximum=0.999)


@section
class Evaluation(Section):
    """Validation loss and evaluation tasks."""

    USED_BY = TRAIN | {"eval"}

    eval_every: Steps = setting(
        1000,
        "Number of steps between evaluations. 0 evaluates only at the end; EVAL_TOKENS=0 never.",
        used_by=TRAIN,
    )
    eval_tokens: Tokens = setting(
        65536,
        "Size of the fixed validation set that is used during training. "
        "The evaluation at the end uses all validation data, up to 20 x EVAL_TOKENS. "
        "At least 256, or 0: training does not evaluate, not even at the end.",
        resume=TRACKED,
    )
    eval_minutes: Positive = setting(
        10,
        "Time limit of an evaluation; the one at the end gets 20 times as much. "
        "Training continues if an evaluation is stopped.",
        unit="minutes",
    )
    core_every: Steps = setting(
        0,
        "Number of steps between evaluations of the CORE metric, which is then also computed at "
        "the end. 0 leaves it to `make eval`.",
        used_by=PRETRAIN,
    )
    core_bundle: str = setting(
        CORE_BUNDLE,
        "Tasks of the CORE metric. `make data-report` searches the training data for their text. "
        "`none` leaves CORE out.",
        format=Format(
            r"https?://[^#,\s]+@sha256:[0-9a-f]{64}|(?!https?:|-)[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]+",
            "a folder, a .zip file, or the address of one with @sha256:HASH after it",
        ),
        needs="CORE_EVERY!=0",
        needed_by=TRAIN_HERE | {"train-8xa100"},
        used_by=PRETRAIN | {"eval", "data-report"},
    )
    eval_examples: int = setting(
        500,
        "Largest number of questions of an evaluation task, always the same ones. 0 asks all.",
        needs="CORE_EVERY!=0",
        needed_by=TRAIN_HERE | {"train-8xa100"},
        used_by=PRETRAIN | {"eval"},
    )
    benchmarks: str = setting(
        "",
        "Tasks of lm-evaluation-harness that `make eval` asks instead: names, or paths of .yaml files. "
        "`none` leaves them out, also of `make pipeline`.",
        format=Format(r"[\w./-]+(,[\w./-]+)*", "names of tasks with commas between them"),
        example="arc_easy,arc_challenge,mmlu,gsm8k",
        used_by={"eval", "pipeline"},
    )
