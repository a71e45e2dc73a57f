"""make net-probe on each node: all come to node 0, which says who measures what, round by round.

Node 0 serves a registry (train/distributed/registry.py) and takes part as the others do. Each node
says that it is there, hears an order, measures, and says what it found. Requests are signed with
the run's secret; what is measured goes over plain sockets, which want a key from the registry.
"""

import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from doctor.net_probe.net_measure import Address, Ears, Unreached, flood, pings
from doctor.net_probe.net_rounds import ring, rounds
from plan.network.links import Flow, Links, Pair
from settings.addresses import is_loopback
from settings.config import Config
from settings.finding import complain
from train.diloco import site_registry
from train.distributed.registry import (
    Client,
    Facts,
    Members,
    NotAdmitted,
    Unreachable,
    Verdict,
    named,
)
from train.distributed.rendezvous import CannotServe, client_of, serving
from train.distributed.run_secret import describe_file

TOTAL_S = 48.0  # of all pairs; ALL_S more with all at once
ALL_S = 5.0
LEAST_S, MOST_S = 1.5, 8.0  # of a pair: pings, one connection, several
PING_SHARE = 0.15
LATE_S = 30.0  # beyond its time, for a node to say what it found
GONE_S = 6.0  # a node that has nothing to measure and is not heard for so long is gone
LOOK_S = 0.1
REMIND_S = 15.0

Say = Callable[[str], None]


def say(text: str) -> None:
    """What goes on, beside what is found."""
    complain(text)


class Gone(Exception):
    """It cannot go on: a node is lost, or does not fit; the verdict says which."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict.why)
        self.verdict = verdict


# ---------------------------------------------------------------------------------------------------
# Every node
# ---------------------------------------------------------------------------------------------------


def take_part(c: Config, site: str = "") -> Verdict:
    """Come to node 0 and measure what it says, until it is over."""
    ears = Ears("", is_loopback(c.master_host))
    facts = {"node_rank": c.node_rank, "nodes": c.nodes, "site": site, "port": ears.port}
    try:
        return obey(client_of(c.replace(sync="ddp")), facts, ears, c.start_timeout_s)
    finally:
        ears.close()


def obey(client: Client, facts: Facts, ears: Ears, timeout_s: float) -> Verdict:
    """What node 0 says, until its last word. It has timeout_s to come."""
    deadline = time.monotonic() + timeout_s
    reminded = -REMIND_S
    done: Facts = {"order": 0}
    while True:
        try:
            answer = client.say(**facts, done=done)
        except NotAdmitted as error:
            return Verdict(64, str(error))
        except Unreachable as error:
            now = time.monotonic()
            if ears.key:
                return Verdict(
                    69,
                    f"node 0 is gone ({error}): it was stopped, or the network between broke; start "
                    "make net-probe again on all nodes",
                )
            if now > deadline:
                return Verdict(69, f"node 0 was not reached in {timeout_s:.0f} s: {error}")
            if now - reminded > REMIND_S:
                say(f"{error}; trying for {deadline - now:.0f} s more")
                reminded = now
            time.sleep(0.5)
            continue
        if answer["verdict"]:
            return Verdict(*answer["verdict"])
        ears.key = answer["key"]
        order = answer["order"]
        if order and order["order"] != done["order"]:
            done = {"order": order["order"]} | carry_out(order, ears.key)
        else:
            time.sleep(LOOK_S)


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
    party = Party(c)
    try:
        with serving(c, party):
            if secret := describe_file(c, sys.stderr.isatty()):
                say(secret)
            threading.Thread(target=take_part, args=(c, site), daemon=True).start()
            try:
                party.gather()
                party.measure(total_s)
                party.verdict = party.of_problems()
            except Gone as gone:
                party.verdict = gone.verdict
            party.dismiss()
    except CannotServe as error:
        return Verdict(78, str(error)), None
    return party.verdict, party.links()


class Party(Members):
    """The nodes as node 0 sees them."""

    def __init__(self, c: Config):
        super().__init__()
        self.c, self.key = c, secrets.token_hex(8)
        self.pairs: list[Pair] = []
        self.flows: list[Flow] = []
        self.problems: list[str] = []
        self.orders: dict[int, Facts] = {}  # what each node is to measure now
        self.given = 0  # orders so far
        self.verdict: Verdict | None = None
        self.told: set[int] = set()

    def reply(self, name: int, now: float) -> Facts:
        if self.verdict:
            self.told.add(name)
        return {"key": self.key, "order": self.orders.get(name), "verdict": self.verdict}

    @property
    def sites(self) -> list[str]:
        """Of each node: as it says itself, else where SITES spreads the nodes evenly; "" where that is not known."""
        said = [str(self.members[rank].facts["site"]) for rank in sorted(self.members)]
        if all(said) or self.c.sites == 1:
            return said if all(said) else ["" for _ in said]
        return [f"site {rank * self.c.sites // self.c.nodes}" for rank in range(self.c.nodes)]

    def name(self, rank: int) -> str:
        return named(self.members[rank].facts)

    def address(self, rank: int) -> Address:
        """Where the others reach it: as it reached node 0; node 0 as they were told."""
        host = self.c.master_host if rank == 0 else self.members[rank].address
        return Address(self.name(rank), host, int(self.members[rank].facts["port"]))

    # ---- All are there
    def gather(self) -> None:
        """Raises Gone where not all come, or one that does not fit."""
        deadline = time.monotonic() + self.c.start_timeout_s
        reminded = time.monotonic()
        where = f"{self.c.master_host}:{self.c.registry_port}"
        while True:
            self.refuse_misfits()
            self.still_there()
            missing = [str(rank) for rank in range(self.c.nodes) if rank not in self.members]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise Gone(
                    Verdict(
                        69,
                        f"node {', '.join(missing)} did not come in {self.c.start_timeout_s} s: it was "
                        f"not started, or cannot reach {where}; on each node: make net-probe "
                        f"NODES={self.c.nodes} NODE_RANK=i MASTER_ADDR={self.c.master_addr}",
                    )
                )
            if time.monotonic() - reminded > REMIND_S:
                say(f"waiting at {where} for node {', '.join(missing)}")
                reminded = time.monotonic()
            time.sleep(LOOK_S)

    def refuse_misfits(self) -> None:
        """Raises Gone."""
        for rank, member in sorted(self.members.items()):
            nodes = member.facts["nodes"]
            if nodes != self.c.nodes:
                raise Gone(
                    Verdict(
                        64,
                        f"{self.name(rank)} has NODES={nodes}, node 0 has NODES={self.c.nodes}; "
                        "give all the same NODES, and each its own NODE_RANK below that",
                    )
                )
            if member.rival:
                raise Gone(
                    Verdict(
                        64,
                        f"{self.name(rank)} and one on {member.rival} both have NODE_RANK={rank}; "
                        f"give each its own, from 0 to {self.c.nodes - 1}",
                    )
                )

    def still_there(self) -> None:
        """Raises Gone where a node that was there is not any more."""
        for rank, member in sorted(self.members.items()):
            silent_s = time.monotonic() - member.heard_at
            if rank not in self.orders and silent_s > GONE_S:
                raise self.lost(rank, f"not heard for {silent_s:.0f} s")

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
            self.given += 1
            waiting[start] = self.given
            self.orders[start] = {
                "order": self.given,
                "to": list(self.address(end)),
                "kind": kind,
                "seconds": seconds,
                "streams": streams,
            }
        deadline = time.monotonic() + seconds + LATE_S
        while waiting:
            for rank, number in list(waiting.items()):
                done = dict(self.members[rank].facts["done"])
                if done.pop("order") == number:
                    found[rank] = done
                    del waiting[rank], self.orders[rank]
            self.still_there()
            if waiting and time.monotonic() > deadline:
                raise self.lost(next(iter(waiting)), "it does not say what it found")
            time.sleep(LOOK_S / 2)
        return found

    # ---- The end
    def of_problems(self) -> Verdict:
        """69 where not all could be measured: training would meet the same."""
        failed = [f"{self.name(pair.start)}: {pair.problem}" for pair in self.pairs if pair.problem]
        said = list(dict.fromkeys([*failed, *self.problems]))
        return Verdict(69, "; ".join(said)) if said else Verdict(0)

    def dismiss(self) -> None:
        """Wait until the nodes have heard how it ended."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and self.told < self.members.keys():
            time.sleep(LOOK_S)

    def links(self) -> Links | None:
        """None where nothing was measured."""
        if not self.pairs:
            return None
        hosts = tuple(str(self.members[rank].facts["host"]) for rank in range(self.c.nodes))
        return Links(
            time.time(),
            hosts,
            tuple(self.sites),
            site_registry.SYNC_STREAMS,
            tuple(self.pairs),
            tuple(self.flows),
        )
