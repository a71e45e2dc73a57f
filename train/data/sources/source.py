"""Where text comes from: a source is declared in sources/NAME.toml, and DATA_MIX names it.

    repository = "HuggingFaceFW/fineweb-edu"   a data set on the Hugging Face hub, with config, split, revision
    files = ["~/papers/*.jsonl.gz"]            or files here, in order of their names
    embedded = "python-stdlib"                 or the text that every machine has

    text = "text"                              a row's text is one column
    template = "{question}\\n{answer}"          or several, as str.format puts them together

A document belongs to the validation split by the hash of its name, so that the split needs no list, is
the same on every machine and does not move when documents are added.
"""

import dataclasses
import hashlib
import json
import math
import re
import string
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from settings.names import find_nearest
from settings.resolve import show_path

RULES = 1  # changes when the same files give other documents, so that what was made before is not taken for the same
EMBEDDED = "python-stdlib"


class CorpusError(Exception):
    """A source that is unknown or cannot be read; the message names the remedy."""


DECLARED = {
    "column": "Name the right one in the declaration of the source, or leave the file out",
    "config": "Name one of them as config in the declaration of the source",
    "split": "Name one of them as split in the declaration of the source",
    "format": "Convert it, or leave it out of the source",
    "rows": "Look at its columns, leave the file out, or allow more as max_dropped in the declaration of the source",
    "files": "Get it again, or leave it out of the source's files",
    "hub": "It is so on the hub: pin another revision, or leave the source out of DATA_MIX",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """What a name in DATA_MIX stands for.

    kind: "hub", "files" or "stdlib". revision: a commit of the repository; "" = the one that is current when the
    source is first prepared. files: globs, relative to this repository's root or absolute. text, id: columns of a
    document's text and name; a template makes the text of several columns instead.
    validation_fraction: share of documents held out. prompt: what the text sample at the end of a run
    continues. compressors: held-out text is small enough to compress. max_dropped: share of a file's rows that may
    be dropped. tokens: about how many the source has, by whoever counted them; make plan reckons with it until there
    are shards. max_epochs: how often a run may repeat it; None: data_paths.MAX_EPOCHS. leave_out: patterns of
    file names, of the standard library. place: DATA without its column, of what DATA stands for (given.py): its
    columns are found where text is "", its documents are named by the hash of their text. remedies: what to do about
    a problem, by its kind.
    """

    name: str
    kind: str
    validation_fraction: float
    prompt: str = "The"
    repository: str = ""
    config: str | None = None
    split: str = "train"
    revision: str = ""
    files: tuple[str, ...] = ()
    text: str = "text"
    template: str = ""
    id: str = "id"
    compressors: bool = False
    max_dropped: float = 0.5
    tokens: int | None = None
    max_epochs: float | None = None
    leave_out: tuple[str, ...] = ()
    place: str = ""
    remedies: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: DECLARED, hash=False, compare=False
    )

    @property
    def identity(self) -> str:
        """8 hex digits of what decides which text comes out and how it is split; the revision aside."""
        decides = [
            RULES,
            self.kind,
            self.repository,
            self.config,
            self.split,
            self.files,
            self.text,
            self.template,
            self.id,
            self.validation_fraction,
        ]
        if self.place:
            decides.append("given")
        if self.leave_out:
            decides.append(self.leave_out)
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row's text is made of."""
        return template_columns(self.template) if self.template else (self.text,)


def is_validation(s: Source, name: str) -> bool:
    """Whether the document of that name is held out."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little") < s.validation_fraction * 2**64


# What a declaration may say: key -> (type, a valid example, the kinds that it is for).
KEYS: dict[str, tuple[type, str, str]] = {
    "repository": (str, 'repository = "HuggingFaceFW/fineweb-edu"', "hub"),
    "files": (list, 'files = ["~/papers/*.jsonl.gz"]', "files"),
    "embedded": (str, f'embedded = "{EMBEDDED}"', "stdlib"),
    "leave_out": (list, 'leave_out = ["encodings/*"]', "stdlib"),
    "config": (str, 'config = "sample-100BT"', "hub"),
    "split": (str, 'split = "train"', "hub"),
    "revision": (str, f'revision = "{"0123456789" * 4}"', "hub"),
    "text": (str, 'text = "text"', "hub files"),
    "template": (str, 'template = "Question: {question}\\nAnswer: {answer}"', "hub files"),
    "id": (str, 'id = "id"', "hub files"),
    "validation_fraction": (float, "validation_fraction = 0.001", "hub files stdlib"),
    "prompt": (str, 'prompt = "The"', "hub files stdlib"),
    "compressors": (bool, "compressors = false", "hub files stdlib"),
    "max_dropped": (float, "max_dropped = 0.5", "hub files stdlib"),
    "tokens": (int, "tokens = 100_000_000_000", "hub files stdlib"),
    "max_epochs": (float, "max_epochs = 64", "hub files stdlib"),
}
TYPES = {
    str: "a string",
    list: "a list of strings",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
}
KINDS = {"repository": "hub", "files": "files", "embedded": "stdlib"}


def declarations(folder: Path) -> list[Path]:
    """Return the files that declare sources. None in a closed folder, which whoever needs the data reports."""
    try:
        return list(folder.glob("*.toml"))
    except PermissionError:
        return []


def declaration(name: str, folders: Sequence[Path]) -> Path:
    """Find the file NAME.toml that declares a source. Raises CorpusError."""
    paths = sorted(path for folder in folders for path in declarations(folder))
    found = [path for path in paths if path.stem == name]
    own = folders[-1] / f"{name}.toml"
    if len(found) > 1:
        others = " and ".join(show_path(path) for path in found)
        raise CorpusError(
            f"DATA_MIX names {name}, which is declared twice, in {others}; rename {show_path(own)}"
        )
    if not found:
        known = [path.stem for path in paths]
        meant = find_nearest(name, known)
        raise CorpusError(
            f"DATA_MIX names {name}, which is no source; there are: {', '.join(known) or 'none'}"
            + (f"; did you mean {meant}?" if meant else "")
            + f" (a source of your own is a file {show_path(own)})"
        )
    return found[0]


def declared(name: str, folders: Sequence[Path]) -> Source:
    """The source that NAME.toml in one of the folders declares; CorpusError says what is wrong with it, and what would
    be right."""
    path = declaration(name, folders)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{show_path(path)}: not TOML ({error}); a line looks like: {KEYS['repository'][1]}"
        ) from None
    except OSError as error:
        raise CorpusError(
            f"{show_path(path)}: cannot be read ({error.strerror}); make it readable"
        ) from None
    if content.get("max_epochs") == "unlimited":
        content["max_epochs"] = math.inf
    for key, value in content.items():
        check_type(path, key, value)
    kind = kind_of(path, content)
    for key in content:
        if kind not in KEYS[key][2].split():
            raise CorpusError(
                f"{show_path(path)}: {key} does not go with {given_as(kind)}; leave it out"
            )
    check_values(path, content)
    content.pop("embedded", None)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }
    return Source(name=name, kind=kind, **values)


def check_type(path: Path, key: str, value: Any) -> None:
    """Raises CorpusError unless the key exists and has a value of its type."""
    if key not in KEYS:
        meant = find_nearest(key, KEYS)
        raise CorpusError(
            f"{show_path(path)}: {key} is no key of a source"
            + (
                f"; did you mean {meant}, as in {KEYS[meant][1]}?"
                if meant
                else f"; there are: {', '.join(KEYS)}"
            )
        )
    kind, example, _ = KEYS[key]
    right = isinstance(value, kind)
    if isinstance(value, list):
        right = kind is list and all(isinstance(item, str) and item for item in value)
    if kind in (float, int):
        right = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not right or value in ("", []):
        is_empty = "is empty" if right else f"is {value!r}"
        raise CorpusError(
            f"{show_path(path)}: {key} {is_empty}, but must be {TYPES[kind]}; for example: {example}"
        )


def kind_of(path: Path, content: dict[str, Any]) -> str:
    """Which kind of source the keys make: exactly one of repository, files and embedded."""
    given = [key for key in KINDS if key in content]
    if len(given) != 1:
        what = " and ".join(given) + " are given" if given else "none is given"
        raise CorpusError(
            f"{show_path(path)}: a source has one of repository, files and embedded, and {what}; "
            f"for example: {KEYS['repository'][1]}"
        )
    return KINDS[given[0]]


def given_as(kind: str) -> str:
    """The key that makes a source of this kind."""
    return next(key for key, value in KINDS.items() if value == kind)


def check_values(path: Path, content: dict[str, Any]) -> None:
    """Raises CorpusError for a value of the right type that cannot be meant."""

    def wrong(key: str, rule: str) -> CorpusError:
        value = f"{key} = {json.dumps(content[key])}" if key in content else f"{key} is missing; it"
        return CorpusError(f"{show_path(path)}: {value} {rule}; for example: {KEYS[key][1]}")

    if not 0 < content.get("validation_fraction", 0) < 1:
        raise wrong(
            "validation_fraction", "must be the share of documents held out, between 0 and 1"
        )
    if not 0 <= content.get("max_dropped", 0.5) <= 1:
        raise wrong("max_dropped", "must be a share of rows, from 0 to 1")
    if content.get("tokens", 1) < 1:
        raise wrong("tokens", "must be about how many tokens the source has, or left out")
    most = content.get("max_epochs", 1)
    if not (most >= 1 and (most == math.inf or most == int(most))):
        raise wrong("max_epochs", 'must be a whole number, at least 1, or "unlimited"')
    if content.get("embedded", EMBEDDED) != EMBEDDED:
        raise wrong("embedded", f"must be {EMBEDDED}, the only text that is everywhere")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", content.get("repository", "a/b")):
        raise wrong(
            "repository", "must be OWNER/NAME as the hub shows it (a folder here is given as files)"
        )
    if not re.fullmatch(r"[0-9a-f]{40}", content.get("revision", "0" * 40)):
        raise wrong("revision", "must be a commit of 40 hex digits (a branch moves), or left out")
    if "text" in content and "template" in content:
        raise wrong("template", "and text are given, and a row's text is made by one of them")
    if "template" in content:
        try:
            if not template_columns(content["template"]):
                raise ValueError("it names no column")
        except ValueError as error:
            raise wrong("template", f"must be text with columns in braces: {error}") from None


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, each once: "{question} {options[A]}" -> question, options.

    Raises ValueError for one that str.format cannot take, or that reaches for more than a row's values.
    """
    names: dict[str, None] = {}
    for _, field, spec, _ in string.Formatter().parse(template):
        if field is None:
            continue
        first = re.fullmatch(r"([^.\[\]]+)((?:\[[^\[\]]+\])*)", field)
        if not first:
            raise ValueError(f"{{{field}}} is no column; write {{column}} or {{column[key]}}")
        if first[1].isdigit():
            raise ValueError(f"{{{field}}} is a number, and columns have names")
        if "{" in (spec or ""):
            raise ValueError(f"{{{field}:{spec}}} has braces in its format")
        names[first[1]] = None
    return tuple(names)
