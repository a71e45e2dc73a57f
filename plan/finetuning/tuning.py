"""The plan of a fine-tuning, put together. Speed and network are reckoned as those of pretraining are; shape, work and
memory are of MODEL, by its config.json or, where that is not there yet, by plan/published.py.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plan import limits, storage
from plan.checks import RECOMPUTE, capacity_bytes
from plan.finetuning import tuned_memory
from plan.finetuning.hf_shape import UnknownShape, shape_of
from plan.finetuning.tuned import Tuned, tuned_of
from plan.fleet import Fleet
from plan.hours import Pace, waiting_s
from plan.memory import Memory
from plan.network import traffic
from plan.planner import probe_of
from plan.published import of_preset, published
from plan.speed import Work, speed
from record.number_formats import GIB, gib, size
from record.run_paths import RunPaths
from settings import ROOT, SettingsError, tuning_rules
from settings.checks import PRETRAINING, check_batch, find_batch_problem
from settings.config import Config
from settings.declare import format_value
from settings.finding import FAIL, Finding
from settings.sources import read_file
from settings.tuning_rules import NO_MODEL
from train.data import data_paths

NOT_ASKED = (*PRETRAINING, check_batch)  # processes are the fleet's
TOKEN_BYTES = 5  # of a token of DATA as it is kept, at most (docs/finetune.md)
PRESET = "finetune"  # where MODEL is set and no PRESET is
LORA = {"lora_rank": 16}  # what is advised where all weights do not fit
CODE = 64


@dataclasses.dataclass(frozen=True)
class Held:
    """What a process holds in one of the ways; as plan/planner.py's."""

    t: Tuned
    need: Memory
    largest_micro_batch: int
    fits: bool
    chosen: bool


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What a fine-tuning will take. model: what it is called; source: where its shape is from; host_bytes: of a process
    while weights are loaded; free_bytes: for RUNS_DIR, None where that is not known."""

    t: Tuned
    fleet: Fleet
    model: str
    source: str
    pace: Pace
    capacity_bytes: float
    memory: list[Held]
    host_bytes: float
    syncs: list[traffic.Sync]
    write_mb_s: float
    write_why: str
    free_bytes: float | None
    findings: list[Finding]

    @property
    def c(self) -> Config:
        return self.t.c

    @property
    def steps(self) -> int | None:
        """None where DATA, which is not read here, decides."""
        return self.c.max_steps

    @property
    def chosen(self) -> Held:
        return next(held for held in self.memory if held.chosen)

    @property
    def checkpoint_bytes(self) -> float:
        """Of those that are the rule."""
        return self.t.lite_bytes if self.c.checkpoint_mode == "lite" else self.t.full_bytes

    @property
    def disk_bytes(self) -> dict[str, float]:
        """Part -> bytes at most, but for DATA: TOKEN_BYTES a token."""
        c, shape = self.c, self.t.shape
        kept = c.keep_last + 1 if c.save_every != 0 else 0
        kept_forever = c.last_step // c.keep_every if kept and c.keep_every else 0
        return {
            "checkpoints": kept * self.checkpoint_bytes + kept_forever * self.t.full_bytes,
            "the export": float(shape.stored * shape.total),
        }

    @property
    def evaluation_tokens(self) -> int:
        """At most, each time."""
        return tuning_rules.HELD_OUT_CONVERSATIONS * self.c.seq_len

    @property
    def evaluation_s(self) -> float | None:
        """Seconds of one, at most: forward alone."""
        rate = self.pace.fast.tokens_per_s
        return (
            None
            if not rate
            else self.evaluation_tokens / rate * self.t.forward_flops / self.t.flops()
        )


def is_tuning(c: Config) -> bool:
    """Whether the settings are of a fine-tuning: MODEL is set, or the preset is for one and so has EPOCHS."""
    path = ROOT / "presets" / f"{c.preset}.env"
    return bool(c.model) or (path.is_file() and "EPOCHS" in read_file(path, "", []))


def refuse(c: Config) -> None:
    """Raises SettingsError where fine-tuning has no such thing."""
    wanted = {"SYNC": "ddp", "OPTIMIZER": "adamw"}
    if problems := [
        f"{name}={getattr(c, name.lower())}: not in fine-tuning; leave it out"
        for name, value in wanted.items()
        if getattr(c, name.lower()) != value
    ]:
        raise SettingsError(problems)


def in_nodes(c: Config) -> Config:
    """With NODES by CARDS and the NPROC of each node, where only these are said: as a preset has them."""
    cards = (
        0
        if c.cards in ("", "here", "cpu")
        else sum(int(part.split("x", 1)[0]) for part in c.cards.split(","))
    )
    if c.nodes > 1 or not c.nproc or cards <= c.nproc or cards % c.nproc:
        return c
    return c.replace(nodes=cards // c.nproc)


# ---------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------


def facts_of(c: Config) -> tuple[dict[str, Any], str, str]:
    """(config.json of MODEL, what the model is called, where that is from). Raises SettingsError."""
    name = c.model or of_preset(c.preset)
    if not name:
        raise SettingsError([NO_MODEL])
    for path in [folder / "config.json" for folder in folders(c)]:
        if not path.is_file():
            continue
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(facts, dict):
                raise ValueError("it is no object")
        except (OSError, ValueError) as error:
            raise SettingsError(
                [f"MODEL={c.model}: {path} cannot be read ({error}); get the folder again"]
            ) from error
        place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        types = {name: facts[name] for name in ("dtype", "torch_dtype") if name in facts}
        return types | (facts.get("text_config") or facts), name, str(place)
    if facts := published(name):
        return facts, name, "what its publisher's config.json says (plan/published.py)"
    run = ROOT / c.runs_dir / c.model
    if (ROOT / c.model / "checkpoints").is_dir() or (run / "checkpoints").is_dir():
        raise SettingsError(
            [
                f"MODEL={c.model}: the run has no export yet, by which it is planned; make finetune makes "
                f"one, as does make export RUN_NAME={Path(c.model).name}"
            ]
        )
    raise SettingsError(
        [
            f"MODEL={c.model}: there is no config.json of it here, by which it is planned; make finetune "
            "brings a model from the hub, or fetch that one file into a folder and give that"
        ]
    )


def folders(c: Config) -> list[Path]:
    """Where the config.json of MODEL may be, in the order of finetune/model_folder.py."""
    if not c.model:
        return []
    place = ROOT / Path(c.model).expanduser()
    runs = [
        run / "export"
        for run in (place, ROOT / c.runs_dir / c.model)
        if (run / "checkpoints").is_dir()
    ]
    return [*(runs or [place]), data_paths.data_dir(c) / "models" / c.model.replace("/", "--")]


def tuned_here(c: Config) -> tuple[Tuned, str, str]:
    """(what is tuned, what the model is called, where its shape is from). Raises SettingsError."""
    facts, name, source = facts_of(c)
    try:
        return tuned_of(c, shape_of(facts)), name, source
    except UnknownShape as error:
        raise SettingsError([f"MODEL={name} cannot be planned: {source}: {error}"]) from None


# ---------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------


def plan(c: Config, fleet: Fleet) -> Tuning:
    """Of c on these devices. Raises SettingsError."""
    refuse(c)
    t, name, source = tuned_here(c)
    probe = probe_of(c, fleet)
    fast = speed(c, fleet, probe, work_of(t))
    syncs = traffic.syncs(c, fleet, fast.step_s, probe.link_gb_s if probe else None, t.sent)
    capacity = capacity_bytes(fleet)
    ways = [held(way, t, fleet, capacity) for way in ways_of(t, fleet)]
    shards = tuned_memory.case(t, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu).shards
    found = Tuning(
        t,
        fleet,
        name,
        source,
        Pace(fast, waiting_s(syncs)),
        capacity,
        ways,
        tuned_memory.host_bytes(t, shards),
        syncs,
        *storage.write_mb_s(probe),
        free_bytes(c),
        list(findings(t, fleet, capacity)),
    )
    return dataclasses.replace(found, findings=[*found.findings, *disk_problem(found)])


def free_bytes(c: Config) -> float | None:
    """For RUNS_DIR on this machine; None where the run is planned for others, or that folder cannot be looked into."""
    if c.cards not in ("", "here"):
        return None
    folder = RunPaths.of(c.runs_dir, c.run_name, ROOT).folder
    try:
        return float(shutil.disk_usage(storage.existing("RUNS_DIR", folder)).free)
    except (storage.FolderError, OSError):
        return None


def work_of(t: Tuned) -> Work:
    """For the speed: MFU counts the model's own work, and what backward computes anew takes the same time."""
    again = {"none": 0.0, "selective": 0.04 * t.flops(), "full": t.forward_flops}[
        t.c.activation_checkpointing
    ]
    remark = (
        "; that is of pretraining: transformers' classes, which are not compiled, are slower"
        f"{', a mixture most' if t.shape.experts else ''}; MFU= says what was measured"
    )
    return Work(t.flops(), t.flops() / (t.flops() + again), remark)


def ways_of(t: Tuned, fleet: Fleet) -> list[Tuned]:
    """As it is set, and where there are several processes the other ways to spread weights; each with what backward
    may compute anew."""
    spread = [t.c]
    if fleet.processes > 1:
        others = [
            t.c.replace(
                parallel=way,
                shard_ranks=None,
                grad_sync="step" if way == "ddp" else t.c.grad_sync,
            )
            for way in ("ddp", "fsdp", "hsdp")
            if way != t.c.parallel and (way != "hsdp" or fleet.nodes > 1)
        ]
        spread = sorted([t.c, *others], key=lambda c: ("ddp", "fsdp", "hsdp").index(c.parallel))
    return [
        dataclasses.replace(t, c=c.replace(activation_checkpointing=how))
        for c in spread
        for how in RECOMPUTE
    ]


def held(way: Tuned, t: Tuned, fleet: Fleet, capacity: float) -> Held:
    need = memory_of(way, fleet)
    largest = tuned_memory.largest_micro_batch(
        way, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu, capacity
    )
    return Held(way, need, largest, need.total <= capacity, way.c == t.c)


def memory_of(t: Tuned, fleet: Fleet) -> Memory:
    return tuned_memory.memory(t, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu)


# ---------------------------------------------------------------------------------------------------
# What cannot be
# ---------------------------------------------------------------------------------------------------


def findings(t: Tuned, fleet: Fleet, capacity: float) -> Iterator[Finding]:
    if uneven := limits.batch(t.c, fleet):
        yield uneven
        return
    if lacking := limits.bf16(t.c, fleet):
        yield lacking
    if problem := memory_problem(t, fleet, capacity):
        yield problem


def disk_problem(p: Tuning) -> Iterator[Finding]:
    """Checkpoints that RUNS_DIR has no room for; those that are there of this run already count for it."""
    if p.free_bytes is None:
        return
    c, needed = p.c, p.disk_bytes["checkpoints"]
    free = p.free_bytes + storage.saved_bytes(RunPaths.of(c.runs_dir, c.run_name, ROOT))
    if needed <= free:
        return
    would = [
        f"KEEP_LAST={n}"
        for n in range(c.keep_last - 1, 1, -1)
        if (n + 1) * p.checkpoint_bytes <= free and not c.keep_every
    ][:1]
    if p.t.lora and c.checkpoint_mode == "full" and (c.keep_last + 1) * p.t.lite_bytes <= free:
        would.append("CHECKPOINT_MODE=lite")
    would.append(f"RUNS_DIR on a disk with {size(needed)}")
    yield Finding(
        "disk",
        FAIL,
        f"RUNS_DIR: up to {size(needed)} of checkpoints, and {size(free)} are free for them",
        f"what would do: {'; or '.join(would)}",
        CODE,
    )


def memory_problem(t: Tuned, fleet: Fleet, capacity: float) -> Finding | None:
    need, c = memory_of(t, fleet), t.c
    if need.total <= capacity:
        return None
    parts = ", ".join(
        f"{name} {gib(part)}"
        for name, part in sorted(need.parts.items(), key=lambda part: -part[1])
        if part >= 0.05 * GIB
    )
    what = "this machine" if fleet.on_cpu else fleet.smallest.key
    said = [
        "MICRO_BATCH_SIZE=" + str(c.micro_batch(fleet.processes)),
        f"PARALLEL={c.parallel}",
        f"DTYPE={c.dtype}",
        f"LORA_RANK={c.lora_rank}",
        f"ACTIVATION_CHECKPOINTING={c.activation_checkpointing}",
    ]
    would = "; or ".join(what_is_held(t, fleet, capacity))
    return Finding(
        "memory",
        FAIL,
        f"fine-tuning with {', '.join(said)} needs {gib(need.total)} GiB a process "
        f"({parts or 'of the model nearly nothing'}), and {what} has {gib(capacity)} to give it",
        f"what would do: {would}"
        if would
        else "nothing here is small enough: more cards, or a smaller MODEL",
        CODE,
    )


def what_is_held(t: Tuned, fleet: Fleet, capacity: float) -> Iterator[str]:
    """From what changes least: fewer sequences at once, more computed anew, both; weights that are split; a shorter
    window; adapters in place of all weights, with these; in bfloat16, with all of these."""
    c, found = t.c, 0
    split = [{}] if c.parallel != "ddp" or fleet.processes == 1 else [{}, {"parallel": "fsdp"}]
    lora = [{}] if c.lora_rank else [{}, LORA]
    dtype = [{}] if c.dtype == "bfloat16" else [{}, {"dtype": "bfloat16"}]
    for of_dtype in dtype:
        for adapters in lora:
            for spread in split:
                if changes := least(t, fleet, capacity, of_dtype | adapters | spread):
                    yield changes
                    found += 1
                    if found == 3:
                        return


def least(t: Tuned, fleet: Fleet, capacity: float, changes: dict[str, Any]) -> str:
    """What else has to change beside these for it to fit, typed; "" where nothing does."""
    c = t.c
    rest = RECOMPUTE[RECOMPUTE.index(c.activation_checkpointing) :]
    share = c.batch_windows // fleet.processes
    sizes = sorted(
        {n for n in range(1, c.micro_batch(fleet.processes) + 1) if share % n == 0}, reverse=True
    )
    tried: list[dict[str, Any]] = [
        {},
        *({"micro_batch_size": n} for n in sizes[1:]),
        *({"activation_checkpointing": how} for how in rest[1:]),
        *(
            {"activation_checkpointing": how, "micro_batch_size": n}
            for how in rest[1:]
            for n in sizes[1:]
        ),
        *(
            {"activation_checkpointing": rest[-1], "micro_batch_size": 1, "seq_len": c.seq_len // n}
            for n in (2, 4, 8)
            if c.seq_len // n >= 128
        ),
    ]
    for more in tried:
        all_of_it = changes | more
        new = dataclasses.replace(c, **all_of_it)
        if not all_of_it or find_batch_problem(new, fleet.processes):
            continue
        need = memory_of(tuned_of(new, t.shape), fleet).total
        if need <= capacity:
            typed = " ".join(
                f"{name.upper()}={format_value(value)}"
                for name, value in all_of_it.items()
                if getattr(c, name) != value
            )
            return f"{typed} ({gib(need)} GiB)"
    return ""
