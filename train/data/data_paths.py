"""Where prepared data lies, how much of each source a run wants, and what is said where that is more than there is.

    DATA_DIR/tokenizers/NAME/tokenizer.json
    DATA_DIR/SOURCE/REVISION/TOKENIZER/{manifest.json, train_*.bin, validation_*.bin}

Reads declarations and pins only, no shard: make plan asks here, without numpy.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import NamedTuple

from record import number_formats
from record.regular_file import open_regular
from settings import ROOT
from settings.config import Config
from settings.json_file import read_whole
from settings.resolve import is_of_preset, show_path
from settings.resume import read_run_config
from train.data.sources.given import given_source
from train.data.sources.pin import Pinned, pinned
from train.data.sources.source import CorpusError, Source, declaration, declared

MANY_EPOCHS = (
    4  # up to which repeated text is worth nearly as much as new text (Muennighoff et al. 2023)
)
MAX_EPOCHS = 16  # beyond which it is worth little, by the same work; a source may say otherwise
NO_BUNDLE = "none"  # CORE_BUNDLE, where its tasks are not wanted
SHARD_TOKENS = 100_000_000  # a shard is sealed at the first end of a document past this many tokens
GROUP_SHARDS = 8  # shards of a group, at most, within which windows are shuffled


def data_dir(c: Config) -> Path:
    return (ROOT / c.data_dir).absolute()


def source_of(c: Config, name: str) -> Source:
    """The declaration of a source, or what DATA stands for. Raises CorpusError."""
    if c.pretrains_on_data:
        return given_source(c.data, name)
    return declared(name, source_folders(c))


def source_folders(c: Config) -> list[Path]:
    """Where sources are declared: in this repository, and next to the data."""
    return [ROOT / "sources", data_dir(c) / "sources"]


def pinned_of(c: Config, name: str) -> Pinned:
    """A source of the mixture at the revision that was prepared; asks no network. Raises CorpusError."""
    return pinned(source_of(c, name), data_dir(c) / name)


def tokenizer_path(c: Config) -> Path:
    """Where the run's tokenizer is, or will be. Raises CorpusError where it is trained on what was not pinned yet."""
    if c.tokenizer != "train" and (path := ROOT / c.tokenizer).suffix == ".json":
        if not path.exists() and c.init_from and path.parent == ROOT / c.init_from:
            of_run = ROOT / c.run_folder / "tokenizer.json"
            return of_run if of_run.is_file() else path  # a run that has begun needs no folder
        return path
    name = c.tokenizer.replace("/", "--")
    if c.tokenizer == "train":
        trained_on = [
            (source, weight, pinned_of(c, source).key) for source, weight in c.mixture.items()
        ]
        digest = hashlib.sha256(repr(trained_on).encode()).hexdigest()
        name = f"{'+'.join(c.mixture)}-{digest[:8]}-bpe{c.vocab_size}"
    return data_dir(c) / "tokenizers" / name / "tokenizer.json"


def may_shrink(c: Config) -> bool:
    """Tell whether VOCAB_SIZE follows the text where that has few different words: a preset chose it, not the user."""
    return c.tokenizer == "train" and c.nodes == 1 and is_of_preset("VOCAB_SIZE")


def fit_vocabulary(c: Config) -> Config:
    """Return the settings with the VOCAB_SIZE of the tokenizer that was trained, if that is smaller."""
    if not may_shrink(c):
        return c
    try:
        with open_regular(tokenizer_path(c)) as file:
            size = len(json.loads(read_whole(file))["model"]["vocab"])
    except (CorpusError, OSError, ValueError, LookupError, TypeError):  # none yet, or damaged
        return c
    return c.replace(vocab_size=min(size, c.vocab_size))


def shard_folder(c: Config, name: str, tokenizer_sha256: str) -> Path:
    """Of a source's shards under a tokenizer. Raises CorpusError."""
    key = pinned_of(c, name).key
    if has_dropped_near_duplicates(c):
        key += "-without-near-duplicates"
    return data_dir(c) / name / key / tokenizer_sha256[:12]


def has_dropped_near_duplicates(c: Config) -> bool:
    """Tell whether the run began with NEAR_DUPLICATES=drop, which was a setting once."""
    stored = read_run_config(ROOT / c.run_folder / "config.json").get("settings", {})
    return stored.get("NEAR_DUPLICATES") == "drop"


def core_bundle_path(setting: str, folder: Path) -> Path:
    """Return where CORE_BUNDLE is: a path, or the place under DATA_DIR of what it downloads."""
    if "://" not in setting:
        return (ROOT / setting).absolute()
    digest = hashlib.sha256(setting.encode()).hexdigest()
    return folder / "core" / f"bundle-{digest[:12]}.zip"


def token_bytes(vocab_size: int) -> int:
    """Bytes that a token takes in a shard of that tokenizer."""
    return 2 if vocab_size <= 2**16 else 4


# ---------------------------------------------------------------------------------------------------
# How much of each source
# ---------------------------------------------------------------------------------------------------


def share_of(c: Config, name: str) -> float:
    """A source's part of the mixture, 0 to 1."""
    return c.mixture[name] / sum(c.mixture.values())


def token_limit(c: Config, s: Source) -> float:
    """Training tokens to prepare of a source: on the Hub its share of TRAIN_TOKENS, else all."""
    if s.kind != "hub":
        return math.inf
    return math.ceil(c.train_tokens * c.mixture[s.name] / sum(c.mixture.values()))


def is_enough(c: Config, s: Source, end: str | None, made: int) -> bool:
    """Whether shards that ended so, with that many training tokens, are all that the settings ask for."""
    return end is not None and (end == "all" or made >= token_limit(c, s))


def wanted_tokens(c: Config, name: str) -> float:
    """Tokens of a source that the run trains on, repeated ones included."""
    return c.last_step * c.batch_tokens * share_of(c, name)


class Repetition(NamedTuple):
    """That a source is repeated often.

    text: how often, in words. meaning: the end of a warning. remedy: what to do where that is more often than it may
    be, else "".
    """

    text: str
    meaning: str
    remedy: str


def find_repetition(c: Config, name: str, tokens: float, has: str = "") -> Repetition | None:
    """Judge how often a run repeats a source with that many tokens; None if not often. has: what else to say of it."""
    source = source_of(c, name)
    limit = MAX_EPOCHS if source.max_epochs is None else source.max_epochs
    wanted = wanted_tokens(c, name)
    epochs = wanted / max(1, tokens)
    if epochs <= min(MANY_EPOCHS, limit):
        return None
    how = f"{number_formats.count(wanted)} tokens are wanted"
    if len(c.mixture) > 1:
        every = number_formats.count(c.last_step * c.batch_tokens)
        how = f"{100 * share_of(c, name):.3g}% of {every} tokens are {number_formats.count(wanted)}"
    times = number_formats.number(epochs)
    text = (
        f"{name} is repeated {times} times: {how}, and it has {number_formats.count(tokens)}{has}"
    )
    meaning = f"; beyond {MANY_EPOCHS} times it is worth less than new text"
    if source.max_epochs is not None and not source.place and epochs <= limit:
        meaning = ", as its max_epochs allows"
    remedy = explain_limit(c, name, tokens, limit) if epochs > limit else ""
    return Repetition(text, meaning, remedy)


def explain_limit(c: Config, name: str, tokens: float, limit: float) -> str:
    """Say what to do if a source with that many tokens is repeated more often than it may be."""
    if c.pretrains_on_data:
        most = int(limit * tokens) // c.batch_tokens * c.batch_tokens
        unit = 10 ** (len(str(most)) - 2)
        fits = f", or set TRAIN_TOKENS={most // unit * unit} or less" if most > 100 else ""
        needed = number_formats.count(math.ceil(wanted_tokens(c, name) / limit))
        return (
            f"The limit is {limit:g} times: text that is repeated more is memorized. "
            f"Use at least {needed} tokens of text{fits}."
        )
    return (
        f"Beyond {MAX_EPOCHS} times text teaches little and is memorized: give it less weight in DATA_MIX, "
        f'or allow it with max_epochs = "unlimited" in {show_path(declaration(name, source_folders(c)))}'
    )
