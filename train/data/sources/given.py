"""The source that DATA stands for: text of one's own, without a declaration.

    DATA=novel.txt, DATA=~/papers        a file or folder: plain text, JSON lines, Parquet, Arrow
    DATA=hf:OWNER/NAME:CONFIG:SPLIT      a data set on the Hugging Face Hub
    DATA=chats.jsonl#body                the column that holds the text, where it must be named

Its column of text is found in each file (formats.py). Plain text is cut into pieces at blank lines,
and a twentieth of all documents is held out, chosen by a hash of their text (rows.py).
"""

import dataclasses
import functools
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
        max_epochs=MOST_EPOCHS,
        given=True,
    )
    if not place.startswith("hf:"):
        files = (place,)
        return dataclasses.replace(source, files=files, tokens=estimate_tokens(place))
    match = HUB.fullmatch(place)
    if match is None:
        raise CorpusError(
            f"DATA={data}: Must be hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG:SPLIT, "
            "for example DATA=hf:roneneldan/TinyStories."
        )
    return dataclasses.replace(
        source,
        kind="hub",
        validation_fraction=HELD_OUT["hub"],
        repository=match["repository"],
        config=match["first"] if match["second"] else None,
        split=match["second"] or match["first"] or "train",
        revision=match["revision"] or "",
    )


@functools.cache
def estimate_tokens(place: str) -> int | None:
    """Estimate the tokens in the files that DATA names by their size, until they are counted."""
    path = ROOT / Path(place).expanduser()
    try:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
    except OSError:  # said better by what reads them
        return None
    return round(size / BYTES_PER_TOKEN) or None


def split_column(data: str) -> tuple[str, str]:
    """Split `PLACE#COLUMN`. A file whose name has a `#` is meant as it is."""
    place, mark, column = data.rpartition("#")
    if not mark or (ROOT / Path(data).expanduser()).exists():
        return data, ""
    return place, column


def list_files(place: str) -> tuple[list[str], Counter[str]]:
    """List the files that DATA names, sorted, each with its path as it was given.

    Returns:
        The names, and how many files of a folder are left out, by suffix: those that are no text,
        no JSON lines and no Parquet, and empty ones. Hidden files and folders are not looked at.

    Raises:
        CorpusError: there is no such file, or no text in it.
    """
    path = ROOT / Path(place).expanduser()
    if path.is_file():
        if not path.stat().st_size:
            raise CorpusError(f"DATA={place}: Is empty. Choose a file with text.")
        if not is_readable(path.name, read_start(path)):
            raise CorpusError(
                f"DATA={place}: Must be plain text in UTF-8, JSON lines, Parquet or Arrow. Convert it "
                "first."
            )
        return [place], Counter()
    if not path.is_dir():
        raise CorpusError(
            f"DATA={place}: There is no such file or folder ({path}). A data set on the Hugging Face "
            f"Hub is DATA=hf:OWNER/NAME."
        )
    names = []
    left_out: Counter[str] = Counter()
    for folder, folders, files in os.walk(path, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in files:
            found = Path(folder, file)
            if file.startswith(".") or not found.is_file():
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
    """Tell whether a file that begins so is of a known format, or text."""
    suffix = Path(name).suffix.lower()
    if suffix == ".json":
        # One value over the whole file is no JSON lines.
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
