"""train/diloco/site_registry.py on a real registry, and what the roll call and make doctor make of it."""

import socket
from types import SimpleNamespace

import pytest
import torch

from doctor import site_checks
from hardware.ports import free_ports
from settings import SettingsError
from settings.config import Config
from train.diloco import roll_call, site_registry
from train.diloco.site_registry import Desk, NoDesk, own_address
from train.diloco.weight_server import Transport
from train.distributed.signed_http import WrongSecret
from train.distributed.world import PeersDiffer, PeersMissing

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
    "common": "",
    "step": 0,
}


@pytest.fixture
def port():
    """The lighthouse's port; the registry is on the next."""
    port = free_ports(2)
    config = Config(lighthouse=f"127.0.0.1:{port}", sync="diloco", sites=3).derived()
    server = site_registry.serve_sites(config, "127.0.0.1", port + 1)
    yield port
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(site_registry, "BEAT_S", 0.05)
    monkeypatch.setattr(site_registry, "LOOK_S", 0.5)
    monkeypatch.setattr(roll_call, "LOOK_S", 0.3)


def at(port, site, **facts):
    config = Config(
        lighthouse=f"127.0.0.1:{port}", sync="diloco", sites=3, nodes=3, node_rank=site
    ).derived()
    return Desk(config, FACTS | {"node_rank": site} | facts)


def test_what_a_site_says_the_others_read_until_it_leaves(port):
    one, other = at(port, 0), at(port, 2)
    assert one.read() == {}
    other.say(outer=7)
    assert one.read()[2]["outer"] == 7
    other.leave(done=False)
    assert one.read() == {}
    at(port, 2).leave(done=True)
    assert one.read()[2]["done"] is True


def test_those_live_that_speak_after_one_has_begun_to_listen(port):
    here, silent, lively = at(port, 0), at(port, 1), at(port, 2)
    silent.say()
    lively.say()
    lively.live()
    assert set(here.living(0.5)) == {2}
    assert set(here.living(60.0, enough=bool)) == {2}
    silent.live()
    here.live()
    assert set(here.living(60.0)) == {1, 2}  # at once, since all are there
    for desk in (here, silent, lively):
        desk.leave(done=False)


def test_another_of_the_same_number_is_seen_if_it_lives(port, monkeypatch):
    before, again = at(port, 1, host="b"), at(port, 1)
    assert again.double() is None
    before.say()
    assert again.double() is None  # what it left behind
    before.live()
    monkeypatch.setattr(site_registry, "LOOK_S", 30.0)  # at most
    assert again.double()["host"] == "b"
    before.leave(done=False)


def test_a_registry_that_is_not_there_is_said(port):
    with pytest.raises(NoDesk, match=rf"127\.0\.0\.1:{port} refuses connections"):
        at(port - 1, 0).read()  # one further is the lighthouse's port, at which nobody listens


@pytest.mark.parametrize(("min_sites", "fits"), [(2, True), (3, False)])
def test_as_many_sites_as_min_sites_are_enough_and_one_less_is_not(port, min_sites, fits):
    """Two of three come, and START_TIMEOUT_S passes."""
    other = at(port, 2)
    other.say()
    other.live()
    config = Config(sync="diloco", sites=3, nodes=3, min_sites=min_sites, start_timeout_s=0)
    site = SimpleNamespace(exchanges=0, common="", address="", turn=1)
    status = SimpleNamespace(phase=lambda *_, **__: None, beat=lambda: None)
    job = SimpleNamespace(config=config, status=status, step=0)
    desk = at(port, 0)
    try:
        if fits:
            assert roll_call.gather(job, site, desk) == (False, False)
        else:
            with pytest.raises(PeersMissing, match=r"2 of 3 sites came .* MIN_SITES=3"):
                roll_call.gather(job, site, desk)
    finally:
        desk.leave(done=False)
        other.leave(done=False)


def test_sites_that_cannot_train_together_are_refused_with_what_differs():
    mine = FACTS | {"node_rank": 1, "host": "b"}
    roll_call.refuse_other(mine, FACTS)
    other_rate = {"settings": {"RUN_NAME": "r", "LEARNING_RATE": 1e-2}}
    with pytest.raises(SettingsError, match=r"RATE=0\.001 on node 0 \(a\) and .* all sites"):
        roll_call.refuse_other(mine | other_rate, FACTS)
    for changes, words in (
        ({"torch": "2.11.0"}, r"torch=2\.13\.0 on node 0"),
        ({"data": "e"}, "data="),
        ({"processes": 1}, r"processes=2 on node 0 \(a\) and processes=1 on node 1"),
    ):
        with pytest.raises(PeersDiffer, match=words):
            roll_call.refuse_other(mine | changes, FACTS)


@pytest.mark.parametrize(
    ("step", "name", "done", "over"),
    [
        (50, "r", {}, False),
        (50, "r", {"done": True}, True),
        (50, "another", {"done": True}, False),
        (0, "r", {"done": True}, False),
        (50, "r", {"done": True, "last_step": 40}, False),
    ],
)
def test_a_run_that_the_others_have_finished_is_not_trained_alone(step, name, done, over):
    config = SimpleNamespace(site_rank=1, run_name=name, last_step=100)
    job = SimpleNamespace(config=config, step=step)
    assert bool(roll_call.describe_end(job, {0: FACTS | done, 1: FACTS | {"done": True}})) is over


# ---- make doctor


def config(**settings):
    return Config.of_preset(SYNC="diloco", SITES="2", NODES="2", **settings)


def test_the_doctor_says_whether_the_lighthouse_and_this_site_can_be_reached(port):
    where = f"127.0.0.1:{port}"
    assert site_checks.findings(Config()) == []
    (finding,) = site_checks.findings(config())
    assert (finding.level, finding.code) == ("FAIL", 64)
    at(port, 1).say()
    (finding,) = site_checks.findings(config(LIGHTHOUSE=where))
    assert finding.level == "PASS"
    assert finding.text.endswith("heard of: 1")
    (finding,) = site_checks.findings(config(LIGHTHOUSE=f"127.0.0.1:{port - 1}"))
    assert finding.level == "WARN"
    assert "make lighthouse" in finding.fix
    assert site_checks.findings(config(LIGHTHOUSE=where), ask=False) == []


def test_the_address_of_a_site_is_the_one_from_which_it_reaches_the_lighthouse(monkeypatch):
    assert own_address("127.0.0.1:29510") == own_address("localhost:29510") == "127.0.0.1"
    with pytest.raises(socket.gaierror):
        own_address("no-such-host.invalid:29510")
    remote = config(LIGHTHOUSE="first:29510")
    assert site_checks.findings(remote, ask=False) == [], "a name may not be known yet"
    monkeypatch.setattr(site_checks, "own_address", lambda lighthouse: "127.0.1.1")
    (finding,) = site_checks.findings(remote, ask=False)
    assert finding.level == "WARN"
    assert "only this machine" in finding.text
    monkeypatch.setattr(site_checks, "own_address", lambda lighthouse: "10.0.0.7")
    assert site_checks.findings(remote, ask=False) == []


# ---- Weights for a site that was away


def fetch(server, secret):
    site = Transport("127.0.0.1", lambda: secret, 5.0)
    try:
        return site.recv_checkpoint(0, server.metadata(), 4, site._timeout)
    finally:
        site.shutdown()


def test_weights_go_to_sites_that_know_the_secret_and_come_from_such(monkeypatch):
    server = Transport("127.0.0.1", lambda: "of-the-run-that-trains", 5.0)
    state = {"weights": torch.arange(100_000.0), "step": 4, "moments": {}}
    server.send_checkpoint([1], 4, state, server._timeout)
    got = fetch(server, "of-the-run-that-trains")
    assert torch.equal(got["weights"], state["weights"])
    assert got["step"] == 4
    for secret in ("of-another-run-than-this", None):
        with pytest.raises(WrongSecret):
            fetch(server, secret)
    assert server._server.refused == 1
    impostor = Transport("127.0.0.1", lambda: "of-another-run-than-this", 5.0)
    impostor.send_checkpoint([1], 4, state, impostor._timeout)
    monkeypatch.setattr("train.distributed.signed_http.is_same", lambda *_: True)
    with pytest.raises(WrongSecret, match="not signed"):
        fetch(impostor, "of-the-run-that-trains")
    for transport in (server, impostor):
        transport.disallow_checkpoint()
        transport.shutdown()
