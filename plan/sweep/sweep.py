"""Runs beside the one that is planned, in a table, and which of them to take: make plan SWEEP=depth|gpus.

    depth         d12 to d32, widths of 64 times the depth and heads of 128 (the family of the presets d16 to d32), at
                  20 tokens a parameter, and at what each can read in the hours that there are
    gpus          numbers of the same card, DDP and FSDP2

All of it computed. A row is what make plan says of what its `typed` is.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from hardware.model_size import parameters
from plan.checks import as_split, capacity_bytes, memory_of, on_the_same
from plan.choices import (
    FILLED_IN,
    Choice,
    card_of_fleet,
    choice,
    in_files,
    together,
    was_filled_in,
    with_cards,
)
from plan.fleet import Fleet
from plan.hours import pace_of, steps_within, time_of
from plan.limits import bf16
from plan.measured import Probe
from plan.run_so_far import begun
from plan.scaling import loss_of, rule_tokens
from plan.speed import SHAPE
from plan.sweep import advice
from plan.sweep.report_rows import Row, Sweep
from settings import ROOT, SettingsError, load_config
from settings.checks import find_batch_problem
from settings.config import SETTINGS, Config

DEPTHS = (12, 14, 16, 18, 20, 24, 28, 32)
WIDTH_OF_DEPTH, HEAD = 64, 128
MOST_CARDS = 64


def sweep(c: Config, fleet: Fleet, probe: Probe | None) -> Sweep:
    """What SWEEP asks for. Raises SettingsError where there is nothing to compare."""
    if without := bf16(c, fleet):
        raise SettingsError([f"{without.text}; {without.fix}"])
    return of_gpus(c, fleet, probe) if c.sweep == "gpus" else of_depths(c, fleet, probe)


def row_of(found: Choice, label: str, probe: Probe | None, done: int = 0, **said: Any) -> Row:
    """done: steps that are made, whose hours are not counted."""
    fleet, less = found.fleet, smaller(found)
    c = less.c if less else found.c
    pace = pace_of(c, fleet, probe)
    time, need, held = (
        time_of(c, pace.fast, pace.wait_s, done),
        memory_of(found.c, fleet).total,
        capacity_bytes(fleet),
    )
    tokens, size = c.last_step * c.batch_tokens, parameters(c).total
    return Row(
        label,
        found.typed,
        size,
        tokens,
        loss_of(c),
        pace.fast.mfu_percent,
        pace.tokens_per_s,
        time.total if time else None,
        time.total * fleet.processes if time and not fleet.on_cpu else None,
        time.waiting / time.total if time and time.total else None,
        need,
        held,
        "" if need <= held else less.typed if less else None,
        **said,
    )


def smaller(found: Choice) -> Choice | None:
    """What is typed beside a run that memory does not hold: fewer sequences at once, or more computed anew, which
    takes longer. None where it is held, and where nothing here helps."""
    held = capacity_bytes(found.fleet)
    if memory_of(found.c, found.fleet).total <= held:
        return None
    return next(iter(on_the_same(found.c, found.fleet, held)), None)


# ---------------------------------------------------------------------------------------------------
# Depths
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Depths:
    """c and its devices, and the presets beside its own."""

    c: Config
    fleet: Fleet
    presets: list[Config]

    def of(self, model: Config, steps: int) -> Choice | None:
        """So many steps of a model: of the preset that has it, if there is one, with all that c has beside its own
        preset; else of c with another model."""
        c = self.c
        length: dict[str, Any] = (
            {"max_steps": steps} if c.max_steps else {"train_tokens": steps * c.batch_tokens}
        )
        if same_model(c, model):
            return choice(c, self.fleet, **(length if steps != c.last_step else {}))
        if preset := next((preset for preset in self.presets if same_model(preset, model)), None):
            found = choice(preset, self.fleet, **beside_the_preset(c, preset), **length)
            return found and dataclasses.replace(
                found, typed=f"PRESET={preset.preset} {found.typed}".strip()
            )
        named = in_files(c)
        shape = {name: getattr(model, name) for name in ("n_layer", "n_head", "n_embd")} | {
            name: getattr(model, name)
            for name in ("n_kv_head", "mlp_dim")
            if name.upper() in named or not was_filled_in(c, name)
        }
        return choice(c, self.fleet, **shape, **length)


def of_depths(c: Config, fleet: Fleet, probe: Probe | None) -> Sweep:
    """The run as it is set is among them, by its depth, or in a row of its own where it is of another family. Raises
    SettingsError where its batch cannot be shared."""
    if problem := find_batch_problem(c, fleet.processes):
        raise SettingsError([problem])
    as_set = row_of(Choice(c, fleet, ""), "as set", probe)
    within = c.target_hours or as_set.hours
    runs = Depths(c, fleet, other_presets(c))
    models = {f"d{depth}": of_depth(c, depth) for depth in DEPTHS}
    own = next((label for label, model in models.items() if same_model(c, model)), "as set")
    rows = (
        [read_in_time(runs, Choice(c, fleet, ""), as_set, probe, within)] if own == "as set" else []
    )
    for label, model in models.items():
        steps = round(rule_tokens(parameters(model).total) / c.batch_tokens)
        if found := runs.of(model, max(steps, 1)):
            rows.append(read_in_time(runs, found, row_of(found, label, probe), probe, within))
    return advice.on_depths(
        c, fleet, rows, next(row for row in rows if row.label == own), within, steps_made(c)
    )


def of_depth(c: Config, depth: int) -> Config:
    """c with the model of that depth: no grouped heads, and an MLP of 8/3 of the width."""
    width = depth * WIDTH_OF_DEPTH
    return c.replace(
        n_layer=depth, n_embd=width, n_head=width // HEAD, n_kv_head=None, mlp_dim=None
    ).derived()


def read_in_time(
    runs: Depths, model: Choice, row: Row, probe: Probe | None, within: float | None
) -> Row:
    """The row with what its model reads in so many hours, at the pace of what memory holds."""
    less = smaller(model)
    c = less.c if less else model.c
    pace = pace_of(c, runs.fleet, probe)
    steps = steps_within(c, pace, within) if within and pace.step_s else 0
    if not steps or (found := runs.of(model.c, steps)) is None:
        return row
    read = found.c.last_step * found.c.batch_tokens
    return dataclasses.replace(
        row, tokens_within=read, loss_within=loss_of(found.c), typed_within=found.typed
    )


def same_model(a: Config, b: Config) -> bool:
    return all(getattr(a, name) == getattr(b, name) for name in SHAPE)


def other_presets(c: Config) -> list[Config]:
    """As they are loaded beside c's env file; one that this does not fit is none to recommend."""
    names = sorted(path.stem for path in (ROOT / "presets").glob("*.env") if path.stem != c.preset)
    return [preset for name in names if (preset := loaded(name, c))]


def loaded(preset: str, c: Config) -> Config | None:
    files = {"ENV_FILE": c.env_file} if c.env_file != SETTINGS["ENV_FILE"].default else {}
    try:
        return load_config({"PRESET": preset, "MASTER_ADDR": "planned"} | files)
    except SettingsError:
        return None


def beside_the_preset(c: Config, preset: Config) -> dict[str, Any]:
    """What c has from neither its preset nor its env file, and its devices; but not the model and its length, and no
    secret, since it is printed."""
    own = loaded(c.preset, c)
    other = {name.lower() for name, field in SETTINGS.items() if not field.secret} - {
        *SHAPE,
        *FILLED_IN,
        "master_addr",
        "train_tokens",
        "max_steps",
        "target_hours",
        "sweep",
        "json",
    }
    changed = {
        name: getattr(c, name)
        for name in sorted(other)
        if own and getattr(c, name) != getattr(own, name)
    }
    return {"cards": c.cards} | changed if c.cards != preset.cards else changed


# ---------------------------------------------------------------------------------------------------
# Cards
# ---------------------------------------------------------------------------------------------------


def steps_made(c: Config) -> int:
    """By the run of this name; 0 where it is at its end, since nothing is left of it to compare."""
    found = begun(c)
    return found.step if found and found.step < c.last_step else 0


def of_gpus(c: Config, fleet: Fleet, probe: Probe | None) -> Sweep:
    if fleet.on_cpu:
        raise SettingsError(
            [
                "SWEEP=gpus compares numbers of a card, and the plan is for CPUs; say which card, for "
                "example CARDS=8xa100-80gb-sxm"
            ]
        )
    numbers = sorted(
        {2**n for n in range(20) if 2**n <= min(MOST_CARDS, c.batch_windows)} | {fleet.processes}
    )
    fleets = [fleet, *([together(fleet)] if fleet.nodes > 1 else [])]
    done = steps_made(c)
    rows = [
        row_of(
            found,
            name_of(found),
            probe,
            done,
            gpus=found.fleet.processes,
            nodes=found.fleet.nodes,
            sites=found.fleet.sites,
            parallel=found.c.parallel,
        )
        for spread_so in fleets
        for found in spread(c, spread_so, numbers)
    ]
    rows = list({row.label: row for row in rows}.values())
    if not rows:
        raise SettingsError(
            [
                f"SWEEP=gpus: BATCH_TOKENS={c.batch_tokens} cannot be split evenly over any number of "
                "cards; for example MICRO_BATCH_SIZE=1"
            ]
        )
    return advice.on_gpus(c, fleet, rows, card_of_fleet(fleet).key, done)


def name_of(found: Choice) -> str:
    where = f" on {found.fleet.nodes} nodes" * (
        found.fleet.nodes > 1
    ) + f" at {found.fleet.sites} sites" * (found.fleet.sites > 1)
    return (
        f"{found.fleet.processes} GPU{'s' * (found.fleet.processes > 1)}{where}, {found.c.parallel}"
    )


def spread(c: Config, fleet: Fleet, numbers: list[int]) -> Iterator[Choice]:
    """Each number of cards, with a copy on each, and from two on split."""
    yield from with_cards(c, fleet, numbers, parallel="ddp", grad_sync="step", shard_ranks=None)
    yield from with_cards(c, fleet, [number for number in numbers if number > 1], **as_split(c))
