"""One run of the real trainer at the sites of a lab: scripts/launch.sh at each, and what its records say.

A run lies in FOLDER/NAME as any other; under SYNC=diloco each site but the first has one of its own in site_N below it.
What each site says goes to FOLDER/NAME.site_N.log. Bytes are the relay's, looked at while the run goes on.
"""

import bisect
import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.wan_lab import crew
from bench.wan_lab.crew import INTERFACE, QUIET
from bench.wan_lab.network import Counters, Network, address_of
from record.metrics import RecordReader
from settings import ROOT
from settings.resolve import NO_TARGET

LOOK_S = 0.05

# A model that two cores train at four sites in a few seconds a round; what is not training is left out, and so is the
# guard, to which a few steps of small batches, with weights that jump at each sync, are full of spikes.
TRAINER = {
    "PRESET": "tiny",
    "NPROC": "1",
    "DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "SAMPLE_TOKENS": "0",
    "WANDB_MODE": "disabled",
    "DETACH": "0",
    "LOG_EVERY": "10",
    "SAVE_EVERY": "0",
    "MAX_RESTARTS": "0",
    "EVAL_EVERY": "0",
    "COMPILE": "0",
    "SPIKE_SIGMAS": "0",
    "LIGHTHOUSE": "",
}


class SiteEnded(RuntimeError):
    """A site's trainer ended, or did not come to where it was waited for; the message says where its log is."""


class AtSites:
    """A run at all sites of a network. settings: beside those of TRAINER."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        name: str,
        settings: dict[str, str],
        lighthouse: str = "",
    ):
        self.network, self.folder, self.name, self.lighthouse = network, folder, name, lighthouse
        self.settings = (
            TRAINER
            | {"NODES": str(network.sites), "RUNS_DIR": str(folder), "RUN_NAME": name}
            | settings
        )
        self.diloco = self.settings.get("SYNC") == "diloco"
        self.processes: dict[int, subprocess.Popen[Any]] = {}
        # site -> the reader of its record, and the records so far
        self.seen: dict[int, tuple[RecordReader, list[dict[str, Any]]]] = {}
        self.looks: list[tuple[float, list[Counters]]] = []  # (Unix seconds, counters)

    def command(self, place: int, *what: str) -> list[str]:
        own = {"NODE_RANK": str(place)}
        if self.diloco:
            own |= {
                "LIGHTHOUSE": self.lighthouse,
                "SITES": str(self.network.sites),
            }  # host names are known in a lab
        else:
            own |= {"MASTER_ADDR": address_of(0)}
        given = [f"{name}={value}" for name, value in (self.settings | own).items()]
        return ["env", *NO_TARGET, f"GLOO_SOCKET_IFNAME={INTERFACE}", QUIET, *given, *what]

    def start(self, place: int) -> None:
        """Start a site, or start it again."""
        with open(self.folder / f"{self.name}.site_{place}.log", "a") as log:
            self.processes[place] = self.network.start(
                place,
                self.command(place, "bash", "scripts/launch.sh"),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def records(self, site: int) -> list[dict[str, Any]]:
        """What a site has written so far; under DDP the first writes for all."""
        folder = self.folder / self.name
        path = (folder / f"site_{site}" if self.diloco and site else folder) / "metrics.jsonl"
        reader, found = self.seen.setdefault(site, (RecordReader(path), []))
        found += reader.read_new()
        return found

    def steps(self, site: int) -> int:
        """How many a site has taken."""
        return len([r for r in self.records(site) if r["event"] == "step"])

    def look(self) -> None:
        self.looks.append((time.time(), self.network.counters()))

    def wait_until(self, what: str, true: Callable[[], Any], timeout_s: float) -> Any:
        """Look on until this is true, and return it. Raises SiteEnded where a site ends in failure or time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.look()
            if found := true():
                return found
            for site, process in self.processes.items():
                if process.poll():
                    raise SiteEnded(
                        f"site {site} ended with exit code {process.returncode} while the lab waited for "
                        f"{what}; see {self.folder / self.name}.site_{site}.log"
                    )
            if time.monotonic() > deadline:
                raise SiteEnded(
                    f"{what}: not there after {timeout_s:.0f} s; see {self.folder / self.name}.site_0.log"
                )
            time.sleep(LOOK_S)

    def to_the_end(self, timeout_s: float) -> None:
        """Look on until all sites are done."""
        self.wait_until(
            "the end",
            lambda: all(process.poll() == 0 for process in self.processes.values()),
            timeout_s,
        )

    def sent_at(self, when: float) -> list[float]:
        """Bytes that each site had sent at that time, by the nearest looks."""
        times = [at for at, _ in self.looks]
        i = min(max(1, bisect.bisect_left(times, when)), len(times) - 1)
        (t0, before), (t1, after) = self.looks[i - 1], self.looks[i]
        part = min(1.0, max(0.0, (when - t0) / (t1 - t0)))
        return [
            then.sent_bytes + part * (now.sent_bytes - then.sent_bytes)
            for then, now in zip(before, after, strict=True)
        ][: self.network.sites]

    def between(self, first: int, last: int) -> dict[str, Any]:
        """What the steps behind `first` up to `last` took: seconds a step, and bytes that each site sent in one."""
        times = {r["step"]: r["time"] for r in self.records(0) if r["event"] == "step"}
        began, ended, steps = times[first], times[last], last - first
        sent = [
            (after - before) / steps
            for before, after in zip(self.sent_at(began), self.sent_at(ended), strict=True)
        ]
        return {"steps": steps, "step_s": (ended - began) / steps, "sent_bytes_per_step": sent}


@contextlib.contextmanager
def at_sites(
    network: Network, folder: Path, name: str, settings: dict[str, str]
) -> Iterator[AtSites]:
    """A run that has been started at all sites; all of it ends with the block."""
    with contextlib.ExitStack() as stack:
        where = ""
        if settings.get("SYNC") == "diloco":
            where = stack.enter_context(crew.lighthouse(network, settings["MIN_SITES"]))
        for site in range(network.sites):
            stack.callback(network.kill, site)
        run = AtSites(network, folder, name, settings, where)
        for site in range(network.sites):
            run.start(site)
        yield run
