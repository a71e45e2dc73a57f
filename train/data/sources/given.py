"""The files that DATA and declared sources name, and the source that DATA stands for.

    DATA=novel.txt, DATA=~/papers        a file or a folder: plain text, JSON lines or arrays, Parquet
    DATA='papers/*.jsonl.gz'             files that match; text and JSON also in gzip and zstd
    DATA=hf:OWNER/NAME:CONFIG:SPLIT      a data set on the Hugging Face Hub
    DATA=chats.jsonl#body                the column that holds the text, where it must be named

Each file is listed once, however many links lead to it; pin.py drops copies. Its column of text is
found in each file (formats.py). Plain text is cut into pieces at blank lines, and a twentieth of all
documents is held out, chosen by a hash of their text (rows.py).
"""

import codecs
import dataclasses
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from settings import ROOT
from train.data.sources.content import (
    ARROW,
    BYTE_ORDER_MARK,
    LFS,
    START_BYTES,
    TABLE,
    Start,
    compression_of,
    find_structure,
    foreign,
    format_of,
    read_start,
)
from train.data.sources.source import CorpusError, Source

HELD_OUT = {"files": 0.05, "hub": 0.01}  # share of documents
MOST_EPOCHS = 64.0  # the first preset takes as many of a quarter of a megabyte
HUB = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<first>[\w.-]+))?(?::(?P<second>[\w.-]+))?"
    r"(?:@(?P<revision>[0-9a-f]{40}))?"
)
BYTES_PER_TOKEN = 3.5  # of a vocabulary of a few thousand
COMPRESSION = 4  # of text in Parquet, gzip and zstd, at most
# Files that tell of a folder's data and are none of it, unless there are no others.
LANGUAGE = r"[a-z]{2}([_-][a-z]{2,4})?"
LICENSE = (
    r"(mit|apache|[al]?gpl|lesser|lib|bsd|isc|mpl|epl|cc0?(-[a-z]{2})*|unlicense|zlib|ofl|odbl)"
)
VERSION = r"([_-]?v?\d[\d.]*)"
ABOUT = re.compile(
    rf"(readme([._-]{LANGUAGE})?|notice|citation|"
    rf"(licen[sc]e|copying)([._-]{LICENSE})?{VERSION}?(-clause)?)"
    r"(\.(md|markdown|txt|rst|cff|bib))?(\.(gz|zst))?",
    re.IGNORECASE,
)


def given_source(data: str, name: str) -> Source:
    """Return what DATA stands for, without looking at the files. Raises CorpusError."""
    place, column = split_column(data)
    if "://" in place:
        raise CorpusError(
            f"DATA={data}: Must be a file, a folder, a pattern or hf:OWNER/NAME. Download what is at an "
            "address first."
        )
    source = Source(
        name,
        "files",
        HELD_OUT["files"],
        text=column,
        prompt="",
        files=(place,),
        max_epochs=MOST_EPOCHS,
        place=place,
        remedies={
            "column": f"Name another one: DATA={place}#COLUMN",
            "rows": f"Leave the file out, or name another column: DATA={place}#COLUMN",
            "files": "Get it again, or leave it out",
        },
    )
    if not place.startswith("hf:"):
        return source
    match = HUB.fullmatch(place)
    if match is None:
        raise CorpusError(
            f"DATA={data}: Must be hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG:SPLIT, "
            "for example DATA=hf:roneneldan/TinyStories."
        )
    repository = f"DATA=hf:{match['repository']}"
    config = f":{match['first']}" if match["second"] else ""
    remedies = {
        "config": f"Name one of them: {repository}:CONFIG:train",
        "split": f"Name one of them: {repository}{config}:SPLIT",
        "format": "Download it, and convert it to JSON lines",
        "hub": f"It is so on the Hub. Name an older commit: {repository}{config}@COMMIT",
    }
    return dataclasses.replace(
        source,
        kind="hub",
        files=(),
        validation_fraction=HELD_OUT["hub"],
        repository=match["repository"],
        config=match["first"] if match["second"] else None,
        split=match["second"] or match["first"] or "train",
        revision=match["revision"] or "",
        remedies={**source.remedies, **remedies},
    )


def estimate_tokens(names: list[str]) -> int:
    """Estimate the tokens in files by their size, until they are counted."""
    size = 0
    for name in names:
        is_compressed = format_of(name) == "parquet" or compression_of(name)
        size += find_path(name).stat().st_size * (COMPRESSION if is_compressed else 1)
    return round(size / BYTES_PER_TOKEN)


def find_path(name: str) -> Path:
    """Return where a file lies. Raises CorpusError for the home of a user that there is not."""
    try:
        return ROOT / Path(name).expanduser()
    except RuntimeError:
        raise CorpusError(f"{name}: There is no such user. Use a path.") from None


def split_column(data: str) -> tuple[str, str]:
    """Split `PLACE#COLUMN`. A file whose name has a `#` is meant as it is."""
    place, mark, column = data.rpartition("#")
    if not mark or find_path(data).exists():
        return data, ""
    if not place:
        raise CorpusError(f"DATA={data}: Names a column and no file. Use DATA=FILE#COLUMN.")
    return place, column


# ---- Which files


def list_files(place: str) -> tuple[list[str], Counter[str]]:
    """List the files that DATA names, sorted, each with its path as it was given.

    Links are followed; a file or folder that several paths lead to is taken once, by the first.

    Returns:
        The names, and how many files of a folder or pattern are left out, by suffix: those that are
        no text, no JSON and no Parquet, empty ones, and a README and LICENSE next to others. Hidden
        files and folders are not looked at.

    Raises:
        CorpusError: there is no such file, or no text in it.
    """
    path = find_path(place)
    left_out: Counter[str] = Counter()
    if path.is_file():
        if problem := find_problem(path, is_chosen=True):
            raise CorpusError(f"DATA={place}: {problem.sentence}")
        return [place], left_out
    if path.is_dir():
        below = expand(f"{glob.escape(str(path))}/**/*")
        places = [place.rstrip("/") + name.removeprefix(str(path)) for name in below]
    else:
        places = sorted(expand(place)) if glob.has_magic(place) else []
        if not places:
            raise CorpusError(f"DATA={place}: {explain_missing(place, path)}")
    names = []
    for name in drop_links(places):
        if problem := find_problem(find_path(name)):
            left_out[problem.kind] += 1
        else:
            names.append(name)
    if not names:
        raise CorpusError(f"DATA={place}: Holds no {READABLE}.")
    data = [name for name in names if not is_about_data(name)]
    if data and len(data) < len(names):
        left_out["README or LICENSE"] += len(names) - len(data)
        names = data
    return sorted(names), left_out


def is_about_data(name: str) -> bool:
    """Tell whether a file is a README or a license, by its name."""
    is_named = ABOUT.fullmatch(Path(name).name) is not None
    return is_named and format_of(name) in ("", "text")


READABLE = "plain text in UTF-8, JSON lines, JSON arrays or Parquet"


def explain_missing(place: str, path: Path) -> str:
    """Say why a path leads to no file, and what to do.

    place: how DATA has the path, which the message begins with.
    """
    where = "" if str(path) == place else f" ({path})"
    if glob.has_magic(str(path)):
        return f"No file matches{where}. Check the pattern, and write it in quotes."
    if path.exists():
        is_there = "Is neither a file nor a folder"
    elif path.is_symlink():
        is_there = "Is a link that leads nowhere, or in a circle"
    else:
        is_there = "There is no such file or folder"
    return f"{is_there}{where}. A data set on the Hugging Face Hub is DATA=hf:OWNER/NAME."


def walk_folders(folder: Path) -> Iterator[Path]:
    """Yield a folder and those below it, in order, each folder once; no hidden ones."""
    known = {os.path.realpath(folder)}
    for parent, folders, _ in os.walk(folder, onerror=refuse, followlinks=True):
        visited = []
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(parent, name))
            if not name.startswith(".") and real not in known:
                known.add(real)
                visited.append(name)
        folders[:] = visited
        yield Path(parent)


def drop_links(names: Iterable[str]) -> list[str]:
    """Return the names without those that lead to a file which an earlier one leads to."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(os.path.realpath(find_path(name)), name)
    return list(first.values())


def expand(pattern: str) -> list[str]:
    """Return the files that match a pattern, as it is written: from ~ or the repository's root on.

    `**` is any number of folders. No folder is entered twice, as glob would do where links lead in a
    circle. Those of a folder come before those below it. Links that lead nowhere are among them.
    """
    if pattern.startswith("~/"):
        home = str(Path.home())
        return ["~" + name.removeprefix(home) for name in expand(glob.escape(home) + pattern[1:])]
    before, mark, rest = f"/{pattern}/".partition("/**/")
    if not mark:
        names = sorted(glob.glob(pattern, root_dir=ROOT))
        return [name for name in names if not (ROOT / name).is_dir()]
    matches = []
    for base in sorted(glob.glob(f"{before}/"[1:], root_dir=ROOT)) if before else [""]:
        for folder in walk_folders(ROOT / base):
            below = folder.relative_to(ROOT / base).as_posix()
            start = base if below == "." else f"{base}{below}/"
            matches += expand(glob.escape(start) + (rest.rstrip("/") or "*"))
    return matches


# ---- Which of them hold text


class Problem(NamedTuple):
    """Why a file is not read.

    Attributes:
        kind: as such files are counted: the suffix, "empty" or "broken link".
        sentence: what it is, and what to do.
    """

    kind: str
    sentence: str


CONVERT = {".csv": TABLE, ".tsv": TABLE, ".arrow": ARROW, ".feather": ARROW}


def find_problem(path: Path, is_chosen: bool = False) -> Problem | None:
    """Look at the first bytes of a file. is_chosen: the user named it, and not its folder.

    Return None if it is read: if it is text, or called like one of the other formats.
    """
    if not path.is_file():
        return Problem("broken link" if path.is_symlink() else "no file", "Is no file.")
    if not path.stat().st_size:
        return Problem("empty", "Is empty. Choose a file with text.")
    try:
        start = read_start(path, path.name)
    except OSError as error:
        refuse(error)
    sentence = explain_start(path, start, is_chosen)
    return Problem(path.suffix or "no suffix", sentence) if sentence else None


def explain_start(path: Path, start: Start, is_chosen: bool) -> str:
    """Say why a file that begins like this is not read, and what to do; "" if it is.

    Blank text and pages for browsers are not worth a refusal of their folder.
    """
    content = start.content
    named = format_of(path.name)
    is_compressed = compression_of(path.name) != ""
    # Whoever reads these says what is wrong with them.
    is_data = named in ("parquet", "lines") or (named != "" and is_compressed)
    what, remedy = foreign(content, None if start.compression else path)
    if what and (is_chosen or not (is_data or LFS.match(content))):
        return f"Is {what}. {remedy or 'Get the file again'}."
    if is_data or start.kind == "parquet":
        return ""
    if start.kind == "json":
        return "" if is_chosen or holds_rows(content) else "Is JSON without rows of text."
    suffixes = {suffix.lower() for suffix in path.suffixes[-2:]}
    what, remedy = next((CONVERT[suffix] for suffix in suffixes & CONVERT.keys()), ("", ""))
    structure = find_structure(content)
    if structure[0]:
        what, remedy = structure
    if what:
        return f"Is {what}. {remedy}."
    if (is_compressed and not start.compression) or b"\0" in content:
        return f"Must be {READABLE}. Convert it first."
    is_whole = len(content) < START_BYTES
    if is_whole and content and not content.strip():
        return "Has only blank lines. Choose a file with text."
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=is_whole)
    except UnicodeDecodeError as error:
        some = content[error.start : error.start + 4]
        return f"Is not UTF-8: byte {error.start} is {some!r}. Save it in UTF-8."
    return ""


TEXT_COLUMNS = {"text", "content", "messages", "conversations"}


def holds_rows(start: bytes) -> bool:
    """Tell whether JSON begins like rows of text: objects in lines, or an array of texts or objects.

    A folder of code has JSON too: the settings of a tool. So the first element must show that it is
    text, or conversations, and one object over the whole file, or over several lines, holds no rows.
    """
    text = start.removeprefix(BYTE_ORDER_MARK).decode(errors="replace").lstrip()
    is_object = text.startswith("{")
    try:
        if is_object:
            return is_line_of_text(text)
        return text.startswith("[") and is_array_of_text(text[1:].lstrip())
    except (ValueError, RecursionError):  # the first element is longer than what was read
        return len(start) >= START_BYTES // 2 and not (is_object and "\n" in text)


def is_line_of_text(text: str) -> bool:
    """Tell whether this begins with an object in a line of its own that holds text. Raises ValueError."""
    row, end = json.JSONDecoder().raw_decode(text)
    if "\n" in text[:end]:
        return False
    has_more_lines = text[end:].strip() != ""
    return has_text_column(row) or (has_more_lines and count_texts(row) > 0)


def is_array_of_text(text: str) -> bool:
    """Tell whether the first of these elements of an array holds text. Raises ValueError."""
    first, _ = json.JSONDecoder().raw_decode(text)
    if isinstance(first, list):
        first = next(iter(first), None)
    if isinstance(first, dict):
        return has_text_column(first) or count_texts(first) == 1
    return isinstance(first, str)


def has_text_column(row: dict[str, Any]) -> bool:
    """Tell whether a row names its text, or the messages of a conversation, as data sets do."""
    return any(is_text_or_messages(row[column]) for column in TEXT_COLUMNS & row.keys())


def is_text_or_messages(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(message, dict) for message in value)
    return isinstance(value, str)


def count_texts(row: dict[str, Any]) -> int:
    return sum(isinstance(value, str) for value in row.values())


def refuse(error: OSError) -> NoReturn:
    """Refuse a file that cannot be read, or a folder, which os.walk would leave out."""
    raise CorpusError(f"DATA: {error.filename}: Cannot be read: {error.strerror}.") from None
