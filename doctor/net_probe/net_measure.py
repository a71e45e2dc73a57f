"""Between two nodes: round trips, and how much goes through so many connections. Plain sockets, nothing is installed.

    caller     {"net_probe": key, "kind": "echo"}                        then 32 bytes, as often as it likes
    listener   the same bytes
    caller     {"net_probe": key, "kind": "sink", "warm_s", "seconds"}   then as much as it can
    listener   {"bytes", "seconds"}: what came behind the first warm_s, until `seconds` were over

It is the listener who counts: what a caller hands to its kernel has not arrived. One process of Python moves some 20
Gbit/s; a faster link is measured as that.
"""

import contextlib
import json
import math
import select
import socket
import struct
import threading
import time
from typing import Any, NamedTuple

PING_BYTES, CHUNK = 32, 2**20
CONNECT_S = 5.0  # for a node to take a connection
SILENT_S = 10.0  # without a byte a connection counts as broken
MOST_PINGS = 500
LINE = 1000  # bytes of a header, at most


class Unreached(Exception):
    """Another node could not be measured; the message says how far it went, and what to look at."""


class Address(NamedTuple):
    """Where a node listens, and how it is called."""

    name: str
    host: str
    port: int

    @property
    def where(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# ---------------------------------------------------------------------------------------------------
# The listening side
# ---------------------------------------------------------------------------------------------------


class Ears:
    """Listens on a port of its own, until close(); a thread for each connection, but none for who lacks the key."""

    def __init__(self, key: str, loopback: bool = False):
        self.key, self.over = key, threading.Event()
        self.listener = listening(loopback)
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self.accept, daemon=True).start()

    def close(self) -> None:
        self.over.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def accept(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            connection.settimeout(SILENT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked, rest = header(connection)
            if asked.get("net_probe") != self.key:
                return
            if asked["kind"] == "echo":
                echo(connection, rest)
            else:
                counted = sink(connection, float(asked["warm_s"]), float(asked["seconds"]))
                connection.sendall(json.dumps(counted).encode() + b"\n")
                while connection.recv(CHUNK):  # a close with data unread would overtake the answer
                    pass


def listening(loopback: bool) -> socket.socket:
    """On a free port, of all addresses or of loopback only."""
    if loopback:
        return socket.create_server(("127.0.0.1", 0), backlog=128)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
            )
    return socket.create_server(("", 0), backlog=128)


def header(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The first line, and what came with it. Raises OSError, ValueError."""
    data = b""
    while b"\n" not in data:
        more = connection.recv(LINE)
        if not more or len(data) > LINE:
            raise ValueError("no header")
        data += more
    line, rest = data.split(b"\n", 1)
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("no header")
    return content, rest


def echo(connection: socket.socket, first: bytes) -> None:
    data = first
    while True:
        if data:
            connection.sendall(data)
        data = connection.recv(PING_BYTES)
        if not data:
            return


def sink(connection: socket.socket, warm_s: float, seconds: float) -> dict[str, float]:
    """Takes what comes; returns the bytes behind the first warm_s, and in which time they came. A machine that is too
    busy to look meanwhile takes longer."""
    buffer, counted = bytearray(CHUNK), 0
    began = counting = last = 0.0
    while True:
        got = connection.recv_into(buffer)
        now = time.monotonic()
        if not got:
            break
        began = began or now
        if counting:
            counted, last = counted + got, now
        elif now - began >= warm_s:
            counting = last = now
        if counted and now - began >= seconds:
            break
    return {"bytes": counted, "seconds": last - counting}


# ---------------------------------------------------------------------------------------------------
# The calling side
# ---------------------------------------------------------------------------------------------------


def connect(to: Address) -> socket.socket:
    """Raises Unreached."""
    any_port = "gloo and NCCL choose any port between nodes, so all must be open"
    try:
        connection = socket.create_connection((to.host, to.port), CONNECT_S)
    except socket.gaierror as error:
        raise Unreached(
            f"{to.name} gives its address as {to.host}, which does not resolve here ({error.strerror}); "
            "set MASTER_ADDR to one that resolves on all nodes"
        ) from None
    except ConnectionRefusedError:
        raise Unreached(
            f"{to.name} at {to.where} refuses connections: a firewall, or another machine has that "
            f"address; {any_port}"
        ) from None
    except TimeoutError:
        raise Unreached(
            f"{to.name} at {to.where} does not answer in {CONNECT_S:.0f} s: a firewall drops what is sent "
            f"there; {any_port}"
        ) from None
    except OSError as error:
        raise Unreached(
            f"{to.name} at {to.where} cannot be reached ({error.strerror or error}); {any_port}"
        ) from None
    connection.settimeout(SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def pings(to: Address, key: str, seconds: float) -> tuple[float, float]:
    """(median, 95 in 100 are no longer) of round trips in milliseconds; at least three. Raises Unreached."""
    found: list[float] = []
    with connect(to) as connection:
        try:
            connection.sendall(json.dumps({"net_probe": key, "kind": "echo"}).encode() + b"\n")
            began = time.monotonic()
            while len(found) < MOST_PINGS and (
                len(found) < 4 or time.monotonic() - began < seconds
            ):
                sent = time.perf_counter()
                connection.sendall(bytes(PING_BYTES))
                left = PING_BYTES
                while left:
                    got = len(connection.recv(left))
                    if not got:
                        raise Unreached(f"{to.name} closed the connection")
                    left -= got
                found.append(1000 * (time.perf_counter() - sent))
        except OSError as error:
            raise Unreached(broken(to, error)) from None
    ordered = sorted(found[1:])  # the first waits for a thread to start
    return ordered[len(ordered) // 2], ordered[math.ceil(0.95 * len(ordered)) - 1]


def flood(to: Address, key: str, streams: int, seconds: float) -> float:
    """Gbit/s through so many connections at once, each as fast as it can; a third of the time is warming up. Raises
    Unreached."""
    connections, counted, troubles = [], [0.0] * streams, list[str]()
    try:
        for _ in range(streams):
            connections.append(connect(to))

        def push(at: int) -> None:
            try:
                counted[at] = pushed(connections[at], key, seconds / 3, seconds)
            except (OSError, ValueError, KeyError, ZeroDivisionError) as error:
                troubles.append(broken(to, error))

        threads = [threading.Thread(target=push, args=(at,), daemon=True) for at in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 2 * SILENT_S)
    finally:
        for connection in connections:
            connection.close()
    if troubles:
        raise Unreached(troubles[0])
    return sum(counted)


def pushed(connection: socket.socket, key: str, warm_s: float, seconds: float) -> float:
    """Gbit/s that arrived through one. Raises OSError, ValueError."""
    asked = {"net_probe": key, "kind": "sink", "warm_s": warm_s, "seconds": seconds}
    connection.sendall(json.dumps(asked).encode() + b"\n")
    # what is still on its way when the time is over shall not hold up the next measurement
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.setblocking(False)
    ready, chunk = select.poll(), memoryview(bytes(CHUNK))
    ready.register(connection, select.POLLIN | select.POLLOUT)
    deadline = time.monotonic() + seconds + SILENT_S
    while time.monotonic() < deadline:
        for _, event in ready.poll(1000 * SILENT_S):
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                connection.settimeout(SILENT_S)
                counted, _ = header(connection)
                return 8 * float(counted["bytes"]) / float(counted["seconds"]) / 1e9
            with contextlib.suppress(BlockingIOError):
                connection.send(chunk)
    raise TimeoutError("it does not say what arrived")


def broken(to: Address, error: Exception) -> str:
    if isinstance(error, ZeroDivisionError):
        return (
            f"nothing of what was sent to {to.name} at {to.where} arrived in time: the link is slower than can be "
            "measured"
        )
    reason = (
        (error.strerror if isinstance(error, OSError) else None)
        or str(error)
        or type(error).__name__
    )
    return f"the connection to {to.name} at {to.where} broke while it was measured ({reason})"
