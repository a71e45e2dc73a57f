"""Node 0's side of the roll call: it hears who is there, says who is missing, and gives all of them one answer.

A caller may be anyone: a port scanner, the torchrun of an attempt that is over, a node with other settings. What is
no short line of JSON ends that connection and nothing else. rendezvous.py tells what is said; nothing here reads
settings or knows torch.
"""

import json
import logging
import re
import selectors
import socket
import time
from typing import Any, NamedTuple

from record.exit_codes import (
    BAD_DATA,
    BAD_SETTING,
    DONE,
    INTERRUPTED,
    NODES_MISSING,
    STOPPED,
)
from record.status import Status

log = logging.getLogger(__name__)

HELLO = {"roll_call": 1}
WAITING = "waiting for peers"  # the phase of a run, with "i/n" behind
LONGEST_LINE = 2**16  # bytes; a node's facts take 3 kB
LONGEST_WHY = 1000  # characters of a node's last word
TOUCH_S = 5.0  # between two signs of life
SILENT_S = 30.0  # without any a node, or node 0, counts as gone
STRANGER_S = 10.0  # for a caller to say who it is
RIVAL_S = 5.0  # for the node that joined first under a rank to show that it lives
LINGER_S = 10.0  # for the nodes that are still on their way to hear that it is over
REMIND_S = 15.0  # between two words on who is missing
MOST_STRANGERS = 100


class Lost(Exception):
    """A connection that has ended, or brings what is no line of JSON; the message says which."""


class Told(BaseException):
    """This node was told to stop. Not an Exception, so that nothing swallows it."""


class Verdict(NamedTuple):
    """What all nodes do: 0 starts torchrun, all else is the exit code, and why."""

    code: int
    why: str = ""


class Line:
    """JSON objects, one a line, over a connection."""

    def __init__(self, connection: socket.socket):
        self.connection, self.received = connection, b""

    def send(self, content: dict[str, Any]) -> None:
        try:
            self.connection.sendall(json.dumps(content).encode() + b"\n")
        except OSError as error:
            raise Lost(f"the connection broke: {error.strerror or error}") from None

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived, perhaps nothing."""
        try:
            data = self.connection.recv(LONGEST_LINE)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError as error:
            raise Lost(f"the connection broke: {error.strerror or error}") from None
        if not data:
            raise Lost("it closed the connection")
        *lines, self.received = (self.received + data).split(b"\n")
        if max(map(len, [*lines, self.received])) > LONGEST_LINE:
            raise Lost("it sent no line of JSON")
        return [parsed(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


def parsed(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Lost("it sent no line of JSON")
    return content


class Caller:
    """A connection, and the node behind it once it has said which it is."""

    def __init__(self, connection: socket.socket, address: str):
        self.line, self.address = Line(connection), address
        self.since = self.heard = time.monotonic()
        self.facts: dict[str, Any] = {}
        self.rival: Caller | None = None  # the one that joined before under the same rank

    @property
    def rank(self) -> int:
        return self.facts.get("node_rank", -1)

    @property
    def name(self) -> str:
        return named(self.facts) if self.facts else f"a caller from {self.address}"


def named(facts: dict[str, Any]) -> str:
    return f"node {facts['node_rank']} ({facts['host']})"


def is_someone(content: dict[str, Any]) -> bool:
    return isinstance(content.get("node_rank"), int) and bool(
        re.fullmatch(r"[\w.-]{1,253}", str(content.get("host")))
    )


def last_word(facts: dict[str, Any], code: int, why: object = "") -> Verdict:
    """What the others are told when a node ends for good. why: what it said itself, where it did."""
    said = " ".join(str(why).split())[:LONGEST_WHY] if isinstance(why, str) else ""
    reason = f": {said}" if said.isprintable() and said else "; its log says why"
    how = f"has ended with exit code {code}{reason}"
    if code in (STOPPED, INTERRUPTED):
        how = "was told to stop"
    return Verdict(code, f"{named(facts)} {how}")


class RollCall:
    """Hears callers until all nodes have joined, or it is clear that they will not."""

    def __init__(
        self,
        facts: dict[str, Any],
        listeners: list[socket.socket],
        where: str,
        timeout_s: float,
        state: Status,
        patient: bool = False,
    ):
        """patient: whether the others wait for this node to come back when it is told to stop."""
        self.facts, self.listeners, self.where, self.timeout_s, self.state = (
            facts,
            listeners,
            where,
            timeout_s,
            state,
        )
        self.patient, self.size = patient, int(facts["nodes"])
        self.callers: list[Caller] = []
        self.joined: dict[int, Caller] = {}
        self.members: list[
            dict[str, Any]
        ] = []  # what all nodes said of themselves, by rank, once they are there
        self.verdict: Verdict | None = None
        self.told: set[int] = set()  # ranks that know it
        self.complaints: list[Verdict] = []
        self.over: Verdict | None = None  # the last word of a node that will not come back
        self.touched = self.reminded = 0.0
        self.selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)

    def hold(self, verdict: Verdict | None = None) -> Verdict:
        """Call the roll; with a verdict, give it to all who call. Returns what was told."""
        self.verdict = verdict
        try:
            deadline = time.monotonic() + (LINGER_S if verdict else self.timeout_s)
            while True:
                now = time.monotonic()
                if self.verdict is None and (verdict := self.judge(now >= deadline)):
                    self.verdict, deadline = verdict, min(deadline, now + LINGER_S)
                if self.verdict:
                    self.tell(self.verdict)
                    if (
                        self.verdict.code in (DONE, NODES_MISSING)
                        or len(self.told) == self.size - 1
                        or now >= deadline
                    ):
                        return self.verdict
                else:
                    self.keep_in_touch(now)
                self.hear()
        except Told:
            self.verdict = last_word(self.facts, INTERRUPTED)
            if not self.patient:
                self.tell(self.verdict)
            return self.verdict
        finally:
            self.close(wait_s=1.0 if self.verdict and self.verdict.code == 0 else 0.0)

    def judge(self, late: bool) -> Verdict | None:
        if self.over:
            return self.over
        if self.complaints:
            return Verdict(
                self.complaints[0].code, "; ".join(complaint.why for complaint in self.complaints)
            )
        if len(self.joined) == self.size - 1:
            self.members = [self.facts, *(self.joined[rank].facts for rank in sorted(self.joined))]
            return Verdict(0)
        return (
            Verdict(
                NODES_MISSING,
                f"after {self.timeout_s:.0f} s {self.roll()}. Look whether those were started, with this "
                "address and port, and whether a firewall keeps the port closed",
            )
            if late
            else None
        )

    def tell(self, verdict: Verdict) -> None:
        for caller in [c for c in self.callers if c.facts and c.rank not in self.told]:
            try:
                caller.line.send({"code": verdict.code, "why": verdict.why})
            except Lost:
                continue
            self.told.add(caller.rank)

    def close(self, wait_s: float) -> None:
        """Free the port. The callers close first, where there is time for it, and leave none of it in use."""
        for listener in self.listeners:
            self.selector.unregister(listener)
            listener.close()
        deadline = time.monotonic() + wait_s
        while self.joined and time.monotonic() < deadline:
            self.hear()
        for caller in self.callers:
            caller.line.close()
        self.selector.close()

    # ---- Who is there

    def roll(self) -> str:
        """'2 of 4 nodes have joined: 0 (a), 2 (c); missing: 1, 3, which call a:29500'"""
        here = {0: self.facts["host"]} | {
            rank: caller.facts["host"] for rank, caller in self.joined.items()
        }
        missing = ", ".join(str(rank) for rank in range(self.size) if rank not in here)
        return (
            f"{len(here)} of {self.size} nodes have joined: "
            + ", ".join(f"{rank} ({host})" for rank, host in sorted(here.items()))
            + (f"; missing: {missing}; they are to reach {self.where}" if missing else "")
        )

    def say(self) -> None:
        if self.verdict:  # it is over for all, however many still come
            return
        log.info("%s", self.roll())
        self.reminded = time.monotonic()
        missing = [rank for rank in range(1, self.size) if rank not in self.joined]
        self.state.phase(f"{WAITING} {len(self.joined) + 1}/{self.size}", missing=missing)

    def keep_in_touch(self, now: float) -> None:
        """Signs of life both ways, and an end of those who give none."""
        self.state.beat()
        if now - self.reminded > REMIND_S:
            self.say()
        for caller in list(self.callers):
            if not caller.facts and now - caller.since > STRANGER_S:
                self.drop(caller, "it does not say who it is")
            elif caller.facts and now - caller.heard > SILENT_S:
                self.drop(caller, f"no sign of life for {SILENT_S:.0f} s")
            elif caller.rival:
                self.settle(caller, caller.rival, now)
        if now - self.touched > TOUCH_S:
            self.touched = now
            for caller in list(self.joined.values()):
                self.touch(caller)

    def touch(self, caller: Caller) -> None:
        try:
            caller.line.send({"waiting": self.roll()})
        except Lost as lost:
            self.drop(caller, str(lost))

    def hear(self, wait_s: float = 0.25) -> None:
        for key, _ in self.selector.select(wait_s):
            caller = key.data
            if caller is None:
                self.answer(key.fileobj)  # type: ignore[arg-type]
            elif caller in self.callers:  # else dropped by what came before
                try:
                    for content in caller.line.receive():
                        self.take(caller, content)
                except Lost as lost:
                    self.drop(caller, str(lost))

    def answer(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # gone before it was answered
            return
        connection.setblocking(False)
        caller = Caller(connection, str(address[0]).removeprefix("::ffff:"))
        self.callers.append(caller)
        self.selector.register(connection, selectors.EVENT_READ, caller)
        try:
            caller.line.send(HELLO)
        except Lost as lost:
            self.drop(caller, str(lost))
        strangers = [c for c in self.callers if not c.facts]
        if len(strangers) > MOST_STRANGERS:
            self.drop(strangers[0], "too many callers do not say who they are")

    def take(self, caller: Caller, content: dict[str, Any]) -> None:
        """Act on a line."""
        caller.heard = time.monotonic()
        if caller.facts:
            self.end(content)
            return
        if not is_someone(content):
            raise Lost("it does not say who it is")
        caller.facts = content
        if "over" in content:
            self.end(content)
            caller.line.send({"code": 0})  # it is heard
        elif before := self.joined.get(caller.rank):
            caller.rival = before
            self.touch(before)  # who lives answers
        else:
            self.join(caller)

    def end(self, content: dict[str, Any]) -> None:
        """A node will not come back: its last word is that of all."""
        if isinstance(code := content.get("over"), int) and 0 < code < 256 and is_someone(content):
            self.over = self.over or last_word(content, code, content.get("why"))
            self.told.add(content["node_rank"])  # by itself

    def join(self, caller: Caller) -> None:
        self.joined[caller.rank] = caller
        self.complaints += differences(self.facts, caller.facts)
        self.say()

    def settle(self, caller: Caller, before: Caller, now: float) -> None:
        """Two under one rank: a node that came back before its old connection was known to be dead, or a mistake."""
        if before.heard > caller.heard:
            self.complaints.append(
                Verdict(
                    BAD_SETTING,
                    f"NODE_RANK={caller.rank} was given to both {before.facts['host']} "
                    f"({before.address}) and {caller.facts['host']} ({caller.address}); each "
                    f"node needs its own, from 0 to {self.size - 1}",
                )
            )
            caller.rival = None
        elif before not in self.callers or now - caller.heard > RIVAL_S:
            caller.rival = None
            if before in self.callers:
                self.drop(before, "it came back over another connection")
            self.join(caller)

    def drop(self, caller: Caller, why: str) -> None:
        self.callers.remove(caller)
        self.selector.unregister(caller.line.connection)
        caller.line.close()
        if self.joined.get(caller.rank) is caller:
            del self.joined[caller.rank]
            if caller.rank not in self.told:
                log.info("%s has left (%s)", caller.name, why)
                self.say()
        elif not caller.facts:
            log.debug("%s was ignored (%s)", caller.name, why)


def differences(first: dict[str, Any], other: dict[str, Any]) -> list[Verdict]:
    """Why two nodes cannot train together: versions and code first, since settings follow from them."""
    found: list[Verdict] = []
    for key, what, remedy in (
        ("torch", "torch", "make setup with one TORCH_BACKEND on all"),
        ("python", "Python", "make setup with one PYTHON on all"),
        ("commit", "commit", "check out the same commit on all, without changes"),
        ("source", "code in train/", "check out the same commit on all, without changes"),
    ):
        mine, theirs = first.get(key), other.get(key)
        known = key != "commit" or (mine and theirs)  # an image has no history
        if (
            known
            and mine != theirs
            and not (key == "source" and any("commit" in v.why for v in found))
        ):
            found.append(
                Verdict(
                    BAD_DATA,
                    f"{what} is {mine} on {named(first)} and {theirs} on {named(other)}: {remedy}",
                )
            )
    mine, theirs = settings_of(first), settings_of(other)
    unequal = [
        name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)
    ]
    if unequal:
        values = ", ".join(
            f"{name}={mine.get(name)} on {named(first)} and {name}={theirs.get(name)} on "
            f"{named(other)}"
            for name in unequal
        )
        found.append(Verdict(BAD_SETTING, f"settings differ: {values}; give all nodes the same"))
    elif other["node_rank"] not in range(1, first["nodes"]):
        found.append(
            Verdict(
                BAD_SETTING,
                f"NODE_RANK={other['node_rank']} was given to {first['host']} and {other['host']}; "
                f"each node needs its own, from 0 to {first['nodes'] - 1}",
            )
        )
    return found


def settings_of(facts: dict[str, Any]) -> dict[str, Any]:
    settings = facts.get("settings")
    return settings if isinstance(settings, dict) else {}
