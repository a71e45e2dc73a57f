"""What a run in the cluster is: its settings, checked as the pods will see them, and the overlay that it takes.

A setting has the same five sources as everywhere. A few have other defaults there, since a job in the cluster is larger
than one on this machine; and what speaks of this machine only is left here. With MODEL it is a fine-tuning.
"""

import math
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plan.allow_fail import find_unknown_check
from record.run_paths import RunPaths
from settings import ROOT, SettingsError, targets
from settings.checks import CHECKS as RULES
from settings.checks import find_conflicts
from settings.cluster import Cluster
from settings.config import SETTINGS, Config
from settings.declare import Section, format_value, read_section
from settings.finetune import LoRA, Tuning
from settings.init_from import SHAPE
from settings.planning import Planning
from settings.resolve import Resolved, find_fitted, resolve
from settings.run import Sources
from settings.sampling import Sampling
from settings.sources import read_file
from settings.training import DiLoCo, Wan
from settings.tuning_rules import FITTED, fit_to_model, refuse_unsupported
from settings.watching import Measuring, Watching
from train.data.sources.source import CorpusError, declared

DEFAULTS = targets.TARGET_DEFAULTS["train-8xa100"] | {
    "START_TIMEOUT_S": "1800",  # pods of one job start whenever each finds room
    "MAX_RESTARTS": "10",  # pods that die take the others' attempts with them
}
# With MODEL, in the place of these.
OF_A_MODEL = targets.TARGET_DEFAULTS["finetune-k8s"] | {"NODES": "1"}

# A process keeps one core busy, a quarter of this: NRP asks for 20% at least.
CORES_PER_GPU = 4
MEMORY_PER_GPU_GB = 48
SMALL_MEMORY_GB = 6  # of a pod without GPUs
LEAST_CORES = 2  # of a pod without GPUs, which else has one for each process
DISK_GB = 50  # GiB of a pod next to the volume: caches and temporary files
SMALL_DISK_GB = 10  # the same of a pod without GPUs
SHM_PART = 6  # of a pod's memory one part in so many may be /dev/shm

LOADING_GB = 8  # of a process that fine-tunes: itself, and a block of a large mixture on its way from file to GPU

VOLUME_AT, CODE_AT = "/volume", "/app"  # in a pod
IN_POD = {"RUNS_DIR": f"{VOLUME_AT}/runs", "DATA_DIR": f"{VOLUME_AT}/data"}

# What pods are not told: secrets, what is of this machine, and what the manifests themselves say.
SENT_OF_OUTSIDE = {
    "JOB_NAME",
    "TARGET_HOURS",
    "TARGET_TOKENS_PER_S",
    "ALLOW_FAIL",
    "INTERVAL_MS",
    "SAMPLE_TOKENS",
}


def names_of(*sections: type[Section]) -> set[str]:
    """Return the settings of some sections."""
    return {name for section in sections for name in read_section(section)}


AT_SITES = names_of(Wan, DiLoCo)  # for pods that are sites
OF_FINETUNING = names_of(Tuning, LoRA)  # for pods that have a MODEL
OUTSIDE = names_of(Sources, Cluster, Planning, Watching, Measuring, Sampling)
NOT_SENT = (
    (OUTSIDE - SENT_OF_OUTSIDE)
    | {"DETACH", "DRY_RUN", "GGUF", "HUB_REPO", "MID_DATA", "NODE_RANK", "SFT_DATA", "STEP"}
    | {name for name, declared in SETTINGS.items() if declared.secret}
)

LIGHTHOUSE, LIGHTHOUSE_PORT = (
    "-lighthouse",
    29510,
)  # behind JOB_NAME: where the sites of a job find each other

FILES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".arrow",
    ".gz",
    ".zst",
)  # of conversations: no name of the hub ends so

# Variables of NCCL that go to the pods if they are set here.
NCCL_FROM_HERE = ("NCCL_DEBUG", "NCCL_SOCKET_FAMILY", "NCCL_SOCKET_IFNAME")

STAND_IN = "in-the-secret"  # for a key that the Secret brings; no Config with it leaves this file


def cluster_config(environ: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """The settings of a run in the cluster, and what is to be said of where they came from. Raises SettingsError."""
    resolved = resolve(environ, ROOT, DEFAULTS, without=RULES)
    if tunes := bool(resolved.config.model):
        resolved = resolve(environ, ROOT, DEFAULTS | OF_A_MODEL, without=RULES)
    values, origin = resolved.config.values(), resolved.origins
    asked = values["NPROC"] if origin["NPROC"] in ("command line", "environment") else None
    if tunes and origin["GPUS_PER_NODE"] == "default" and origin["NPROC"].startswith("presets/"):
        values["GPUS_PER_NODE"] = values["NPROC"]
    job, key = values["JOB_NAME"], values["WANDB_API_KEY"]
    values |= {
        "NPROC": values["GPUS_PER_NODE"],
        "NODE_RANK": 0,
        "WANDB_API_KEY": key or (STAND_IN if values["ENGINE"] == "kubernetes" else ""),
        "MASTER_ADDR": f"{job}-0.{job}" if values["NODES"] > 1 and values["SYNC"] == "ddp" else "",
    }
    problems, refused = list(resolved.problems), resolved.invalid
    if values["SYNC"] == "diloco" and (found := as_sites(values, origin)):
        problems += found if "NODES" not in refused else []
        refused.add("SITES")  # nothing more is to be said of it
    c = Config(**{name.lower(): value for name, value in values.items()})
    if tunes:
        c = fit_to_model(c, resolved.fitted, None, c.nodes * (c.nproc or 1))
    if "GPUS_PER_NODE" in refused:
        refused.add("NPROC")
    if asked not in (None, c.nproc):
        problems.append(
            f"NPROC={asked} ({origin['NPROC']}): a pod runs one process for each of its GPUS_PER_NODE="
            f"{c.gpus_per_node}; leave it out, or set GPUS_PER_NODE={asked}"
        )
    purpose = "finetune" if tunes else "train"
    for name, sentence in find_conflicts(c, purpose, refused, ()):
        text = format_value(getattr(c, name.lower()))
        problems.append(f"{name}={text} ({origin[name]}): {sentence}")
    for names, check in CHECKS_OF[c.engine]:
        if refused & {*names, "PRESET", "ENV_FILE"} or (tunes and check is check_sources):
            continue
        if problem := check(c):
            problems.append(problem)
    if tunes:
        try:
            refuse_unsupported(c)
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError(problems, resolved.warnings)
    c = c.replace(wandb_api_key=key)
    pod_environment(c)
    return c, resolved.warnings


def as_sites(values: dict[str, Any], origin: Mapping[str, str]) -> list[str]:
    """Give each pod to a site of its own, and all of them the lighthouse beside them; what was asked for otherwise is
    returned as problems. A pod of several GPUs splits the weights over them, so that each sends its part only."""
    pods, found = values["NODES"], []
    ours = {"SITES": pods, "LIGHTHOUSE": f"{values['JOB_NAME']}{LIGHTHOUSE}:{LIGHTHOUSE_PORT}"}
    why = {
        "SITES": f"each of NODES={pods} pods is a site",
        "LIGHTHOUSE": "the lighthouse of a job in the cluster is a pod beside the others",
    }
    for name, value in ours.items():
        if origin[name] != "default" and values[name] != value:
            found.append(
                f"{name}={values[name]} ({origin[name]}): with SYNC=diloco {why[name]}; leave {name} out"
            )
    if pods == 1:
        found.append(
            "SYNC=diloco with NODES=1: each pod is a site, and one alone has nobody to exchange with; set "
            "NODES=4 and GPUS_PER_NODE=2, or SYNC=ddp"
        )
    if (values["GPUS_PER_NODE"] or 1) > 1 and origin["PARALLEL"] == "default":
        values["PARALLEL"] = "fsdp"
    values |= ours
    return found


# ---------------------------------------------------------------------------------------------------
# What can be said here already, and would fail there
# ---------------------------------------------------------------------------------------------------


def check_site(c: Config) -> str | None:
    if c.sync == "diloco" and c.site:
        return (
            f"SYNC=diloco with SITE={c.site}: pods of one site are quick enough to keep in step at every step, which "
            "costs nothing in loss; set SYNC=ddp, or leave SITE out"
        )
    return None


def check_memory(c: Config) -> str | None:
    if not c.model or c.device == "cpu":
        return None
    loading = LOADING_GB * (c.gpus_per_node or 1)
    if pod_memory_gb(c) - shm_gb(c) >= loading:
        return None
    return (
        f"POD_MEMORY_GB={pod_memory_gb(c)}: to load a model each of GPUS_PER_NODE={c.gpus_per_node} processes needs "
        f"{LOADING_GB} GiB of the host, and a sixth of the memory is /dev/shm; set "
        f"POD_MEMORY_GB={math.ceil(loading * SHM_PART / (SHM_PART - 1))}"
    )


def check_paths(c: Config) -> str | None:
    there = f"where pods do not reach it; copy it to a folder below {VOLUME_AT} on the volume, for example"
    if c.init_from and not in_a_pod(c.init_from):
        return f"INIT_FROM={c.init_from} is on this machine, {there} INIT_FROM={VOLUME_AT}/models/qwen3-1.7b"
    if c.tokenizer.endswith(".json") and not in_a_pod(c.tokenizer):
        return (
            f"TOKENIZER={c.tokenizer} is on this machine, {there} TOKENIZER={VOLUME_AT}/tokenizer.json, or name a "
            "repository on the hub"
        )
    return None


def check_tuned(c: Config) -> str | None:
    """MODEL and DATA are read in the pods: on the volume or from the hub, whose names look like paths."""
    if not c.model:
        return None
    if not c.data:
        return (
            f"DATA is not set, which MODEL={c.model} is to be fine-tuned on; give conversations on the volume or "
            f"the hub, for example DATA={VOLUME_AT}/chats.jsonl"
        )
    if problem := check_named("MODEL", c.model, f"{VOLUME_AT}/models/qwen3-1.7b", "OWNER/NAME"):
        return problem
    if "/" not in c.model and is_run_here(RunPaths.of(c.runs_dir, c.model, ROOT)):
        return (
            f"MODEL={c.model} is a run of this machine, where pods do not reach it; copy its export to the volume "
            f"and give that, for example MODEL={VOLUME_AT}/models/{c.model}"
        )
    parts = [
        (name, part)
        for name in ("DATA", "EVAL_DATA")
        for part in getattr(c, name.lower()).split(",")
        if part
    ]
    return next(
        (
            problem
            for name, part in parts
            if (
                problem := check_named(
                    name, part, f"{VOLUME_AT}/chats.jsonl", "OWNER/NAME:CONFIG:SPLIT"
                )
            )
        ),
        None,
    )


def check_named(setting: str, value: str, example: str, of_the_hub: str) -> str | None:
    """Why pods do not find what a setting names."""
    here = (ROOT / Path(value).expanduser()).exists() and not (
        setting == "MODEL" and "/" not in value
    )
    is_path = value.startswith(("/", "~", ".")) or value.endswith(FILES)
    if (in_a_pod(value) and ".." not in Path(value).parts) or not (here or is_path):
        return None
    return (
        f"{setting}={value} is {'on this machine' if here else 'a path'}, where pods do not reach it; copy it to a "
        f"folder below {VOLUME_AT} on the volume, for example {setting}={example}, or name one on the hub, "
        f"{setting}={of_the_hub}"
    )


def is_run_here(paths: RunPaths) -> bool:
    """Whether a run was trained on this machine, and not brought from the cluster."""
    return paths.checkpoints.is_dir() and not (paths.folder / "cluster.json").exists()


def in_a_pod(path: str) -> bool:
    """Whether pods reach a path: on the volume, or in the image."""
    return path.startswith((f"{VOLUME_AT}/", f"{CODE_AT}/"))


def check_sources(c: Config) -> str | None:
    if c.pretrains_on_data:
        if c.data.startswith("hf:") or in_a_pod(c.data):
            return None
        return (
            f"DATA={c.data}: Is on this machine, where pods do not reach it. Copy it to the volume, for "
            f"example to DATA={VOLUME_AT}/text, or use a data set on the Hub: DATA=hf:OWNER/NAME."
        )
    for name in c.mixture:
        try:
            source = declared(name, [ROOT / "sources"])
        except CorpusError as error:
            return f"DATA_MIX={c.data_mix}: {error}"
        if here := [pattern for pattern in source.files if not in_a_pod(pattern)]:
            return (
                f"DATA_MIX={c.data_mix}: the files of sources/{name}.toml, {here[0]}, are on this machine, where "
                f'pods do not reach them; copy them to the volume, for example files = ["{VOLUME_AT}/{name}/*"]'
            )
        if problem := not_committed(f"sources/{name}.toml"):
            return f"DATA_MIX={c.data_mix}: {problem}"
    return None


def check_allow_fail(c: Config) -> str | None:
    return find_unknown_check(c.allow_fail)


def check_preset(c: Config) -> str | None:
    problem = not_committed(f"presets/{c.preset}.env")
    return f"PRESET={c.preset}: {problem}" if problem else None


def not_committed(path: str) -> str:
    """What to do about a file that is not in the image as it is here; "" if it is committed, or nobody can tell."""
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain", "--ignored", "--", path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here
        return ""
    return (
        f"{path} is not committed as it stands, and the image holds what is; commit it, then make image push"
        if done.stdout.strip()
        else ""
    )


CHECKS: list[tuple[tuple[str, ...], Callable[[Config], str | None]]] = [
    (("SYNC", "SITE"), check_site),
    (("POD_MEMORY_GB", "GPUS_PER_NODE"), check_memory),
    (("INIT_FROM", "TOKENIZER"), check_paths),
    (("DATA_MIX", "DATA"), check_sources),
    (("MODEL", "DATA", "EVAL_DATA", "RUNS_DIR"), check_tuned),
    (("PRESET",), check_preset),
    (("ALLOW_FAIL",), check_allow_fail),
]


def check_engine(c: Config) -> str | None:
    if c.sync == "diloco":
        return "ENGINE=slurm: sites need a lighthouse, which only ENGINE=kubernetes starts; set SYNC=ddp"
    return None


# Its nodes share the disk of this machine, where relative paths start at the repository.
SLURM_CHECKS: list[tuple[tuple[str, ...], Callable[[Config], str | None]]] = [
    (("SYNC", "ENGINE"), check_engine),
    (("ALLOW_FAIL",), check_allow_fail),
]

CHECKS_OF = {"kubernetes": CHECKS, "slurm": SLURM_CHECKS}


# ---------------------------------------------------------------------------------------------------
# What follows from the settings
# ---------------------------------------------------------------------------------------------------


def overlay_of(c: Config) -> str:
    """Return the folder of k8s/manifests/overlays that the run takes."""
    if c.device == "cpu":
        return "cpu-smoke"
    if c.sync == "diloco":
        return "diloco"
    if c.nodes == 1:
        return "single-node"
    if c.site:
        return "pinned-site"
    return "nrp"


def network_of(c: Config) -> str:
    """Return the file of k8s/manifests/network with NCCL's settings: for nodes of one site, or of several."""
    if c.site or c.nodes == 1 or c.sync == "diloco":  # NCCL does not join the sites of DiLoCo
        return "site"
    return "wan"


def pod_cpus(c: Config) -> int:
    """Return POD_CPUS, or else four cores for each GPU; without GPUs one for each process, and two at least."""
    if c.pod_cpus is not None:
        return c.pod_cpus
    processes = c.gpus_per_node or 1
    if c.device == "cpu":
        return max(LEAST_CORES, processes)
    return CORES_PER_GPU * processes


def pod_memory_gb(c: Config) -> int:
    """Return POD_MEMORY_GB, or else the GiB of memory that the GPUs of a pod need, with its /dev/shm."""
    if c.pod_memory_gb is not None:
        return c.pod_memory_gb
    if c.device == "cpu":
        return SMALL_MEMORY_GB
    return MEMORY_PER_GPU_GB * (c.gpus_per_node or 1)


def pod_disk_gb(c: Config) -> int:
    """Return the GiB of disk that a pod has next to the volume."""
    return SMALL_DISK_GB if c.device == "cpu" else DISK_GB


def shm_gb(c: Config) -> int:
    """Return the GiB of a pod's memory that /dev/shm may take."""
    return max(1, pod_memory_gb(c) // SHM_PART)


def pod_environment(c: Config) -> dict[str, str]:
    """The settings as the pods get them, and the variables of the network. Raises SettingsError where pods would."""
    path = ROOT / "k8s" / "manifests" / "network" / f"{network_of(c)}.env"
    problems: list[str] = []
    network = read_file(path, path.name, problems)
    if problems:
        raise SettingsError(problems)
    variables = {name: given.text for name, given in network.items()} | nccl_from_here()
    return run_environment(c, variables | {"POD_NETWORK": network_of(c)}, IN_POD)


def run_environment(
    c: Config, variables: dict[str, str], folders: dict[str, str]
) -> dict[str, str]:
    """The settings of a node as its environment gives them, with these variables. Raises SettingsError where the node would.

    folders: RUNS_DIR and DATA_DIR of the node.
    """
    asked = c.replace(nproc=c.gpus_per_node)
    left = (
        NOT_SENT
        | (set() if c.sync == "diloco" else AT_SITES)
        | (set() if c.model else OF_FINETUNING)
    )
    values: dict[str, Any] = {
        name: getattr(asked, name.lower()) for name in SETTINGS if name not in left
    }
    defaults = Config()
    # The pods choose the others, once they have read model and DATA.
    given = set(FITTED) - find_fitted() if c.model else set(FITTED)
    environment = (
        variables
        | {
            "PRESET": c.preset,
            "OMP_NUM_THREADS": str(max(1, pod_cpus(c) // (c.gpus_per_node or 1))),
        }
        | {
            name: format_value(value)
            for name, value in values.items()
            if name not in FITTED
            and value != getattr(defaults, name.lower())
            and not (c.init_from and name in SHAPE)
        }
        | {name: format_value(values[name]) for name in FITTED if name in given & values.keys()}
        | folders
    )
    seen = as_a_pod_sees(environment).config
    environment |= {
        name: format_value(value)
        for name, value in values.items()  # where the preset has another
        if name not in environment and value != getattr(seen, name.lower())
    }
    as_a_pod_sees(environment).check()
    return dict(sorted(environment.items()))


def nccl_from_here() -> dict[str, str]:
    """Return the variables of NCCL that are set in this environment for the pods."""
    return {name: os.environ[name] for name in NCCL_FROM_HERE if os.environ.get(name)}


def as_a_pod_sees(environment: Mapping[str, str]) -> Resolved:
    """What this environment gives where there is no env file, but a Secret."""
    return resolve(
        environment,
        ROOT,
        defaults={"ENV_FILE": "none-in-a-pod", "WANDB_API_KEY": STAND_IN},
    )
