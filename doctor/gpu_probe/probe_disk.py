"""How fast a disk writes and reads: a process of its own, which ends where a disk hangs. Standard library only.

    python -m doctor.gpu_probe.probe_disk FOLDER UNTIL LIMIT      (Unix times: to be through, and to end whatever happens)

Written is a file as a checkpoint is, in one go and with fsync behind it; read back it is when the system was told to
forget it. The file has no name from the moment it is made, so that nothing is left of it however this process ends.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHUNK = 2**24
FIRST = 2**25  # bytes written to see how many the time allows
MOST = 2**31
SHARE = 0.1  # of the room that is free, at most


def measure(folder: Path, until: float) -> dict[str, Any]:
    """write_mb_s; read_mb_s, None where the system keeps what it was told to forget; bytes; or problem, in words."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(folder).free
        if room * SHARE < FIRST:
            return {
                "problem": f"only {room / 1e6:.0f} MB are free, and a tenth of that says nothing"
            }
        descriptor, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
        try:
            os.unlink(name)
            chunk = random.Random(1).randbytes(CHUNK)  # a disk that compresses finds nothing to
            rate = FIRST / write(descriptor, chunk, FIRST)
            size = FIRST
            if (wanted := fitting(rate, until - time.time(), room)) > FIRST:
                size = wanted
                rate = size / write(descriptor, chunk, size)
            return {
                "write_mb_s": rate / 1e6,
                "read_mb_s": read_mb_s(descriptor, size, until),
                "bytes": size,
            }
        finally:
            os.close(descriptor)
    except OSError as error:
        return {"problem": error.strerror or str(error)}


def fitting(rate: float, left_s: float, room: int) -> int:
    """Bytes, in whole chunks, that half of the time that is left suffices for, within MOST and a SHARE of the room."""
    return int(min(rate * max(0.0, left_s) / 2, MOST, room * SHARE)) // CHUNK * CHUNK


def write(descriptor: int, chunk: bytes, size: int) -> float:
    """Seconds until `size` bytes from the start of the file on are on the disk."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    began = time.perf_counter()
    for _ in range(size // len(chunk)):
        view = memoryview(chunk)
        while view:
            view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
    return time.perf_counter() - began


def read_mb_s(descriptor: int, size: int, until: float) -> float | None:
    """MB/s of reading the file, or as much of it as there is time for; None where it is not read from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return None
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    buffer, done = bytearray(CHUNK), 0
    if any(kept(descriptor, at) for at in range(0, size, CHUNK)):
        return None
    began = time.perf_counter()
    while done < size and (done == 0 or time.time() < until):
        done += os.preadv(descriptor, [buffer], done)
    return done / (time.perf_counter() - began) / 1e6


def kept(descriptor: int, at: int) -> bool:
    """Whether a place of a file is in memory: then it can be read without a wait. False where the system cannot say."""
    with contextlib.suppress(OSError, AttributeError):
        return os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) > 0
    return False


if __name__ == "__main__":
    signal.setitimer(
        signal.ITIMER_REAL, max(0.1, float(sys.argv[3]) - time.time())
    )  # SIGALRM, which ends it
    sys.stdout.write(json.dumps({"disk": measure(Path(sys.argv[1]), float(sys.argv[2]))}) + "\n")
