"""train/diloco/site_registry.py on a real registry, and what the rendezvous and make doctor make of it."""

import datetime
import socket
import time
from types import SimpleNamespace

import pytest
import torch

from doctor import site_checks
from hardware.ports import free_ports
from settings import SettingsError, load_preset
from settings.config import Config
from train.diloco import site_registry, site_rendezvous
from train.diloco.result import RunIsOver
from train.diloco.site_registry import SiteClient, own_address
from train.diloco.weight_server import WeightServer
from train.distributed.signed_http import WrongSecret
from train.distributed.world import PeersDiffer, PeersMissing

SETTINGS = {"RUN_NAME": "r", "LEARNING_RATE": 1e-3}
FACTS = {
    "host": "a",
    "torch": "2.13.0",
    "settings": SETTINGS,
    "data": "d",
    "processes": 2,
    "last_step": 100,
    "training": False,
}
LIMIT = datetime.timedelta(seconds=5)
PROGRESS = {"exchanges": 5, "weights": "f"}


@pytest.fixture
def port(monkeypatch):
    """The lighthouse's port; the registry is on the next."""
    monkeypatch.setattr(site_registry, "BEAT_S", 0.05)
    monkeypatch.setattr(site_registry, "LOOK_S", 0.4)
    port = free_ports(2)
    server = site_registry.serve_sites(config_at(port), "127.0.0.1", port + 1)
    yield port
    server.shutdown()
    server.server_close()


def config_at(port, **settings):
    run = {"run_name": "r", "max_steps": 100, "lighthouse": f"127.0.0.1:{port}"}
    return Config(sync="diloco", sites=3, nodes=3, **run | settings).derived()


def client_at(port, site, **facts):
    return SiteClient(config_at(port, node_rank=site), FACTS | {"node_rank": site} | facts)


def test_a_site_is_there_while_it_speaks_and_until_it_leaves(port, monkeypatch):
    here, silent, lively = (client_at(port, site) for site in range(3))
    assert here.read() == {}
    silent.say()
    lively.say(exchanges=7)
    assert set(here.read()) == {1, 2} and here.read()[2]["exchanges"] == 7
    assert client_at(port, 2).find_duplicate() is None  # it has only left its word behind
    lively.heartbeat.start()
    assert set(here.listen(lambda others: False)) == {2}
    monkeypatch.setattr(site_registry, "LOOK_S", 30.0)  # at most
    assert set(here.listen(bool)) == {2}
    assert client_at(port, 2).find_duplicate()["host"] == "a"
    lively.leave(done=True)
    silent.leave(done=False)
    assert set(here.read()) == {2} and here.read()[2]["done"] is True


@pytest.mark.fault(42)
@pytest.mark.parametrize(
    ("settings", "other", "outcome", "words"),
    [
        ({"min_sites": 2}, {}, {2}, ""),
        ({"min_sites": 3}, {}, PeersMissing, "2 of 3 sites .*missing: 1, after .*MIN_SITES=3"),
        ({"min_sites": 3, "start_timeout_s": 300}, {"training": True}, {2}, ""),
        ({}, {"node_rank": 0}, PeersMissing, "site 0 is there already, on a"),
        ({}, {"weights": "g"}, PeersDiffer, r"node 2 \(a\) have trained apart.* folder .*/r\)"),
        ({}, {"weights": "g", "exchanges": 6}, {2}, ""),
        ({}, {"exchanges": -1}, {2}, ""),  # it ended before it knew how far it was
        ({}, {"torch": "2.11.0"}, PeersDiffer, r"torch=2\.13\.0 on node 0"),
        ({}, {"data": "e"}, PeersDiffer, "data="),
        ({}, {"processes": 1}, PeersDiffer, r"processes=2 on node 0 \(b\) and processes=1 on"),
        (
            {},
            {"settings": SETTINGS | {"LEARNING_RATE": 1e-2}},
            SettingsError,
            r"LEARNING_RATE=0\.001 on node 0 \(b\) and .*=0\.01 on node 2 .* all sites",
        ),
        ({}, {"done": True}, RunIsOver, r"run r is done: .* last step 100 .* at node 2 \(a\)"),
    ],
)
def test_the_rendezvous_of_two_of_three_sites(port, settings, other, outcome, words):
    """START_TIMEOUT_S passes while the other one, with these facts, is there."""
    config = config_at(port, **{"start_timeout_s": 0} | settings)
    status = SimpleNamespace(phase=lambda *_, **__: None)
    job = SimpleNamespace(config=config, status=status, step=50)
    site = SimpleNamespace(progress=lambda: PROGRESS)
    here = SiteClient(config, FACTS | {"node_rank": 0, "host": "b"})
    there = client_at(port, other.get("node_rank", 2), **PROGRESS | other)
    there.say()
    there.heartbeat.start()
    deadline = time.monotonic() + config.start_timeout_s
    try:
        if isinstance(outcome, set):
            assert site_rendezvous.wait_for_sites(job, here, deadline) == {}
            assert set(site_rendezvous.wait_for_sites(job, here, deadline, site)) == outcome
            return
        with pytest.raises(outcome, match=words):
            site_rendezvous.wait_for_sites(job, here, deadline, site)
    finally:
        for client in (here, there):
            client.leave(done=False)


@pytest.mark.parametrize(
    ("step", "other", "over"),
    [
        (50, {}, False),
        (50, {"done": True}, True),
        (50, {"done": True, "settings": {"RUN_NAME": "another"}}, False),
        (0, {"done": True}, False),
        (50, {"done": True, "last_step": 40}, False),
    ],
)
def test_a_run_that_the_others_have_finished_is_not_trained_alone(step, other, over):
    config = SimpleNamespace(site_rank=1, run_name="r", last_step=100)
    job = SimpleNamespace(config=config, step=step)
    sites = {0: FACTS | {"node_rank": 0} | other, 1: FACTS | {"done": True}}
    assert bool(site_rendezvous.describe_end(job, sites)) is over


def test_a_lighthouse_that_is_not_started_is_waited_for_and_then_named(port, monkeypatch, caplog):
    monkeypatch.setattr(site_rendezvous, "RETRY_S", 0.1)
    config = config_at(port - 1, start_timeout_s=1)  # at its second port nobody listens
    job = SimpleNamespace(config=config, status=SimpleNamespace(phase=lambda *_: None), step=0)
    client = SiteClient(config, FACTS)
    words = r"LIGHTHOUSE=127.*:\d+ refuses connections.* START_TIMEOUT_S=1; start make lighthouse"
    with caplog.at_level("INFO"), pytest.raises(PeersMissing, match=words):
        site_rendezvous.wait_for_sites(job, client, time.monotonic() + 0.5)
    assert caplog.text.count("refuses connections") == 1


# ---- make doctor


def config(**settings):
    return load_preset(SYNC="diloco", SITES="2", NODES="2", **settings)


def test_the_doctor_says_whether_the_lighthouse_and_this_site_can_be_reached(port):
    where = f"127.0.0.1:{port}"
    assert site_checks.findings(Config()) == []
    (finding,) = site_checks.findings(config())
    assert (finding.level, finding.code) == ("FAIL", 64)
    client_at(port, 1).say()
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
    for own, levels in (("127.0.1.1", ["WARN"]), ("10.0.0.7", [])):
        monkeypatch.setattr(site_checks, "own_address", lambda lighthouse, own=own: own)
        assert [finding.level for finding in site_checks.findings(remote, ask=False)] == levels


# ---- Weights for a site that was away


def test_weights_go_to_sites_that_know_the_secret_and_come_from_such(monkeypatch):
    def serve(secret):
        return WeightServer("127.0.0.1", lambda: secret, 5.0)

    def fetch(server, secret, step=4):
        site = serve(secret)
        return site.recv_checkpoint(0, server.metadata(), step, LIMIT)

    ours, theirs = "of-the-run-that-trains", "of-another-run-than-this"
    server, impostor = serve(ours), serve(theirs)
    state = {"weights": torch.arange(100_000.0), "step": 4, "moments": {}}
    for sender in (server, impostor):
        sender.send_checkpoint([1], 4, state, LIMIT)
    assert torch.equal(fetch(server, ours)["weights"], state["weights"])
    assert fetch(server, ours)["step"] == 4
    with pytest.raises(OSError, match="no weights of step 3"):
        fetch(server, ours, step=3)
    for secret in (theirs, None):
        with pytest.raises(WrongSecret):
            fetch(server, secret)
    assert server.server.refused == 1
    monkeypatch.setattr("train.distributed.signed_http.is_same", lambda *_: True)
    with pytest.raises(WrongSecret, match="not signed"):
        fetch(impostor, ours)
    server.disallow_checkpoint()
    assert server.offer == (-1, None)
