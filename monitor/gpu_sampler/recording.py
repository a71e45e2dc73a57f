"""The files of a sampler, written by a thread: a disk that keeps a write waiting costs no sample.

    gpu_metrics_YYYYMMDD_HHMMSS.csv    a row a sample
    gpu_slow_YYYYMMDD_HHMMSS.csv       a row a second
    gpu_metrics_YYYYMMDD_HHMMSS.json   what is known of both; replaced as a whole, now and then

Rows are appended as they come, so that a kill leaves all that was handed on, and at most one torn line at the end. A
full disk is said once; rows wait for it in memory as long as it takes to fill BACKLOG_BYTES, further ones are lost and
counted.
"""

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record.durable import write_whole
from record.run_paths import RunPaths
from settings.resolve import show_path

BACKLOG_BYTES = 2**25  # of each file: 20 minutes of 8 GPUs
WAITING = 600  # hand-overs, of half a second each


class Growing:
    """A file that is appended to: whole lines, or the beginning of one where the disk took no more.

    lost: lines that there was no room for, neither on the disk nor in memory.
    """

    def __init__(self, path: Path, header: list[str]):
        """Raises FileExistsError where there is one already, and OSError; then nothing is left behind."""
        self.path = path
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self.rest = b""  # what the disk has not taken yet
        self.added, self.lost = -1, 0  # the header is no row
        try:
            self.append([",".join(header)])
        except OSError:
            self.close()
            path.unlink()
            raise

    @property
    def waiting(self) -> int:
        """Lines that are not whole on the disk."""
        return self.rest.count(b"\n")

    def append(self, lines: list[str]) -> None:
        """Add lines behind those that still wait. Raises OSError where the disk does not take all."""
        data = "".join(f"{line}\n" for line in lines).encode()
        if self.rest and len(self.rest) + len(data) > BACKLOG_BYTES:
            self.lost += len(lines)
        else:
            self.rest += data
            self.added += len(lines)
        while self.rest:
            self.rest = self.rest[os.write(self.file, self.rest) :]

    def close(self) -> None:
        os.close(self.file)


class Recording:
    """All files of a moment, and the thread that writes them. `rotate` goes on in new ones.

    fast, slow: the columns. say: for what goes wrong, once. Raises OSError where the first files cannot be made.
    """

    def __init__(
        self, paths: RunPaths, fast: list[str], slow: list[str], say: Callable[[str], None]
    ):
        self.paths, self.columns, self.say = paths, (fast, slow), say
        self.passed_over, self.failing = 0, False  # rows; whether the last write failed
        self.open()
        self.jobs = queue.SimpleQueue[Callable[[], Any] | None]()
        self.keeper = threading.Thread(target=self.keep, name="keeper", daemon=True)
        self.keeper.start()

    # ---- For who samples; none of these waits for a disk, but close

    def add(self, fast: list[str], slow: list[str]) -> None:
        """Rows to be written."""
        assert self.keeper.is_alive()
        if self.jobs.qsize() > WAITING:
            self.passed_over += len(fast) + len(slow)
            return
        self.jobs.put(lambda: self.write(fast, slow))

    def tell(self, facts: dict[str, Any]) -> None:
        """What the .json is to say now."""
        self.jobs.put(lambda: self.describe(facts))

    def rotate(self, facts: dict[str, Any]) -> None:
        """Go on in new files; facts: the last of those so far."""
        self.jobs.put(lambda: self.reopen(facts))

    def close(self, facts: dict[str, Any]) -> None:
        """Write what is left. A full disk is waited for no longer."""
        self.tell(facts)
        self.jobs.put(None)
        self.keeper.join()
        for file in self.files:
            file.close()

    # ---- In the thread

    def keep(self) -> None:
        while job := self.jobs.get():
            job()

    def open(self) -> None:
        """New files, under the next name that is free: nodes may share the folder."""
        moment = time.time()
        while True:
            stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(moment))
            try:
                fast = Growing(self.paths.gpu_metrics(stamp), self.columns[0])
                break
            except FileExistsError:
                moment += 1
        try:
            self.files = (fast, Growing(self.paths.gpu_slow(stamp), self.columns[1]))
        except OSError:
            fast.close()
            fast.path.unlink()
            raise
        self.sidecar = self.paths.gpu_sidecar(stamp)

    def write(self, fast: list[str], slow: list[str]) -> None:
        failed = None
        for file, lines in zip(self.files, (fast, slow), strict=True):
            try:
                file.append(lines)
            except OSError as error:
                failed = error
        if failed:
            self.fail(failed)
        self.failing = failed is not None

    def describe(self, facts: dict[str, Any]) -> None:
        rows, slow_rows = (file.added - file.waiting for file in self.files)
        of_files = {
            "rows": rows,
            "slow_rows": slow_rows,
            "waiting_rows": sum(file.waiting for file in self.files),
            "lost_rows": self.passed_over + sum(file.lost for file in self.files),
            "files": [file.path.name for file in self.files],
        }
        try:
            write_whole(self.sidecar, json.dumps(facts | of_files, indent=1).encode() + b"\n")
        except OSError as error:
            self.fail(error)

    def reopen(self, facts: dict[str, Any]) -> None:
        self.describe(facts)
        before = self.files
        try:
            self.open()
        except OSError as error:
            return self.fail(error)  # the old ones grow on
        for file in before:
            file.close()
        self.describe(facts)

    def fail(self, error: OSError) -> None:
        if not self.failing:
            self.say(
                f"{show_path(self.sidecar.parent)}: cannot be written ({error.strerror}); rows wait in memory, and "
                "what does not fit there is lost and counted"
            )
        self.failing = True
