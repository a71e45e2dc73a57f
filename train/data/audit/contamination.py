"""Find text of evaluation tasks in training data: runs of 13 words that both have.

    CORE_BUNDLE -> the strings of each row -> words -> hashes of runs of 13: the table
    documents of a source -> words -> hashes of runs of 13, looked up in the table

As in Brown et al. 2020 (GPT-3, appendix C), runs have 13 words, and strings of fewer than 8 are
not compared. A row without a string of 13 words is compared as a whole. No run spans two strings or
two documents.
"""

import collections
import dataclasses
import itertools
import json
import logging
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from settings import SettingsError
from train.data.data_paths import NO_BUNDLE, core_bundle_path
from train.data.manifest import DataError
from train.data.word_hashes import hash_runs, hash_words, split_words

log = logging.getLogger(__name__)

RUN_WORDS = 13
SHORTEST = 8  # words of a text that is compared as a whole
EXAMPLES = 3  # of shared text, for a source and a task
REMEDY = "download the tasks again, or leave them out with CORE_BUNDLE=none"
TABLE_BITS = 4  # the table has 2^4 to 2^5 places per hash, so most runs of a source miss it


@dataclasses.dataclass(frozen=True)
class Text:
    """A part of a row that is compared.

    Attributes:
        row: counted from 1.
        length: words in a run; all of them if there are fewer than 13.
        runs: (n,) uint64, hashes of the runs in order.
    """

    row: int
    words: list[str]
    length: int
    runs: np.ndarray


@dataclasses.dataclass(frozen=True)
class Task:
    """A file of an evaluation, with this many rows."""

    name: str
    rows: int
    texts: list[Text]


def read_tasks(setting: str, data_dir: Path) -> list[Task]:
    """Read the tasks of CORE_BUNDLE.

    Returns:
        No task for `none`, or for an address that `make eval` has not downloaded yet.

    Raises:
        SettingsError: there are no tasks.
        DataError: a file is damaged.
    """
    if setting == NO_BUNDLE:
        return []
    path = core_bundle_path(setting, data_dir)
    if not path.exists() and "://" in setting:
        log.info(
            "The tasks of CORE are not downloaded yet, so the text is not compared with them. "
            "`make eval` of any run downloads them. Or set CORE_BUNDLE to the path of a copy."
        )
        return []
    contents = read_bundle(path)
    if not contents:
        problem = f"CORE_BUNDLE={setting}: There is no *.jsonl in {path}."
        raise SettingsError(
            [f"{problem} Set a folder, a .zip or a .jsonl of tasks, or CORE_BUNDLE=none."]
        )
    stems = collections.Counter(file.stem for file in contents)
    return [
        read_task(name_task(file, path, stems), file, content) for file, content in contents.items()
    ]


def read_bundle(path: Path) -> dict[Path, bytes]:
    """Return all *.jsonl of a folder or a .zip, or the one file, by path. Raises DataError."""
    contents = {}
    file = path
    try:
        if path.suffix == ".zip" and path.is_file():
            with zipfile.ZipFile(path) as archive:
                for name in sorted(archive.namelist()):
                    file = path / name
                    if file.suffix == ".jsonl":
                        contents[file] = archive.read(name)
        else:
            for file in [path] if path.is_file() else sorted(path.rglob("*.jsonl")):
                contents[file] = file.read_bytes()
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error}); {REMEDY}") from None
    return contents


def name_task(file: Path, bundle: Path, stems: collections.Counter[str]) -> str:
    """Name a task by its file's stem, or by its path in the bundle if others have that stem too."""
    if stems[file.stem] == 1:
        return file.stem
    return file.relative_to(bundle).with_suffix("").as_posix()


def read_task(name: str, file: Path, content: bytes) -> Task:
    """Read the rows of a task, JSON lines. Raises DataError."""
    texts = []
    rows = 0
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            start = f"starts with {line[:20]!r}"
            raise DataError(f"{file} row {number}: not JSON ({start}); {REMEDY}") from None
        rows += 1
        strings = [split_words(string) for string in list_strings(row)]
        for words in choose_strings(strings):
            length = min(RUN_WORDS, len(words))
            texts.append(Text(number, words, length, hash_runs(hash_words(words), length)))
    if not rows:
        raise DataError(f"{file}: holds no row; {REMEDY}")
    return Task(name, rows, texts)


def list_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a row, in order, but not the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from list_strings(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from list_strings(item)


def choose_strings(strings: list[list[str]]) -> list[list[str]]:
    """Choose what is compared of a row: its strings of 13 words, else those of 8, else all of it."""
    all_strings = list(itertools.chain(*strings))
    for texts, least in ((strings, RUN_WORDS), (strings, SHORTEST), ([all_strings], SHORTEST)):
        chosen = [words for words in texts if len(words) >= least]
        if chosen:
            return chosen
    return []


class RunTable:
    """All runs of the tasks. runs: (n,) uint64, their hashes, sorted, each once."""

    def __init__(self, tasks: list[Task]):
        texts = [text for task in tasks for text in task.texts]
        self.lengths = sorted({text.length for text in texts})
        self.runs = np.unique(join([text.runs for text in texts]))
        bits = TABLE_BITS + len(self.runs).bit_length()
        self.shift = np.uint64(64 - bits)
        self.is_possible = np.zeros(2**bits, dtype=bool)  # by the upper bits of a hash
        self.is_possible[self.runs >> self.shift] = True

    def find(self, words: np.ndarray) -> np.ndarray:
        """Return the places in `runs` of those that a text has.

        Args:
            words: (words,) uint64, hashes of words.
        """
        matches = []
        for length in self.lengths:
            runs = hash_runs(words, length)
            runs = runs[self.is_possible[runs >> self.shift]]
            places = np.searchsorted(self.runs, runs)
            places[places == len(self.runs)] = 0
            matches.append(places[self.runs[places] == runs])
        return np.unique(join(matches)).astype(np.int64)

    def count_shared(self, task: Task, is_found: np.ndarray) -> dict[str, Any]:
        """Count what a source shares with a task.

        Args:
            is_found: (n,) bool, by place in `runs`.

        Returns:
            As in report.json. The examples are the first run of each of the first rows.
        """
        examples: dict[int, str] = {}  # by row
        for text in task.texts:
            is_shared = is_found[np.searchsorted(self.runs, text.runs)]
            if is_shared.any():
                first = int(np.argmax(is_shared))
                run = text.words[first : first + text.length]
                examples.setdefault(text.row, " ".join(run))
        return {
            "rows": task.rows,
            "rows_touched": len(examples),
            "examples": [
                {"row": row, "text": run}
                for row, run in itertools.islice(examples.items(), EXAMPLES)
            ],
        }


def join(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate arrays of uint64, of which there may be none."""
    return np.concatenate([np.zeros(0, dtype=np.uint64), *arrays])
