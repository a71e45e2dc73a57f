"""Rings: ALERT_CMD is run once for each new fault, and once at the end of the run.

    ALERT_CMD "xlarge: hanging: 8 GPUs at 100% utilisation ...; next: make logs ..."

Its one argument is the sentence. The environment is the monitor's own, and beside it MONITOR_RUN, MONITOR_FAULT (the
rule's name, or end), MONITOR_ABOUT, MONITOR_FAILING (0 or 1) and MONITOR_NEXT. It is run without a shell, one at a
time, and never waited for: one that takes longer than LIMIT_S is ended. Why it fails is said once.

What has rung is kept in the run's folder, .alerts.json, so that a monitor which is started again, or ONCE=1 from cron,
does not ring for the same fault again. A fault is forgotten, and would ring again, after it was away for ALERT_MINUTES;
how a run ended, as soon as it is in another phase than that in which it did: then another attempt is at work, or over.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from monitor.facts import Fault, Seen
from monitor.snapshot import SURROGATES, since
from monitor.verdict import Verdict
from record.durable import write_whole
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from settings.json_file import read_small

STATE = ".alerts.json"
ENDS = ("crashed", "killed")  # the faults by which an attempt ends
LIMIT_S = 60.0
ALERT_MINUTES = 5.0  # a fault that was away for so long, and is back, is a new one
MOST_WAITING = 20  # alerts that are not yet out; beyond it the oldest is dropped, and that is said


def command_of(c: Config, root: Path = ROOT) -> str:
    """The program of ALERT_CMD: a path, relative to the repository, or a name that the shell would find; "" for none.

    Raises SettingsError where it cannot be run.
    """
    named = c.alert_cmd
    if not named:
        return ""
    good = "for example ALERT_CMD=scripts/my_alert.sh, which gets a sentence as its one argument"
    path = root / named if "/" in named else Path(shutil.which(named) or root / named)
    if "=" in str(path):
        raise SettingsError([f"ALERT_CMD={named}: its path must have no = in it; {good}"])
    if not path.is_file():
        raise SettingsError(
            [f"ALERT_CMD={named}: there is no file {path}, nor a program of that name; {good}"]
        )
    if not os.access(path, os.X_OK):
        raise SettingsError([f"ALERT_CMD={named}: cannot be executed; chmod +x {path}"])
    return str(path)


class Alerts:
    """Told at each look what is wrong; rings for what is new. `command` is what command_of() found."""

    def __init__(self, command: str, paths: RunPaths, limit_s: float = LIMIT_S):
        self.command, self.run, self.limit_s = command, paths.name, limit_s
        self.again_s, self.path = 60 * ALERT_MINUTES, paths.folder / STATE
        self.waiting = deque[list[str]]()
        self.ringing: subprocess.Popen | None = None
        self.began = 0.0
        self.stderr: Any = None  # what it complains of: a file without a name
        self.problems: list[str] = []  # to be said
        self.known: set[str] = set()  # of them, by kind, so that each is said once
        self.kept: dict[str, Any] = {}  # where the file cannot be written

    def look(
        self, seen: Seen, faults: Iterable[Fault], verdict: Verdict | None = None
    ) -> list[str]:
        """Ring for what is new at this moment, and look after what rings. Returns what is to be said of ALERT_CMD
        itself, each problem once."""
        if self.command:
            state = self.read()
            before, faults = json.dumps(state), list(faults)
            if is_another(seen, verdict, state):
                state["ended"] = ""
                state["faults"] = {
                    key: gone
                    for key, gone in state["faults"].items()
                    if key.split(" ")[0] not in ENDS
                }
            for fault in self.new(state["faults"], faults, seen.now):
                self.ring(
                    f"{self.run}: {fault.text}; next: {fault.next}",
                    fault.name,
                    fault.about,
                    fault.failing,
                    fault.next,
                )
            ended = self.end_of(seen, verdict)
            if verdict and ended and ended != state["ended"]:
                self.ring(f"{self.run}: {verdict.sentence}", "end", "", verdict.is_bad, "")
            state["ended"] = ended or state["ended"]
            if ended or any(fault.name in ENDS for fault in faults):
                state["since"] = since(seen) or state["since"]
            if json.dumps(state) != before:
                self.write(state)
        self.poll()
        said, self.problems = self.problems, []
        return said

    def new(self, known: dict[str, float | None], faults: list[Fault], now: float) -> list[Fault]:
        """Faults that were not there at the last looks. known: fault -> since when it is away, None while it is there;
        it is brought up to date."""
        there = {" ".join(fault.key): fault for fault in faults}
        found = [
            fault
            for key, fault in there.items()
            if key not in known or ((gone := known[key]) is not None and now - gone >= self.again_s)
        ]
        for key, gone in list(known.items()):
            if key not in there and gone is None:
                known[key] = now
            elif key not in there and gone is not None and now - gone >= self.again_s:
                del known[key]
        known |= dict.fromkeys(there)
        return found

    def end_of(self, seen: Seen, verdict: Verdict | None) -> str:
        """Which end this is, so that the next attempt's rings again; "" as long as the run goes on."""
        if verdict is None or not verdict.is_last:
            return ""
        return f"{verdict.word} in attempt {seen.progress.attempt if seen.progress else 0}"

    # ---- The file

    def read(self) -> dict[str, Any]:
        """What has rung; nothing where the file is absent or damaged."""
        try:
            state = json.loads(read_small(self.path))
            faults = {
                str(key): None if gone is None else float(gone)
                for key, gone in state["faults"].items()
            }
            began = state.get("since")
            return {
                "schema": 1,
                "faults": faults,
                "ended": str(state["ended"]),
                "since": None if began is None else float(began),
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return self.kept or {"schema": 1, "faults": {}, "ended": "", "since": None}

    def write(self, state: dict[str, Any]) -> None:
        try:
            write_whole(self.path, json.dumps(state, indent=1).encode() + b"\n")
            self.kept = {}
        except OSError as error:
            self.kept = state
            self.say(
                "file",
                f"{self.path}: cannot be written ({error.strerror}); a monitor that is started again will "
                "ring for the same faults",
            )

    # ---- The command

    def ring(self, sentence: str, name: str, about: str, failing: bool, following: str) -> None:
        facts = {
            "RUN": self.run,
            "FAULT": name,
            "ABOUT": about,
            "FAILING": int(failing),
            "NEXT": following,
        }
        arguments = [
            "env",
            *(f"MONITOR_{key}={value}" for key, value in facts.items()),
            self.command,
            sentence,
        ]
        # a log may hold anything, and half of a character can be told to no program
        self.waiting.append(
            [SURROGATES.sub("\ufffd", argument.replace("\0", "")) for argument in arguments]
        )
        if len(self.waiting) > MOST_WAITING:
            self.waiting.popleft()
            self.say(
                "many",
                f"more than {MOST_WAITING} alerts wait for ALERT_CMD={self.command}: the oldest are "
                "dropped",
            )

    def poll(self) -> bool:
        """Start what waits, and end what takes too long. Returns whether anything is still to be done; never waits."""
        if self.ringing and self.ringing.poll() is None:
            if time.monotonic() - self.began <= self.limit_s:
                return True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.ringing.pid, signal.SIGKILL)
            self.ringing.wait()
            self.say("slow", f"ALERT_CMD={self.command} was ended after {self.limit_s:g} s")
        elif self.ringing and self.ringing.returncode:
            self.say(
                "failed",
                f"ALERT_CMD={self.command} ended with exit code {self.ringing.returncode}{self.words()}",
            )
        if self.stderr:
            self.stderr.close()
        self.ringing = self.stderr = None
        if self.waiting:
            self.start(self.waiting.popleft())
        return self.ringing is not None or bool(self.waiting)

    def start(self, arguments: list[str]) -> None:
        """In a session of its own: Ctrl-C ends the monitor, and not what it has begun to say."""
        try:
            self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process has ended)
            self.ringing = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.stderr,
                start_new_session=True,
            )
            self.began = time.monotonic()
        except OSError as error:
            self.say("failed", f"ALERT_CMD={self.command} cannot be started ({error.strerror})")

    def words(self) -> str:
        """': curl: (6) Could not resolve host', the last line of what it said."""
        if self.stderr is None:
            return ""
        self.stderr.seek(0)
        lines = self.stderr.read(2**16).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last[:200]}" if last else ""

    def say(self, kind: str, problem: str) -> None:
        if kind not in self.known:
            self.known.add(kind)
            self.problems.append(problem)

    def close(self) -> list[str]:
        """Until all that is to be said is out, for as long as one may take. Returns what is to be said of ALERT_CMD."""
        deadline = time.monotonic() + self.limit_s
        while self.poll() and time.monotonic() < deadline + 1:
            time.sleep(0.02)
        said, self.problems = self.problems, []
        return said


def is_another(seen: Seen, verdict: Verdict | None, state: dict[str, Any]) -> bool:
    """Whether what is seen is not of the attempt whose end was told last: the phase began at another moment, which one
    that is over, or killed, never changes; or the Job that had ended is there anew."""
    there, began = seen.cluster, since(seen)
    if there and state["ended"] and not (verdict and verdict.is_last):
        return bool(there.wanted_pods) and not (there.ended or there.problem or there.unread)
    return None not in (began, state["since"]) and began != state["since"]
