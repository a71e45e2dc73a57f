"""Recipes trained side by side from one seed, in turns, and scored: a process for quality.py.

    standard input: {"settings": of a run, "checkout": of nanoGPT}  ->  a JSON line: what each entrant came to

All entrants are there at once, and one of them works at a time, with all threads: in each of TURNS turns every one
takes its share of its steps. So a machine whose speed drifts from minute to minute slows all of them alike. Those of
`tokens` take as many steps as nanoGPT; those of `time` as many as fit into its seconds, by the time of a step as it was
measured in turns just before, with other models; their schedules are laid out for so many from the first step. Seconds
are those of steps alone: batch, rate, forward, backward and update; no start, no first use of a kernel, no scoring.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from bench.recipes import NANOGPT, NanoGPT, Ours, Recipe, Text, bits_per_byte
from doctor.gpu_probe import worker
from doctor.gpu_probe.foreign_load import Foreign
from doctor.gpu_probe.messages import say
from settings.config import Config
from train.data import prepare
from train.open_data import padded_lengths

ADAMW, MUON = "ours, AdamW", "ours, Muon"
OPTIMIZERS = {ADAMW: "adamw", MUON: "muon"}
RECIPES = (NANOGPT, ADAMW, MUON)
TOKENS, TIME = "tokens", "time"
ENTRANTS = tuple((name, TOKENS) for name in RECIPES) + tuple((name, TIME) for name in OPTIMIZERS)
TURNS = 40  # of about a second
TRIES, TRY_STEPS = 5, 8  # turns in which the time of a step is measured, and steps in each


def laid_out(c: Config, optimizer: str, steps: int) -> Config:
    """The settings of a run of so many steps: warm-up and decay keep their shares of it."""
    tokens = steps * c.batch_tokens
    decay = round(c.decay_tokens * tokens / c.train_tokens) if c.decay_tokens else None
    return c.replace(
        optimizer=optimizer,
        train_tokens=tokens,
        max_steps=None,
        decay_tokens=decay,
        warmup_tokens=round(c.warmup_tokens * tokens / c.train_tokens),
    ).derived()


def steps_in(seconds: float, step_s: float) -> int:
    """Whole steps that fit, and at least one."""
    return max(1, int(seconds / step_s))


def enter(name: str, c: Config, text: Text, checkout: str, steps: int) -> Recipe:
    """A recipe before its first step, with schedules for so many."""
    return (
        NanoGPT(laid_out(c, "adamw", steps), text, checkout)
        if name == NANOGPT
        else Ours(laid_out(c, OPTIMIZERS[name], steps), text)
    )


def take_turns(
    entrants: Mapping[Any, Recipe], steps: Mapping[Any, int], turns: int
) -> dict[Any, list[float]]:
    """Train each by so many steps, in turns; the seconds of each turn. Another begins each time."""
    names, seconds = list(entrants), {name: list[float]() for name in entrants}
    before = {name: recipe.done for name, recipe in entrants.items()}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            recipe, until = entrants[name], before[name] + steps[name] * (turn + 1) // turns
            began = time.perf_counter()
            while recipe.done < until:
                recipe.step()
            worker.synchronize()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def step_times(c: Config, text: Text, checkout: str, tries: int = TRIES) -> dict[str, float]:
    """Seconds of a step of each recipe, of models that are thrown away."""
    tried = {name: enter(name, c, text, checkout, (tries + 1) * TRY_STEPS) for name in RECIPES}
    steps = dict.fromkeys(RECIPES, TRY_STEPS)
    take_turns(tried, steps, 1)  # warms up
    turns = take_turns(tried, dict.fromkeys(RECIPES, tries * TRY_STEPS), tries)
    return {name: statistics.median(took) / TRY_STEPS for name, took in turns.items()}


def contest(
    c: Config, text: Text, checkout: str, turns: int = TURNS, tries: int = TRIES
) -> dict[str, Any]:
    """Train and score all entrants on c.train_tokens, or in the seconds that nanoGPT has for them, from c.seed."""
    step_s = step_times(c, text, checkout, tries)
    whole = c.last_step
    steps = {
        (name, equal): whole if equal == TOKENS else steps_in(whole * step_s[NANOGPT], step_s[name])
        for name, equal in ENTRANTS
    }
    entrants = {
        (name, equal): enter(name, c, text, checkout, steps[name, equal])
        for name, equal in ENTRANTS
    }
    foreign = Foreign([], time.monotonic())
    seconds = take_turns(entrants, steps, turns)
    load = foreign.percent(time.monotonic())
    results = []
    for (name, equal), recipe in entrants.items():
        results.append(
            {
                "recipe": name,
                "equal": equal,
                "steps": recipe.done,
                "tokens": recipe.done * c.batch_tokens,
                "seconds": sum(seconds[name, equal]),
                "parameters": recipe.parameters,
                "validation": bits_per_byte(recipe, text, c.seq_len),
            }
        )
    return {"seed": c.seed, "step_s": step_s, "foreign_percent": load, "entrants": results}


def open_text(c: Config) -> Text:
    """The prepared text of the one source of DATA_MIX."""
    vocabulary = prepare.vocabulary(c)
    (shards,) = prepare.open_sources(c, vocabulary).values()
    return Text(shards, padded_lengths(vocabulary, c), vocabulary.end_of_text)


def main() -> None:
    told = json.load(sys.stdin)
    c = Config(**{name.lower(): value for name, value in told["settings"].items()}).derived()
    with contextlib.redirect_stdout(None):  # nanoGPT prints
        found = contest(c, open_text(c), told["checkout"])
    say(**found)


if __name__ == "__main__":
    main()
