"""train/distributed/, rendezvous.py and registry.py: nodes that join, that do not fit, and that are not there. Real sockets."""

import contextlib
import dataclasses
import json
import logging
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from record import status
from record.run_paths import RunPaths
from record.status import Status
from settings.config import Config
from train.distributed import registry, rendezvous
from train.distributed.registry import Line, Verdict, differences


class Nodes:
    """Nodes of one run, each a thread of this process; `verdict` waits for what a node was told."""

    def __init__(self, folder: Path, port: int, count: int, timeout_s: float = 20):
        self.folder, self.timeout_s = folder, timeout_s
        self.config = dataclasses.replace(
            Config(),
            nodes=count,
            master_addr=f"127.0.0.1:{port}",
            runs_dir=str(folder),
            run_name="run",
            batch_tokens=8192,
        ).derived()
        self.told: dict[int, queue.Queue[Verdict]] = {}
        self.paths = RunPaths(folder / "run")
        self.paths.folder.mkdir(exist_ok=True)

    def start(
        self, rank: int, changes: dict[str, Any] | None = None, timeout_s: float = 0, host: str = ""
    ) -> None:
        """changes: settings in which it differs from the others, and facts about it."""
        settings = {
            name: value for name, value in (changes or {}).items() if hasattr(self.config, name)
        }
        facts = {name: value for name, value in (changes or {}).items() if name not in settings}
        c = dataclasses.replace(self.config, node_rank=rank, **settings)
        content = rendezvous.facts_of(c, 1) | {"host": host or f"host-{rank}"} | facts
        told = self.told[rank] = queue.Queue()
        patience = timeout_s or self.timeout_s

        def node() -> None:
            if rank:
                told.put(rendezvous.call(c, content, patience))
            else:
                told.put(
                    rendezvous.receive(c, content, rendezvous.status_of(c, self.paths), patience)[0]
                )

        threading.Thread(target=node, daemon=True).start()

    def verdict(self, rank: int, seconds: float = 20) -> Verdict:
        return self.told[rank].get(timeout=seconds)

    def wait_for(self, phase: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while status.read(self.paths.status).get("phase") != phase:
            assert time.monotonic() < deadline, (
                f"{status.read(self.paths.status)} does not come to {phase}"
            )
            time.sleep(0.02)

    def connect(self) -> socket.socket:
        """As a caller that then does what it likes."""
        for _ in range(100):
            try:
                return socket.create_connection(("127.0.0.1", self.config.master_port), 10)
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise AssertionError("node 0 does not listen")


def until_said(caplog: pytest.LogCaptureFixture, text: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while text not in caplog.text:
        assert time.monotonic() < deadline, f"{text!r} was not said, but:\n{caplog.text}"
        time.sleep(0.02)


@pytest.fixture
def nodes(tmp_path: Path, free_port: int, caplog: pytest.LogCaptureFixture) -> Nodes:
    """Three nodes, of which none has been started."""
    caplog.set_level(logging.INFO)
    return Nodes(tmp_path, free_port, 3)


# ---- All are there


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nodes_join_in_any_order(
    nodes: Nodes, order: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for rank in order:
        nodes.start(rank)
        time.sleep(0.2)
    assert [nodes.verdict(rank) for rank in order] == [Verdict(0)] * 3
    assert "3 of 3 nodes have joined: 0 (host-0), 1 (host-1), 2 (host-2)" in caplog.text
    with socket.socket() as probe:  # torchrun can have the port at once
        probe.bind(("127.0.0.1", nodes.config.master_port))


def test_status_tells_how_many_are_there_and_keeps_what_it_knew(nodes: Nodes) -> None:
    nodes.paths.status.write_text(json.dumps({"phase": "crashed", "step": 7, "loss": 2.5}))
    nodes.start(0)
    nodes.wait_for("waiting for peers 1/3")
    nodes.start(2)
    nodes.wait_for("waiting for peers 2/3")
    state = status.read(nodes.paths.status)
    assert (state["step"], state["loss"], state["last_step"]) == (7, 2.5, nodes.config.last_step)
    nodes.start(1)
    assert nodes.verdict(0).code == 0


def test_a_run_that_is_done_stays_so_in_its_status(nodes: Nodes) -> None:
    before = {"phase": "done", "step": nodes.config.last_step}
    nodes.paths.status.write_text(json.dumps(before))
    for rank in (0, 1, 2):
        nodes.start(rank)
    assert nodes.verdict(0).code == 0
    assert status.read(nodes.paths.status) == before


def test_node_0_listens_on_loopback_only_where_its_address_is_there(
    nodes: Nodes, monkeypatch: Any
) -> None:
    state = Status(nodes.paths.status, active=False)
    bound = {}
    # a host's own name leads to loopback too, on Debian, and the others know it by another address
    found = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *rest, **named: found(
            "127.0.0.1" if name == "a-host" else name, *rest, **named
        ),
    )
    for name in ("127.0.0.1", "localhost", "a-host"):
        c = dataclasses.replace(nodes.config, master_addr=name)
        listeners = rendezvous.listen(c, state, time.monotonic() + 1)
        assert isinstance(listeners, list)
        bound[name] = {listener.getsockname()[0] for listener in listeners}
        for listener in listeners:
            listener.close()
    assert bound["127.0.0.1"] == {"127.0.0.1"} and bound["localhost"] <= {"127.0.0.1", "::1"}
    assert bound["a-host"] <= {"::", "0.0.0.0"}


# ---- Some are not


@pytest.mark.fault(36)
def test_a_missing_node_is_named_on_all_that_waited_for_it(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.start(0, timeout_s=6)
    nodes.start(2)
    for rank in (0, 2):
        code, why = nodes.verdict(rank)
        assert code == 69
        assert (
            f"2 of 3 nodes have joined: 0 (host-0), 2 (host-2); missing: 1; they are to reach 127.0.0.1:"
            f"{nodes.config.master_port}" in why
        )
    assert "1 of 3 nodes have joined: 0 (host-0); missing: 1, 2" in caplog.text


@pytest.mark.fault(36)
def test_who_is_missing_is_said_again_and_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "REMIND_S", 0.3)
    nodes.start(0, timeout_s=1.5)
    assert nodes.verdict(0).code == 69
    assert caplog.text.count("1 of 3 nodes have joined: 0 (host-0); missing: 1, 2") >= 3


@pytest.mark.fault(36)
def test_a_node_without_its_first_tells_what_to_look_at(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.start(1, timeout_s=1.2)
    code, why = nodes.verdict(1)
    assert code == 69
    assert (
        f"127.0.0.1:{nodes.config.master_port} refuses connections: node 0 has not been started yet"
        in why
    )
    assert caplog.text.count("refuses connections") == 1  # said once, tried several times


def test_an_address_that_is_dropped_is_told_from_one_that_refuses(
    nodes: Nodes, monkeypatch: Any
) -> None:
    def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    nodes.start(1, timeout_s=0.1)
    assert "does not answer in 5 s: a firewall drops" in nodes.verdict(1).why


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve_is_said_at_once_and_tried_on(
    nodes: Nodes, rank: int, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = socket.getaddrinfo
    known: list[bool] = []

    def late(name: str, *rest: Any, **named: Any) -> Any:
        if name == "late" and not known:
            raise socket.gaierror(-2, "Name or service not known")
        return found("127.0.0.1" if name == "late" else name, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    nodes.start(rank, {"master_addr": "late"}, timeout_s=0.3)
    code, why = nodes.verdict(rank)
    assert (
        code == 69
        and "MASTER_ADDR=late does not resolve on" in why
        and "MASTER_ADDR=10.0.0.5" in why
    )
    for every in range(3):
        nodes.start(every, {"master_addr": "late"})
    time.sleep(0.5)
    assert "MASTER_ADDR=late does not resolve" in caplog.text
    known.append(True)
    assert nodes.verdict(rank).code == 0


@pytest.mark.fault(36)
def test_a_taken_port_is_said_at_once_and_waited_for(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", nodes.config.master_port)):
        nodes.start(0)
        nodes.start(1)
        until_said(caplog, f"port {nodes.config.master_port} cannot be listened on here")
    nodes.start(2)
    assert [nodes.verdict(rank).code for rank in range(3)] == [0, 0, 0]
    monkeypatch.setattr(rendezvous, "PORT_S", 0.3)
    with socket.create_server(("127.0.0.1", nodes.config.master_port)):
        nodes.start(0)
        code, why = nodes.verdict(0)
    assert code == 78 and "choose another on all nodes, for example MASTER_ADDR=127.0.0.1:" in why


def test_what_answers_but_calls_no_roll_is_waited_out(
    nodes: Nodes, monkeypatch: Any, caplog: Any
) -> None:
    """As the store of a torchrun that is about to end: it takes the call and says nothing."""
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", nodes.config.master_port)):
        nodes.start(1)
        until_said(caplog, "it calls no roll: an attempt of node 0 may still be ending")
    nodes.start(0)
    nodes.start(2)
    assert nodes.verdict(1).code == 0


def test_a_node_that_leaves_is_taken_off_and_may_come_back(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.start(0)
    for _ in range(2):
        leaving = Line(nodes.connect())
        leaving.send(fitting(nodes, 2))
        nodes.wait_for("waiting for peers 2/3")
        leaving.close()
        nodes.wait_for("waiting for peers 1/3")
    assert caplog.text.count("node 2 (host-2) has left (") == 2
    nodes.start(1)
    nodes.start(2)
    assert [nodes.verdict(rank).code for rank in range(3)] == [0, 0, 0]


def fitting(nodes: Nodes, rank: int) -> dict[str, Any]:
    return rendezvous.facts_of(dataclasses.replace(nodes.config, node_rank=rank), 1) | {
        "host": f"host-{rank}"
    }


def test_a_node_that_comes_back_before_its_old_connection_is_known_to_be_dead(
    nodes: Nodes, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(registry, "RIVAL_S", 0.5)
    nodes.start(0)
    vanished = Line(nodes.connect())  # without power: it neither answers nor closes
    vanished.send(fitting(nodes, 2))
    nodes.wait_for("waiting for peers 2/3")
    nodes.start(2)
    until_said(caplog, "node 2 (host-2) has left (it came back over another connection)")
    nodes.start(1)
    assert [nodes.verdict(rank).code for rank in range(3)] == [0, 0, 0]
    vanished.close()


def test_a_node_without_a_sign_of_life_is_taken_off(
    nodes: Nodes, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(registry, "SILENT_S", 2.0)
    monkeypatch.setattr(registry, "TOUCH_S", 0.2)
    nodes.start(0)
    vanished = Line(nodes.connect())  # without power: it neither answers nor closes
    vanished.send(fitting(nodes, 2))
    until_said(caplog, "2 of 3 nodes have joined")
    until_said(caplog, "node 2 (host-2) has left (no sign of life for 2 s)")
    nodes.start(1)
    time.sleep(2.5)
    assert caplog.text.count("has left") == 1  # one that answers stays
    vanished.close()


# ---- They do not fit


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"nodes": 4}, 64, "NODES=3 on node 0 (host-0) and NODES=4 on node 2 (host-2)"),
        (
            {"learning_rate": 2e-3},
            64,
            "LEARNING_RATE=0.001 on node 0 (host-0) and LEARNING_RATE=0.002 on node 2 (host-2)",
        ),
        (
            {"run_name": "other"},
            64,
            "RUN_NAME=run on node 0 (host-0) and RUN_NAME=other on node 2 (host-2)",
        ),
        ({"torch": "2.11.0+cu126"}, 78, "2.11.0+cu126 on node 2 (host-2): make setup"),
        ({"python": "3.99"}, 78, "Python is 3.11 on node 0"),
        (
            {"commit": "abc with changes"},
            78,
            "abc with changes on node 2 (host-2): check out the same commit",
        ),
        ({"source": "abc"}, 78, "code in train/ is"),
    ],
)
def test_nodes_that_do_not_fit_are_named_with_what_differs(
    nodes: Nodes, monkeypatch: Any, changes: dict[str, Any], code: int, words: str
) -> None:
    if "python" in changes:
        monkeypatch.setattr(rendezvous.platform, "python_version_tuple", lambda: ("3", "11", "2"))
    monkeypatch.setattr(registry, "LINGER_S", 20)  # over once all have been told
    nodes.start(0)
    nodes.start(2, changes)
    nodes.start(1)
    verdict, *others = [nodes.verdict(rank) for rank in range(3)]
    assert verdict.code == code and words in verdict.why
    assert others == [verdict, verdict]


def test_one_rank_for_two_nodes_is_refused_with_both_named(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LINGER_S", 1)
    nodes.start(0)
    nodes.start(1, host="this-one")
    first = nodes.told[1]
    nodes.wait_for("waiting for peers 2/3")
    nodes.start(1, host="that-one")
    for told in (nodes.told[0], first, nodes.told[1]):
        code, why = told.get(timeout=20)
        assert code == 64
        assert "NODE_RANK=1 was given to both this-one (127.0.0.1) and that-one (127.0.0.1)" in why


def test_what_may_differ_between_nodes_and_what_is_secret_is_not_sent() -> None:
    c = dataclasses.replace(
        Config(), hf_token="hf_secret", wandb_api_key="key", data_dir="elsewhere", nodes=2
    )
    settings = rendezvous.facts_of(c.derived(), 4)["settings"]
    assert settings["NPROC"] == 4 and settings["SEED"] == 1337 and settings["LEARNING_RATE"] == 1e-3
    assert not settings.keys() & {
        "HF_TOKEN",
        "WANDB_API_KEY",
        "DATA_DIR",
        "RUNS_DIR",
        "NODE_RANK",
        "MASTER_ADDR",
    }


def test_an_image_without_history_fits_a_checkout_of_equal_code() -> None:
    facts = {
        "node_rank": 0,
        "host": "a",
        "nodes": 2,
        "torch": "2",
        "python": "3",
        "source": "x",
        "settings": {},
    }
    other = facts | {"node_rank": 1, "host": "b"}
    assert differences(facts | {"commit": "abc"}, other | {"commit": ""}) == []
    assert [
        v.code
        for v in differences(facts | {"commit": "abc"}, other | {"commit": "", "source": "y"})
    ] == [78]
    assert (
        len(differences(facts, {"node_rank": 1, "host": "b", "settings": [1]})) == 3
    )  # of other code altogether


# ---- Strangers


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\xfe" * 100,
        b"[1]\n",
        b"{}\n",
        b"[" * 60000,
        b"[" * 50000 + b"\n",
        b"x" * 100_000,
        b'{"node_rank": "1", "host": "h"}\n',
        b'{"node_rank": 1, "host": "two\\nlines"}\n',
        b'{"over": 75}\n',
    ],
)
def test_a_stranger_ends_its_own_connection_and_nothing_else(
    nodes: Nodes, sent: bytes, monkeypatch: Any
) -> None:
    monkeypatch.setattr(registry, "STRANGER_S", 0.5)
    nodes.start(0)
    with nodes.connect() as stranger:
        stranger.settimeout(10)
        assert json.loads(stranger.makefile("rb").readline()) == {"roll_call": 1}
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""  # closed
    nodes.start(1)
    nodes.start(2)
    assert [nodes.verdict(rank).code for rank in range(3)] == [0, 0, 0]


def test_many_strangers_hold_nobody_up(nodes: Nodes) -> None:
    nodes.start(0)
    crowd = [nodes.connect() for _ in range(registry.MOST_STRANGERS + 20)]
    nodes.start(1)
    nodes.start(2)
    assert [nodes.verdict(rank).code for rank in range(3)] == [0, 0, 0]
    for stranger in crowd:
        stranger.close()
