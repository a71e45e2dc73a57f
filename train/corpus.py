"""Where text comes from: a source is declared here by name and yields documents.

    documents(source) -> Document(name, text), always in the same order for the same revision

A document belongs to the validation split by the hash of its name, so that the split needs no list, is
the same on every machine and does not move when documents are added.
"""

import dataclasses
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class CorpusError(Exception):
    """A source that is unknown or cannot be read; the message names the remedy."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with a name that is unique in its source."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Source:
    """What a name in DATA_MIX stands for.

    kind: "stdlib" or "hub". For the hub: repository (or a local folder in the same layout), config,
    text and name columns; a template makes the text of several columns instead.
    validation_fraction: share of documents held out. prompt: what the text sample at the end of a run
    continues. compressors: held-out text is small enough to compress.
    """

    name: str
    kind: str
    validation_fraction: float
    prompt: str
    repository: str = ""
    config: str | None = None
    text_column: str = "text"
    template: str = ""
    name_column: str = "id"
    compressors: bool = False


SOURCES = {source.name: source for source in (
    Source("python-stdlib", "stdlib", validation_fraction=0.05, prompt="def ", compressors=True),
    Source("fineweb-edu", "hub", validation_fraction=0.001, prompt="The", repository="HuggingFaceFW/fineweb-edu",
           config="sample-100BT"),
    Source("finepdfs", "hub", validation_fraction=0.001, prompt="The", repository="HuggingFaceFW/finepdfs",
           config="eng_Latn"),
    Source("usmle", "hub", validation_fraction=0.02, prompt="Question:", repository="GBaker/MedQA-USMLE-4-options",
           template="Question: {question}\nA. {options[A]}\nB. {options[B]}\nC. {options[C]}\nD. {options[D]}\n"
                    "Answer: {answer_idx}. {answer}"),
)}


def source(name: str) -> Source:
    """The declared source of that name."""
    if name not in SOURCES:
        raise CorpusError(f"DATA_MIX names {name}, which is no source; there are: {', '.join(SOURCES)}")
    return SOURCES[name]


def revision(s: Source, token: str = "") -> str:
    """What fixes the text of a source: the interpreter's version, or the commit on the hub."""
    if s.kind == "stdlib":
        return ".".join(map(str, sys.version_info[:3]))
    if Path(s.repository).is_dir():
        return "local"
    from huggingface_hub import HfApi
    try:
        return str(HfApi(token=token or None).dataset_info(s.repository).sha)
    except Exception as error:  # the hub's client raises a score of types; what to do is the same for all
        raise CorpusError(f"the hub does not tell the revision of {s.repository}: {error}; check the network, "
                          "and HF_TOKEN if the data set is gated") from error


def is_validation(s: Source, name: str) -> bool:
    """Whether the document of that name is held out."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little") < s.validation_fraction * 2**64


def documents(s: Source, at_revision: str, skip: int = 0, token: str = "") -> Iterator[Document]:
    """The documents of a source from number `skip` on, in a fixed order."""
    if s.kind == "stdlib":
        yield from stdlib_documents(skip)
    else:
        yield from hub_documents(s, at_revision, skip, token)


def stdlib_documents(skip: int = 0) -> Iterator[Document]:
    """The Python source of the running interpreter's standard library, by file name.

    Tests and installed packages are left out, and the few files that are not UTF-8 (they declare
    another encoding and exist to test that). About 12 MB.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")
                   if not left_out & set(path.relative_to(root).parts))
    if not names:
        raise CorpusError(f"{root} holds no Python source: this interpreter has its standard library in an archive; "
                          "use another Python, or another source in DATA_MIX")
    for name in names[skip:]:
        try:
            text = (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            text = ""  # keeps the numbering; an empty document is counted and dropped by prepare.py
        yield Document(name, text)


def hub_documents(s: Source, at_revision: str, skip: int, token: str) -> Iterator[Document]:
    """Rows of a hub data set as a stream, in the order of its files, at one revision."""
    import datasets
    try:
        rows = datasets.load_dataset(s.repository, s.config, split="train", streaming=True, token=token or None,
                                     revision=None if at_revision == "local" else at_revision)
    except Exception as error:
        raise CorpusError(f"cannot open {s.repository}: {error}; check the network, and HF_TOKEN if the data set "
                          "is gated") from error
    for number, row in enumerate(guarded(s, rows.skip(skip) if skip else rows), skip):
        try:
            text = s.template.format(**row) if s.template else row[s.text_column] or ""
        except KeyError as missing:
            raise CorpusError(f"{s.repository} row {number} has no column {missing}; "
                              f"it has: {', '.join(row)}") from None
        yield Document(str(row.get(s.name_column, number)), text)


def guarded(s: Source, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, with whatever the reading of them raises as a CorpusError."""
    try:
        yield from rows
    except Exception as error:
        raise CorpusError(f"cannot read {s.repository}: {error}; check the network, and the files if it is a folder; "
                          "the same command goes on behind the last shard") from error
