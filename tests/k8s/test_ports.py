"""The ports of the kubelet's pods: free, never given to anybody else meanwhile, and others in every test process."""

import os
import socket

import pytest

from tests.cluster_sim.kubelet import Ports


def test_an_address_keeps_its_port_and_no_other_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    ports = Ports()
    first = ports["a.a"]
    assert ports["a.a"] == first and ports["b.b"] != first, "though nobody listens there yet"
    with socket.create_server(("127.0.0.1", first)):
        assert Ports()["a.a"] != first
    assert all(1024 < port < 32768 for port in ports.values()), (
        "the kernel gives away those from there on"
    )


def test_processes_side_by_side_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, set[int]] = {}
    for worker in ("gw0", "gw1", "gw11"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        ports = Ports()
        taken[worker] = {ports[str(number)] for number in range(20)}
    assert len(set.union(*taken.values())) == 60
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    monkeypatch.setattr(os, "getpid", lambda: 1000)
    one = Ports()["a.a"]
    monkeypatch.setattr(os, "getpid", lambda: 1001)
    assert Ports()["a.a"] - one >= 100
