"""Which evaluation tasks a source has read already: n-grams of words that its text shares with theirs.

    CORE_BUNDLE -> the strings of each row -> words -> hashes of 13-grams: the table
    documents of a source -> their text -> words -> hashes of 13-grams -> found in the table, on all cores

After Brown et al. 2020 (GPT-3, appendix C) a word is lower case, delimited by white space and without
punctuation: whatever is neither letter, digit nor white space is taken out ("Don't" is "dont"). From there
also come 13 words as the length of a gram and 8 as the shortest text that is compared. No gram spans two
strings or two documents. Hashes have 64 bits: that one of 10**7 grams is found among 10**11 by chance alone
has a probability of 5%.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import logging
import multiprocessing
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from settings import SettingsError
from train.data.data_paths import NO_BUNDLE, core_bundle_path
from train.data.manifest import DataError
from train.data.tokenizer import Vocabulary

log = logging.getLogger(__name__)

GRAM, SHORTEST = 13, 8  # words
NO_WORD = re.compile(r"[^\w\s\0]+|_+")
DOCUMENT_END = b" \0 "  # stands between documents as a word that no task has
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
EXAMPLES = 3  # of shared text, for a source and a task
REMEDY = "download the tasks again, or leave them out with CORE_BUNDLE=none"
WAITING = 2  # chunks a process that are read ahead


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared."""
    return NO_WORD.sub("", text.lower()).split()


def hashes_of(words: list[str]) -> np.ndarray:
    """(words,) uint64."""
    return np.fromiter(
        map(xxhash.xxh3_64_intdigest, " ".join(words).encode().split()), np.uint64, len(words)
    )


def gram_hashes(words: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """n, and the hashes (len(words) - n + 1,) of all runs of n words, for n = SHORTEST..GRAM. words: their hashes."""
    grams = words
    for n in range(2, GRAM + 1):
        grams = grams[:-1] * MULTIPLIER + words[n - 1 :]
        if n >= SHORTEST:
            yield n, grams


# ---------------------------------------------------------------------------------------------------
# The tasks
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """One file of an evaluation. `texts` are compared, as words with a blank between; text_rows says whose each is.

    short: rows none of whose strings has 13 words; of these, incomparable: they have not even 8 words in all.
    grams (n,) are the hashes of the texts' grams, one text after the other, and gram_texts (n,) says whose.
    """

    name: str
    file: Path
    rows: int
    short: int
    incomparable: int
    texts: list[str]
    text_rows: np.ndarray
    grams: np.ndarray
    gram_texts: np.ndarray


def read_tasks(setting: str, data_dir: Path) -> list[Task]:
    """Read the tasks of CORE_BUNDLE; none where it is `none`, or an address that was not downloaded.

    Raises SettingsError where there are none, DataError where one is damaged.
    """
    if setting == NO_BUNDLE:
        return []
    path = core_bundle_path(setting, data_dir)
    if not path.exists() and "://" in setting:
        log.info(
            "text is not compared with the tasks of CORE, which are not downloaded: `make eval` of any run "
            "does that, or give the path of a copy as CORE_BUNDLE"
        )
        return []
    files = task_files(path)
    if not files:
        raise SettingsError(
            [
                f"CORE_BUNDLE={setting}: there is no *.jsonl in {path}; give a folder, a .zip or a file of "
                "tasks, or CORE_BUNDLE=none"
            ]
        )
    return [read_task(name, file) for name, file in zip(names_of(files), files, strict=True)]


def task_files(path: Path) -> list[Path]:
    """Return all files of tasks: of a folder or a .zip every *.jsonl below it."""
    if path.suffix == ".zip" and path.is_file():
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: is not a .zip ({error}); {REMEDY}") from None
        return sorted(path / name for name in names if name.endswith(".jsonl"))
    if path.is_file():
        return [path]
    return sorted(path.rglob("*.jsonl"))


def read_file(file: Path) -> bytes:
    """Read a file of tasks, on its own or in a .zip. Raises DataError."""
    archive = next((folder for folder in file.parents if folder.suffix == ".zip"), None)
    try:
        if archive and archive.is_file():
            with zipfile.ZipFile(archive) as opened:
                return opened.read(file.relative_to(archive).as_posix())
        return file.read_bytes()
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error}); {REMEDY}") from None


def names_of(files: list[Path]) -> list[str]:
    """The stem of each file, behind as many of its folders as tell it from all others."""

    def tail(file: Path, length: int) -> str:
        return "/".join(file.with_suffix("").parts[-length:])

    names = []
    for file in files:
        length = 1
        while sum(
            tail(other, length) == tail(file, length) for other in files
        ) > 1 and length < len(file.parts):
            length += 1
        names.append(tail(file, length))
    return names


def read_task(name: str, file: Path) -> Task:
    texts, text_rows, hashes = [], [], []
    rows = short = incomparable = 0
    for number, line in enumerate(read_file(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise DataError(
                f"{file} row {number}: not JSON (starts with {line[:20]!r}); {REMEDY}"
            ) from None
        rows += 1
        strings = [words_of(text) for text in strings_in(row)]
        compared = [words for words in strings if len(words) >= GRAM]
        if not compared:
            short += 1
            whole = [words for words in strings if len(words) >= SHORTEST] or [
                list(itertools.chain(*strings))
            ]
            compared = [words for words in whole if len(words) >= SHORTEST]
            incomparable += not compared
        for words in compared:
            texts.append(" ".join(words))
            text_rows.append(number)
            hashes.append(dict(gram_hashes(hashes_of(words)))[min(GRAM, len(words))])
    if not rows:
        raise DataError(f"{file}: holds no row; {REMEDY}")
    return Task(
        name,
        file,
        rows,
        short,
        incomparable,
        texts,
        np.array(text_rows, dtype=np.int64),
        np.concatenate([np.zeros(0, dtype=np.uint64), *hashes]),
        np.repeat(np.arange(len(texts)), [len(h) for h in hashes]),
    )


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a row, in order; names of fields are none of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_in(item)


def shared(task: Task, found: np.ndarray) -> dict[str, Any]:
    """What a source shares with a task. found (n,) bool, of task.grams.

    An example is a stretch of a row every word of which is in a gram that was found: the longest ones, each of
    another row and text.
    """
    hit = np.flatnonzero(found)
    first = np.flatnonzero(np.diff(hit, prepend=-2) != 1) if hit.size else hit
    first = np.union1d(
        first, np.flatnonzero(np.diff(task.gram_texts[hit], prepend=-1))
    )  # a text begins
    runs = np.diff(np.append(first, len(hit)))
    examples: dict[str, dict[str, Any]] = {}
    for k in np.argsort(-runs, kind="stable"):
        gram = hit[first[k]]
        text = task.gram_texts[gram]
        words, row = task.texts[text].split(), int(task.text_rows[text])
        begin = gram - np.searchsorted(task.gram_texts, text)
        stretch = words[begin : begin + runs[k] - 1 + min(GRAM, len(words))]
        if row not in {e["row"] for e in examples.values()}:
            examples.setdefault(" ".join(stretch), {"row": row, "words": len(stretch)})
        if len(examples) == EXAMPLES:
            break
    return {
        "rows": task.rows,
        "rows_touched": len(np.unique(task.text_rows[task.gram_texts[hit]])),
        "grams": len(np.unique(task.grams)),
        "grams_found": len(np.unique(task.grams[hit])),
        "examples": [{**example, "text": text} for text, example in examples.items()],
    }


# ---------------------------------------------------------------------------------------------------
# The sources
# ---------------------------------------------------------------------------------------------------


def spellings(v: Vocabulary) -> list[bytes]:
    """The bytes that each id stands for; the end of text stands for DOCUMENT_END, which no other one holds.

    A byte-level BPE spells each byte as one character: those that print as themselves, the others, in order, as
    U+0100 and on (Radford et al. 2019).
    """
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    byte_of = {chr(byte): byte for byte in printing} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }
    entries = v.tokenizer.get_vocab(with_added_tokens=True)
    spelled = [b""] * (max(entries.values()) + 1)
    for token, i in entries.items():
        plain = (
            bytes(map(byte_of.__getitem__, token))
            if set(token) <= byte_of.keys()
            else token.encode()
        )
        spelled[i] = plain.replace(b"\0", b"")
    spelled[v.end_of_text] = DOCUMENT_END
    return spelled


class Scanner:
    """Finds grams of the tasks in token ids. known (n,) are all the tasks' hashes, sorted, each once."""

    def __init__(self, v: Vocabulary, tasks: list[Task]):
        self.spelled = spellings(v)
        self.known = np.unique(np.concatenate([task.grams for task in tasks]))
        self.lengths = {min(GRAM, text.count(" ") + 1) for task in tasks for text in task.texts}
        bits = max(10, (16 * len(self.known)).bit_length())  # one in 16 or fewer passes by chance
        self.shift = np.uint64(64 - bits)
        self.may_be_known = np.zeros(2**bits, dtype=bool)  # by the upper bits of a hash
        self.may_be_known[self.known >> self.shift] = True

    def scan(self, ids: np.ndarray) -> tuple[int, np.ndarray]:
        """Bytes of text of these ids, and places in `known` of the grams that they hold."""
        text = b"".join(map(self.spelled.__getitem__, ids.tolist()))
        found = [np.zeros(0, dtype=np.int64)]
        for n, grams in gram_hashes(hashes_of(words_of(text.decode(errors="replace")))):
            if n in self.lengths:
                candidates = grams[self.may_be_known[grams >> self.shift]]
                places = np.searchsorted(self.known, candidates)
                places[places == len(self.known)] = 0
                found.append(places[self.known[places] == candidates])
        return len(text), np.unique(np.concatenate(found))

    def found_in(self, task: Task, hit: np.ndarray) -> np.ndarray:
        """(n,) bool: which of a task's grams are at the places hit (len(known),) bool."""
        return hit[np.searchsorted(self.known, task.grams)]


_scanner: Scanner  # of this process, where it is one of those that scan


def _receive(scanner: Scanner) -> None:
    global _scanner
    _scanner = scanner


def _scan(ids: np.ndarray) -> tuple[int, np.ndarray]:
    return _scanner.scan(ids)


class Pool:
    """Scans on so many cores; on one, in this process. Memory: a few chunks a process, whatever is to be scanned."""

    def __init__(self, scanner: Scanner, cores: int):
        self.scanner, self.cores = scanner, cores
        self.executor = (
            None
            if cores == 1
            else concurrent.futures.ProcessPoolExecutor(
                cores, multiprocessing.get_context("spawn"), _receive, (scanner,)
            )
        )  # the tokenizer's threads bear no fork

    def scan(self, chunks: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """Scanner.scan of each chunk of ids."""
        if self.executor is None:
            yield from map(self.scanner.scan, chunks)
            return
        waiting: collections.deque[concurrent.futures.Future] = collections.deque()
        try:
            for chunk in chunks:
                waiting.append(self.executor.submit(_scan, chunk))
                if len(waiting) > WAITING * self.cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise DataError(
                f"one of {self.cores} processes that compare text with the tasks was killed, most "
                "often for want of memory; give it more, or fewer cores (taskset -c 0 make data-report)"
            ) from None

    def close(self) -> None:
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)
