"""`make bench-quality`: validation bits per byte at equal tokens and at equal wall time, beside nanoGPT's recipe.

    text -> tokenizer and shards, in a temporary folder
        for each seed:    a process in which all recipes train in turns, and are scored (contest.py)

The corpus is the one source of DATA_MIX: by default that of Python's standard library, as in `make train`.
Alike for all: tokens, tokenizer, layers, width, heads, window, batch, type, threads. Not alike, since these are the
recipes: what a block is made of, tied or untied head, first weights, optimizer, rate and its schedule, windows from
anywhere or each once an epoch.

The shape, the batch and our rates are the preset's. `tiny` takes TOKENS_OF_A_RECIPE in 500 steps: 0.4 of what it
trains on in `make train`, enough to fall below gzip's 1.96 bits per byte; 300 of these steps for 2 corpora x 3 seeds x
5 runs took 18 minutes on two CPU cores. nanoGPT has the numbers that it gives for models of that size (recipes.py).
"""

import json
import logging
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import peers
from bench.contest import TIME, TOKENS, laid_out
from bench.host_facts import machine
from bench.recipes import NANOGPT
from bench.run import FOREIGN, spread
from doctor.gpu_probe.foreign_load import worst
from settings import ROOT, SettingsError, explain_error, load_config
from settings.config import Config
from settings.resolve import show_path
from train.data import prepare
from train.data.data_paths import data_dir
from train.data.manifest import DataError
from train.data.sources.source import CorpusError

RESULTS = ROOT / "bench" / "results"
TOKENS_OF_A_RECIPE = 512_000  # nanoGPT's time for them is what all recipes get
SEEDS = 3  # runs of each recipe, from SEED on
OFF = 3.0  # per cent: a larger difference in seconds is said
HEADER = (
    "| corpus | equal | recipe | bits per byte | tokens, M | seconds of steps | of nanoGPT's in that seed, % | "
    "foreign load, % |",
    "|---" * 8 + "|",
)


def find_checkout() -> str:
    """Return the folder of nanoGPT, which has taken a step. Raises SettingsError where there is none."""
    peer = next(peer for peer in peers.PEERS if peer.name == NANOGPT)
    present, missing = peers.find_checkouts()
    if peer not in present:
        raise SettingsError([f"{missing[NANOGPT]}: our recipes are compared with its recipe."])
    peers.fitting({peer: present[peer]})
    return present[peer]


def refuse_mixture(c: Config) -> None:
    """Raise SettingsError if DATA_MIX names more than one source."""
    if len(c.mixture) > 1:
        raise SettingsError(
            [
                f"DATA_MIX={c.data_mix}: make bench-quality trains on one source. Set for example "
                f"DATA_MIX={next(iter(c.mixture))}:1."
            ]
        )


def settings_of_corpus(c: Config, scratch: Path) -> Config:
    """Return the settings of a run whose shards are made in `scratch`.

    The sources that are declared in DATA_DIR are those there too.
    """
    data, declared = scratch / "data", data_dir(c) / "sources"
    data.mkdir()
    if declared.is_dir():
        (data / "sources").symlink_to(declared)
    return c.replace(
        data_dir=str(data),
        tokenizer="train",
        data_stream="0",
        sync="ddp",
        nodes=1,
        node_rank=0,
    )


def hold(c: Config, checkout: str) -> dict[str, Any]:
    """One seed of one corpus, in a process of its own."""
    told = json.dumps({"settings": c.stored(), "checkout": checkout})
    done = subprocess.run(
        [sys.executable, "-m", "bench.contest"],
        cwd=ROOT,
        text=True,
        input=told,
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(done.stdout))


# ---------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------


def by_entrant(contests: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(equal, recipe) -> its results, one a seed; nanoGPT's own stand for equal time too."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for equal in (TOKENS, TIME):
        for contest in contests:
            theirs = next(e["seconds"] for e in contest["entrants"] if e["recipe"] == NANOGPT)
            for entrant in contest["entrants"]:
                if entrant["equal"] == equal or entrant["recipe"] == NANOGPT:
                    found.setdefault((equal, entrant["recipe"]), []).append(
                        entrant
                        | {"of_theirs": 100 * entrant["seconds"] / theirs, "seed": contest["seed"]}
                    )
    return found


def bits(results: list[dict[str, Any]]) -> list[float]:
    return [result["validation"]["bpb"] for result in results]


def rows(corpus: str, contests: list[dict[str, Any]]) -> list[str]:
    """Lines of the table: medians over seeds, with the least and the most."""
    load = worst(contests)
    quiet = all(
        contest["foreign_percent"] is None or contest["foreign_percent"] <= FOREIGN
        for contest in contests
    )
    return [
        "| "
        + " | ".join(
            [
                corpus,
                "wall time" if equal == TIME else equal,
                recipe,
                spread(bits(results), 3),
                spread([result["tokens"] / 1e6 for result in results], 2),
                spread([r["seconds"] for r in results], 1),
                spread([r["of_theirs"] for r in results], 1),
                load + ("" if quiet else " (disturbed)"),
            ]
        )
        + " |"
        for (equal, recipe), results in by_entrant(contests).items()
    ]


def verdict(corpus: str, contests: list[dict[str, Any]]) -> list[str]:
    """Who needs the fewest bits at equal wall time, and whether that is more than seeds make; whose time was not
    equal."""
    of = {
        recipe: results
        for (equal, recipe), results in by_entrant(contests).items()
        if equal == TIME
    }
    first, *others = sorted(of, key=lambda recipe: statistics.median(bits(of[recipe])))
    said = [
        f"{corpus}, equal wall time: {first} has the lowest, {spread(bits(of[first]), 3)} bits per byte"
    ]
    for other in others:
        apart = statistics.median(bits(of[other])) - statistics.median(bits(of[first]))
        beyond = max(bits(of[first])) < min(bits(of[other]))
        said[0] += f"; {apart:.3f} below {other}, " + (
            f"{'beyond' if beyond else 'within'} the spread of {len(contests)} seeds"
            if len(contests) > 1
            else "of one seed, which tells no spread"
        )
    said[0] += "."
    for recipe, results in of.items():
        said += [
            f"{corpus}, seed {result['seed']}: {recipe} had {result['of_theirs']:.1f}% of nanoGPT's seconds, more "
            f"than {OFF:g}% off: its steps took another time than those that were tried before."
            for result in results
            if abs(result["of_theirs"] - 100) > OFF
        ]
    return said


def main() -> int:
    try:
        c = load_config()
        refuse_mixture(c)
        checkout = find_checkout()
        c = laid_out(c, c.optimizer, math.ceil(TOKENS_OF_A_RECIPE / c.batch_tokens))
    except SettingsError as error:
        sys.stderr.write(f"{explain_error(error)}\n")
        return 64
    say, facts = sys.stdout.write, machine()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    say("".join(f"{name}: {value}\n" for name, value in facts.items()))
    say(
        f"preset: {c.preset}, {c.last_step} steps of {c.batch_tokens} tokens, rate {c.learning_rate:g}, "
        f"{c.dtype}\n\n" + "\n".join(HEADER) + "\n"
    )
    sys.stdout.flush()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            corpus = settings_of_corpus(c, Path(scratch))
            prepare.prepare(corpus)
            contests = [hold(corpus.replace(seed=c.seed + k), checkout) for k in range(SEEDS)]
    except (DataError, CorpusError) as error:
        sys.stderr.write(f"{error}\n")
        return 78
    name = next(iter(c.mixture))
    say("\n".join([*rows(name, contests), "", *verdict(name, contests)]) + "\n")
    path = RESULTS / time.strftime("quality_%Y%m%d_%H%M%S.json")
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {"schema": 1, "machine": facts, "settings": c.stored(), "corpora": {name: contests}},
            indent=1,
        )
        + "\n"
    )
    say(f"\n{show_path(path)} has all runs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
