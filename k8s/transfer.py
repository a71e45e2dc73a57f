"""Files from a pod to this machine over `kubectl exec`: in parts that can be continued, and known whole by their hash.

kubectl exec may end early without an error, and `kubectl cp` with it: so bytes are counted, and what was brought is
compared by hash. A file that grows while it is read counts up to the size that it had when it was listed; one that is
replaced is read anew. Nothing gets its final name before it is whole.
"""

import dataclasses
import hashlib
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from k8s.cluster.kubectl import Refused
from k8s.cluster.volume import Volume
from record import number_formats
from record.regular_file import only_regular

PIECE = 2**20
SMALL = 2**20  # bytes up to which content and hash come in one answer
STALL_S = 60.0  # without a byte the connection counts as broken
TRIES = 6  # without a byte in between, before it is given up; and of a file whose hash differs
PAUSE_S = 1.0  # before the second try; twice as long before each further one
QUIET_S = 10.0  # between two words on progress, where it is no terminal

PART = 'tail -c "+$1" "$2" | head -c "$3"'
BOTH = 'exec 3<"$1" 4<"$1" || exit 2; sha256sum <&3; cat <&4'
HASH = 'head -c "$1" "$2" | sha256sum'
ABSENT = re.compile(r"No such file|cannot open|can't open|nonexistent")


class Vanished(Exception):
    """A file is no longer on the volume."""


@dataclasses.dataclass
class Meter:
    """Says how far a transfer is. `moved` counts what came over the wire, `done` what of `total` is here."""

    total: int
    done: int = 0
    moved: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)
    said: float = dataclasses.field(default_factory=time.monotonic)

    def add(self, count: int) -> None:
        self.done += count
        self.moved += count
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if now - self.said >= (0.5 if terminal else QUIET_S):
            self.said = now
            sys.stdout.write(f"\r{self.words()} " if terminal else f"{self.words()}\n")
            sys.stdout.flush()

    def words(self) -> str:
        rate = self.moved / max(1e-3, time.monotonic() - self.began)
        return f"{number_formats.size(self.done)} of {number_formats.size(self.total)}, {number_formats.size(rate)}/s"

    def end(self) -> None:
        """Leave the line that is written over and over."""
        if sys.stdout.isatty():
            sys.stdout.write("\r" + " " * 60 + "\r")


def bring(volume: Volume, remote: str, size: int, partial: Path, meter: Meter) -> None:
    """Continue a partial file until it has `size` bytes. Raises Refused, Vanished."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    failures, why = 0, ""
    while (have := partial.stat().st_size if partial.exists() else 0) < size:
        got, why = part(volume, remote, have, size - have, partial, meter)
        if have + got >= size:
            break
        failures = 0 if got else failures + 1
        if failures >= TRIES:
            raise Refused(
                69,
                f"{remote} comes no further than {have} of {size} bytes in {TRIES} tries "
                f"({why or 'the connection breaks'}). Run the same command to resume.",
            )
        time.sleep(PAUSE_S * 2 ** max(0, failures - 1))
        volume.lost()
    with open(partial, "ab", opener=only_regular) as file:
        if file.tell() > size:
            file.truncate(size)
        file.flush()
        os.fsync(file.fileno())


def part(
    volume: Volume, remote: str, offset: int, count: int, partial: Path, meter: Meter
) -> tuple[int, str]:
    """Add what comes of `count` bytes from an offset on. Returns how many came, and what kubectl complained of."""
    pod, container = volume.place()
    got = 0
    with open(partial, "ab", opener=only_regular) as file, tempfile.TemporaryFile() as complaints:
        process = volume.target.start(
            "exec",
            pod,
            "-c",
            container,
            "--",
            "sh",
            "-c",
            PART,
            "sh",
            str(offset + 1),
            remote,
            str(count),
            stdout=subprocess.PIPE,
            stderr=complaints,
        )
        assert process.stdout is not None
        try:
            source = process.stdout.fileno()
            while got < count and select.select([source], [], [], STALL_S)[0]:
                piece = os.read(source, min(PIECE, count - got))
                if not piece:
                    break
                file.write(piece)
                got += len(piece)
                meter.add(len(piece))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        complaints.seek(0)
        said = complaints.read().decode(errors="replace").strip()
    if not got and ABSENT.search(said):
        raise Vanished(remote)
    return got, (said.splitlines() or [""])[-1]


def whole(volume: Volume, remote: str, size: int, partial: Path, meter: Meter) -> str:
    """Bring a file as it is now, or its first `size` bytes where it is large. Returns its SHA-256."""
    if size <= SMALL:
        return small(volume, remote, partial, meter)
    for again in range(TRIES):
        if again:
            meter.done -= partial.stat().st_size
            partial.unlink()
        bring(volume, remote, size, partial, meter)
        theirs = hash_there(volume, remote, size)
        if theirs == sha256(partial):
            return theirs
    raise differs(remote)


def small(volume: Volume, remote: str, partial: Path, meter: Meter) -> str:
    """Bring a small file with its hash in one answer, so that it may be replaced at any moment."""
    partial.parent.mkdir(parents=True, exist_ok=True)

    def once() -> str:
        answer = volume.content("sh", "-c", BOTH, "sh", remote)
        head, _, content = answer.partition(b"\n")
        meter.add(len(content))
        digest = hashlib.sha256(content).hexdigest()
        if head.split()[:1] != [digest.encode()]:
            meter.done -= len(content)
            return ""
        with open(partial, "wb", opener=only_regular) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return digest

    return patiently(volume, remote, once)


def hash_there(volume: Volume, remote: str, size: int) -> str:
    """The SHA-256 of a file's first bytes, computed in the pod."""

    def once() -> str:
        found = re.match(
            rb"([0-9a-f]{64})\b",
            volume.content("sh", "-c", HASH, "sh", str(size), remote, timeout=900),
        )
        return found[1].decode() if found else ""

    return patiently(volume, remote, once)


def patiently(volume: Volume, remote: str, once: Callable[[], str]) -> str:
    """The first answer that is not empty; broken connections are tried again. Raises Refused, Vanished."""
    refused: Refused | None = None
    for again in range(TRIES):
        if again:
            time.sleep(PAUSE_S * 2 ** (again - 1))
            volume.lost()
        try:
            if answer := once():
                return answer
        except Refused as error:
            if error.code == 78:
                if volume.pod is not None and "there is no run" in str(error):
                    raise Vanished(remote) from None
                raise
            refused = error
    raise refused or differs(remote)


def differs(remote: str) -> Refused:
    return Refused(
        1,
        f"{remote}: what arrives has another hash than what is there, {TRIES} times; it is being "
        "rewritten, or the way damages it: try again later",
    )


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
