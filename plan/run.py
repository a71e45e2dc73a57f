"""What is planned: the settings of a run, its devices, and the model that it trains.

A proposal is a run with other settings: `changed(run, train_tokens=10**9)`. It passes the rules that settings have, and
`added(run, other)` is what to type for it: `TRAIN_TOKENS=1B`.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from plan import storage
from plan.finetuning.hf_shape import (
    ATTENTION,
    Block,
    Matrix,
    Shape,
    UnknownShape,
    shape_of,
    swiglu,
)
from plan.finetuning.tuned import Tuned, item_bytes, tuned_of
from plan.fleet import Fleet
from plan.memory import Memory, least_bytes, peak_memory
from plan.past_runs import PastRun
from plan.planned_step import Step
from plan.published import of_preset, published
from settings import ROOT, SettingsError
from settings.checks import CHECKS, PRETRAINING, check_batch, check_nodes, find_batch_problem
from settings.config import SETTINGS, Config
from settings.declare import format_value
from settings.json_file import read_object
from settings.sources import read_file
from settings.tuning_rules import NO_MODEL, fit_to_model
from train.data import data_paths

RECOMPUTE = ("none", "selective", "full")  # ACTIVATION_CHECKPOINTING, from fastest to least memory

# Settings that follow from others where nobody sets them, and the value that stands for "not set".
DERIVED: dict[str, Any] = {
    "run_name": "",
    "n_kv_head": None,
    "mlp_dim": None,
    "min_learning_rate": None,
    "decay_tokens": None,
}
# The processes of a plan are those of its fleet, and it needs no address of node 0.
NOT_OF_A_PLAN = (check_batch, check_nodes)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is planned.

    Attributes:
        model: the model with what is trained of it.
        model_name: what MODEL is called; "" in pretraining.
        source: where the shape of MODEL is from, in words.
        mfu_percent: to plan with whatever the settings say, for runs that are compared.
        past_runs: those that tell how fast devices are.
    """

    config: Config
    fleet: Fleet
    model: Tuned
    model_name: str = ""
    source: str = ""
    mfu_percent: float | None = None
    past_runs: tuple[PastRun, ...] = ()

    @property
    def is_finetuning(self) -> bool:
        return bool(self.model_name)

    @property
    def micro_batch(self) -> int:
        return self.config.micro_batch(self.fleet.processes)

    @property
    def site_processes(self) -> int:
        """Processes that take every step together: under SYNC=diloco those of one site."""
        return self.fleet.processes // self.config.replicas

    @property
    def steps(self) -> int | None:
        """None in fine-tuning, where EPOCHS of DATA decide."""
        return self.config.max_steps if self.is_finetuning else self.config.last_step

    @property
    def step(self) -> Step:
        """A step of one process: all that memory depends on."""
        fleet = self.fleet
        return Step(
            self.model,
            is_ours=not self.is_finetuning,
            processes=fleet.processes,
            node_processes=fleet.processes_of_a_node,
            on_cpu=fleet.on_cpu,
        )

    @property
    def memory(self) -> Memory:
        """What the largest process holds at its peak."""
        return peak_memory(self.step)

    @property
    def standing_bytes(self) -> float:
        """Weights, gradients and optimizer state of a process, and what sites have in common: a step ends with all of
        them."""
        return least_bytes(self.step)

    def largest_micro_batch(self, capacity_bytes: float) -> int:
        """Return the largest MICRO_BATCH_SIZE that fits and divides the batch, 0 for none."""
        windows = self.step.windows
        # It must divide the windows. Divisors come in pairs, so the search ends at the square root.
        small = [divisor for divisor in range(1, math.isqrt(windows) + 1) if windows % divisor == 0]
        for size in sorted({*small, *(windows // divisor for divisor in small)}, reverse=True):
            config = self.config.replace(micro_batch_size=size)
            if find_batch_problem(config, self.fleet.processes):
                continue
            step = dataclasses.replace(self.step, model=dataclasses.replace(self.model, c=config))
            if peak_memory(step).total <= capacity_bytes:
                return size
        return 0

    @property
    def checkpoint_bytes(self) -> float:
        """The size of a checkpoint: weights and optimizer state in float32, or the adapters alone."""
        if not self.is_finetuning:
            return storage.checkpoint_bytes(self.config)
        is_lite = self.config.checkpoint_mode == "lite"
        return self.model.lite_bytes if is_lite else self.model.full_bytes


def pretraining_memory(config: Config, processes: int, node_processes: int, on_cpu: bool) -> Memory:
    """Return what a process of pretraining holds at its peak."""
    return peak_memory(Step(own_model(config), True, processes, node_processes, on_cpu))


# ---------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------


def run_of(config: Config, fleet: Fleet, fitted: Collection[str] = ()) -> Run:
    """Return the run that the settings describe. Raises SettingsError for an unknown MODEL.

    Args:
        fitted: settings of a fine-tuning that nobody has set, and that follow from MODEL and DATA.
    """
    if not is_finetuning(config):
        return Run(config, fleet, own_model(config))
    refuse_pretraining_settings(config)
    facts, name, source = read_model(config)
    if fitted:
        longest = facts.get("max_position_embeddings")
        if type(longest) is not int or longest < 1:
            longest = None
        config = fit_to_model(config, fitted, longest, fleet.processes)
    try:
        return Run(config, fleet, tuned_of(config, shape_of(facts)), name, source)
    except UnknownShape as error:
        raise SettingsError([f"MODEL={name} cannot be planned: {source}: {error}"]) from None


def is_finetuning(config: Config) -> bool:
    """Tell whether MODEL is set, or the preset is one of fine-tuning and so has EPOCHS."""
    path = ROOT / "presets" / f"{config.preset}.env"
    return bool(config.model) or (path.is_file() and "EPOCHS" in read_file(path, "", []))


def refuse_pretraining_settings(config: Config) -> None:
    problems = []
    for name, value in (("SYNC", "ddp"), ("OPTIMIZER", "adamw")):
        given = getattr(config, name.lower())
        if given != value:
            problems.append(f"{name}={given}: not available in fine-tuning. Leave {name} out.")
    if problems:
        raise SettingsError(problems)


def own_model(config: Config) -> Tuned:
    """Return the model of pretraining, all of whose weights are trained."""
    return Tuned(config.replace(lora_rank=0), own_shape(config), frozenset())


def own_shape(config: Config) -> Shape:
    """Return the shape of the model that pretraining builds: Llama's, or Qwen3's with QK_NORM."""
    assert config.n_kv_head and config.mlp_dim  # filled in by load_config
    width = config.n_embd
    keys = config.n_kv_head * config.head_dim
    attention = (
        Matrix("self_attn.q_proj", ATTENTION, width, width),
        Matrix("self_attn.k_proj", ATTENTION, keys, width),
        Matrix("self_attn.v_proj", ATTENTION, keys, width),
        Matrix("self_attn.o_proj", ATTENTION, width, width),
    )
    norms = 2 * width
    norm_tensors = 2
    if config.qk_norm:
        norms += 2 * config.head_dim
        norm_tensors += 2
    mlp = swiglu("mlp.", width, config.mlp_dim)
    block = Block(config.n_layer, attention + mlp, norms, norm_tensors)
    return Shape(
        kind="qwen3" if config.qk_norm else "llama",
        vocabulary=config.padded_vocab_size,
        width=width,
        heads=config.n_head,
        keys=config.n_kv_head,
        head_dim=config.head_dim,
        qk_norm=config.qk_norm,
        tied=config.tie_embeddings,
        blocks=(block,),
        stored=item_bytes(config),
    )


def read_model(config: Config) -> tuple[dict[str, Any], str, str]:
    """Return (config.json of MODEL, its name, where that is from). Raises SettingsError."""
    name = config.model or of_preset(config.preset)
    if not name:
        raise SettingsError([NO_MODEL])
    for folder in model_folders(config):
        path = folder / "config.json"
        if path.is_file():
            place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            return read_facts(config, path), name, str(place)
    if facts := published(name):
        return facts, name, "its publisher's config.json (plan/published.py)"
    runs = (ROOT / config.model, ROOT / config.runs_dir / config.model)
    if any((run / "checkpoints").is_dir() for run in runs):
        raise SettingsError(
            [
                f"MODEL={config.model}: the run has no export yet, and the plan reads its config.json. "
                f"`make export RUN_NAME={Path(config.model).name}` makes one; make finetune does so itself."
            ]
        )
    raise SettingsError(
        [
            f"MODEL={config.model}: its config.json is not on this machine. make finetune downloads the "
            "model; or put that one file into a folder and set MODEL to it."
        ]
    )


def read_facts(config: Config, path: Path) -> dict[str, Any]:
    try:
        facts = read_object(path)
    except (OSError, ValueError) as error:
        raise SettingsError(
            [f"MODEL={config.model}: {path} cannot be read ({error}). Get the model again."]
        ) from error
    types = {name: facts[name] for name in ("dtype", "torch_dtype") if name in facts}
    text = facts.get("text_config")
    return types | (text if isinstance(text, dict) and text else facts)


def model_folders(config: Config) -> list[Path]:
    """Return where MODEL may be, in the order of finetune/model_folder.py."""
    if not config.model:
        return []
    place = ROOT / Path(config.model).expanduser()
    exports = []
    for run in (place, ROOT / config.runs_dir / config.model):
        if (run / "checkpoints").is_dir():
            exports.append(run / "export")
    downloaded = data_paths.data_dir(config) / "models" / config.model.replace("/", "--")
    return [*(exports or [place]), downloaded]


# ---------------------------------------------------------------------------------------------------
# Proposals
# ---------------------------------------------------------------------------------------------------


def changed(run: Run, fleet: Fleet | None = None, **changes: Any) -> Run | None:
    """Return the run with other settings, or None where a rule of the settings forbids them.

    Settings that follow from others are derived again. With fewer TRAIN_TOKENS a warm-up or decay that
    no longer fits is shortened in proportion.
    """
    fleet = fleet or run.fleet
    config = run.config
    if fleet.sites == 1 and config.sync == "diloco":
        changes = {"sync": "ddp"} | changes
    if run.is_finetuning:
        other = dataclasses.replace(config, **changes)
        return (
            None
            if is_forbidden(other, fleet, CHECKS.keys() - set(PRETRAINING))
            else with_config(run, other, fleet)
        )
    files = names_in_files(config)
    derived_again = {}
    for name, unset in DERIVED.items():
        if name not in changes and name.upper() not in files and is_derived(config, name):
            derived_again[name] = unset
    other = dataclasses.replace(config, **(derived_again | changes)).derived()
    if "train_tokens" in changes and is_forbidden(other, fleet, CHECKS):
        share = other.train_tokens / config.train_tokens
        shorter: dict[str, Any] = {}
        for name in ("warmup_tokens", "decay_tokens"):
            if name not in derived_again and getattr(config, name):
                shorter[name] = int(getattr(config, name) * share)
        other = dataclasses.replace(other, **shorter).derived()
    return None if is_forbidden(other, fleet, CHECKS) else with_config(run, other, fleet)


def with_config(run: Run, config: Config, fleet: Fleet) -> Run:
    if run.is_finetuning:
        model = tuned_of(config, run.model.shape)
    else:
        model = own_model(config)
    return dataclasses.replace(run, config=config, fleet=fleet, model=model)


def is_forbidden(config: Config, fleet: Fleet, checks: Any) -> bool:
    """Tell whether a rule forbids the settings on these devices."""
    if fleet.nodes % fleet.sites:
        return True
    if config.sync == "diloco" and not fleet.has_sites_of_one_kind:
        return True
    site_processes = fleet.processes // config.replicas
    ranks = config.shard_ranks or fleet.processes_of_a_node
    if config.parallel == "hsdp" and site_processes % ranks:
        return True
    if find_batch_problem(config, fleet.processes):
        return True
    return any(check(config) for check in checks if check not in NOT_OF_A_PLAN)


def is_derived(config: Config, name: str) -> bool:
    """Tell whether a value is the one that follows from other settings."""
    again = dataclasses.replace(config, **{name: DERIVED[name]}).derived()
    return getattr(config, name) == getattr(again, name)


def names_in_files(config: Config) -> set[str]:
    """Return the settings that the preset and the env file name."""
    names: set[str] = set()
    for path in (ROOT / "presets" / f"{config.preset}.env", ROOT / config.env_file):
        if path.is_file():
            names |= set(read_file(path, "", []))
    return names


def added(run: Run, other: Run) -> str:
    """Return the settings to add to the command that was typed, as `NAME=value NAME=value`."""
    files = names_in_files(run.config)
    texts = []
    values = other.config.values()
    for name in values:
        field = name.lower()
        if field == "master_addr" or not SETTINGS[name].has_effect(values):
            continue
        after = getattr(other.config, field)
        if getattr(run.config, field) == after:
            continue
        follows = field in DERIVED and name not in files
        if follows and is_derived(run.config, field) and is_derived(other.config, field):
            continue
        texts.append(f"{name}={format_value(after)}")
    return " ".join(texts)


def sharded(run: Run) -> dict[str, Any]:
    """Return the settings that shard the weights. Muon needs whole matrices, so it becomes AdamW."""
    changes: dict[str, Any] = {}
    if run.config.parallel != "fsdp":
        changes = {"parallel": "fsdp", "shard_ranks": None}
    if run.config.optimizer == "muon":
        changes["optimizer"] = "adamw"
    return changes


def smaller_models(run: Run) -> Iterator[Run]:
    """Yield models of the same family with fewer layers, from the largest, as wide for their depth."""
    config = run.config
    for depth in range(config.n_layer - 1, 0, -1):
        if config.n_head * depth % config.n_layer:
            continue
        other = changed(run, **shape_of_depth(run, depth))
        if other:
            yield other


def shape_of_depth(run: Run, depth: int) -> dict[str, Any]:
    """Return the settings of the model of that depth in the run's family."""
    config = run.config
    files = names_in_files(config)
    heads = config.n_head * depth // config.n_layer
    width = heads * config.head_dim
    changes: dict[str, Any] = {"n_layer": depth, "n_head": heads, "n_embd": width}
    assert config.n_kv_head and config.mlp_dim
    if "N_KV_HEAD" in files or not is_derived(config, "n_kv_head"):
        changes["n_kv_head"] = max(1, config.n_kv_head * heads // config.n_head)
    if "MLP_DIM" in files or not is_derived(config, "mlp_dim"):
        changes["mlp_dim"] = 64 * max(1, round(config.mlp_dim * width / (config.n_embd * 64)))
    return changes
