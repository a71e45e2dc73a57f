"""Samples the stand-in for NVML in a time of its own, which passes while the sampler sleeps and at no other time.

    python -m tests.monitor.in_time FOLDER '{"seconds": 30, "interval_ms": 10, "every": true, ...}'

late_ms: what a sleep takes longer, at most, at random; stalls: [[slot, seconds], ...], by which the sleep before a slot
is longer; clock_set: [slot, seconds], by which the clock on the wall jumps there; rotate_bytes.
"""

import ctypes
import json
import random
import sys
from pathlib import Path
from typing import Any

import pynvml

from hardware import nvml
from monitor.gpu_sampler.recording import Recording
from monitor.gpu_sampler.sampling import ROTATE_BYTES, Sampler
from monitor.gpu_sampler.slots import Clock
from record.run_paths import RunPaths


class Time:
    """Seconds that pass when told to."""

    def __init__(self, how: dict[str, Any]):
        self.mono, self.offset, self.random = 1000.0, 1.7e9, random.Random(1)
        self.late_s, self.sleeps = how.get("late_ms", 0) / 1000, 0
        self.stalls, self.clock_set = dict(how.get("stalls", [])), how.get("clock_set", [-1, 0])
        self.began = float("inf")
        self.tell()

    def tell(self) -> None:
        pynvml.nvmlLib["fake_nvml_set_time"](ctypes.c_double(self.mono))

    def sleep(self, seconds: float) -> None:
        self.mono += seconds + self.random.uniform(0, self.late_s)
        if self.mono > self.began:  # slots count
            self.sleeps += 1
            self.mono += self.stalls.get(self.sleeps, 0)
            self.offset += self.clock_set[1] * (self.sleeps == self.clock_set[0])
        self.tell()


def main(folder: str, how: dict[str, Any]) -> None:
    driver = nvml.start()
    devices = nvml.list_devices(None)
    time = Time(how)
    sampler = Sampler(
        devices,
        how.get("interval_ms", 10),
        {"driver": driver},
        lambda line: sys.stdout.write(line + "\n") and None,
        Clock(lambda: time.mono, lambda: time.mono + time.offset, time.sleep),
    )
    recording = Recording(
        RunPaths(Path(folder)), sampler.columns, sampler.slow_columns, sys.stderr.write
    )
    sys.stdout.write(f"bytes an hour: {sampler.bytes_per_hour}\n")
    time.began, slots = time.mono, round(how["seconds"] * 1000 / sampler.interval_ms)
    sampler.run(
        recording,
        lambda: "the end" if sampler.slots.slot + 1 >= slots else "",
        how.get("rotate_bytes", ROTATE_BYTES),
    )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
