"""Namespaces joined by the relay: delay, rate, loss, what is counted, cut links, and that nothing is left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from bench.wan_lab import link
from bench.wan_lab.network import (
    PREFIX,
    CannotRun,
    Link,
    Network,
    address_of,
    ip,
    name_of,
    processes_in,
    what_is_missing,
)
from settings import ROOT

missing = what_is_missing() if sys.platform == "linux" else ["it needs Linux"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason="; ".join(missing) or "it can run"),
]

LINK = Link(gbit=0.1, one_way_ms=10)

# Sends datagrams to a place, or counts those that come until there is one of a single byte. 33 is SO_RCVBUFFORCE: the
# buffer has room for all of them, however late they are read.
SEND = (
    "import socket, sys, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "for i in range(int(sys.argv[3])): s.sendto(bytes(1000), (sys.argv[1], int(sys.argv[2]))); time.sleep(0.001)"
)
COUNT = (
    "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', int(sys.argv[1])))\n"
    "s.setsockopt(socket.SOL_SOCKET, 33, 2**24); print('ready', flush=True); n = 0; s.settimeout(60)\n"
    "while len(s.recv(2000)) > 1: n += 1\nprint(n)"
)
END = (
    "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "s.sendto(b'.', ('127.0.0.1', int(sys.argv[1])))"
)


@pytest.fixture
def network() -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Network(2, LINK, seed=5))
        except CannotRun as error:
            pytest.skip(str(error))
        yield made


def sent_through(network: Network, count: int, port: int = 7000) -> int:
    """How many of so many datagrams of 1,000 bytes come from site 0 to site 1."""
    before = settled(network)
    counting = network.start(
        1, [sys.executable, "-c", COUNT, str(port)], stdout=subprocess.PIPE, text=True
    )
    assert counting.stdout and counting.stdout.readline() == "ready\n"
    network.start(0, [sys.executable, "-c", SEND, address_of(1), str(port), str(count)]).wait()
    deadline = time.monotonic() + 20
    while settled(network) < before + count and time.monotonic() < deadline:
        time.sleep(0.05)
    network.start(
        1, [sys.executable, "-c", END, str(port)]
    ).wait()  # at the place itself, where no link counts it
    return int(counting.stdout.readline())


def settled(network: Network) -> int:
    """Of how many packets it is known what became of them."""
    return sum(
        c.received_packets + c.lost + c.cut_off + c.queue_drops + c.ingress_drops
        for c in network.counters()
    )


def namespaces() -> list[str]:
    return [line for line in ip("netns", "list").splitlines() if line.startswith(PREFIX)]


def test_delay_and_rate_are_those_asked_for(network: Network) -> None:
    found = link.found(network)
    assert 9.9 < found["one_way_ms"] < 20
    # not more than the cap, but for what a lost packet held back before the count began
    assert 0.04 < found["gbit"] < 0.12 and max(found["ring_gbit"]) < 0.12
    assert link.row(found).count("|") == link.HEADER[0].count("|")
    assert found["congestion_control"]


def test_bytes_are_counted_at_both_ends_and_a_site_has_its_own_name(network: Network) -> None:
    assert sent_through(network, 200) == 200
    before, after = network.counters()[:2]
    assert before.sent_bytes == after.received_bytes == 200 * (1000 + 28)  # IPv4 and UDP headers
    assert before.sent_packets == after.received_packets == 200
    said = network.start(
        1,
        [
            sys.executable,
            "-c",
            "import socket; h = socket.gethostname(); "
            f"print(h, socket.gethostbyname(h), socket.gethostbyname({name_of(0)!r}))",
        ],
        stdout=subprocess.PIPE,
        text=True,
    ).communicate()[0]
    assert said.split() == [name_of(1), address_of(1), address_of(0)]
    assert socket.gethostname() != name_of(1)


def test_a_cut_link_loses_all_and_a_joined_one_nothing(network: Network) -> None:
    network.cut(1)
    assert sent_through(network, 50, 7001) == 0
    assert network.counters()[0].cut_off == 50
    network.join(1)
    assert sent_through(network, 50, 7002) == 50


def test_a_link_can_be_changed_and_loses_the_same_packets_for_one_seed(network: Network) -> None:
    network.change(Link(0.1, 1, loss=0.3))
    through = sent_through(network, 300, 7003)
    counted = network.counters()[0]
    assert counted.lost == 300 - through
    assert 40 < counted.lost < 140  # 90 are expected, and eight standard deviations are 64
    with pytest.raises(RuntimeError, match="no such command or site"):
        network.cut(9)


def test_a_killed_site_has_no_process_left(network: Network) -> None:
    process = network.start(0, ["sh", "-c", "sleep 1000 & sleep 1000"])
    deadline = time.monotonic() + 10
    while len(processes_in(name_of(0))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert network.kill(0) == 3
    assert process.wait(120) == -signal.SIGKILL
    assert processes_in(name_of(0)) == []


HOLD = (
    "import sys, time\nfrom bench.wan_lab.network import *\nwith stopping(), Network(2, Link(0.1, 1)) as network:\n"
    "    network.start(1, ['sleep', '1000']); print('up', flush=True); time.sleep(1000)"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_lab_that_is_ended_leaves_nothing_behind_for_the_next_one(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as lab:
        try:
            assert lab.stdout
            if lab.stdout.readline() != "up\n":
                pytest.skip("another lab is at work on this machine")
            deadline = (
                time.monotonic() + 60
            )  # the shell that becomes sleep takes a moment to get there
            while not (there := processes_in(name_of(1))) and time.monotonic() < deadline:
                time.sleep(0.05)
            inside = min(there)
            lab.send_signal(number)
            lab.wait(120)
        finally:
            lab.kill()  # or the end of the block would wait for it for ever
    if number == signal.SIGKILL:
        assert namespaces()
        with Network(2, LINK):
            assert len(namespaces()) == 3
    assert namespaces() == []
    deadline = time.monotonic() + 5
    while (
        os.path.exists(f"/proc/{inside}") and time.monotonic() < deadline
    ):  # it may still be told of its end
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{inside}")
