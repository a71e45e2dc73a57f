"""The files of a pinned source: on this machine, and verified against size and hash.

    path(i)       waits until file i is here and verified
    prefetch(i)   begins to download file i in the background, one at a time
    done(i)       file i is not needed any more: a downloaded one is deleted

The Hub's client downloads to a temporary name in DATA_DIR/NAME/downloads/REVISION and renames. A file
that is not what the pin says is deleted and asked for again, within the bounds of hub.py.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from train.data.sources.content import difference
from train.data.sources.hub import Again, ask
from train.data.sources.pin import File, Pinned, local_path
from train.data.sources.source import CorpusError


class Files:
    """The files of a pinned source. folder: DATA_DIR/NAME."""

    def __init__(self, pinned: Pinned, folder: Path, token: str = ""):
        self.pinned, self.token = pinned, token
        self.name = pinned.source.name
        self.is_on_hub = pinned.source.kind == "hub"
        self.folder = folder / "downloads" / pinned.revision[:12]
        self.ahead: tuple[int, Future[Path]] | None = None  # a file and its download
        if self.is_on_hub:  # what a killed process left half done
            for path in self.folder.rglob("*.incomplete"):
                path.unlink(missing_ok=True)

    def path(self, i: int) -> Path:
        """Return where file i is, verified; download it if it is not here. Raises CorpusError."""
        if not self.is_on_hub:
            return self.local(self.pinned.files[i])
        if self.ahead is None:
            return self.downloaded(i)
        number, download = self.ahead
        if number == i + 1:  # the download under way is wanted next
            return self.downloaded(i)
        self.ahead = None
        if number == i:
            return download.result()
        return self.downloaded(i)  # reading went elsewhere: the other file stays for later

    def prefetch(self, i: int) -> None:
        """Begin to download file i in the background, unless another is under way or there is no such file."""
        if not self.is_on_hub or self.ahead or i >= len(self.pinned.files):
            return
        download: Future[Path] = Future()

        def run() -> None:
            try:
                download.set_result(self.downloaded(i))
            except Exception as error:  # raised where the file is asked for
                download.set_exception(error)

        # A daemon does not hold up the end of the process.
        threading.Thread(target=run, daemon=True, name=f"download-{self.name}-{i}").start()
        self.ahead = i, download

    def done(self, i: int) -> None:
        """Delete file i if it was downloaded."""
        if self.is_on_hub:
            (self.folder / self.pinned.files[i].name).unlink(missing_ok=True)

    def close(self) -> None:
        """Forget the download under way, and delete the folder of downloads if nothing is in it."""
        ahead, self.ahead = self.ahead, None
        if not self.is_on_hub or (ahead and not ahead[1].done()):
            return
        if not any((self.folder / file.name).exists() for file in self.pinned.files):
            shutil.rmtree(self.folder, ignore_errors=True)  # the client's notes on its downloads

    def local(self, file: File) -> Path:
        """Return where a file on this machine is. Raises CorpusError if it is not what was pinned."""
        path = local_path(self.pinned.source, file.name)
        try:
            wrong = difference(path, file.bytes, file.digest)
        except OSError as error:
            wrong = f"cannot be read ({error.strerror})"
        if wrong:
            raise CorpusError(
                f"{file.name}: {wrong}; it changed since {self.name} was prepared: put it back, or run: "
                "make data"
            )
        return path

    def downloaded(self, i: int) -> Path:
        """Return file i, from the Hub or as it was left here. Raises CorpusError."""
        file = self.pinned.files[i]
        repository = self.pinned.source.repository
        target = self.folder / file.name
        if target.is_file() and not difference(target, file.bytes, file.digest):
            return target
        attempts = 0

        def get() -> None:
            nonlocal attempts
            from huggingface_hub import hf_hub_download

            attempts += 1
            hf_hub_download(
                repository,
                file.name,
                repo_type="dataset",
                revision=self.pinned.revision,
                local_dir=self.folder,
                token=self.token or None,
                # Else a wrong file is copied again from the client's own cache.
                force_download=attempts > 1,
            )

        what = f"{file.name} of {repository} at {self.pinned.revision[:12]}"
        ask(repository, what, lambda: download(target, file.bytes, file.digest, get))
        return target


def download(target: Path, bytes: int | None, digest: str, get: Callable[[], None]) -> None:
    """Have `get` write a file. Raises Again, and leaves none, unless its size and its hash are right.

    To be asked by hub.ask or hub.ask_until. bytes: None if its size is not known.
    """
    target.unlink(missing_ok=True)
    get()
    if wrong := difference(target, bytes, digest):
        target.unlink()
        raise Again(wrong)
