"""hardware/ports.py: ports for processes that are about to be started."""

import contextlib
import socket
from pathlib import Path

from hardware import ports


def listen(port):
    return socket.create_server(("", port))


def test_free_ports_are_none_that_an_outgoing_connection_may_take():
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first, last = text.split()
    outgoing = range(int(first), int(last) + 1)
    draws = set()
    for _ in range(50):
        draw = ports.free_ports(3)
        draws.add(draw)
        with contextlib.ExitStack() as stack:
            for port in range(draw, draw + 3):
                assert port not in outgoing
                stack.enter_context(listen(port))
    assert len(draws) > 40  # by chance, although all tests have the same seed


def test_free_ports_are_not_next_to_one_that_is_taken(monkeypatch):
    free = ports.free_ports(3)
    draws = iter([free, free - 1, free + 1])

    class Chance:
        def choice(self, _):
            return next(draws)

    monkeypatch.setattr(ports.random, "SystemRandom", Chance)
    with listen(free):
        assert ports.free_ports(2) == free + 1
