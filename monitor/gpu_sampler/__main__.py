"""`make gpu-sampler`: samples this machine's GPUs into the folder of a run, beside training or without any.

    python -m monitor.gpu_sampler [INTERVAL_MS] [--follow [SECONDS]]

It runs until Ctrl-C or SIGTERM; training may come and go. With --follow, as make train-2xh100 starts it, it waits for
RUN_NAME to be at work, stays through restarts of the trainer, and ends by itself SECONDS (60) after the last of it.
One sampler a node records a run. Exit codes: 0 ended, 64 bad setting, 78 nothing to sample, or no place for it.
"""

import argparse
import logging
import math
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from hardware import nvml
from monitor.gpu_sampler.recording import Recording
from monitor.gpu_sampler.sampling import ROTATE_BYTES, Sampler
from record import locks, number_formats
from record.provenance import boot_id
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import SETTINGS, Config
from settings.finding import complain
from settings.resolve import show_path
from settings.visible_gpus import visible_gpus

log = logging.getLogger("monitor.gpu_sampler")

FOLLOW_S = 60.0  # a run that is started again within it goes on in the same files
LOOK_S = 1.0  # how often it is looked whether the run is at work


class Follow:
    """Whether the run that is followed is over: not at work for `patience_s`, or never in it."""

    def __init__(
        self,
        at_work: Callable[[], bool],
        patience_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.at_work, self.patience_s, self.monotonic = at_work, patience_s, monotonic
        self.last_seen, self.began = monotonic(), False

    def is_over(self) -> bool:
        if self.at_work():
            self.last_seen, self.began = self.monotonic(), True
        return self.monotonic() - self.last_seen > self.patience_s


class End:
    """Why to end, as soon as there is a reason."""

    def __init__(self) -> None:
        self.why = ""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if (
                number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
            ):  # nohup's wish
                signal.signal(number, self.told)

    def told(self, number: int, _: FrameType | None) -> None:
        self.why = self.why or f"told to stop by {signal.Signals(number).name}"

    def wait_for(self, run: Follow) -> bool:
        """Until the run is at work; False where it is over before that, or something else is."""
        while not run.began and not self.why and not run.is_over():
            time.sleep(0.1)
        return run.began and not self.why

    def follow(self, run: Follow) -> None:
        """Look at the run now and then, in a thread, since its disk may keep that waiting."""

        def look() -> None:
            while not run.is_over():
                time.sleep(LOOK_S)
            self.why = self.why or f"training ended {run.patience_s:g} s ago"

        threading.Thread(target=look, name="follow", daemon=True).start()


def settings(interval_ms: str | None) -> Config:
    """The settings, with the interval of the command line in the place of INTERVAL_MS. Raises SettingsError."""
    c = Config.load()
    if interval_ms is None:
        return c
    field = SETTINGS["INTERVAL_MS"]
    try:
        return c.replace(interval_ms=field.parse(interval_ms))
    except ValueError as error:
        raise SettingsError([f"INTERVAL_MS={interval_ms} (command line): {error}"]) from None


def greeting(c: Config, sampler: Sampler, recording: Recording, driver: str) -> list[str]:
    """What is sampled, where it goes, how much it will be, and whether it can be done in time."""
    names = [device.name or "?" for device in sampler.devices]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    call_us = {name: found["call_us"] for name, found in sampler.first_look["readings"].items()}
    sample_ms = sum(call_us.values()) * len(names) / 1000
    free = shutil.disk_usage(recording.paths.folder).free
    lines = [
        f"{kinds} (driver {driver}), every {c.interval_ms:g} ms; "
        + ", ".join(f"{name} takes {took:g} us" for name, took in call_us.items()),
        f"{show_path(recording.files[0].path)}: about {number_formats.size(sampler.bytes_per_hour)} per hour (computed), a new "
        f"file every {number_formats.size(ROTATE_BYTES)}; {number_formats.size(free)} are free",
    ]
    if sample_ms > 0.8 * c.interval_ms:
        lines.append(
            f"a sample of all takes about {sample_ms:.1f} ms, so that slots of {c.interval_ms:g} ms will be "
            f"missed; for example INTERVAL_MS={min(1000, 2 * math.ceil(sample_ms))}"
        )
    return lines


def record(c: Config, paths: RunPaths, driver: str, end: End, run: Follow | None) -> None:
    """Sample until there is a reason to end. Raises Unavailable, RunFolderError."""
    visible = visible_gpus()
    devices = nvml.list_devices(visible)
    lock = locks.hold(paths.gpu_lock, "records its GPUs")
    if run:
        end.follow(run)
    about = {
        "host": socket.gethostname(),
        "node": paths.node,
        "boot_id": boot_id(),
        "driver": driver,
    }
    sampler = Sampler(devices, c.interval_ms, about, log.info)
    try:
        recording = Recording(paths, sampler.columns, sampler.slow_columns, log.info)
    except OSError as error:
        raise nvml.Unavailable(
            f"{paths.folder}: cannot be written ({error.strerror}); choose another place with "
            "RUNS_DIR, make room, or mend its permissions"
        ) from None
    if any(name.startswith("MIG") for name in visible or []):
        log.info(
            "CUDA_VISIBLE_DEVICES names a slice (MIG): power and temperature are those of whole GPUs"
        )
    for line in greeting(c, sampler, recording, driver):
        log.info("%s", line)
    sampler.run(recording, lambda: end.why)
    lock.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m monitor.gpu_sampler", description="Samples this machine's GPUs."
    )
    parser.add_argument("interval_ms", nargs="?", help="in the place of the setting INTERVAL_MS")
    parser.add_argument(
        "--follow",
        nargs="?",
        type=float,
        const=FOLLOW_S,
        metavar="SECONDS",
        help="wait for RUN_NAME to be at work, and end so long after it was",
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s gpu-sampler: %(message)s", stream=sys.stdout
    )
    logging.raiseExceptions = False  # whoever listened may be gone
    try:
        c = settings(arguments.interval_ms)
    except SettingsError as error:
        complain(error)
        return 64
    paths, end, run = RunPaths.of_node(c, ROOT), End(), None
    try:
        driver = nvml.start()
        if arguments.follow is not None:
            run = Follow(lambda: locks.is_at_work(paths), arguments.follow)
            if not end.wait_for(run):
                log.info("%s: nothing was sampled", end.why or f"no training of {paths.name} began")
                return 0
        record(c, paths, driver, end, run)
    except (nvml.Unavailable, locks.RunFolderError) as error:
        complain(f"gpu-sampler: {error}")
        return 0 if run and isinstance(error, locks.RunIsHeld) else 78
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
