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
        port = free_ports(2)
        self.folder, self.paths = folder, RunPaths(folder / "run")
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
            LIGHTHOUSE=f"127.0.0.1:{port}",
            **usual | settings,
        )
        self.lighthouse = self.light()
        self.sites = {rank: self.start(rank) for rank in range(sites if start else 0)}

    def log(self, rank):
        return self.folder / f"console_{rank}"

    def run(self, rank):
        return self.paths.of_site(rank).folder

    def light(self):
        with open(self.folder / "lighthouse", "a") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "train.diloco.lighthouse"],
                env=self.env,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def start(
        self, rank: int, command: list[str] | None = None, **changes: str
    ) -> "subprocess.Popen[bytes]":
        with open(
            self.log(rank), "a"
        ) as out:  # a session of its own: all of it can be lost at once
            return subprocess.Popen(
                command or [str(ROOT / "scripts" / "launch.sh")],
                env=self.env | {"NODE_RANK": str(rank)} | changes,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def again(self, rank: int, command: list[str] | None = None, **changes: str) -> None:
        self.sites[rank] = self.start(rank, command, **changes)

    def lose(self, rank):
        """kill -9 of all there is of a site."""
        signal_session(self.sites[rank].pid, signal.SIGKILL)
        self.sites[rank].wait()

    def pause(self, rank):
        """Nothing of a site runs until `resume`, as of a machine that swaps; its heartbeats stop, too."""
        signal_session(self.sites[rank].pid, signal.SIGSTOP)

    def resume(self, rank):
        signal_session(self.sites[rank].pid, signal.SIGCONT)

    def tell(self, number):
        """A signal to every site's launcher."""
        for site in self.sites.values():
            site.send_signal(number)

    def ends(self, *codes: int) -> list[str]:
        """What each said, once it has ended with its code."""
        deadline = time.monotonic() + 240
        got = tuple(
            self.sites[rank].wait(max(1.0, deadline - time.monotonic()))
            for rank in range(len(self.sites))
        )
        assert got == codes, self.said()
        return [self.log(rank).read_text() for rank in range(len(self.sites))]

    def events(self, rank: int, *names: str) -> list[dict[str, Any]]:
        """The events of these names in a site's record."""
        with contextlib.suppress(FileNotFoundError):
            return [
                entry
                for entry in record_reader.read_records(self.run(rank) / "metrics.jsonl")
                if entry["event"] in names
            ]
        return []

    def hashes(self, rank):
        """Exchange -> the hash of what the sites then had in common."""
        return {entry["outer_step"]: entry["hash"] for entry in self.events(rank, "sync")}

    def agreed(self, one, other, behind=0):
        """How many exchanges behind this one both have seen, after each of which they had the same in common."""
        mine, others = self.hashes(one), self.hashes(other)
        both = [outer for outer in mine if outer > behind and outer in others]
        assert [mine[outer] for outer in both] == [others[outer] for outer in both]
        return len(both)

    def wait(self, rank, exchanges, sites=0, seconds=240):
        """Until a site has seen so many exchanges, the last of them among so many sites, if that matters."""
        deadline = time.monotonic() + seconds
        while not any(
            entry["outer_step"] >= exchanges and sites in (0, entry["sites"])
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
        for site in self.sites.values():
            signal_session(site.pid, signal.SIGKILL)
        self.lighthouse.kill()
        for process in (*self.sites.values(), self.lighthouse):
            process.wait()


def signal_session(session, number):
    """torchrun puts its workers into groups of their own: by session they are all found."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,sid="], text=True, check=True, capture_output=True
    ).stdout
    for line in listed.splitlines():
        pid, sid = map(int, line.split())
        if sid == session:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
