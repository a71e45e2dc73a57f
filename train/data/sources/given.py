"""The source that DATA stands for: text of one's own, without a declaration.

    DATA=novel.txt, DATA=~/papers        a file or folder: plain text, JSON lines, Parquet, Arrow
    DATA=hf:OWNER/NAME:CONFIG:SPLIT      a data set on the Hugging Face Hub
    DATA=chats.jsonl#body                the column that holds the text, where it must be named

Its column of text is found in each file (formats.py). Plain text is cut into pieces at blank lines,
and a twentieth of all documents is held out, chosen by a hash of their text (rows.py).
"""

import codecs
import dataclasses
import os
import re
from collections import Counter
from pathlib import Path

from settings import ROOT
from train.data.sources.content import LFS, foreign, format_of
from train.data.sources.source import CorpusError, Source

HELD_OUT = {"files": 0.05, "hub": 0.01}  # share of documents
MOST_EPOCHS = 64.0  # the first preset takes as many of a quarter of a megabyte
HUB = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<first>[\w.-]+))?(?::(?P<second>[\w.-]+))?"
    r"(?:@(?P<revision>[0-9a-f]{40}))?"
)
BYTES_PER_TOKEN = 3.5  # of a vocabulary of a few thousand
COMPRESSION = 4  # of text in Parquet, gzip and zstd, at most
START_BYTES = 4096  # of a file, by which text is known


def given_source(data: str, name: str) -> Source:
    """Return what DATA stands for, without looking at the files. Raises CorpusError."""
    place, column = split_column(data)
    if "://" in place:
        raise CorpusError(
            f"DATA={data}: Must be a file, a folder or hf:OWNER/NAME. Download what is at an address first."
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
        bytes = find_path(name).stat().st_size
        size += bytes * (1 if is_plain(name) else COMPRESSION)
    return round(size / BYTES_PER_TOKEN)


def is_plain(name: str) -> bool:
    return format_of(name) in ("", "text", "json")


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


def list_files(place: str) -> tuple[list[str], Counter[str]]:
    """List the files that DATA names, sorted, each with its path as it was given.

    Links are followed; a file or folder that several paths lead to is taken once, by the first.

    Returns:
        The names, and how many files of a folder are left out, by suffix: those that are no text,
        no JSON lines and no Parquet, and empty ones. Hidden files and folders are not looked at.

    Raises:
        CorpusError: there is no such file, or no text in it.
    """
    path = find_path(place)
    if path.is_file():
        if not path.stat().st_size:
            raise CorpusError(f"DATA={place}: Is empty. Choose a file with text.")
        if not is_readable(path.name, read_start(path)):
            raise CorpusError(f"DATA={place}: {explain_unreadable(path)}")
        return [place], Counter()
    if not path.is_dir():
        is_there = (
            "Is neither a file nor a folder" if path.exists() else "There is no such file or folder"
        )
        raise CorpusError(
            f"DATA={place}: {is_there} ({path}). A data set on the Hugging Face Hub is "
            "DATA=hf:OWNER/NAME."
        )
    names = []
    left_out: Counter[str] = Counter()
    known = {os.path.realpath(path)}
    for folder, folders, files in os.walk(path, onerror=refuse, followlinks=True):
        folders[:] = [name for name in sorted(folders) if is_new(folder, name, known)]
        for file in sorted(files):
            if not is_new(folder, file, known):
                continue
            found = Path(folder, file)
            if not found.is_file():
                left_out["broken link" if found.is_symlink() else "no file"] += 1
                continue
            start = read_start(found)
            if is_readable(file, start) and not is_worthless(file, start):
                names.append(f"{place.rstrip('/')}/{found.relative_to(path).as_posix()}")
            else:
                left_out[found.suffix if found.stat().st_size else "empty"] += 1
    if not names:
        raise CorpusError(
            f"DATA={place}: The folder holds no plain text in UTF-8, JSON lines, Parquet or Arrow."
        )
    return sorted(names), left_out


def is_new(folder: str, name: str, known: set[str]) -> bool:
    """Tell whether a file or folder is not hidden and no other path led to it before, and note it."""
    real = os.path.realpath(os.path.join(folder, name))
    if name.startswith(".") or real in known:
        return False
    known.add(real)
    return True


def explain_unreadable(path: Path) -> str:
    """Say why a file is not read, and what to do."""
    if path.suffix.lower() in (".csv", ".tsv"):
        return "Is a table. Convert it to JSON lines."
    if b"\0" not in read_start(path) and path.suffix.lower() != ".json":
        return (
            f"Is not UTF-8. Convert it, for example: iconv -f latin1 -t utf-8 {path.name} > "
            f"utf8-{path.name}"
        )
    return "Must be plain text in UTF-8, JSON lines, Parquet or Arrow. Convert it first."


def refuse(error: OSError) -> None:
    """Refuse a folder that cannot be listed; os.walk would leave it out."""
    raise CorpusError(f"DATA: {error.filename}: Cannot be read: {error.strerror}.") from None


def is_worthless(name: str, start: bytes) -> bool:
    """Tell whether a text file of a folder is blank or a page for browsers, and not worth a refusal of the folder."""
    if format_of(name) not in ("", "text"):
        return False
    if not start.strip():
        return len(start) < START_BYTES
    return bool(foreign(start)) and not start.startswith(LFS)


def is_readable(name: str, start: bytes) -> bool:
    """Return whether these first bytes are those of a known format, or of text."""
    suffix = Path(name).suffix.lower()
    if suffix == ".json":
        # One value over the whole file is no JSON lines.
        start = start.removeprefix(codecs.BOM_UTF8)
        return start.lstrip()[:1] == b"{" and start.splitlines()[0].strip() != b"{"
    if format_of(name) not in ("", "text"):
        return True
    if suffix in (".csv", ".tsv") or not start or b"\0" in start:
        return False
    try:
        start.decode()
    except UnicodeDecodeError as error:
        # The last character may be cut.
        return error.start >= len(start) - 3 and len(start) == START_BYTES
    return True


def read_start(path: Path) -> bytes:
    """Return the first bytes of a file. Raises CorpusError."""
    try:
        with open(path, "rb") as file:
            return file.read(START_BYTES)
    except OSError as error:
        raise CorpusError(f"DATA: {path}: Cannot be read: {error.strerror}.") from None
