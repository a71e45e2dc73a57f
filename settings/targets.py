"""Name the make targets by the kind of settings that they use.

`make plan`, `doctor` and `restart` take what a training target takes: they preview or repeat it.
"""

PREVIEW = {"plan", "doctor", "restart"}
PRETRAIN = PREVIEW | {"train", "train-node", "train-2xh100", "train-8xa100", "pipeline"}
FINETUNE = PREVIEW | {"finetune", "finetune-node", "finetune-k8s", "pipeline"}
TRAIN = PRETRAIN | FINETUNE
PREPARE_DATA = {"data", "data-verify", "data-report"}
GENERATE = {"sample", "chat"}
NODE = {"train", "train-node", "finetune", "finetune-node", "net-probe"}  # may be one of several
COMPUTE = TRAIN | GENERATE | {"eval"}
SEND = {"train-8xa100", "finetune-k8s"}  # these send a run to a cluster
LAUNCH = PREVIEW | SEND | {"data"}
DRY_RUN = {"restart", "train-8xa100", "finetune-k8s", "data", "upload", "pipeline"}
WATCH = {
    "status",
    "monitor",
    "attach",
    "logs",
    "checkpoints",
    "stop",
    "fetch-run",
    "plots",
    "bad-nodes",
    "clear-bad-nodes",
}
READ_A_RUN = WATCH - {"fetch-run", "plots"}  # and write nothing into its folder
CLUSTER = LAUNCH | WATCH | {"sites", "describe", "net-probe"}
BENCHMARKS = {"bench", "bench-quality", "gpu-check", "wan-lab", "certify"}
ALL_SETTINGS = {"settings", "check-env"}  # these read every setting
OTHERS = {
    "runs",
    "compare",
    "energy",
    "mirror",
    "gpu-sampler",
    "export",
    "upload",
    "lighthouse",
    "image",
    "push",
}
EVERY = COMPUTE | PREPARE_DATA | CLUSTER | BENCHMARKS | ALL_SETTINGS | OTHERS
SETUP = {"setup", "setup-dev", "setup-finetune"}
DEVELOP = {"test", "test-faults", "lint", "lock", "image-test"}
# The Makefile has no others.
TARGETS = EVERY | SETUP | DEVELOP | {"help", "env-example", "gpu-rehearsal"}

# These load a checkpoint or an export, and compare its shape.
OPEN = {"sample", "eval", "export"}
# These look for a run's folder, which is another one for the nodes of another site: SITES and the
# like that only tell which (finds_run) come from the environment or an env file.
FIND = (
    WATCH
    | OPEN
    | GENERATE
    | PREPARE_DATA
    | {"runs", "compare", "energy", "mirror", "gpu-sampler", "lighthouse"}
)

# These go on with a run that exists, so they must not change its frozen settings.
CONTINUE = {"train", "train-node", "train-2xh100", "finetune", "finetune-node", "check-env"}
START = {"train", "train-node", "train-2xh100", "pipeline"}  # these pretrain on this machine
# These train on this machine, and do nothing else.
TRAIN_HERE = CONTINUE - {"check-env"}
# These list runs, and say which may not be read.
LISTS_RUNS = {"runs", "status"}
# These also take the settings that it was started with.
RESUME = CONTINUE | PREVIEW | {"settings"}

# These pretrain, or fine-tune if MODEL is set.
EITHER = PREVIEW | ALL_SETTINGS

# Variables that are no settings, and the targets that read them.
BUILD = {"image", "push", "image-test"}
VARIABLES = {
    "PYTHON": TARGETS,
    "SHELL": TARGETS,
    "VENV": TARGETS,
    "CUDA_VISIBLE_DEVICES": TARGETS,
    "OMP_NUM_THREADS": TARGETS,
    "NCCL_DEBUG": TRAIN,
    "NCCL_SOCKET_FAMILY": TRAIN,
    "NCCL_SOCKET_IFNAME": TRAIN,
    "ALL": {"help", "gpu-rehearsal"},
    "CASE": {"gpu-rehearsal"},
    "CHAOS_MINUTES": {"test-faults"},
    "BASE_IMAGE": BUILD,
    "FLASH_ATTN_WHEEL": BUILD,
    "IMAGE_BUILDER": BUILD,
    "TORCH_BACKEND": SETUP | BUILD,
}

# What a target puts in the place of the declared defaults.
TARGET_DEFAULTS = {
    "train-2xh100": {"PRESET": "d16-2xh100", "NPROC": "2"},
    "train-8xa100": {"PRESET": "xlarge-8xa100", "NODES": "4", "GPUS_PER_NODE": "2"},
    "lighthouse": {"SYNC": "diloco"},
    "finetune": {"PRESET": "finetune"},
    "finetune-node": {"PRESET": "finetune"},
    "finetune-k8s": {"PRESET": "finetune", "GPUS_PER_NODE": "1"},
}
