"""The rows of a sampler: power and temperature of every GPU in each slot, and what changes slowly once a second.

    timestamp, elapsed_sec, gpu0_power_w, gpu0_temp_c, gpu1_power_w, ... , gpu0_power_inst_w, gpu0_energy_j, ...

timestamp is the clock on the wall, in UTC; elapsed_sec counts on the monotonic clock of this machine, which the record
of a run has too (mono_s): the sidecar says where both stood when it was 0. An empty cell is what could not be had.
"""

import gc
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from hardware.nvml import Device
from monitor.gpu_sampler.counters import Complaints, Counter
from monitor.gpu_sampler.interfaces import Network
from monitor.gpu_sampler.readings import BASIC, MEANING, MORE, SLOW, Reading
from monitor.gpu_sampler.recording import Recording
from monitor.gpu_sampler.slots import Clock, Slots
from monitor.gpu_sampler.slow import Slow

FLUSH_S = 0.5  # rows are handed on so often: more than that no kill takes
FACTS_S = 60.0  # the .json is brought up to date so often, and first after FIRST_S
FIRST_S = 10.0
ROTATE_BYTES = (
    2**28
)  # 256 MiB: 8 hours of 2 GPUs, and still what one table in memory takes without a thought
LOOK_S, LOOK_MS = 0.5, 1.0  # the first look: so long, and so often
STEP_S = 1e-3  # a clock on the wall that was set by more than that gets a new anchor


class Sampler:
    """Samples devices every interval_ms, from `run` on.

    about: what the sidecar says of machine and driver. `first_look` is taken when this is made.
    """

    def __init__(
        self,
        devices: list[Device],
        interval_ms: float,
        about: dict[str, Any],
        say: Callable[[str], None],
        clock: Clock | None = None,
        network: Network | None = None,
    ):
        self.devices, self.interval_ms, self.about = devices, interval_ms, about
        self.say, self.clock = say, clock or Clock()
        self.complaints, self.slots_per_s = Complaints(say), max(1, round(1000 / interval_ms))
        self.groups = (BASIC, MORE)
        self.second, self.prefix = -1, ""
        self.first_look, self.row_bytes = self.look()
        self.fast = [c for group in self.groups for d in devices for c in self.counters(group, d)]
        self.slow = Slow(
            [self.counters(SLOW, d, patience=1) for d in devices],
            network or Network(),
            self.slots_per_s,
        )
        self.columns = ["timestamp", "elapsed_sec", *(c.column for c in self.fast)]
        self.slow_columns = ["timestamp", "elapsed_sec", *self.slow.columns]

    def counters(
        self, readings: list[Reading], device: Device, patience: int | None = None
    ) -> list[Counter]:
        return [
            Counter(
                device.index,
                name,
                read(device),
                text,
                self.complaints,
                patience or self.slots_per_s,
            )
            for name, read, text in readings
        ]

    def begin(self) -> None:
        """From here on slots count."""
        gc.freeze()  # the modules' objects: to look through them takes longer than a slot
        self.cpu_s, self.real_s = time.process_time(), time.monotonic()
        self.sampling_s, self.longest_s = 0.0, 0.0
        self.slots = Slots(self.interval_ms / 1000, self.clock)
        self.anchors = [self.anchor()]

    def look(self) -> tuple[dict[str, Any], int]:
        """(what a call of each reading takes and how often it has a new value, by the first GPU; bytes of a row).

        A millisecond apart: changes are told apart for which the slots may be too long.
        """
        counters = [c for group in self.groups for c in self.counters(group, self.devices[0])]
        slots, costs = Slots(LOOK_MS / 1000, self.clock), dict[str, list[float]]()
        while slots.wait() * LOOK_MS / 1000 < LOOK_S:
            for counter in counters:
                began = time.perf_counter()
                counter.cell(slots.slot)
                costs.setdefault(counter.name, []).append(time.perf_counter() - began)
        found = {
            c.name: {"call_us": round(1e6 * median(costs[c.name]), 1), **c.period.found(LOOK_MS)}
            for c in counters
        }
        size = (
            len(self.stamp(self.clock.wall()))
            + len(",1000.0000\n")
            + len(self.devices) * sum(len(c.shown) + 1 for c in counters)
        )
        return {
            "gpu": self.devices[0].index,
            "seconds": LOOK_S,
            "interval_ms": LOOK_MS,
            "readings": found,
        }, size

    @property
    def bytes_per_hour(self) -> float:
        """If all rows are as long as the first GPU's first readings make them."""
        return self.row_bytes * 3600e3 / self.interval_ms

    # ---- Clocks

    def stamp(self, wall: float) -> str:
        second = int(wall)
        if second != self.second:
            self.second, self.prefix = (
                second,
                time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(second)),
            )
        return f"{self.prefix}{int((wall - second) * 1000):03d}Z"

    def anchor(self) -> dict[str, float]:
        """Where both clocks stand at one moment."""
        mono = self.clock.monotonic()
        return {"time": self.clock.wall(), "mono_s": mono, "elapsed_sec": mono - self.slots.began}

    def look_at_clocks(self) -> None:
        """Another anchor where the clock on the wall was set."""
        last, now = self.anchors[-1], self.anchor()
        if abs((now["time"] - now["mono_s"]) - (last["time"] - last["mono_s"])) > STEP_S:
            self.anchors.append(now)

    # ---- Rows

    def run(
        self, recording: Recording, over: Callable[[], str], rotate_bytes: int = ROTATE_BYTES
    ) -> None:
        """Sample until `over` says why to end; closes the recording."""
        self.begin()
        clock, slots, began = self.clock, self.slots, self.slots.began
        fast, slow, size = list[str](), list[str](), 0
        flush_at, facts_at = FLUSH_S, FIRST_S
        recording.tell(self.facts())
        while not (why := over()):
            slot = slots.wait()
            mono, wall = clock.monotonic(), clock.wall()
            elapsed = mono - began
            cells = [self.stamp(wall), f"{elapsed:.4f}"]
            fast.append(",".join(cells + [counter.cell(slot) for counter in self.fast]))
            if row := self.slow.row(elapsed, cells):
                slow.append(row)
            took = clock.monotonic() - mono
            self.sampling_s += took
            self.longest_s = max(self.longest_s, took)
            if elapsed < flush_at:
                continue
            size += sum(map(len, fast)) + len(fast)
            recording.add(fast, slow)
            fast, slow, flush_at = [], [], elapsed + FLUSH_S
            if elapsed < facts_at and size < rotate_bytes:
                continue
            self.look_at_clocks()
            if facts_at == FIRST_S and elapsed >= facts_at:
                self.say(self.periods())
            if size < rotate_bytes:
                facts_at = elapsed + FACTS_S
                recording.tell(self.facts())
            else:
                size = 0
                recording.rotate(self.facts())
        recording.add(fast, slow)
        self.look_at_clocks()
        recording.close(self.facts(why))
        self.say(self.result(why))

    # ---- What is said of them

    def facts(self, ended: str | None = None) -> dict[str, Any]:
        """What the sidecar says, of all rows so far."""
        counters = self.fast + [c for gpu in self.slow.counters for c in gpu]
        gpus = [
            {
                "index": d.index,
                "name": d.name,
                "uuid": d.uuid,
                "power_limit_w": d.power_limit_w,
                "memory_total_gib": d.memory_total_gib,
                "clock_max_mhz": d.clock_max_mhz,
                "readings": {
                    c.name: c.period.found(self.interval_ms) for c in self.fast if c.gpu == d.index
                },
                "faults": {
                    c.name: dict(c.faults) for c in counters if c.gpu == d.index and c.faults
                },
            }
            for d in self.devices
        ]
        return {
            "schema": 1,
            **self.about,
            "pid": os.getpid(),
            "interval_ms": self.interval_ms,
            "columns": MEANING,
            "elapsed_0": self.anchors[0],
            "anchors": list(self.anchors),
            "gpus": gpus,
            "first_look": self.first_look,
            "slots": self.slots.slot + 1,
            "samples": self.slots.taken,
            "missed": self.slots.missed,
            "hz": round(self.hz, 3),
            "cpu_percent": round(self.cpu_percent, 3),
            "sample_ms": {
                "mean": round(1e3 * self.sampling_s / max(1, self.slots.taken), 4),
                "longest": round(1e3 * self.longest_s, 4),
            },
            "ended": ended,
        }

    @property
    def hz(self) -> float:
        """Samples a second, over all slots so far."""
        return self.slots.taken / max(1, self.slots.slot + 1) * 1000 / self.interval_ms

    @property
    def cpu_percent(self) -> float:
        """Of one core, since slots count: all threads of this process, the calls into the driver included."""
        return 100 * (time.process_time() - self.cpu_s) / max(1e-9, time.monotonic() - self.real_s)

    def periods(self) -> str:
        """How often the readings have new values, in a sentence."""
        words = []
        for name in dict.fromkeys(c.name for c in self.fast):
            found = [c.period.found(self.interval_ms) for c in self.fast if c.name == name]
            sure = [f["period_ms"] for f in found if f["period_ms"]]
            close = self.first_look["readings"][name]["period_ms"]
            if sure:
                words.append(f"{name} every {median(sure):.0f} ms")
            elif any("at_most_ms" in f for f in found):
                words.append(
                    f"{name} every {close:.0f} ms"
                    if close
                    else f"{name} every {2 * self.interval_ms:g} ms or more often"
                )
        return (
            f"new values: {'; '.join(words)}; rows in between repeat them"
            if words
            else "new values: too few so far to say how often"
        )

    def result(self, why: str) -> str:
        missed = self.slots.missed
        return (
            f"{why}: {self.slots.taken} samples in {(self.slots.slot + 1) * self.interval_ms / 1000:.1f} s, "
            f"{self.hz:.1f} Hz, {missed} {'slot' if missed == 1 else 'slots'} missed, "
            f"{self.cpu_percent:.1f}% of one core"
        )
