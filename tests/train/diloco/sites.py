"""A run at several sites, on loopback: a lighthouse, and for each site its launcher with whatever that starts."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hardware.ports import free_ports
from record import metrics as record_reader
from record.run_paths import RunPaths
from tests.running import ROOT, environment


class Sites:
    """SITES sites of one run. `end` leaves nothing of it behind."""

    def __init__(
        self, folder: Path, data: dict[str, str], sites: int, start: bool = True, **settings: object
    ):
        """start: the sites, too; else each starts by `again`."""
        self.folder = folder
        self.paths = RunPaths(folder / "run")
        usual = {
            "SAVE_MINUTES": 60,
            "START_TIMEOUT_S": 120,
            "SITE_WAIT_S": 60,
            "NPROC": 1,
            "SYNC_STREAMS": 2,
        }
        self.env = environment(
            folder,
            data,
            SYNC="diloco",
            SITES=sites,
            NODES=sites,
            LIGHTHOUSE=f"127.0.0.1:{free_ports(2)}",
            **usual | settings,
        )
        self.lighthouse = self.light()
        self.sites: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(sites if start else 0):
            self.again(rank)

    def log(self, rank):
        return self.folder / f"console_{rank}"

    def run(self, rank):
        return self.paths.of_site(rank).folder

    def popen(self, command, log, **changes):
        """Start a command in a session of its own: all of it can be lost at once."""
        with open(log, "a") as out:
            return subprocess.Popen(
                command,
                env=self.env | changes,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def light(self):
        command = [sys.executable, "-m", "train.diloco.lighthouse"]
        return self.popen(command, self.folder / "lighthouse")

    def again(self, rank: int, command: list[str] | None = None, **changes: str) -> None:
        launch = [str(ROOT / "scripts" / "launch.sh")]
        changes["NODE_RANK"] = str(rank)
        self.sites[rank] = self.popen(command or launch, self.log(rank), **changes)

    def lose(self, rank):
        """Kill all processes of a site."""
        kill_session(self.sites[rank])

    def ends(self, *codes: int) -> list[str]:
        """What each said, once it has ended with its code."""
        deadline = time.monotonic() + 240
        got = [
            self.sites[rank].wait(max(1.0, deadline - time.monotonic()))
            for rank in range(len(codes))
        ]
        assert got == list(codes), self.said()
        return [self.log(rank).read_text() for rank in range(len(codes))]

    def stop(self):
        """Stop all sites, which would train far longer than a test needs."""
        for site in self.sites.values():
            site.send_signal(signal.SIGTERM)
        self.ends(*[75] * len(self.sites))

    def events(self, rank: int, *names: str) -> list[dict[str, Any]]:
        """The events of these names in a site's record."""
        with contextlib.suppress(FileNotFoundError):
            records = record_reader.read_records(self.run(rank) / "metrics.jsonl")
            return [entry for entry in records if entry["event"] in names]
        return []

    def last(self, rank: int) -> dict[str, Any]:
        """The last sync of a site."""
        return self.events(rank, "sync")[-1]

    def hashes(self, rank):
        """Sync -> the hash of the global weights then."""
        return {entry["outer_step"]: entry["hash"] for entry in self.events(rank, "sync")}

    def agreed(self, after=0):
        """Return how many syncs after this one both of the first two sites saw, with equal weights."""
        mine, others = self.hashes(0), self.hashes(1)
        both = [outer for outer in mine if outer > after and outer in others]
        assert [mine[outer] for outer in both] == [others[outer] for outer in both]
        return len(both)

    def wait(self, rank, syncs, sites=0):
        """Wait until a site has made this many syncs; with `sites`, the last among this many sites."""
        deadline = time.monotonic() + 240
        while not any(
            entry["outer_step"] >= syncs and sites in (0, entry["sites"])
            for entry in self.events(rank, "sync")
        ):
            assert self.sites[rank].poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def said(self):
        """What the lighthouse and all sites have said."""
        return "\n".join(
            path.read_text() for path in (self.folder / "lighthouse", *map(self.log, self.sites))
        )

    def end(self):
        for process in (*self.sites.values(), self.lighthouse):
            kill_session(process)


def kill_session(process):
    """torchrun puts its workers into groups of their own: by session they are all found."""
    listed = subprocess.check_output(["ps", "-A", "-o", "pid=,sid="], text=True)
    for line in listed.splitlines():
        pid, session = map(int, line.split())
        if session == process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
