"""train/diloco/site_registry.py, with a real server on loopback, and what hook.py and make doctor make of it."""

import http.client
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from doctor import site_checks as check
from hardware.ports import free_ports
from settings import SettingsError
from settings.config import Config
from train.diloco import site_registry
from train.diloco.site_registry import Desk, NoDesk, own_address
from train.distributed.world import PeersDiffer
from train.hooks import diloco as hook

FACTS = {
    "node_rank": 0,
    "nodes": 3,
    "host": "a",
    "torch": "2.13.0",
    "python": "3.11",
    "commit": "",
    "source": "1",
    "settings": {"RUN_NAME": "r", "LEARNING_RATE": 1e-3},
    "data": "d",
    "processes": 2,
    "last_step": 100,
    "training": False,
}


@pytest.fixture
def port() -> Iterator[int]:
    """The lighthouse's port, whose desk is open on the next."""
    found = free_ports(2)
    server = site_registry.opened(found + 1)
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_registry, "BEAT_S", 0.05)
    monkeypatch.setattr(site_registry, "LOOK_S", 0.5)


def at(port: int, site: int, **facts: Any) -> Desk:
    return Desk(f"127.0.0.1:{port}", site, 3, FACTS | {"node_rank": site} | facts)


def test_what_a_site_says_the_others_read_until_it_leaves(port: int) -> None:
    one, other = at(port, 0), at(port, 2)
    assert one.read() == {}
    other.say(outer=7)
    assert one.read()[2]["outer"] == 7 and one.read()[2]["node_rank"] == 2
    other.leave(done=False)
    assert one.read() == {}
    other.leave(done=True)
    assert one.read()[2]["done"] is True


def test_those_live_whose_beat_moves_or_who_have_just_appeared(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, silent, lively = at(port, 0), at(port, 1), at(port, 2)
    silent.say()
    lively.say()
    lively.live()
    assert set(here.living(0.5)) == {2}
    read, reads = here.read, []

    def reading() -> dict[int, dict[str, Any]]:
        reads.append(0)
        if len(reads) == 2:  # behind the first look
            silent.say()
        return read()

    monkeypatch.setattr(here, "read", reading)
    assert set(here.living(60.0)) == {1, 2}  # at once, since all are there
    assert set(here.living(60.0, enough=bool)) == {2}
    lively.leave(done=False)


def test_another_of_the_same_number_is_seen_if_it_lives(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, again = at(port, 1, host="b"), at(port, 1)
    assert again.double() is None
    before.say()
    assert again.double() is None  # what it left behind
    before.live()
    monkeypatch.setattr(site_registry, "LOOK_S", 30.0)  # at most
    found = again.double()
    assert found and found["host"] == "b"
    before.leave(done=False)


def test_a_desk_that_is_not_there_or_something_else_is_said(port: int) -> None:
    away = Desk(
        f"127.0.0.1:{port - 1}", 0, 3, {}
    )  # one further is the lighthouse's port, at which nobody listens
    with pytest.raises(NoDesk, match=rf"no desk answers at 127\.0\.0\.1:{port}"):
        away.read()
    connection = http.client.HTTPConnection("127.0.0.1", port + 1, timeout=10)
    for path, body in (("/1", "{"), ("/x", "{}"), ("/1", "")):
        connection.request("PUT", path, body)
        answer = connection.getresponse()
        assert answer.status == 400 and answer.read()
        connection.close()
    assert at(port, 0).read() == {}


def test_sites_that_cannot_train_together_are_refused_with_what_differs() -> None:
    mine = FACTS | {"node_rank": 1, "host": "b"}
    hook.refuse_others(mine, {0: FACTS})
    with pytest.raises(
        SettingsError,
        match=r"RATE=0\.001 on node 0 \(a\) and LEARNING_RATE=0\.01 on node 1 .*all"
        " sites",
    ):
        hook.refuse_others(
            mine | {"settings": {"RUN_NAME": "r", "LEARNING_RATE": 1e-2}}, {0: FACTS}
        )
    with pytest.raises(PeersDiffer, match=r"torch is 2\.13\.0 on node 0"):
        hook.refuse_others(mine | {"torch": "2.11.0"}, {0: FACTS})
    with pytest.raises(PeersDiffer, match="data"):
        hook.refuse_others(mine | {"data": "e"}, {0: FACTS})
    with pytest.raises(PeersDiffer, match="processes at a site: 1 on node 1"):
        hook.refuse_others(mine | {"processes": 1}, {0: FACTS})


@pytest.mark.parametrize(
    ("step", "done", "over"),
    [
        (50, {}, False),
        (50, {"done": True}, True),
        (0, {"done": True}, False),
        (50, {"done": True, "last_step": 40}, False),
    ],
)
def test_a_run_that_the_others_have_finished_is_not_trained_alone(
    step: int, done: dict[str, Any], over: bool
) -> None:
    job: Any = SimpleNamespace(
        config=SimpleNamespace(site_rank=1, run_name="r", last_step=100), step=step
    )
    assert bool(hook.over_at(job, {0: FACTS | done, 1: FACTS | {"done": True}})) is over
    job.config.run_name = "another"
    assert hook.over_at(job, {0: FACTS | {"done": True}}) == ""


def config(**settings: str) -> Config:
    return Config.of_preset(SYNC="diloco", SITES="2", NODES="2", **settings)


def test_the_doctor_says_whether_the_lighthouse_and_this_site_can_be_reached(port: int) -> None:
    where = f"127.0.0.1:{port}"
    assert check.findings(Config()) == []
    (found,) = check.findings(config())
    assert (found.level, found.code) == ("FAIL", 64) and "LIGHTHOUSE is not set" in found.text
    at(port, 1).say()
    (found,) = check.findings(config(LIGHTHOUSE=where))
    assert found.level == "PASS" and found.text.endswith("heard of: 1")
    (found,) = check.findings(config(LIGHTHOUSE=f"127.0.0.1:{port - 1}"))
    assert found.level == "WARN" and "make lighthouse" in found.fix
    assert check.findings(config(LIGHTHOUSE=where), ask=False) == []


def test_the_address_of_a_site_is_the_one_from_which_it_reaches_the_lighthouse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert own_address("127.0.0.1:29510") == own_address("localhost:29510") == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        own_address("no-such-host.invalid:29510")
    c = config(LIGHTHOUSE="first:29510")
    assert check.findings(c, ask=False) == [], (
        "a name that is not known yet is no fault of the address"
    )
    monkeypatch.setattr(check, "own_address", lambda lighthouse: "127.0.1.1")
    (found,) = check.findings(c, ask=False)
    assert found.level == "WARN" and "only this machine" in found.text
    assert "LIGHTHOUSE=10.0.0.5:29510" in found.fix
    monkeypatch.setattr(check, "own_address", lambda lighthouse: "10.0.0.7")
    assert check.findings(c, ask=False) == []
