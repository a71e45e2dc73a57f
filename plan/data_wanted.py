"""How often the run will see each source's text: what it wants of it, and what there is.

there   counted in the shards under DATA_DIR, once they are all made
        else as `tokens` in sources/NAME.toml has it, about, less what is held out
        else not known
"""

import dataclasses
import hashlib
from pathlib import Path

from hardware.model_size import parameters
from settings.config import Config
from settings.finding import FAIL, WARN, Finding
from settings.json_file import read_small
from train.data.data_paths import (
    MANY_EPOCHS,
    find_repetition,
    is_enough,
    shard_folder,
    source_of,
    token_limit,
    tokenizer_path,
    wanted_tokens,
)
from train.data.manifest import DataError, read_manifest
from train.data.sources.given import estimate_tokens, list_files
from train.data.sources.source import CorpusError, Source

TOKENS_PER_PARAMETER = 20  # of the 70B model that Hoffmann et al. trained, and of the presets


@dataclasses.dataclass(frozen=True)
class Epochs:
    """wanted_tokens: that the run trains on, repeated ones included. there_tokens: of training text, None where that is
    not known; counted: in shards. origin: where it is from, in words. epochs: None where there_tokens is."""

    source: str
    wanted_tokens: float
    there_tokens: float | None
    origin: str
    epochs: float | None
    counted: bool = False


@dataclasses.dataclass(frozen=True)
class Sealed:
    """The shards of a source that are there. tokens: of training text, in whole windows of SEQ_LEN, as training sees
    them; size: bytes of their files; whole: all that the settings ask for has been made."""

    tokens: int
    size: int
    whole: bool


def epochs(c: Config) -> list[Epochs]:
    """Of each source of DATA_MIX. Raises CorpusError for one that is not declared as it must be."""
    return [of_source(c, source_of(c, name)) for name in c.mixture]


def of_source(c: Config, s: Source) -> Epochs:
    wanted, shards, there = wanted_tokens(c, s.name), sealed(c, s), declared_tokens(c, s)
    if shards and shards.whole:
        return Epochs(
            s.name,
            wanted,
            shards.tokens,
            "counted in its shards",
            wanted / max(1, shards.tokens),
            True,
        )
    if there is None:
        unknown = f"{c.data} was not contacted" if s.place else f"{declares(s)} has no `tokens`"
        return Epochs(s.name, wanted, None, f"size unknown: {unknown}", None)
    origin = "about, by the size of its files" if s.place else f"about, by {declares(s)}"
    if token_limit(c, s) < min(
        wanted - c.batch_tokens, there
    ):  # no more are made; a run's last step is a whole one
        there, origin = (
            token_limit(c, s),
            f"as many as TRAIN_TOKENS has made, of what {declares(s)} says",
        )
    return Epochs(s.name, wanted, there, origin, wanted / max(1, there))


def declares(s: Source) -> str:
    """What says how many tokens a source has."""
    return "DATA" if s.place else f"sources/{s.name}.toml"


def declared_tokens(c: Config, s: Source) -> float | None:
    """Training tokens that a source has by its declaration, or about by the size of the files of DATA."""
    tokens = s.tokens
    if s.place and s.files:
        from train.data.sources.rows import check_first  # it needs pyarrow

        names, _ = list_files(s.place)
        check_first(s, names[0])
        tokens = estimate_tokens(names)
    return None if tokens is None else tokens * (1 - s.validation_fraction)


def sealed(c: Config, s: Source) -> Sealed | None:
    """What there is of a source's shards under this run's tokenizer; None where there are none, or they are damaged,
    which make data-verify tells."""
    try:
        folder = shard_folder(c, s.name, hashlib.sha256(read_small(tokenizer_path(c))).hexdigest())
        if not (folder / "manifest.json").is_file():
            return None
    except (CorpusError, OSError):  # not prepared yet
        return None
    return counted(c, s, folder)


def counted(c: Config, s: Source, folder: Path) -> Sealed | None:
    try:
        manifest = read_manifest(folder)
    except (DataError, OSError):
        return None
    there = {path.name for path in folder.glob("*.bin")}
    return Sealed(
        sum(info.windows(c.seq_len) for info in manifest.train()) * c.seq_len,
        sum(info.bytes for info in manifest.infos() if info.file in there),
        is_enough(c, s, manifest.end, manifest.tokens()),
    )


def findings(c: Config, sources: list[Epochs]) -> list[Finding]:
    """What is to be said where text is repeated often, as make data and the start of a run say it.

    A declared number is no ground to refuse a run: it is about right, and the shards will tell. The size of files is.
    """
    warnings = []
    for e in sources:
        if e.there_tokens is None:
            continue
        has = f" ({e.origin})"
        repetition = find_repetition(c, e.source, e.there_tokens, has)
        if repetition is None:
            continue
        text, meaning, remedy = repetition
        is_given = source_of(c, e.source).place
        if remedy:
            is_known = e.counted or is_given  # a declared number is about right at best
            warnings.append(Finding("epochs", FAIL if is_known else WARN, text, remedy))
        else:
            fix = smaller_model(c, e) if is_given else ""
            warnings.append(Finding("epochs", WARN, text + meaning, fix))
    return warnings


def smaller_model(c: Config, e: Epochs) -> str:
    """Propose the size of a model for a run whose text is repeated, or nothing if it is that small."""
    assert e.there_tokens
    best = min(e.wanted_tokens, MANY_EPOCHS * e.there_tokens) / TOKENS_PER_PARAMETER
    size = parameters(c).total
    if size <= best:
        return ""
    enough = float(f"{best:.2g}")
    return (
        f"For this much text a model of {enough:,.0f} parameters would be enough "
        f"({TOKENS_PER_PARAMETER} tokens per parameter); this one has {size:,}"
    )
