"""Other runs than the one that is planned, and just what to type for each: fewer tokens, another model, other cards.

    choice(c, fleet, train_tokens=10**10)      settings and devices, checked by the rules that settings have, and
                                               "TRAIN_TOKENS=10000000000"
    shape(c, 12)                               the model of depth 12 of the family that c's belongs to

What is typed beside the same PRESET and env file gives these settings, which tests hold.
"""

import dataclasses
import math
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from hardware.gpu_specs import GpuSpec
from hardware.model_size import parameters
from plan.fleet import Fleet
from plan.network.outer import of_a_site
from plan.scaling import SMALLEST
from plan.speed import SHAPE
from settings import ROOT
from settings.checks import CHECKS, check_batch, check_nodes, find_batch_problem
from settings.config import SETTINGS, Config
from settings.declare import format_value
from settings.resolve import resolve
from settings.sources import read_file

# Filled in from others where nobody sets them (Config.derived), with what stands for that.
FILLED_IN: dict[str, Any] = {
    "run_name": "",
    "n_kv_head": None,
    "mlp_dim": None,
    "min_learning_rate": None,
    "decay_tokens": None,
}
# What else a plan knows better: processes are the fleet's, and a plan needs neither addresses nor keys.
NOT_OF_A_PLAN = (check_batch, check_nodes)
CARDS_OF_A_NODE = 8
OF_THIS_COMMAND = frozenset({"preset", "env_file", "sweep", "json"})  # not of the run


@dataclasses.dataclass(frozen=True)
class Choice:
    """typed: NAME=value of all that differs, with blanks between; "" where nothing does."""

    c: Config
    fleet: Fleet
    typed: str


def choice(
    c: Config, fleet: Fleet, on: tuple[GpuSpec, int] | None = None, **changes: Any
) -> Choice | None:
    """c with these fields changed, on so many of one card if that is said; None where a rule forbids it.

    What was filled in from other settings is filled in anew; a warm-up or decay that is longer than what is left of
    TRAIN_TOKENS is shortened with it.
    """
    if on:
        card, number = on
        fleet = Fleet(((number, card),), number, nodes_for(fleet, number), fleet.sites)
        changes = {"cards": f"{number}x{card.key}", "nodes": fleet.nodes} | changes
    fleet = dataclasses.replace(fleet, sites=min(changes.get("sites", fleet.sites), fleet.nodes))
    changes |= {"sites": fleet.sites} if fleet.sites != c.sites else {}
    if fleet.sites == 1 and c.sync == "diloco":
        changes = {"sync": "ddp"} | changes  # one site has nobody to exchange with
    named = in_files(c)
    refill = {
        name: nothing
        for name, nothing in FILLED_IN.items()
        if name not in changes and name.upper() not in named and was_filled_in(c, name)
    }
    changed = dataclasses.replace(c, **(refill | changes)).derived()
    if "train_tokens" in changes:
        kept = changed.train_tokens / c.train_tokens
        shorter: dict[str, Any] = {
            name: int(value * kept)
            for name in ("warmup_tokens", "decay_tokens")
            if name not in refill and (value := getattr(c, name))
        }
        if refused(changed, fleet) and shorter:
            changes |= shorter
            changed = dataclasses.replace(changed, **shorter).derived()
    if refused(changed, fleet):
        return None
    return Choice(changed, fleet, typed(c, changed, changes))


def refused(c: Config, fleet: Fleet) -> bool:
    """Whether a rule that names several settings forbids c on these devices."""
    ranks = c.shard_ranks or fleet.processes_of_a_node
    if fleet.nodes % fleet.sites or (
        c.parallel == "hsdp" and of_a_site(c, fleet.processes) % ranks
    ):
        return True
    return find_batch_problem(c, fleet.processes) is not None or any(
        check(c) for check in CHECKS if check not in NOT_OF_A_PLAN
    )


def typed(c: Config, changed: Config, changes: Iterable[str]) -> str:
    return " ".join(
        f"{name.upper()}={format_value(getattr(changed, name))}"
        for name in changes
        if getattr(changed, name) != getattr(c, name)
    )


def was_filled_in(c: Config, name: str) -> bool:
    """Whether a value is the one that is filled in where nobody sets one."""
    return getattr(c, name) == getattr(
        dataclasses.replace(c, **{name: FILLED_IN[name]}).derived(), name
    )


def in_files(c: Config) -> set[str]:
    """The settings that c's preset and its env file name."""
    paths = [ROOT / "presets" / f"{c.preset}.env", ROOT / c.env_file]
    return {name for path in paths if path.is_file() for name in read_file(path, "", [])}


def given(c: Config, another_preset: bool = False) -> dict[str, str]:
    """NAME -> value, quoted for a shell, of what c has from neither its preset nor its env file, no secret among them.

    another_preset: to be typed beside one, which has a model, a length and what follows from them of its own.
    """
    files = {"PRESET": c.preset, "ENV_FILE": c.env_file}
    own = resolve(files).config
    theirs = (
        ({*SHAPE, "train_tokens", "max_steps", *FILLED_IN} - {"run_name"})
        if another_preset
        else set()
    )
    found = {}
    for name, field in SETTINGS.items():
        low, value = name.lower(), getattr(c, name.lower())
        if low in OF_THIS_COMMAND | theirs or value == getattr(own, low) or field.secret:
            continue
        if (low in FILLED_IN and was_filled_in(c, low)) or (
            low == "master_addr" and value == "planned"
        ):
            continue
        found[name] = shlex.quote(format_value(value)) if value is not None else ""
    default = SETTINGS["ENV_FILE"].default
    return found if c.env_file == default else found | {"ENV_FILE": shlex.quote(c.env_file)}


# ---------------------------------------------------------------------------------------------------
# Models and cards
# ---------------------------------------------------------------------------------------------------


def shape(c: Config, depth: int) -> dict[str, Any]:
    """The model of that depth in c's family: as wide for its depth, with heads as large and as many to a group, an MLP
    as wide for its width. For the presets d16 to d32 that is a width of 64 times the depth and heads of 128."""
    assert c.n_kv_head and c.mlp_dim
    group = c.n_head // c.n_kv_head
    heads = group * max(1, round(c.n_head * depth / (c.n_layer * group)))
    width = heads * c.head_dim
    found = {"n_layer": depth, "n_head": heads, "n_embd": width}
    named = in_files(c)
    if "N_KV_HEAD" in named or not was_filled_in(c, "n_kv_head"):
        found["n_kv_head"] = heads // group
    if "MLP_DIM" in named or not was_filled_in(c, "mlp_dim"):
        found["mlp_dim"] = 64 * max(1, round(c.mlp_dim * width / (c.n_embd * 64)))
    return found


def depths(c: Config) -> list[int]:
    """Those of c's family below its own, from the largest: where the width comes out as it should, if there are."""
    assert c.n_kv_head
    step = c.n_layer // math.gcd(c.n_layer, c.n_kv_head)
    return list(range(c.n_layer - step, 0, -step)) or list(range(c.n_layer - 1, 0, -1))


def smaller_models(c: Config, fleet: Fleet) -> Iterator[Choice]:
    """Of c's family, from the largest."""
    return (found for depth in depths(c) if (found := choice(c, fleet, **shape(c, depth))))


def known_models(c: Config, fleet: Fleet) -> Iterator[Choice]:
    """Of these such as the scaling law knows: a model for which nobody could say what it is worth is no advice."""
    return (found for found in smaller_models(c, fleet) if parameters(found.c).total >= SMALLEST)


def nodes_for(fleet: Fleet, number: int) -> int:
    """For so many cards: of as many as each node has now where there are several, else of up to eight."""
    each = fleet.processes_of_a_node if fleet.nodes > 1 else max(CARDS_OF_A_NODE, fleet.processes)
    return next(nodes for nodes in range(-(-number // each), number + 1) if number % nodes == 0)


def together(fleet: Fleet) -> Fleet:
    """The devices as if they were at one place, in nodes of eight."""
    return dataclasses.replace(
        fleet, processes=min(fleet.processes, CARDS_OF_A_NODE), nodes=1, sites=1
    )


def card_of_fleet(fleet: Fleet) -> GpuSpec:
    """Of a mixed fleet the fastest, since more of a slow one would hold it back."""
    return max(
        (card for _, card in fleet.cards), key=lambda card: card.bf16_tflops or card.fp32_tflops
    )


def with_cards(c: Config, fleet: Fleet, numbers: Iterable[int], **changes: Any) -> Iterator[Choice]:
    """So many cards of the fleet's kind, where that splits BATCH_TOKENS evenly."""
    return (
        found
        for number in numbers
        if find_batch_problem(c, number) is None
        if (found := choice(c, fleet, (card_of_fleet(fleet), number), **changes))
    )


def more_cards(c: Config, fleet: Fleet, **changes: Any) -> Iterator[Choice]:
    """From the fewest that are more; a card has at least one sequence of a step."""
    return (
        with_cards(c, fleet, range(fleet.processes + 1, c.batch_windows + 1), **changes)
        if fleet.cards
        else iter(())
    )


def cards_together(c: Config, fleet: Fleet, **changes: Any) -> Iterator[Choice]:
    """From as many as there are, at one place; none where they are in one node already."""
    if fleet.nodes > 1 and fleet.cards:
        yield from with_cards(
            c, together(fleet), range(fleet.processes, c.batch_windows + 1), **changes
        )
