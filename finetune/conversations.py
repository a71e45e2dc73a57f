"""DATA to conversations, in a fixed order. What becomes of each row is counted and named.

    DATA=chats.jsonl                     a file: .jsonl, .json, also .gz and .zst; .parquet; or another
                                         name if the content is plainly one of these
    DATA=chats/                          a folder: all such files in it, in the order of their names
    DATA=OWNER/NAME:CONFIG:SPLIT@COMMIT  a data set on the Hub
    DATA=chats.jsonl,OWNER/NAME*2        several of these; the last one counts twice

A damaged file is refused, as in train/data/sources/rows.py, and so is one of which none of the first
100 rows is a conversation. A row that is none is dropped. Each reason is counted, and its first three
rows are named by FILE:LINE. Of 100 rows or more, at most half may be dropped.
"""

import collections
import dataclasses
import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from finetune import row_shapes
from finetune.row_shapes import ACCEPTED, COLUMNS, Conversation, conversation_of
from settings import ROOT
from train.data.prepare import one_at_a_time
from train.data.sources.content import FORMATS, foreign, read_start
from train.data.sources.fetch import Files
from train.data.sources.formats import Bad, Broken, open_parquet, read
from train.data.sources.pin import Pinned, pin
from train.data.sources.rows import ENOUGH_ROWS
from train.data.sources.source import DECLARED, CorpusError, Source

READABLE = tuple(suffix for suffix, kind in FORMATS.items() if kind != "text")
NAMED = 3  # rows of each reason
MOST_DROPPED = 0.5  # share of the rows
TIMES = re.compile(r"(?P<source>.+?)\*(?P<times>[0-9]+)")
MOST_TIMES = 100
HUB = re.compile(
    r"(hf:)?(?P<repository>[\w.-]+(/[\w.-]+)?)(:(?P<first>[\w.-]+))?(:(?P<second>[\w.-]+))?"
    r"(@(?P<revision>[0-9a-f]{40}))?"
)
REASONS = {
    "not json": "a line that is no row. Make each line of a file a JSON object, or each a list of "
    "messages",
    "utf-8": "bytes that are not UTF-8. Save the file again as UTF-8",
    "long": "a line longer than is read. Split it",
    "empty": "a message without text. Fill it in, or remove the message or the row",
    "blank": "a blank line. Remove it",
} | row_shapes.REASONS
SENTENCES = REASONS | row_shapes.NOTES

log = logging.getLogger(__name__)


class Located(NamedTuple):
    """A conversation with the numbers of its file and row, both from 0. place: these as FILE:LINE."""

    conversation: Conversation
    file: int
    row: int
    place: str


@dataclasses.dataclass
class Tally:
    """What became of the rows.

    Attributes:
        shapes: rows taken, by shape.
        dropped: rows, by reason.
        notes: how often something was repaired, left out or changed.
        first: the first rows of each reason and note.
        unread: rows, by column that nothing follows.
    """

    rows: int = 0
    shapes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unread: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def drop(self, place: str, bad: Bad) -> None:
        self.dropped[bad.reason] += 1
        self.name(bad.reason, f"{place}: {bad.what}{bad.why}")

    def note(self, place: str, note: str, times: int = 1) -> None:
        if times:
            self.notes[note] += times
            self.name(note, place)

    def name(self, what: str, words: str) -> None:
        named = self.first.setdefault(what, [])
        if len(named) < NAMED:
            named.append(words)

    def take(self, place: str, conversation: Conversation) -> None:
        self.shapes[conversation.shape] += 1
        self.unread.update(conversation.unread)
        for note in conversation.notes:
            self.note(place, note)

    def report(self, sentences: Mapping[str, str] = SENTENCES) -> list[str]:
        """Return all of it as lines. sentences: what reasons and notes mean."""
        shapes = [f"{count:,} of the shape {shape}" for shape, count in self.shapes.most_common()]
        lines = [f"{self.rows:,} rows: {', '.join(shapes) or 'none is a conversation'}"]
        if self.unread:
            lines.append(f"columns that are not used: {', '.join(sorted(self.unread))}")
        for note, count in self.notes.most_common():
            places = ", ".join(self.first[note])
            more = ", ..." if count > len(self.first[note]) else ""
            lines.append(f"{count:,} {sentences[note]} ({places}{more})")
        for reason, count in self.dropped.most_common():
            lines.append(f"dropped {count:,}: {sentences[reason]}")
            lines += [f"  {place}" for place in self.first[reason]]
        return lines

    def check(self, setting: str, sentences: Mapping[str, str] = SENTENCES) -> None:
        """Raise CorpusError if too many rows were dropped."""
        dropped = self.dropped.total()
        if not self.rows:
            raise CorpusError(f"{setting}: has no rows. Give a file with conversations.")
        if dropped == self.rows or (
            self.rows >= ENOUGH_ROWS and dropped > MOST_DROPPED * self.rows
        ):
            lines = "\n  ".join(self.report(sentences))
            raise CorpusError(
                f"{setting}: {dropped} of {self.rows} rows had to be dropped. Fix or remove them "
                f"first; at most half may be dropped.\n  {lines}"
            )


def read_all(
    data: str, folder: Path, token: str = "", setting: str = "DATA"
) -> tuple[list[Located], list[str]]:
    """Return all conversations of DATA, and what became of its rows as lines. Raises CorpusError.

    folder: DATA_DIR/finetune, where pins are kept. A source that counts several times is read once.
    """
    rows: list[Located] = []
    lines: list[str] = []
    with one_at_a_time(folder):  # files of the Hub are deleted once they are read
        for source, _ in sources_in(data, setting):
            pinned, files = pinned_files(source, folder, token, setting)
            tally = Tally()
            rows += conversations(pinned, files, tally)
            tally.check(f"{setting}={source}")
            lines += tally.report()
    return rows, lines


# ---- Which files


def sources_in(data: str, setting: str = "DATA") -> list[tuple[str, int]]:
    """Return (source, how often it counts) of each part of DATA. Raises CorpusError."""
    if os.path.exists(ROOT / Path(data).expanduser()):  # False as well if too long for a name
        return [(data, 1)]
    repeats: dict[str, int] = {}
    for part in data.split(","):
        source, times = part, 1
        if match := TIMES.fullmatch(part):
            source, times = match["source"], int(match["times"])
        if not source or not 1 <= times <= MOST_TIMES:
            raise CorpusError(
                f"{setting}={data}: {part!r} is not a source. Write SOURCE or SOURCE*TIMES, with "
                f"TIMES from 1 to {MOST_TIMES}, for example {setting}=chats.jsonl,questions.jsonl*2"
            )
        if source in repeats:
            raise CorpusError(
                f"{setting}={data}: has {source} twice. Write {source}*2 to count it twice."
            )
        repeats[source] = times
    return list(repeats.items())


def source_of(data: str, setting: str = "DATA") -> Source:
    """Return what one part of DATA stands for. Raises CorpusError."""
    path = ROOT / Path(data).expanduser()
    if path.is_dir():
        names = [f"{data.rstrip('/')}/{file}" for file in files_in(path, f"{setting}={data}")]
        return Source(setting, "files", 0.5, files=tuple(map(glob.escape, names)))
    if path.is_file():
        if not may_hold_rows(path):
            what, remedy = foreign(read_start(path, path.name).content, path)
            raise CorpusError(
                f"{setting}={data}: {what or 'not a kind of file that conversations are read from'}. "
                f"{remedy or 'Convert it to one of: ' + ', '.join(READABLE)}."
            )
        return Source(setting, "files", 0.5, files=(glob.escape(data),))
    match = HUB.fullmatch(data)
    if not match or data.lower().endswith(READABLE) or data.startswith((".", "~", "/")):
        raise CorpusError(
            f"{setting}={data}: there is no such file or folder ({path}), and it is not the name of a "
            f"data set on the Hub. For example {setting}=chats.jsonl or {setting}=OWNER/NAME:CONFIG:SPLIT"
        )
    first, second = match["first"], match["second"]
    given = f"{setting}={match['repository']}"
    return Source(
        setting,
        "hub",
        0.5,
        repository=match["repository"],
        config=first if second else None,
        split=second or first or "train",
        revision=match["revision"] or "",
        remedies={
            **DECLARED,
            "config": f"Name one of them: {given}:CONFIG:train",
            "split": f"Name one of them: {given}:{first + ':' if second else ''}SPLIT",
        },
    )


def files_in(folder: Path, data: str) -> list[Path]:
    """Return the files of a folder that hold rows, relative to it. Raises CorpusError."""
    names = []
    others: collections.Counter[str] = collections.Counter()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if may_hold_rows(path):
            names.append(name)
        else:
            others[path.suffix or "no suffix"] += 1
    if others:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common())
        log.warning("%s: left out files that hold no rows (%d): %s", data, others.total(), kinds)
    if not names:
        raise CorpusError(
            f"{data}: the folder has no file of conversations ({', '.join(READABLE)})"
        )
    return names


def may_hold_rows(path: Path) -> bool:
    """Tell whether conversations are read from such a file, by its name or else by its content."""
    if path.name.lower().endswith(READABLE):
        return True
    try:
        return read_start(path, path.name).kind != "text"
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror}). Make it readable.") from None


def pinned_files(
    data: str, folder: Path, token: str = "", setting: str = "DATA"
) -> tuple[Pinned, Files]:
    """Return the files of one part of DATA. Raises CorpusError.

    Those of the Hub are as they were when they were first asked for, which `folder` keeps.
    """
    source = source_of(data, setting)
    try:
        pinned = pin(source, folder, token)
    except CorpusError as error:
        raise CorpusError(f"{setting}={data}: {error}") from None
    for file in pinned.files:
        if source.kind == "hub" and not file.name.lower().endswith(READABLE):
            raise CorpusError(
                f"{setting}={data}: {file.name} is not a kind of file that conversations are read "
                f"from. These are: {', '.join(READABLE)}"
            )
    return pinned, Files(pinned, folder, token)


# ---- Rows


def conversations(pinned: Pinned, files: Files, tally: Tally) -> Iterator[Located]:
    """Yield the conversations of all files, and count what becomes of each row. Raises CorpusError."""
    for number, file in enumerate(pinned.files):
        path = files.path(number)
        files.prefetch(number + 1)
        try:
            yield from read_file(path, file.name, number, tally)
        except Broken as broken:
            place = f"{file.name}:{(broken.row or 0) + 1} of {pinned.source.name}"
            again = "Download it again, or leave it out"
            if pinned.source.kind == "hub":
                again = "It is like this on the Hub, so name another revision or data set"
            raise CorpusError(f"{place}: {broken}. {broken.remedy or again}.") from None
        files.done(number)
    files.close()


def read_file(path: Path, name: str, number: int, tally: Tally) -> Iterator[Located]:
    """Yield the conversations of a file. Raises Broken."""
    columns, unused = columns_of(path, name)
    rows = n_conversations = 0
    first: tuple[int, Bad] | None = None
    for row, value in read(path, name, columns):
        place = f"{name}:{row + 1}"
        rows += 1
        tally.rows += 1
        made = value if isinstance(value, Bad) else conversation_of(value)
        if isinstance(made, Bad):
            if value is made and made.reason == "empty":
                made = made._replace(reason="blank")
            first = first or (row, made)
            tally.drop(place, made)
            if rows >= ENOUGH_ROWS and not n_conversations:
                row, bad = first
                raise Broken(
                    f"none of its first {rows} rows is a conversation. The first: {bad.what}",
                    f"Reason: {REASONS[bad.reason]}",
                    row,
                )
            continue
        n_conversations += 1
        tally.unread.update(unused)
        tally.take(place, made)
        yield Located(made, number, row, place)


def columns_of(path: Path, name: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the columns of a Parquet file that are read, and the others. JSON has them by row."""
    if read_start(path, name).kind != "parquet":
        return (), []
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        rows = file.metadata.num_rows
    used = tuple(column for column in names if column.lower() in COLUMNS)
    if rows and not used:
        raise Broken(f"has the columns {', '.join(names)}", f"Rename them; accepted are {ACCEPTED}")
    return used, [column for column in names if column.lower() not in COLUMNS]
