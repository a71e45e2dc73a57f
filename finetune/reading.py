"""DATA to conversations, in a fixed order: files here or a data set on the hub, what is wrong counted and named.

    DATA=chats.jsonl                     a file: .jsonl, .json (lines or one array), also .gz and .zst; .parquet
    DATA=chats/                          a folder: all such files below it, in order of their names; by their
                                         content, if their names do not tell
    DATA=OWNER/NAME:CONFIG:SPLIT@COMMIT  a data set on the hub; split train, and the only config, where not said

What is wrong with a file is refused, as in train/data/sources/rows.py, and so is one of which none of the first 100 rows is a
conversation. What is wrong with a row is dropped: each reason is counted, and the first three of each are named by
FILE:LINE. Of 100 rows or more at most half may be dropped.
"""

import collections
import dataclasses
import glob
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from finetune import row_shapes
from finetune.row_shapes import COLUMNS, SHAPES, Conversation, conversation_of
from settings import ROOT
from train.data.sources import rows
from train.data.sources.content import FORMATS, foreign, read_start
from train.data.sources.fetch import Files
from train.data.sources.formats import Bad, Broken, open_parquet, read
from train.data.sources.pin import Pinned, pin
from train.data.sources.rows import ENOUGH_ROWS
from train.data.sources.source import DECLARED, CorpusError, Source

log = logging.getLogger(__name__)
READABLE = tuple(suffix for suffix in FORMATS if FORMATS[suffix] != "text")
NAMED = 3  # of each reason for which rows are dropped
MOST_DROPPED = 0.5  # share of the rows
HUB = re.compile(
    r"(hf:)?(?P<repository>[\w.-]+(/[\w.-]+)?)(:(?P<first>[\w.-]+))?(:(?P<second>[\w.-]+))?"
    r"(@(?P<revision>[0-9a-f]{40}))?"
)
REASONS = (
    {
        reason: sentence
        for reason, sentence in rows.REASONS.items()
        if reason in ("not json", "utf-8", "long")
    }
    | {"blank": "a blank line"}
    | row_shapes.REASONS
)
SENTENCES = REASONS | row_shapes.NOTES


@dataclasses.dataclass
class Tally:
    """What became of the rows. shapes: rows taken by shape; dropped: rows by reason; notes: how often something in a
    row was mended, left out or changed; first: of each reason and note the first NAMED places; unread: rows by column
    that was not looked at."""

    rows: int = 0
    shapes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unread: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def drop(self, place: str, bad: Bad) -> None:
        self.dropped[bad.reason] += 1
        self.name(bad.reason, f"{place}: {bad.what}")

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

    def report(self, sentences: Mapping[str, str]) -> list[str]:
        """Lines that say all of it. sentences: what reasons and notes mean, those of later steps too."""
        lines = [
            f"{self.rows:,} rows: "
            + (
                ", ".join(f"{n:,} of the shape {shape}" for shape, n in self.shapes.most_common())
                or "none is a conversation"
            )
        ]
        if self.unread:
            lines.append("columns that are not read: " + ", ".join(sorted(self.unread)))
        lines += [
            f"{n:,} {sentences[note]} ("
            + ", ".join(self.first[note])
            + (", ..." if n > len(self.first[note]) else "")
            + ")"
            for note, n in self.notes.most_common()
        ]
        for reason, n in self.dropped.most_common():
            lines.append(f"dropped {n:,}: {sentences[reason]}")
            lines += [f"  {where}" for where in self.first[reason]]
        return lines


class Located(NamedTuple):
    """A conversation, the number of its file and its row there, both from 0 on; place: them as FILE:LINE."""

    conversation: Conversation
    file: int
    row: int
    place: str


# ---- Which files


def source_of(data: str, setting: str = "DATA") -> Source:
    """What DATA stands for. Raises CorpusError."""
    path = ROOT / Path(data).expanduser()
    if path.is_dir():
        below = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
        shown = [file for file in below if not any(part.startswith(".") for part in file.parts)]
        found = [file for file in shown if may_hold_rows(path / file)]
        if len(found) < len(shown):
            left_out = collections.Counter(file.suffix for file in shown if file not in found)
            log.warning(
                "%s=%s: left out files that hold no rows (%d): %s",
                setting,
                data,
                left_out.total(),
                ", ".join(f"{n} {suffix or 'no suffix'}" for suffix, n in left_out.most_common()),
            )
        if not found:
            raise CorpusError(
                f"{setting}={data}: the folder holds no file of conversations ({', '.join(READABLE)})"
            )
        return Source(
            setting,
            "files",
            0.5,
            files=tuple(glob.escape(f"{data.rstrip('/')}/{file}") for file in found),
        )
    if path.is_file():
        if not may_hold_rows(path):
            what, remedy = foreign(read_start(path, path.name).content, path)
            raise CorpusError(
                f"{setting}={data}: {what or 'not a kind of file that conversations are read from'}; there "
                f"are: {', '.join(READABLE)}; {remedy or 'convert it to one of them'}"
            )
        return Source(setting, "files", 0.5, files=(glob.escape(data),))
    is_hub = HUB.fullmatch(data)
    if not is_hub or data.lower().endswith(READABLE) or data.startswith((".", "~", "/")):
        raise CorpusError(
            f"{setting}={data}: there is no such file or folder ({path}), and it is no name of a data "
            f"set on the hub; for example {setting}=chats.jsonl, or {setting}=OWNER/NAME:CONFIG:SPLIT"
        )
    first, second = is_hub["first"], is_hub["second"]
    config = f"{first}:" if second else ""
    return Source(
        setting,
        "hub",
        0.5,
        repository=is_hub["repository"],
        config=first if second else None,
        split=second or first or "train",
        revision=is_hub["revision"] or "",
        remedies={
            **DECLARED,
            "config": f"Name one of them: {setting}={is_hub['repository']}:CONFIG:train",
            "split": f"Name one of them: {setting}={is_hub['repository']}:{config}SPLIT",
        },
    )


def may_hold_rows(path: Path) -> bool:
    """Tell whether a file is of a kind that conversations are read from, by its name or else by its content."""
    if path.name.lower().endswith(READABLE):
        return True
    try:
        return read_start(path, path.name).kind != "text"
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror}); make it readable") from None


def pinned_files(
    data: str, folder: Path, token: str = "", setting: str = "DATA"
) -> tuple[Pinned, Files]:
    """The files of DATA, as they are now or as the hub had them when they were first asked for, noted in `folder`.

    Raises CorpusError.
    """
    s = source_of(data, setting)
    try:
        pinned = pin(s, folder, token)
    except CorpusError as error:
        raise CorpusError(f"{setting}={data}: {error}") from None
    if s.kind == "hub" and (
        wrong := next(
            (file.name for file in pinned.files if not file.name.lower().endswith(READABLE)), None
        )
    ):
        raise CorpusError(
            f"{setting}={data}: {wrong} is not a kind of file that conversations are read from; there "
            f"are: {', '.join(READABLE)}"
        )
    return pinned, Files(pinned, folder, token)


# ---- Rows


def conversations(pinned: Pinned, files: Files, tally: Tally) -> Iterator[Located]:
    """The conversations of all files, in order; what becomes of each row is counted. Raises CorpusError."""
    for number, file in enumerate(pinned.files):
        path = files.path(number)
        files.prefetch(number + 1)
        seen = taken = row = 0
        try:
            columns, unread = columns_of(path, file.name)
            for row, value in read(path, file.name, columns):
                seen, place = seen + 1, f"{file.name}:{row + 1}"
                tally.rows += 1
                made = read_row(value)
                if isinstance(made, Bad):
                    tally.drop(place, made)
                    if seen >= ENOUGH_ROWS and not taken:
                        raise Broken(
                            f"none of its first {seen} rows is a conversation; the first: {made.what}"
                        )
                    continue
                taken += 1
                tally.unread.update(unread)
                tally.take(place, made)
                yield Located(made, number, row, place)
        except Broken as broken:
            at = row if broken.row is None else broken.row
            raise refusal(pinned, file.name, at, str(broken), broken.remedy) from None
        files.done(number)
    files.close()


def read_row(value: dict | Bad) -> Conversation | Bad:
    if isinstance(value, Bad):
        return value._replace(reason="blank") if value.reason == "empty" else value
    return conversation_of(value)


def check_dropped(pinned: Pinned, tally: Tally, sentences: Mapping[str, str]) -> None:
    """Raises CorpusError if hardly anything could be taken. sentences: as Tally.report takes them."""
    dropped = tally.dropped.total()
    if dropped == tally.rows or (tally.rows >= ENOUGH_ROWS and dropped > MOST_DROPPED * tally.rows):
        lines = "\n  ".join(tally.report(sentences))
        raise CorpusError(
            f"{pinned.source.name}: {dropped} of {tally.rows} rows had to be dropped, more than half of "
            f"them; mend or filter them first, or raise SEQ_LEN where they are too long\n  {lines}"
        )


def columns_of(path: Path, name: str) -> tuple[tuple[str, ...], list[str]]:
    """(columns to read, columns that are left) of a file that says which it has; else nothing: JSON says it by row."""
    if read_start(path, name).kind != "parquet":
        return COLUMNS, []
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        if not file.metadata.num_rows:
            return (), []
    if not any(set(columns) <= set(names) for columns in SHAPES.values()):
        raise Broken(
            f"none of the accepted shapes; it has the columns {', '.join(names)}, accepted are "
            + "; ".join(" + ".join(columns) for columns in SHAPES.values()),
            "rename its columns, or leave the file out",
        )
    return tuple(column for column in COLUMNS if column in names), [
        n for n in names if n not in COLUMNS
    ]


def refusal(pinned: Pinned, name: str, row: int, what: str, remedy: str = "") -> CorpusError:
    again = (
        "it is so on the hub: name another revision or data set"
        if pinned.source.kind == "hub"
        else "get it again, or leave it out"
    )
    return CorpusError(f"{name}:{row + 1} of {pinned.source.name}: {what}; {remedy or again}")
