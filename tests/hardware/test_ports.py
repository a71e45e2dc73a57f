"""hardware/ports.py: ports for processes that are about to be started."""

import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from hardware import ports


def test_free_ports_are_none_that_an_outgoing_connection_may_take_meanwhile() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = [ports.free_ports(3) for _ in range(50)]
    assert (
        len(set(found)) > 40
    )  # of thousands, by chance; the same seed for all tests does not make them the same
    for port in found:
        with contextlib.ExitStack() as listening:
            for one in range(port, port + 3):
                assert not first <= one <= last
                listening.enter_context(socket.create_server(("127.0.0.1", one)))


def test_free_ports_are_not_beside_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.free_ports(3)
    drawn = iter([free, free - 1, free + 1])
    monkeypatch.setattr(
        ports.random, "SystemRandom", lambda: SimpleNamespace(randrange=lambda *_: next(drawn))
    )
    with socket.create_server(("", free)):
        assert ports.free_ports(2) == free + 1
