"""Several sources as one: DATA=chats.jsonl,medqa.jsonl*2, conversations of all, those of the last twice an epoch.

Each is read, verified and kept by itself (store.py); only the index, 32 bytes an example, is put together in memory.
"""

import dataclasses
import functools
import os
import re
from pathlib import Path

import numpy as np

from finetune import store
from finetune.store import Examples
from finetune.template import Template, digest
from settings import ROOT
from train.data.sources.source import CorpusError

TIMES = re.compile(r"(?P<source>.+?)\*(?P<times>[0-9]+)")
MOST_TIMES = 100


@dataclasses.dataclass(frozen=True)
class Joined(Examples):
    """The examples of all parts, one part behind the other; ids and scored are each part's own."""

    parts: tuple[Examples, ...] = ()

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """(parts,) int64: the number of the first example of each."""
        return np.cumsum([0, *(len(part) for part in self.parts[:-1])])

    def at(self, i: int) -> tuple[Examples, int]:
        """The part that example i is of, and its number there."""
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.parts[part], i - int(self.starts[part])

    def of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        part, inside = self.at(i)
        return part.of(inside)

    @functools.cached_property
    def positions(self) -> np.ndarray:
        return np.concatenate([part.positions for part in self.parts])

    def place(self, i: int) -> str:
        part, inside = self.at(i)
        return part.place(inside)


def sources_in(data: str, setting: str = "DATA") -> list[tuple[str, int]]:
    """(source, how often it counts) of each part of DATA. Raises CorpusError."""
    if os.path.exists(
        ROOT / Path(data).expanduser()
    ):  # False as well of what is too long for a name
        return [(data, 1)]
    found = []
    for part in data.split(","):
        said = TIMES.fullmatch(part)
        source, times = (said["source"], int(said["times"])) if said else (part, 1)
        if not source or not 1 <= times <= MOST_TIMES:
            raise CorpusError(
                f"{setting}={data}: {part!r} is none of the sources that commas divide, SOURCE or "
                f"SOURCE*TIMES with TIMES from 1 to {MOST_TIMES}; for example "
                f"{setting}=chats.jsonl,questions.jsonl*2"
            )
        found.append((source, times))
    if twice := next(
        (source for source, _ in found if [one for one, _ in found].count(source) > 1), None
    ):
        raise CorpusError(
            f"{setting}={data}: has {twice} twice; {twice}*2 says that it counts twice"
        )
    return found


def examples_of(
    data: str,
    made_for: Template,
    seq_len: int,
    folder: Path,
    token: str = "",
    setting: str = "DATA",
) -> Examples:
    """As store.examples_of, of all sources in DATA. Raises CorpusError."""
    sources = sources_in(data, setting)
    made = [
        store.examples_of(source, made_for, seq_len, folder, token, setting)
        for source, _ in sources
    ]
    if len(made) == 1 and sources[0][1] == 1:
        return made[0]
    parts = tuple(
        part for part, (_, times) in zip(made, sources, strict=True) for _ in range(times)
    )
    report = [
        f"{source}{f', counted {times} times' if times > 1 else ''}: {line}"
        for part, (source, times) in zip(made, sources, strict=True)
        for line in part.report
    ]
    return Joined(
        parts[0].ids[:0],
        parts[0].scored[:0],
        np.concatenate([part.index for part in parts]),
        tuple(name for part in made for name in part.files),
        tuple(report),
        digest("several", [part.key for part in parts])[:16],
        parts,
    )
