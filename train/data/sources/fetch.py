"""The bytes themselves: the files of a pinned source, there and the right ones.

    path(i)       waits until file i is here, and has its size and hash verified
    prefetch(i)   begins the download of file i meanwhile, one ahead at most
    done(i)       file i is not needed any more: a downloaded one is deleted, one that was here stays

The hub's client downloads to a temporary name in DATA_DIR/NAME/downloads/REVISION and renames; what then is not
what the pin says is deleted and asked for again, within the bounds of hub.py.
"""

import logging
import shutil
import threading
from pathlib import Path

from train.data.sources.content import foreign
from train.data.sources.hub import Again, ask
from train.data.sources.pin import File, Pinned, digest_of, local_path
from train.data.sources.source import CorpusError

log = logging.getLogger(__name__)


class Files:
    """The files of a pinned source. folder: DATA_DIR/NAME."""

    def __init__(self, pinned: Pinned, folder: Path, token: str = ""):
        self.pinned, self.token = pinned, token
        self.folder = folder / "downloads" / pinned.revision[:12]
        self.ahead: Download | None = None
        if pinned.source.kind == "hub":  # what a killed process had half of
            for path in self.folder.rglob("*.incomplete"):
                path.unlink(missing_ok=True)

    def path(self, i: int) -> Path:
        """Where file i is, verified; downloads it if it is not here. Raises CorpusError."""
        if self.pinned.source.kind != "hub":
            return self.local(self.pinned.files[i])
        if self.ahead and self.ahead.number not in (i, i + 1):
            self.ahead = None  # reading has gone elsewhere: what comes lies ready
        if self.ahead and self.ahead.number == i:
            ahead, self.ahead = self.ahead, None
            return ahead.wait()
        return self.downloaded(i)

    def prefetch(self, i: int) -> None:
        """Begin to download file i in the background, unless another is under way or there is no such file."""
        if self.pinned.source.kind == "hub" and self.ahead is None and i < len(self.pinned.files):
            self.ahead = Download(self, i)

    def done(self, i: int) -> None:
        """Delete file i if it was downloaded."""
        if self.pinned.source.kind == "hub":
            (self.folder / self.pinned.files[i].name).unlink(missing_ok=True)

    def close(self) -> None:
        """Forget the download under way, and delete the folder of downloads if nothing is in it."""
        under_way, self.ahead = self.ahead is not None and self.ahead.thread.is_alive(), None
        if (
            self.pinned.source.kind == "hub"
            and not under_way
            and not any((self.folder / file.name).exists() for file in self.pinned.files)
        ):
            shutil.rmtree(self.folder, ignore_errors=True)  # what the client notes of its downloads

    def local(self, file: File) -> Path:
        """Where a file here is; CorpusError if it is not what was pinned."""
        path = local_path(self.pinned.source, file.name)
        try:
            wrong = difference(path, file)
        except OSError as error:
            raise CorpusError(
                f"{file.name}: cannot be read ({error.strerror}), but was there when {self.name} was "
                "prepared; put it back, or run: make data"
            ) from None
        if wrong:
            raise CorpusError(
                f"{file.name}: {wrong}; it changed since {self.name} was prepared: put it back, or run: "
                "make data"
            )
        return path

    @property
    def name(self) -> str:
        return self.pinned.source.name

    def downloaded(self, i: int) -> Path:
        """File i from the hub, or as it was left here."""
        file, s = self.pinned.files[i], self.pinned.source
        target = self.folder / file.name
        if target.is_file() and not difference(target, file):
            return target
        asked = 0

        def download() -> Path:
            nonlocal asked
            from huggingface_hub import hf_hub_download

            asked += 1
            target.unlink(missing_ok=True)
            hf_hub_download(
                s.repository,
                file.name,
                repo_type="dataset",
                revision=self.pinned.revision,
                local_dir=self.folder,
                token=self.token or None,
                force_download=asked > 1,
            )  # else a wrong one is copied again from the client's own cache
            if wrong := difference(target, file):
                target.unlink(missing_ok=True)
                raise Again(wrong)
            return target

        return ask(
            s.repository, f"{file.name} of {s.repository} at {self.pinned.revision[:12]}", download
        )


class Download:
    """A file on its way here in a thread that does not hold up the end of the process."""

    def __init__(self, files: Files, number: int):
        self.files, self.number = files, number
        self.outcome: Path | Exception | None = None
        self.thread = threading.Thread(
            target=self.run, daemon=True, name=f"download-{files.name}-{number}"
        )
        self.thread.start()

    def run(self) -> None:
        try:
            self.outcome = self.files.downloaded(self.number)
        except Exception as error:  # raised where the file is asked for
            self.outcome = error

    def wait(self) -> Path:
        """Its path, or its error raised."""
        self.thread.join()
        if isinstance(self.outcome, Path):
            return self.outcome
        raise self.outcome or AssertionError("a download ends with a path or an error")


def difference(path: Path, file: File) -> str:
    """What is wrong with a file against its pin, in words; "" if nothing is. Raises OSError."""
    size = path.stat().st_size
    if size != file.bytes:
        return f"{size} bytes, not {file.bytes}{looks_like(path)}"
    if (found := digest_of(path, file.digest.partition(":")[0])) != file.digest:
        return f"its hash is {found[:24]}..., not {file.digest[:24]}...{looks_like(path)}"
    return ""


def looks_like(path: Path) -> str:
    """How a file begins, and what that is where it is known: " (a web or error page, it starts with b'<!DOCTYPE')"."""
    with open(path, "rb") as file:
        start = file.read(40)
    what = foreign(start)
    return f" ({what}, it starts with {start!r})" if what else f" (it starts with {start!r})"
