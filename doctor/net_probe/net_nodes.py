"""make net-probe on each node: all come to node 0, which says who measures what, round by round, and hears the results.

    caller   {"node_rank": 1, "host": ..., "nodes": 4, "site": ..., "port": ...}   I am here
    node 0   {"key": ...}                                                                       all are: what you know
    node 0   {"order": 3, "to": [name, host, port], "kind": "pair", "seconds": 5.0}             measure
    caller   {"order": 3, ...}                                                                  this I found
    node 0   {"code": 0, "why": ""}                                                             it is over

Node 0 greets first, so that a caller knows whom it has reached; it takes part as the others do, by a call to itself.
Anyone who reaches the port can take part, as with torchrun's own: it belongs into a private network.
"""

import contextlib
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from doctor.net_probe.net_measure import Address, Ears, Unreached, flood, pings
from doctor.net_probe.net_rounds import ring, rounds
from plan.network.links import Flow, Links, Pair
from settings.config import Config
from train.diloco import site_registry
from train.distributed.registry import Line, Lost, Verdict, is_someone, named
from train.distributed.rendezvous import (
    Reminder,
    Unreachable,
    busy_port,
    is_loopback,
    opened,
    reached,
    unresolved,
    where,
)

HELLO = {"net_probe": 1}
TOTAL_S = 48.0  # of all pairs; ALL_S more with all at once
ALL_S = 5.0
LEAST_S, MOST_S = 1.5, 8.0  # of a pair: pings, one connection, several
PING_SHARE = 0.15
LATE_S = 30.0  # beyond its time, for a node to say what it found
LOOK_S = 0.05

Say = Callable[[str], None]


def say(text: str) -> None:
    """What goes on, beside what is found."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Gone(Exception):
    """It cannot go on: a node is lost, or does not fit; the verdict says which."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict.why)
        self.verdict = verdict


# ---------------------------------------------------------------------------------------------------
# Every node
# ---------------------------------------------------------------------------------------------------


def take_part(c: Config, site: str = "", at: tuple[str, int] | None = None) -> Verdict:
    """Come to node 0 and measure what it says, until it is over. at: node 0's own port, for itself."""
    ears = Ears("", is_loopback(c.master_host))
    facts = {
        "node_rank": c.node_rank,
        "host": socket.gethostname(),
        "nodes": c.nodes,
        "site": site,
        "port": ears.port,
    }
    try:
        if at:
            with socket.create_connection(at, 5) as connection:
                return obey(Line(connection), facts, ears)
        return call(c, facts, ears)
    finally:
        ears.close()


def call(c: Config, facts: dict[str, Any], ears: Ears) -> Verdict:
    """Until node 0 is there, for START_TIMEOUT_S."""
    deadline, reminder = time.monotonic() + c.start_timeout_s, Reminder()
    while True:
        try:
            with reached(c) as line:
                return obey(line, facts, ears)
        except Unreachable as error:
            trouble = str(error)
        if (left := deadline - time.monotonic()) <= 0:
            return Verdict(69, f"node 0 was not reached in {c.start_timeout_s} s: {trouble}")
        reminder.say(f"{trouble}; trying on", f"{trouble}; trying for {left:.0f} s more")
        time.sleep(min(0.5, left))


def obey(line: Line, facts: dict[str, Any], ears: Ears) -> Verdict:
    """What node 0 says, until its last word. Raises Unreachable where it is no node 0 of this."""
    greeted, heard = False, time.monotonic()
    line.connection.settimeout(LOOK_S * 4)
    try:
        while True:
            for said in line.receive():
                if not greeted and said != HELLO:
                    raise Lost("it sent something else than a greeting")
                if not greeted:
                    greeted = True
                    line.send(facts)
                elif isinstance(said.get("code"), int):
                    return Verdict(said["code"], str(said.get("why", "")))
                elif "key" in said:
                    ears.key = str(said["key"])
                elif "order" in said:
                    line.send({"order": said["order"]} | carry_out(said, ears.key))
            if not greeted and time.monotonic() - heard > 5:
                raise Lost("it says nothing")
    except Lost as lost:
        if not greeted:
            raise Unreachable(
                "something answers where node 0 should, but it is no make net-probe; choose another "
                "port on all nodes: MASTER_ADDR=HOST:PORT"
            ) from None
        return Verdict(
            69,
            f"node 0 is gone ({lost}): it was stopped, or the network between broke; start make "
            "net-probe again on all nodes",
        )


def carry_out(order: dict[str, Any], key: str) -> dict[str, Any]:
    """What was found, or {"problem": why nothing was}."""
    to, seconds, streams = Address(*order["to"]), float(order["seconds"]), int(order["streams"])
    try:
        if order["kind"] == "flow":
            return {"many_gbit": flood(to, key, streams, seconds)}
        median, slow = pings(to, key, PING_SHARE * seconds)
        each = (1 - PING_SHARE) / 2 * seconds
        return {
            "rtt_ms": median,
            "rtt_p95_ms": slow,
            "one_gbit": flood(to, key, 1, each),
            "many_gbit": flood(to, key, streams, each),
        }
    except Unreached as error:
        return {"problem": str(error)}


# ---------------------------------------------------------------------------------------------------
# Node 0
# ---------------------------------------------------------------------------------------------------


def conduct(c: Config, site: str = "", total_s: float = TOTAL_S) -> tuple[Verdict, Links | None]:
    """Of node 0: wait for all, have them measure, and say what was found, also where it ends before its time."""
    try:
        listeners = opened(c, Reminder())
    except socket.gaierror as error:
        return Verdict(69, unresolved(c, error)), None
    except OSError as error:
        return Verdict(
            78,
            busy_port(c, error),
        ), None
    at = listeners[0].getsockname()[:2]
    own = (
        ("::1" if ":" in at[0] else "127.0.0.1") if at[0] in ("", "::", "0.0.0.0") else at[0],
        at[1],
    )
    threading.Thread(target=node_0_itself, args=(c, site, own), daemon=True).start()
    party = Party(c)
    try:
        party.gather(listeners)
        party.measure(total_s)
        party.verdict = party.of_problems()
    except Gone as gone:
        party.verdict = gone.verdict
    finally:
        party.dismiss()
        for listener in listeners:
            listener.close()
    return party.verdict, party.links()


def node_0_itself(c: Config, site: str, at: tuple[str, int]) -> None:
    """It takes part as others do; where it is over before it came, so be it."""
    with contextlib.suppress(OSError, Unreachable):
        take_part(c, site, at)


class Party:
    """The nodes as node 0 sees them."""

    def __init__(self, c: Config):
        self.c, self.key = c, secrets.token_hex(8)
        self.lines: dict[int, Line] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self.peers: dict[int, str] = {}
        self.pairs: list[Pair] = []
        self.flows: list[Flow] = []
        self.problems: list[str] = []
        self.verdict = Verdict(1, "it was ended")
        self.orders = 0

    @property
    def sites(self) -> list[str]:
        """Of each node: as it says itself, else where SITES spreads the nodes evenly; "" where that is not known."""
        said = [str(self.facts[rank].get("site") or "") for rank in sorted(self.facts)]
        if all(said) or self.c.sites == 1:
            return said if all(said) else ["" for _ in said]
        return [f"site {rank * self.c.sites // self.c.nodes}" for rank in range(self.c.nodes)]

    def name(self, rank: int) -> str:
        return named(self.facts[rank]) if rank in self.facts else f"node {rank}"

    def address(self, rank: int) -> Address:
        """Where the others reach it: as it reached node 0; node 0 as they were told."""
        host = self.c.master_host if rank == 0 else self.peers[rank]
        return Address(self.name(rank), host, int(self.facts[rank]["port"]))

    # ---- All are there
    def gather(self, listeners: Sequence[socket.socket]) -> None:
        """Raises Gone where not all come, or one that does not fit."""
        deadline, reminder = time.monotonic() + self.c.start_timeout_s, Reminder()
        strangers: list[tuple[Line, str, float]] = []
        for listener in listeners:
            listener.settimeout(LOOK_S)
        while len(self.facts) < self.c.nodes:
            for listener in listeners:
                with contextlib.suppress(TimeoutError):
                    connection, peer = listener.accept()
                    connection.settimeout(LOOK_S)
                    line = Line(connection)
                    with contextlib.suppress(Lost):
                        line.send(HELLO)
                        strangers.append(
                            (line, str(peer[0]).removeprefix("::ffff:"), time.monotonic())
                        )
            strangers = [one for one in strangers if not self.heard(*one)]
            self.still_there()
            missing = [str(rank) for rank in range(self.c.nodes) if rank not in self.facts]
            if missing and time.monotonic() > deadline:
                raise Gone(
                    Verdict(
                        69,
                        f"node {', '.join(missing)} did not come in {self.c.start_timeout_s} s: it was "
                        f"not started, or cannot reach {where(self.c)}; on each node: make net-probe "
                        f"NODES={self.c.nodes} NODE_RANK=i MASTER_ADDR={self.c.master_addr}",
                    )
                )
            if missing:
                reminder.say(
                    f"{len(self.facts)} of {self.c.nodes} nodes are there, waiting at {where(self.c)} for "
                    f"node {', '.join(missing)}"
                )
        for line in self.lines.values():
            line.send({"key": self.key})

    def heard(self, line: Line, peer: str, since: float) -> bool:
        """Whether a caller said who it is, or is none of ours. Raises Gone."""
        try:
            said = line.receive()
        except Lost:
            line.close()
            return True
        if not said:
            return time.monotonic() - since > 10
        facts = said[0]
        if not is_someone(facts) or not isinstance(facts.get("port"), int):
            line.close()
            return True
        rank = facts["node_rank"]
        if facts.get("nodes") != self.c.nodes or not 0 <= rank < self.c.nodes:
            self.lines[max([*self.lines, self.c.nodes]) + 1] = line
            raise Gone(
                Verdict(
                    64,
                    f"{named(facts)} has NODES={facts.get('nodes')}, node 0 has NODES={self.c.nodes}; "
                    "give all the same NODES, and each its own NODE_RANK below that",
                )
            )
        if rank in self.facts:
            self.lines[max([*self.lines, self.c.nodes]) + 1] = line
            raise Gone(
                Verdict(
                    64,
                    f"{named(facts)} and {self.name(rank)} both have NODE_RANK={rank}; give each its "
                    f"own, from 0 to {self.c.nodes - 1}",
                )
            )
        self.lines[rank], self.facts[rank], self.peers[rank] = line, facts, peer
        return True

    def still_there(self) -> None:
        """Raises Gone where a node that was there is not any more."""
        for rank, line in self.lines.items():
            try:
                line.receive()
            except Lost as lost:
                raise self.lost(rank, lost) from None

    def lost(self, rank: int, why: object) -> Gone:
        return Gone(
            Verdict(
                69,
                f"{self.name(rank)} is gone ({why}): it was stopped, or the network to it broke; what "
                "was measured until then is above, and make net-probe on all nodes starts again",
            )
        )

    # ---- Measuring
    def measure(self, total_s: float) -> None:
        """All pairs, and all at once. Raises Gone."""
        planned, streams = rounds(self.sites), site_registry.SYNC_STREAMS
        each = min(MOST_S, max(LEAST_S, total_s / max(1, len(planned))))
        all_s = min(ALL_S, total_s / 4)
        say(
            f"{self.c.nodes} nodes are there: {self.c.nodes * (self.c.nodes - 1)} pairs in {len(planned)} rounds, "
            f"about {len(planned) * each + all_s:.0f} s"
        )
        for chosen in planned:
            found = self.ask([(start, end, "pair") for start, end in chosen], each, streams)
            self.pairs += [Pair(start, end, **found[start]) for start, end in chosen]
        found = self.ask([(start, end, "flow") for start, end in ring(self.sites)], all_s, streams)
        for start, end in ring(self.sites):
            self.flows.append(Flow(start, end, found[start].get("many_gbit")))
            self.problems += [
                f"{self.name(start)}: {said}" for said in [found[start].get("problem")] if said
            ]

    def ask(
        self, orders: list[tuple[int, int, str]], seconds: float, streams: int
    ) -> dict[int, dict[str, Any]]:
        """What each of these found; who asks is in one order. Raises Gone."""
        waiting, found = {}, dict[int, dict[str, Any]]()
        for start, end, kind in orders:
            self.orders += 1
            waiting[start] = self.orders
            try:
                self.lines[start].send(
                    {
                        "order": self.orders,
                        "to": list(self.address(end)),
                        "kind": kind,
                        "seconds": seconds,
                        "streams": streams,
                    }
                )
            except Lost as lost:
                raise self.lost(start, lost) from None
        deadline = time.monotonic() + seconds + LATE_S
        while waiting:
            for rank, line in self.lines.items():
                try:
                    for said in line.receive():
                        if said.get("order") == waiting.get(rank):
                            del waiting[rank]
                            found[rank] = {
                                name: value for name, value in said.items() if name != "order"
                            }
                except Lost as lost:
                    raise self.lost(rank, lost) from None
            if waiting and time.monotonic() > deadline:
                raise self.lost(next(iter(waiting)), "it does not say what it found")
        return found

    # ---- The end
    def of_problems(self) -> Verdict:
        """69 where not all could be measured: training would meet the same."""
        failed = [f"{self.name(pair.start)}: {pair.problem}" for pair in self.pairs if pair.problem]
        said = list(dict.fromkeys([*failed, *self.problems]))
        return Verdict(69, "; ".join(said)) if said else Verdict(0)

    def dismiss(self) -> None:
        for line in self.lines.values():
            with contextlib.suppress(Lost):
                line.connection.settimeout(5)
                line.send({"code": self.verdict.code, "why": self.verdict.why})
            line.close()

    def links(self) -> Links | None:
        """None where nothing was measured."""
        if not self.pairs:
            return None
        hosts = tuple(str(self.facts[rank]["host"]) for rank in range(self.c.nodes))
        return Links(
            time.time(),
            hosts,
            tuple(self.sites),
            site_registry.SYNC_STREAMS,
            tuple(self.pairs),
            tuple(self.flows),
        )
