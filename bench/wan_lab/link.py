"""What the relay really gives: round trip and rate between sites, measured by plain TCP. Standard library only.

    alone       8 connections from site 0 to site 1
    in a ring   the same from each site to the next at once, as an all-reduce does; the slowest counts

Payload is counted where it arrives, over the last part of a measurement only, since connections start slowly.
Round trips are those of one byte and its answer, over a link that does nothing else.
"""

import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from bench.wan_lab.network import Network, address_of
from doctor.gpu_probe.messages import say

PORT = 5201
STREAMS = 8
ROUNDS = 15  # round trips that are measured
WARM_S, COUNT_S = 1.0, 2.0
PIECE = 2**18


def serve(address: str, port: int) -> None:
    """Answer one connection's bytes, and count what comes over STREAMS others; say both."""
    with socket.create_server((address, port), backlog=STREAMS + 1) as server:
        say(ready=True)
        first, _ = server.accept()
        with first:
            first.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := first.recv(1):
                first.sendall(data)
        connections = [server.accept()[0] for _ in range(STREAMS)]
    counts = [0] * STREAMS
    threads = [
        threading.Thread(target=count, args=(connection, counts, i))
        for i, connection in enumerate(connections)
    ]
    for thread in threads:
        thread.start()
    time.sleep(WARM_S)
    before, began = sum(counts), time.monotonic()
    time.sleep(COUNT_S)
    got, took = sum(counts) - before, time.monotonic() - began
    for thread in threads:
        thread.join()
    say(gbit=8 * got / took / 1e9)


def count(connection: socket.socket, counts: list[int], which: int) -> None:
    """Add up what comes until the other side closes."""
    buffer = bytearray(PIECE)
    with connection:
        while got := connection.recv_into(buffer):
            counts[which] += got


def measure(address: str, port: int) -> None:
    """Ask for round trips, then fill STREAMS connections for as long as the other side counts; say the round trips."""
    trips = []
    with socket.create_connection((address, port), timeout=20) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUNDS):
            began = time.monotonic()
            one.sendall(b"x")
            one.recv(1)
            trips.append(1000 * (time.monotonic() - began))
    deadline = time.monotonic() + WARM_S + COUNT_S + 0.5

    def fill() -> None:
        data = bytes(PIECE)
        with socket.create_connection((address, port), timeout=20) as connection:
            while time.monotonic() < deadline:
                connection.sendall(data)

    threads = [threading.Thread(target=fill) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(round_trip_ms=statistics.median(trips), least_ms=min(trips), most_ms=max(trips))


def between(network: Network, pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """What each pair (from, to) finds, all at once. Raises RuntimeError where a process fails."""
    from settings import ROOT

    def start(place: int, what: str, to: int, port: int) -> subprocess.Popen[str]:
        return network.start(
            place,
            [sys.executable, "-m", "bench.wan_lab.link", what, address_of(to), str(port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    servers = [start(to, "serve", to, PORT + i) for i, (_, to) in enumerate(pairs)]
    for server in servers:
        line_of(server)
    clients = [start(here, "measure", to, PORT + i) for i, (here, to) in enumerate(pairs)]
    return [
        line_of(server) | line_of(client) for server, client in zip(servers, clients, strict=True)
    ]


def line_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    import json

    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with exit code {process.wait()}, see above")
    return dict(json.loads(line))


def found(network: Network) -> dict[str, Any]:
    """Delay and rate of a network beside those asked for, alone and with all sites sending at once."""
    before = network.counters()
    (alone,) = between(network, [(0, 1)])
    network.counters_and_delay()
    ring = between(network, [(site, (site + 1) % network.sites) for site in range(network.sites)])
    after, latest_ms = network.counters_and_delay()
    drops = sum(
        now.queue_drops + now.ingress_drops - then.queue_drops - then.ingress_drops
        for now, then in zip(after, before, strict=True)
    )
    return {
        "sites": network.sites,
        "asked_gbit": network.link.gbit,
        "asked_one_way_ms": network.link.one_way_ms,
        "loss": network.link.loss,
        "mtu": network.link.mtu,
        "congestion_control": network.congestion_control(),
        "one_way_ms": alone["round_trip_ms"] / 2,
        "least_ms": alone["least_ms"] / 2,
        "most_ms": alone["most_ms"] / 2,
        "gbit": alone["gbit"],
        "ring_gbit": [pair["gbit"] for pair in ring],
        "latest_ms": latest_ms,
        "queue_drops": drops,
        "undelivered": sum(network.undelivered(site) for site in range(network.sites)),
    }


HEADER = (
    "| sites | asked for | one way, ms | rate, Gbit/s | all sites at once, each | packets dropped by queues; by "
    "the machine | relay late by, ms | MTU; TCP |",
    "|---|---|---|---|---|---|---|---|",
)


def row(taken: dict[str, Any]) -> str:
    from bench.wan_lab.network import Link

    link = Link(taken["asked_gbit"], taken["asked_one_way_ms"], taken["loss"])
    ring = taken["ring_gbit"]
    return (
        "| "
        + " | ".join(
            [
                str(taken["sites"]),
                str(link),
                f"{taken['one_way_ms']:.1f} ({taken['least_ms']:.1f}-{taken['most_ms']:.1f})",
                f"{taken['gbit']:.3g}",
                f"{statistics.median(ring):.3g} ({min(ring):.3g}-{max(ring):.3g})",
                f"{taken['queue_drops']}; {taken['undelivered']}",
                f"{taken['latest_ms']:.1f}",
                f"{taken['mtu']}; {taken['congestion_control']}",
            ]
        )
        + " |"
    )


if __name__ == "__main__":
    {"serve": serve, "measure": measure}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
