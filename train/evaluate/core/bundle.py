"""A bundle of CORE's tasks in nanochat's layout: a folder or a .zip, on disk or downloaded.

    CORE_BUNDLE   a path, or an address with its hash: https://HOST/PATH.zip@sha256:HASH
    DATA_DIR/core/bundle-KEY.zip         the download; KEY stands for CORE_BUNDLE

Opening a bundle reads every task to the end, so that a run learns of a damaged one before it trains.
What is no bundle, such as an error page, is never kept; its size and first bytes are reported.
"""

import csv
import hashlib
import logging
import shutil
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from record.regular_file import only_regular, open_regular
from train.data.data_paths import core_bundle_path
from train.data.prepare import one_at_a_time
from train.data.sources.content import digest_of, looks_like
from train.data.sources.fetch import download
from train.data.sources.hub import DISK, PASSES, SILENCE_S, ask_until
from train.data.sources.source import CorpusError
from train.evaluate.core.tasks import (
    CORE_TASKS,
    CoreError,
    Example,
    Task,
    read_examples,
    read_tasks,
)

log = logging.getLogger(__name__)

TASK_LIST, META = "core.yaml", "eval_meta_data.csv"
OTHERS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # models whose results a bundle may have
# What reading a damaged .zip raises: flipped bits, an unknown method, an encrypted file.
DAMAGE = (OSError, KeyError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)


class Bundle:
    """An open bundle. Raises CoreError.

    Attributes:
        tasks: that are there.
        missing: label -> why it is not there, for the other tasks that CORE needs.
        tables: model -> label -> centered accuracy, of other models whose results the bundle has.
        digests: file -> sha256 of it when it was first read.
        sha256: of all that was read, the same for a folder and for a .zip of it.
    """

    def __init__(self, path: Path):
        self.path = path
        self.digests: dict[str, str] = {}
        self.root = self.find_root()
        declared = read_tasks(self.read(TASK_LIST), self.read(META), str(path))
        self.tasks: list[Task] = []
        self.missing: dict[str, str] = {}
        for task in declared:
            name = f"eval_data/{task.file}"
            if not self.has(name):
                self.missing[task.label] = f"the bundle has no {name}"
            elif not self.examples(task):
                self.missing[task.label] = f"{name} is empty"
            else:
                self.tasks.append(task)
        names = {task.label for task in declared}
        for label in CORE_TASKS:
            if label not in names:
                self.missing[label] = "core.yaml does not name it"
        if not self.tasks:
            raise CoreError(
                f"{path}: none of its {len(declared)} tasks is there; the first would be "
                f"{self.root}eval_data/{declared[0].file}"
            )
        self.tables = {model: table for model in OTHERS if (table := self.read_table(model))}
        read = "".join(f"{name} {digest}\n" for name, digest in sorted(self.digests.items()))
        self.sha256 = hashlib.sha256(read.encode()).hexdigest()

    def open(self) -> Path | zipfile.Path:
        """Open the folder or the .zip; both find and read files alike. It is opened anew each time."""
        return self.path if self.path.is_dir() else zipfile.Path(self.path)

    def find_root(self) -> str:
        """Find the folder inside, with its slash, that has core.yaml: the top, or one below."""
        try:
            top = self.open()
            folders = ["", *sorted(f"{entry.name}/" for entry in top.iterdir() if entry.is_dir())]
            for folder in folders:
                if (top / f"{folder}{TASK_LIST}").is_file():
                    return folder
        except DAMAGE as error:
            size = self.path.stat().st_size
            raise CoreError(
                f"{self.path}: {size} bytes that are no whole .zip of a bundle{looks_like(self.path)} "
                f"({error})"
            ) from None
        raise CoreError(
            f"{self.path}: has no {TASK_LIST}, so that it is no bundle of CORE; it needs {TASK_LIST}, "
            f"{META} and eval_data/ (docs/evaluation.md)"
        )

    def has(self, name: str) -> bool:
        return (self.open() / f"{self.root}{name}").is_file()

    def read(self, name: str) -> bytes:
        """Read a file. Raises CoreError if it is damaged, or not the same as the first time."""
        try:
            place = self.open() / f"{self.root}{name}"
            with open_regular(place) if isinstance(place, Path) else place.open("rb") as file:
                content: bytes = file.read()
        except DAMAGE as error:
            raise CoreError(
                f"{self.path}: {self.root}{name} cannot be read ({type(error).__name__}: {error}); "
                "bring the bundle again"
            ) from None
        digest = hashlib.sha256(content).hexdigest()
        if self.digests.setdefault(name, digest) != digest:
            raise CoreError(
                f"{self.path}: {self.root}{name} has changed since it was opened; put it back"
            )
        return content

    def examples(self, task: Task) -> list[Example]:
        """Read a task's examples, in the order in which they are asked."""
        return read_examples(task, self.read(f"eval_data/{task.file}"))

    def read_table(self, model: str) -> Mapping[str, float]:
        """Read label or CORE -> centered accuracy of another model; {} if the bundle has no readable table."""
        name = f"openai-community-{model}.csv"
        if not self.has(name):
            return {}
        rows = self.read(name).decode(errors="replace").splitlines()[1:]  # Task, Accuracy, Centered
        try:
            return {row[0].strip(): float(row[2]) for row in csv.reader(rows) if any(row)}
        except (IndexError, ValueError):
            log.warning("%s: %s is no table of Task, Accuracy, Centered", self.path, name)
            return {}

    def describe(self) -> str:
        """Return what it is, for a line of the log."""
        lacks = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        return (
            f"CORE bundle {self.path} (sha256 {self.sha256[:12]}): {len(self.tasks)} tasks{lacks}"
        )


def open_bundle(setting: str, data_dir: Path) -> Bundle:
    """Open the bundle that CORE_BUNDLE names, verified. Raises CoreError."""
    path = core_bundle_path(setting, data_dir)
    if "://" in setting:
        bring(setting, path)
    elif not path.exists():
        raise CoreError(
            f"CORE_BUNDLE={setting}: is not there; give a folder or a .zip with core.yaml, {META} and "
            "eval_data/"
        )
    return Bundle(path)


def bring(setting: str, path: Path) -> None:
    """Download a bundle unless it is there; one process at a time. Raises CoreError."""
    url, _, sha256 = setting.rpartition("@")

    def is_whole() -> bool:
        return path.is_file() and digest_of(path, "sha256") == sha256

    try:
        if is_whole():  # also where nothing can be written
            return
        with one_at_a_time(path.parent):
            if not is_whole():  # or another process was faster
                fetch(url, sha256, path)
    except OSError as error:
        raise CoreError(
            f"{path}: cannot be kept ({error.strerror or error}); make room, or choose another "
            "DATA_DIR, or give CORE_BUNDLE as a path"
        ) from None


def fetch(url: str, sha256: str, path: Path) -> None:
    """Download a bundle in place of what is there. Raises CoreError."""
    partial = path.with_suffix(".part")

    def get() -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "pure-transformer"})
        with (
            urllib.request.urlopen(request, timeout=SILENCE_S) as answer,
            open(partial, "wb", opener=only_regular) as file,
        ):
            shutil.copyfileobj(answer, file)

    try:
        ask_until(url, lambda: download(partial, None, sha256, get), judge, SILENCE_S)
        Bundle(partial)  # whole to the last example
        partial.replace(path)
    except CorpusError as error:
        raise CoreError(
            f"no CORE bundle could be had from {url}: {error}. Or download it by hand and give its path "
            "as CORE_BUNDLE"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    log.info("CORE bundle from %s: %d bytes, %s", url, path.stat().st_size, sha256)


def judge(error: Exception) -> tuple[str, float]:
    """Return what failed, for another try. Raises CoreError or OSError if that cannot help."""
    if isinstance(error, urllib.error.HTTPError):
        answer = f"it answers {error.code} with {error.read(40)!r}"
        if error.code in PASSES or error.code >= 500:
            return answer, 0.0
        raise CoreError(answer) from None
    if isinstance(error, OSError) and error.errno in DISK:
        raise error
    return str(error), 0.0
