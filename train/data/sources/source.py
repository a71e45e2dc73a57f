"""Where text comes from: a source is declared in sources/NAME.toml, and DATA_MIX names it.

    repository = "HuggingFaceFW/fineweb-edu"   a data set on the Hugging Face hub, with config, split, revision
    files = ["~/papers/*.jsonl.gz"]            or files here, in order of their names
    embedded = "python-stdlib"                 or the text that every machine has

    text = "text"                              a row's text is one column
    template = "{question}\\n{answer}"          or several, as str.format puts them together

    hold_out_by = "text"                       equal texts are never on both sides of the split

A document belongs to the validation split by the hash of its name, or of its text, so that the split
needs no list, is the same on every machine and does not move when documents are added.
"""

import dataclasses
import hashlib
import json
import math
import re
import string
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from settings import ExpectedError
from settings.json_file import read_small
from settings.names import find_nearest
from settings.resolve import show_path

RULES = 1  # changes when the same files give other documents, so that what was made before is not taken for the same
EMBEDDED = "python-stdlib"


class CorpusError(ExpectedError):
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
    validation_fraction: share of documents held out; hold_out_by: "text" chooses them by the hash of their text, "name"
    by that of their name, as before there was a choice. prompt: what the text sample at the end of a run
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
    hold_out_by: str = "name"
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
        if self.hold_out_by != "name":
            decides.append(self.hold_out_by)
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row's text is made of."""
        return template_columns(self.template) if self.template else (self.text,)


def is_validation(s: Source, name: str) -> bool:
    """Whether the document of that name is held out."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little") < s.validation_fraction * 2**64


def is_match(pattern: str) -> Callable[[Any], bool]:
    """Return whether a value is a string of that pattern."""
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def is_list(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(is_text, value))


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def is_whole(value: Any) -> bool:
    return type(value) is int and value >= 1


is_text = is_match(r"(?s).+")


class Key(NamedTuple):
    """What a declaration may say.

    Attributes:
        kinds: of sources that may say it.
        example: a whole line.
        rule: what the value must be.
        is_valid: whether a value is that.
    """

    kinds: str
    example: str
    rule: str = "a string"
    is_valid: Callable[[Any], bool] = is_text


EVERY = "hub files stdlib"
KEYS = {
    "repository": Key(
        "hub",
        'repository = "HuggingFaceFW/fineweb-edu"',
        "OWNER/NAME as the Hub shows it (a folder here is given as files)",
        is_match(r"[\w.-]+(/[\w.-]+)?"),
    ),
    "files": Key("files", 'files = ["~/papers/*.jsonl.gz"]', "a list of patterns", is_list),
    "embedded": Key(
        "stdlib",
        f'embedded = "{EMBEDDED}"',
        f"{EMBEDDED}, the only text that is everywhere",
        is_match(EMBEDDED),
    ),
    "leave_out": Key("stdlib", 'leave_out = ["encodings/*"]', "a list of patterns", is_list),
    "config": Key("hub", 'config = "sample-100BT"'),
    "split": Key("hub", 'split = "train"'),
    "revision": Key(
        "hub",
        f'revision = "{"0123456789" * 4}"',
        "a commit of 40 hex digits (a branch moves), or left out",
        is_match(r"[0-9a-f]{40}"),
    ),
    "text": Key("hub files", 'text = "text"'),
    "template": Key(
        "hub files",
        'template = "Question: {question}\\nAnswer: {answer}"',
        "text with columns in braces",
    ),
    "id": Key("hub files", 'id = "id"'),
    "validation_fraction": Key(
        EVERY,
        "validation_fraction = 0.001",
        "the share of documents held out, between 0 and 1",
        lambda value: is_number(value) and 0 < value < 1,
    ),
    "hold_out_by": Key(EVERY, 'hold_out_by = "text"', "name or text", is_match("name|text")),
    "prompt": Key(EVERY, 'prompt = "The"'),
    "compressors": Key(
        EVERY, "compressors = false", "true or false", lambda value: isinstance(value, bool)
    ),
    "max_dropped": Key(
        EVERY,
        "max_dropped = 0.5",
        "a share of rows, from 0 to 1",
        lambda value: is_number(value) and 0 <= value <= 1,
    ),
    "tokens": Key(
        EVERY,
        "tokens = 100_000_000_000",
        "about how many tokens the source has, or left out",
        is_whole,
    ),
    "max_epochs": Key(
        EVERY,
        "max_epochs = 64",
        'a whole number, at least 1, or "unlimited"',
        lambda value: value == math.inf or is_whole(value),
    ),
}
KINDS = {"repository": "hub", "files": "files", "embedded": "stdlib"}


def declaration(name: str, folders: Sequence[Path]) -> Path:
    """Find the file NAME.toml that declares a source. Raises CorpusError."""
    paths = sorted(path for folder in folders for path in declarations(folder))
    matches = [path for path in paths if path.stem == name]
    own = show_path(folders[-1] / f"{name}.toml")
    if len(matches) > 1:
        others = " and ".join(map(show_path, matches))
        raise CorpusError(
            f"DATA_MIX names {name}, which is declared twice, in {others}; rename {own}"
        )
    if not matches:
        known = [path.stem for path in paths]
        meant = find_nearest(name, known)
        raise CorpusError(
            f"DATA_MIX names {name}, which is no source; there are: {', '.join(known) or 'none'}"
            + (f"; did you mean {meant}?" if meant else "")
            + f" (a source of your own is a file {own})"
        )
    return matches[0]


def declarations(folder: Path) -> list[Path]:
    """Return the files that declare sources. None in a closed folder, which whoever needs the data reports."""
    try:
        return list(folder.glob("*.toml"))
    except PermissionError:
        return []


def declared(name: str, folders: Sequence[Path]) -> Source:
    """Return the source that NAME.toml in one of the folders declares. Raises CorpusError."""
    path = declaration(name, folders)
    shown = show_path(path)
    try:
        content = tomllib.loads(read_small(path).decode())
        if content.get("max_epochs") == "unlimited":
            content["max_epochs"] = math.inf
        kind = check_content(content)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{shown}: not TOML ({error}); a line looks like: {KEYS['repository'].example}"
        ) from None
    except ValueError as error:
        raise CorpusError(f"{shown}: {error}") from None
    except OSError as error:
        raise CorpusError(f"{shown}: cannot be read ({error.strerror}); make it readable") from None
    content.pop("embedded", None)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }
    return Source(name=name, kind=kind, **values)


def check_content(content: dict[str, Any]) -> str:
    """Return the kind of source that the keys make. Raises ValueError with what is wrong."""
    given = [key for key in KINDS if key in content]
    for key, value in content.items():
        if key not in KEYS:
            meant = find_nearest(key, KEYS)
            hint = f"there are: {', '.join(KEYS)}"
            if meant:
                hint = f"did you mean {meant}, as in {KEYS[meant].example}?"
            raise ValueError(f"{key} is no key of a source; {hint}")
        check_value(key, value)
    if len(given) != 1:
        what = " and ".join(given) + " are given" if given else "none is given"
        raise ValueError(
            f"a source has one of repository, files and embedded, and {what}; for example: "
            f"{KEYS['repository'].example}"
        )
    kind = KINDS[given[0]]
    for key in content:
        if kind not in KEYS[key].kinds.split():
            raise ValueError(f"{key} does not go with {given[0]}; leave it out")
    check_value("validation_fraction", content.get("validation_fraction"))
    if "text" in content and "template" in content:
        raise ValueError("text and template are given, and a row's text is made by one of them")
    return kind


def check_value(key: str, value: Any) -> None:
    """Raise ValueError unless a key may have this value."""
    wanted = KEYS[key]
    why = ""
    if wanted.is_valid(value):
        if key != "template":
            return
        try:
            if template_columns(value):
                return
            why = " (it names no column)"
        except ValueError as error:
            why = f" ({error})"
    given = f"{key} is missing; it" if value is None else f"{key} = {value!r}"
    raise ValueError(f"{given} must be {wanted.rule}{why}; for example: {wanted.example}")


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
