"""settings/addresses.py: where node 0 is, as MASTER_ADDR writes it."""

import pytest

from settings import load_preset
from settings.addresses import join_address
from settings.config import Config
from settings.declare import SettingsError
from tests.settings.test_declarations import is_accepted


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.5", "10.0.0.5", 29500),
        ("node-0.lab.org:4000", "node-0.lab.org", 4000),
        ("[fe80::1]:4000", "fe80::1", 4000),
        ("[fe80::1]", "fe80::1", 29500),
        ("2001:db8::5", "2001:db8::5", 29500),
    ],
)
def test_an_address_has_a_host_and_a_port(address, host, port):
    config = load_preset(NODES="2", MASTER_ADDR=address)
    assert (config.master_host, config.master_port) == (host, port)
    again = Config(master_addr=join_address(host, port))
    assert (again.master_host, again.master_port) == (host, port)


def test_ports_are_those_that_anybody_may_listen_on():
    """LIGHTHOUSE's registry takes the next port, so the largest is not for it."""
    ports = [port for port in range(70_000) if is_accepted("LIGHTHOUSE", f"a:{port}")]
    assert ports == list(range(1024, 65535))


@pytest.mark.parametrize("address", ["a:", ":4000", "a:80", "a:65536", "x:1:2", "a b", "[a]:4000"])
def test_what_is_no_address_is_refused_by_name(address):
    with pytest.raises(SettingsError, match="MASTER_ADDR="):
        load_preset(NODES="2", MASTER_ADDR=address)
