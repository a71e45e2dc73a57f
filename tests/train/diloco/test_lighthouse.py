"""train/diloco/lighthouse.py: addresses at which it does not listen."""

import socket

import pytest

from settings.config import Config
from settings.declare import SettingsError
from tests.settings.test_declarations import is_accepted
from train.diloco import lighthouse
from train.distributed import rendezvous
from train.distributed.signed_http import listen

NO_NAME = "no-such-host.invalid"


@pytest.fixture
def no_pod(monkeypatch, tmp_path):
    monkeypatch.delenv("K8S_NODE", raising=False)

    def find_none(host, *_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find_none)


def test_a_name_without_an_address_is_listened_at_nowhere(no_pod, monkeypatch, tmp_path, free_port):
    pytest.importorskip("torchft")
    config = Config(runs_dir=str(tmp_path), run_name="x", lighthouse=f"{NO_NAME}:{free_port}")
    message = f"LIGHTHOUSE={NO_NAME}:{free_port}: This name has no address .Name or service"
    with pytest.raises(SettingsError, match=message):
        lighthouse.serve(config)
    with pytest.raises(socket.gaierror):
        listen(NO_NAME, free_port)
    monkeypatch.setenv("K8S_NODE", "a-machine")  # a Service gets its address later
    listen(NO_NAME, free_port).close()


def test_node_0_does_not_serve_at_a_name_without_an_address(no_pod, tmp_path, free_port):
    config = Config(
        runs_dir=str(tmp_path), run_name="x", nodes=2, master_addr=f"{NO_NAME}:{free_port}"
    )
    members = rendezvous.Members()
    with (
        pytest.raises(rendezvous.CannotServe, match="This name has no address"),
        rendezvous.serving(config, members),
    ):
        pass


def test_a_lighthouse_has_no_ipv6_address():
    assert not is_accepted("LIGHTHOUSE", "[::1]:29630")
    assert is_accepted("LIGHTHOUSE", "127.0.0.1:29630")
