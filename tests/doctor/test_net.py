"""make net-probe between processes of this machine, by real sockets: what is measured, and what is said when a node
dies, a port is closed, or a link is slow."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doctor.net_probe import net, net_nodes
from doctor.net_probe.net_measure import Address, Ears, Unreached, flood, pings, sink
from doctor.net_probe.net_rounds import needs_of, ring, rounds
from plan.network import links
from plan.network.links import Flow, Links, Pair
from settings import ROOT, SettingsError
from settings.config import Config
from tests.doctor.slow_link import SlowLink
from train.distributed.registry import Verdict
from train.distributed.rendezvous import client_of


@pytest.fixture
def port(free_port: int) -> int:
    return free_port


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 says how long each takes."""
    monkeypatch.setattr(net_nodes, "LEAST_S", 0.25)
    monkeypatch.setattr(net_nodes, "LATE_S", 10.0)


def settings(port: int, nodes: int, rank: int = 0, **more: Any) -> Config:
    return dataclasses.replace(
        Config(),
        nodes=nodes,
        node_rank=rank,
        master_addr=f"127.0.0.1:{port}",
        start_timeout_s=60,
        run_name="run",
        **more,
    )


def typed(port: int, nodes: int, rank: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "doctor.net_probe.net",
        "pod",
        str(rank),
        str(nodes),
        "127.0.0.1",
        str(port),
        "3",
        "48",
        "60",
    ]


class Others:
    """The nodes but the first, each a process as kubectl exec or a shell starts it."""

    def __init__(self, port: int, nodes: int):
        self.processes = {
            rank: subprocess.Popen(
                typed(port, nodes, rank),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, nodes)
        }

    def ended(self, rank: int) -> tuple[int, str]:
        _, err = self.processes[rank].communicate(timeout=120)
        return self.processes[rank].returncode, err

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@contextlib.contextmanager
def others(port: int, nodes: int) -> Iterator[Others]:
    found = Others(port, nodes)
    try:
        yield found
    finally:
        found.close()


# ---- Measuring


def test_every_pair_and_all_at_once(port: int) -> None:
    with others(port, 3) as party:
        verdict, found = net_nodes.conduct(settings(port, 3), total_s=5.0)
        assert verdict == Verdict(0) and found
        assert [party.ended(rank) for rank in (1, 2)] == [(0, ""), (0, "")]
    assert [
        (pair.start, pair.end)
        for pair in sorted(found.pairs, key=lambda pair: (pair.start, pair.end))
    ] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    for pair in found.pairs:
        assert (
            not pair.problem
            and pair.rtt_ms
            and pair.rtt_p95_ms
            and pair.one_gbit
            and pair.many_gbit
        )
        assert 0 < pair.rtt_ms <= pair.rtt_p95_ms
    assert [(flow.start, flow.end) for flow in found.at_once] == [(0, 1), (1, 2), (2, 0)]
    assert all(flow.gbit for flow in found.at_once)
    assert found.hosts == 3 * (socket.gethostname(),) and not found.known and found.streams == 16
    assert links.of_json(links.to_json(found)) == found


def node_behind(c: Config, port: int) -> threading.Thread:
    """A node that gives another port than its own as that where it listens."""

    def work() -> None:
        ears = Ears("", loopback=True)
        link = SlowLink(ears.port, 0.1, 1e6) if not port else None
        facts = {
            "node_rank": c.node_rank,
            "host": "far",
            "nodes": c.nodes,
            "site": "",
            "port": link.port if link else port,
        }
        net_nodes.obey(client_of(c), facts, ears, 60.0)
        ears.close()
        if link:
            link.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_slow_link_is_measured_as_it_is(port: int) -> None:
    """100 ms each way and 1 MB/s, which are 0.008 Gbit/s, on the way to node 1; none of it on the way back. So
    slow that what a busy machine adds is little beside it."""
    node_behind(settings(port, 2, 1), 0)
    verdict, found = net_nodes.conduct(settings(port, 2), total_s=5.0)
    assert verdict == Verdict(0) and found
    there, back = sorted(found.pairs, key=lambda pair: pair.start)
    assert there.rtt_ms and back.rtt_ms and back.many_gbit
    assert 200 <= there.rtt_ms < 400 and back.rtt_ms < 100
    for value in (there.one_gbit, there.many_gbit, found.at_once[0].gbit):
        assert value and 0.004 < value < 0.012, found
    assert back.many_gbit > 0.1
    assert (
        0.004 < float(found.settings["WAN_GBIT"]) < 0.012
        and 200 <= float(found.settings["WAN_RTT_MS"]) < 400
    )


def test_a_closed_port_is_named_and_the_rest_is_measured(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        closed = int(nobody.getsockname()[1])
    node_behind(settings(port, 2, 1), closed)
    verdict, found = net_nodes.conduct(settings(port, 2), total_s=3.0)
    assert verdict.code == 69 and found
    assert (
        "node 1 (far) at 127.0.0.1:" in verdict.why
        and "refuses connections: a firewall" in verdict.why
    )
    assert "all must be open" in verdict.why
    there, back = sorted(found.pairs, key=lambda pair: pair.start)
    assert there.many_gbit is None and "refuses" in there.problem and back.many_gbit
    assert found.settings["WAN_GBIT"] == f"{min(back.many_gbit, found.at_once[1].gbit or 1e9):.3g}"


def test_a_node_that_dies_ends_it_for_all(port: int, capfd: pytest.CaptureFixture) -> None:
    with others(port, 3) as party:
        killer = threading.Timer(0, lambda: None)

        def kill_when_it_measures(text: str) -> None:
            nonlocal killer
            killer = threading.Timer(0.5, lambda: os.kill(party.processes[2].pid, signal.SIGKILL))
            killer.start()

        before, net_nodes.say = net_nodes.say, kill_when_it_measures
        try:
            verdict = net_nodes.conduct(settings(port, 3), total_s=20.0)[0]
        finally:
            net_nodes.say = before
        killer.join()
        assert verdict.code == 69
        assert verdict.why.startswith(f"node 2 ({socket.gethostname()}) is gone (")
        code, said = party.ended(1)
        assert code == 69 and "net-probe: node 2 (" in said and "is gone" in said


def test_node_0_that_dies_is_named_on_the_others(port: int) -> None:
    with others(port, 2) as party:
        first = subprocess.Popen(
            typed(port, 2, 0),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert first.stderr
        assert any("2 nodes are there: 2 pairs in 2 rounds" in line for line in first.stderr)
        first.kill()
        first.communicate()
        code, said = party.ended(1)
    assert code == 69 and "node 0 is gone (" in said and "again on all nodes" in said


# ---- Who does not fit, and who does not come


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"nodes": 3, "node_rank": 1}, "has NODES=3, node 0 has NODES=2"),
        ({"nodes": 2, "node_rank": 0}, "both have NODE_RANK=0; give each its own, from 0 to 1"),
    ],
)
def test_who_does_not_fit_is_told_so(port: int, more: dict[str, int], words: str) -> None:
    told: list[Verdict] = []
    c = dataclasses.replace(settings(port, 2), **more)

    def node() -> None:
        facts = {"node_rank": c.node_rank, "host": "other", "nodes": c.nodes, "site": "", "port": 1}
        told.append(net_nodes.obey(client_of(c), facts, Ears("", loopback=True), 60.0))

    thread = threading.Thread(target=node)
    thread.start()
    verdict, found = net_nodes.conduct(settings(port, 2), total_s=1.0)
    thread.join(10)
    assert verdict.code == 64 and words in verdict.why and found is None
    assert told == [verdict]


def test_nodes_that_do_not_come_are_named(port: int) -> None:
    c = dataclasses.replace(settings(port, 3), start_timeout_s=1)
    verdict, found = net_nodes.conduct(c)
    assert found is None and verdict.code == 69
    assert (
        f"node 1, 2 did not come in 1 s: it was not started, or cannot reach 127.0.0.1:{port + 1}"
        in verdict.why
    )
    alone = net_nodes.take_part(dataclasses.replace(c, node_rank=1))
    assert (
        alone.code == 69
        and f"node 0 was not reached in 1 s: 127.0.0.1:{port + 1} refuses connections" in alone.why
    )
    lost = net_nodes.take_part(
        dataclasses.replace(c, node_rank=1, master_addr="no-such-host.invalid")
    )
    assert lost.code == 69 and "no-such-host.invalid:29501 cannot be reached" in lost.why


def test_another_program_at_the_port_is_no_node_0(port: int) -> None:
    with socket.create_server(("127.0.0.1", port + 1)) as listener:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"220 mail.example.org\n")

        threading.Thread(target=greet, daemon=True).start()
        told = net_nodes.take_part(dataclasses.replace(settings(port, 2, 1), start_timeout_s=1))
        taken, found = net_nodes.conduct(settings(port, 2))
    assert told.code == 69 and "is another program's port: choose another one" in told.why
    assert (
        taken.code == 78 and found is None and f"port {port + 1} cannot be served here" in taken.why
    )
    assert "for example MASTER_ADDR=127.0.0.1:" in taken.why


def test_who_looks_late_goes_on_until_something_is_counted() -> None:
    """Each piece comes when the time to measure in is over already."""
    near, far = socket.socketpair()
    found: list[dict[str, float]] = []
    taking = threading.Thread(target=lambda: found.append(sink(near, 0.03, 0.05)))
    with near, far:
        taking.start()
        while taking.is_alive():
            far.send(b"x")
            time.sleep(0.1)
    assert found[0]["bytes"] >= 1 and found[0]["seconds"] > 0


def test_ears_are_deaf_to_who_does_not_know_the_key() -> None:
    ears = Ears("key", loopback=True)
    to = Address("node 1", "127.0.0.1", ears.port)
    with pytest.raises(Unreached, match="node 1"):
        pings(to, "another", 0.1)
    with pytest.raises(Unreached, match="node 1 at 127"):
        flood(to, "another", 1, 0.2)
    assert flood(to, "key", 2, 1.0) > 0.01
    ears.close()
    with pytest.raises(Unreached, match="refuses connections"):
        pings(to, "key", 0.1)


# ---- Rounds


@pytest.mark.parametrize("nodes", range(2, 10))
def test_rounds_have_every_pair_once_and_no_node_twice(nodes: int) -> None:
    found = rounds(nodes * [""])
    assert sorted(pair for chosen in found for pair in chosen) == sorted(
        (a, b) for a in range(nodes) for b in range(nodes) if a != b
    )
    for chosen in found:
        assert len({node for pair in chosen for node in pair}) == 2 * len(chosen)
    if nodes in (2, 4, 8):
        assert len(found) == 2 * (nodes - 1)  # as few as can be: each round has all nodes
    assert len(found) <= 4 * nodes


def test_a_sites_link_has_one_pair_at_a_time() -> None:
    sites = ["a", "a", "b", "b", "c", "c"]
    found = rounds(sites)
    assert sum(map(len, found)) == 30
    for chosen in found:
        links_in_use = [
            site for pair in chosen for site in needs_of(pair, sites) if isinstance(site, str)
        ]
        assert len(set(links_in_use)) == len(links_in_use)
    assert any({(0, 1), (2, 3)} <= set(chosen) for chosen in found)  # inside sites it is not in use


def test_all_at_once_is_a_ring_between_sites() -> None:
    assert ring(["", "", ""]) == [(0, 1), (1, 2), (2, 0)] == ring(["a", "a", "a"])
    assert ring(["a", "a", "b", "b"]) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert ring(["a", "b", "b"]) == [(0, 1), (1, 0), (2, 0)]


# ---- What is said of it

FOUND = Links(
    1.8e9,
    ("h0", "h1"),
    ("", ""),
    8,
    (Pair(0, 1, 30.5, 42.0, 0.24, 0.93), Pair(1, 0, 30.4, 31.0, 0.25, 0.9)),
    (Flow(0, 1, 0.81), Flow(1, 0, 0.88)),
)


def test_the_table_and_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    net.tell(FOUND, str(tmp_path / "runs"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "from" and "Gbit/s, 1 connection  8 connections" in lines[0]
    assert lines[1].split() == [
        "node",
        "0",
        "(h0)",
        "node",
        "1",
        "(h1)",
        "30.5",
        "42",
        "0.24",
        "0.93",
    ]
    assert lines[4].split()[-1] == "0.81"
    assert lines[-1] == "NODES=2 SITES=2 WAN_GBIT=0.81 WAN_RTT_MS=30.5"
    assert "where make plan finds them" in " ".join(" ".join(lines).split())
    assert json.loads((tmp_path / "runs" / "net_probe.json").read_text())["settings"] == {
        "WAN_GBIT": "0.81",
        "WAN_RTT_MS": "30.5",
    }
    (tmp_path / "file").touch()
    net.tell(FOUND, str(tmp_path / "file" / "runs"))
    assert "kept nowhere" in capsys.readouterr().out


def test_bad_settings_are_refused_before_anything_is_opened(port: int) -> None:
    for c, words in (
        (settings(port, 1), "NODES=1: there is nothing between nodes"),
        (settings(port, 4, 4), "NODE_RANK=4 with NODES=4"),
        (dataclasses.replace(settings(port, 2), master_addr=""), "NODES=2 needs MASTER_ADDR"),
        (settings(port, 4, sites=3), "SITES=3: NODES=4 cannot be spread evenly"),
    ):
        with pytest.raises(SettingsError, match=words):
            net.check(c)


def test_as_it_is_typed_on_a_machine(port: int, tmp_path: Path) -> None:
    """NODES=2 on this one: node 1 first, which waits for node 0; SITES says which are apart."""
    (tmp_path / "empty.env").touch()
    given = os.environ | {
        "ENV_FILE": str(tmp_path / "empty.env"),
        "RUNS_DIR": str(tmp_path / "runs"),
        "NODES": "2",
        "SITES": "2",
        "MASTER_ADDR": f"127.0.0.1:{port}",
        "PRESET": "tiny",
    }
    quick = (
        "from doctor.net_probe import __main__ as command, net_nodes; net_nodes.TOTAL_S = 4.0; net_nodes.LEAST_S = net_nodes.MOST_S = 1.2; "
        "import sys; sys.exit(command.main())"
    )
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", quick],
            cwd=ROOT,
            env=given | {"NODE_RANK": rank},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in "10"
    ]
    said = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "at site 0" in said[1][0] and "at site 1" in said[1][0]
    assert said[1][0].splitlines()[-1].startswith("NODES=2 SITES=2 WAN_GBIT=")
    assert (tmp_path / "runs" / "net_probe.json").is_file()
