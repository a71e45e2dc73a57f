"""hardware/ports.py: ports for processes that are about to be started."""

import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from hardware import ports


def test_free_ports_are_none_that_an_outgoing_connection_may_take() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    draws = [ports.free_ports(3) for _ in range(50)]
    assert len({*draws}) > 40  # by chance, although all tests have the same seed
    for draw in draws:
        with contextlib.ExitStack() as stack:
            for port in range(draw, draw + 3):
                assert not first <= port <= last
                stack.enter_context(socket.create_server(("127.0.0.1", port)))


def test_free_ports_are_not_next_to_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.free_ports(3)
    draws = iter([free, free - 1, free + 1])
    chance = SimpleNamespace(choice=lambda _: next(draws))
    monkeypatch.setattr(ports.random, "SystemRandom", lambda: chance)
    with socket.create_server(("", free)):
        assert ports.free_ports(2) == free + 1


def test_the_free_port_is_the_next_one_or_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.free_ports(2)
    with socket.create_server(("", free)):
        assert ports.free_port(free) == free + 1
        assert ports.free_port(free - 1) == free + 1
    assert 1024 <= ports.free_port(65535) < 65535

    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(ports.socket, "create_server", refuse)
    with pytest.raises(OSError, match="All TCP ports of this machine from 1024 to 65535 are taken"):
        ports.free_port(29500)
