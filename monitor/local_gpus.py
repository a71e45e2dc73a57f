"""The GPUs of this machine as they are now: from the rows of the sampler beside the run, else asked of the driver.

The newest rows of this node's sampler serve as long as they are fresh: nothing is asked twice, and a GPU that is lost
keeps only the sampler waiting. The driver is asked in a thread, as it may keep who asks waiting for long.
"""

import datetime
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any

from monitor.facts import Gpu
from record.regular_file import open_regular
from record.run_paths import RunPaths
from settings.json_file import read_small
from settings.visible_gpus import visible_gpus

FRESH_S = 5.0  # a row that is older is of a sampler that ended or hangs; each comes within 1.5 s
PATIENCE_S = 2.0  # for the driver, in a look
AGAIN_S = 60.0  # until a driver that was not there is looked for again
ROW_BYTES = (
    2**15
)  # the last row of a file is within so much of its end, the first readings of its beginning
FILES = 64  # so many of the newest are looked at for one of this node

Found = tuple[
    tuple[Gpu, ...], float | None, str
]  # GPUs, when they were read (Unix seconds), why there are none
# Reading -> field of Gpu, of the columns of a sampler (readings.BASIC, SLOW).
FIELDS = {
    "util_percent": "utilisation_percent",
    "mem_used_gib": "memory_gib",
    "power_w": "power_w",
    "temp_c": "temp_c",
    "sm_mhz": "clock_mhz",
}


class GpusHere:
    """Looks at them, again and again."""

    def __init__(self, paths: RunPaths):
        self.sampled, self.driver = Sampled(paths), Driver()

    def look(self) -> Found:
        return self.sampled.look() or self.driver.look()

    @property
    def energy(self) -> tuple[float, float] | None:
        """(joules of all, since when in Unix seconds) at the last look, where a sampler reads their counters."""
        return self.sampled.energy


def throttle(text: str) -> tuple[str, ...]:
    """readings.reasons, without none and idle."""
    return tuple(word for word in text.split("+") if word not in ("", "none", "idle"))


# ---------------------------------------------------------------------------------------------------
# Of the sampler
# ---------------------------------------------------------------------------------------------------


class Sampled:
    """The last rows of the sampler of this node."""

    def __init__(self, paths: RunPaths):
        self.paths = paths
        self.stamp, self.about = "", dict[int, Any]()  # the moment of its files; by index
        self.energy: tuple[float, float] | None = None
        self.began, self.first = (
            tuple[Any, ...](),
            dict[str, str](),
        )  # which sampler, and the first row of all it wrote

    def look(self) -> Found | None:
        """None where none samples now."""
        self.energy = None
        found = (
            self.read() if self.stamp and self.first else None
        )  # a sampler that begins has a file before a row
        if found is None and self.find():
            found = self.read()
        return found

    def find(self) -> bool:
        """Set the newest files of this node, by what stands beside them: nodes may share the folder."""
        stamps = sorted(
            (
                path.stem.removeprefix("gpu_slow_")
                for path in self.paths.folder.glob("gpu_slow_*.csv")
            ),
            reverse=True,
        )
        for self.stamp in stamps[:FILES]:
            about = self.sidecar(self.stamp)
            try:
                if (about["node"], about["host"], about["ended"]) == (
                    self.paths.node,
                    gethostname(),
                    None,
                ):
                    self.about = {int(gpu["index"]): gpu for gpu in about["gpus"]}
                    self.find_first(about, stamps)
                    return True
            except (ValueError, KeyError, TypeError):
                pass
        self.stamp = ""
        return False

    def sidecar(self, stamp: str) -> dict[str, Any]:
        """{} where there is none that can be read."""
        try:
            found = json.loads(read_small(self.paths.gpu_sidecar(stamp)))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def find_first(self, about: dict[str, Any], stamps: list[str]) -> None:
        """Set the first row of a sampler, which goes on in new files when they are large: all tell of one beginning."""

        def began(of: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(of.get(key) for key in ("host", "node", "boot_id", "pid", "elapsed_0"))

        if self.began != began(about) or not self.first:
            self.began = began(about)
            first = min(
                (stamp for stamp in stamps if began(self.sidecar(stamp)) == self.began),
                default=self.stamp,
            )
            self.first = first_row(self.paths.gpu_metrics(first))

    def read(self) -> Found | None:
        """None where the rows are old, or not there yet."""
        now = time.time()
        rows = [
            last_row(self.paths.gpu_slow(self.stamp)),
            last_row(self.paths.gpu_metrics(self.stamp)),
        ]
        at = max((seconds_of(row.get("timestamp", "")) for row in rows), default=0.0)
        if any(now - seconds_of(row.get("timestamp", "")) > FRESH_S for row in rows):
            return None
        cells = rows[0] | rows[1]
        self.energy = self.taken(cells)
        return tuple(self.gpu(index, about, cells) for index, about in self.about.items()), at, ""

    def taken(self, cells: dict[str, str]) -> tuple[float, float] | None:
        """(joules, since when), by what the counters stood at; None where one is not known, or began anew."""
        names = [f"gpu{index}_energy_j" for index in self.about]
        if not names or not all(self.first.get(name) and cells.get(name) for name in names):
            return None
        rises = [float(cells[name]) - float(self.first[name]) for name in names]
        return (
            (sum(rises), seconds_of(self.first.get("timestamp", ""))) if min(rises) >= 0 else None
        )

    def gpu(self, index: int, about: dict[str, Any], cells: dict[str, str]) -> Gpu:
        own = {
            name.removeprefix(f"gpu{index}_"): text
            for name, text in cells.items()
            if name.startswith(f"gpu{index}_")
        }
        values = {field: float(own[name]) for name, field in FIELDS.items() if own.get(name)}
        return Gpu(
            index,
            about.get("name") or "",
            memory_total_gib=about.get("memory_total_gib"),
            power_limit_w=about.get("power_limit_w"),
            clock_max_mhz=about.get("clock_max_mhz"),
            throttle=throttle(own.get("throttle", "")),
            lost=not any(own.values()),
            **values,
        )


def first_row(path: Path) -> dict[str, str]:
    """Column -> the first text that it has, within ROW_BYTES; a reading may fail. {} where there is no row yet."""
    try:
        with open_regular(path) as file:
            names = file.readline(ROW_BYTES).decode(errors="replace").strip().split(",")
            lines = file.read(ROW_BYTES).decode(errors="replace").split("\n")[:-1]
    except OSError:
        return {}
    found: dict[str, str] = {}
    for cells in (line.split(",") for line in lines):
        if len(cells) == len(names):
            found = {name: text for name, text in zip(names, cells, strict=True) if text} | found
    return found


def last_row(path: Path) -> dict[str, str]:
    """Column -> text of the last whole row; {} where there is none."""
    try:
        with open_regular(path) as file:
            header = file.readline(ROW_BYTES)
            file.seek(max(len(header), file.seek(0, 2) - ROW_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return {}
    names = header.decode(errors="replace").strip().split(",")
    cells = lines[-2].split(",") if len(lines) > 1 else []
    return dict(zip(names, cells, strict=True)) if len(cells) == len(names) else {}


def seconds_of(stamp: str) -> float:
    """Unix seconds of a row's time stamp; 0 of what is none."""
    try:
        return datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


# ---------------------------------------------------------------------------------------------------
# Of the driver
# ---------------------------------------------------------------------------------------------------


class Driver:
    """Asks NVML, which is loaded when it is asked first."""

    def __init__(self) -> None:
        self.gpus: list[tuple[Any, dict[str, Callable[[], int]]]] | None = (
            None  # device, its readings by name
        )
        self.found: Found = ((), None, "")
        self.thread: threading.Thread | None = None
        self.asked, self.not_before = 0.0, 0.0

    def look(self) -> Found:
        now = time.monotonic()
        if self.thread is None or not self.thread.is_alive():
            if now < self.not_before:
                return self.found
            self.asked = now
            self.thread = threading.Thread(target=self.ask, name="driver", daemon=True)
            self.thread.start()
        self.thread.join(PATIENCE_S)
        if self.thread.is_alive():
            waited = time.monotonic() - self.asked
            return (
                (),
                None,
                f"the NVIDIA driver has not answered for {waited:.0f} s; nvidia-smi shows whether it works",
            )
        return self.found

    def ask(self) -> None:
        """The thread."""
        try:
            from hardware import nvml
            from monitor.gpu_sampler import (
                readings,  # late: who has a sampler, or no GPU to look for, needs them not
            )
        except ImportError as error:
            self.found = (
                (),
                None,
                f"GPUs cannot be looked at: {error}; make setup installs what is missing",
            )
            self.not_before = self.asked + AGAIN_S
            return
        try:
            if self.gpus is None:
                nvml.start()
                wanted = {name: read for name, read, _ in [*readings.SLOW, *readings.BASIC]}
                self.gpus = [
                    (device, {name: wanted[name](device) for name in (*FIELDS, "throttle")})
                    for device in nvml.list_devices(visible_gpus())
                ]
        except nvml.Unavailable as error:
            self.found, self.not_before = ((), None, str(error)), self.asked + AGAIN_S
            return
        self.found = tuple(self.gpu(device, reads) for device, reads in self.gpus), time.time(), ""

    @staticmethod
    def gpu(device: Any, reads: dict[str, Callable[[], int]]) -> Gpu:
        from pynvml import NVMLError

        from hardware import nvml
        from monitor.gpu_sampler import readings

        values, lost = dict[str, int](), False
        for name, read in reads.items():
            try:
                values[name] = read()
            except NVMLError as error:
                lost |= error.value in nvml.LOST
        unit = {"mem_used_gib": 2**30, "power_w": 1000}
        fields = {
            field: values[name] / unit.get(name, 1)
            for name, field in FIELDS.items()
            if name in values and not lost
        }
        return Gpu(
            device.index,
            device.name or "",
            memory_total_gib=device.memory_total_gib,
            power_limit_w=device.power_limit_w,
            clock_max_mhz=device.clock_max_mhz,
            lost=lost,
            throttle=() if lost else throttle(readings.reasons(values.get("throttle", 0))),
            **fields,
        )
