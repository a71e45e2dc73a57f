"""k8s/manifests/network/ and docs/nccl.md: one verdict on each variable of the lab's old list, the same in both."""

import re

import pytest

from settings import ROOT
from settings.sources import read_file

# The lab's list, with the values that its manifests had; None where they had left the variable unset.
LAB = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_NET_GDR_LEVEL": "0",
    "NCCL_BUFFSIZE": "4194304",
    "NCCL_MIN_NCHANNELS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_SOCKET_IFNAME": None,
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
}
NETWORKS = ("wan", "site")
PATHS = {network: ROOT / "k8s" / "manifests" / "network" / f"{network}.env" for network in NETWORKS}
PAGE = (ROOT / "docs" / "nccl.md").read_text()


def values(network: str) -> dict[str, str]:
    """What the strict reader of env files makes of a file."""
    problems: list[str] = []
    source = read_file(PATHS[network], network, problems)
    assert problems == []
    return {name: given.text for name, given in source.items()}


def verdicts_of_file(network: str) -> dict[str, tuple[str, str]]:
    """Variable -> (verdict, the NAME=value line below it, or ""), of the comments of a file."""
    line = r"^# ([A-Z0-9_]+): (kept|changed|dropped)\b.*\n(?:([A-Z0-9_]+=\S+)\n)?"
    found = re.findall(line, PATHS[network].read_text(), re.MULTILINE)
    assert len(found) == len({name for name, *_ in found})
    return {name: (verdict, line) for name, verdict, line in found}


def verdicts_of_page() -> dict[str, dict[str, tuple[str, str]]]:
    """Network -> variable -> (verdict, NAME=value), of the table."""
    found: dict[str, dict[str, tuple[str, str]]] = {network: {} for network in NETWORKS}
    for name, lab, *cells in re.findall(
        r"^\| `([A-Z0-9_]+)` \|(.*?)\|(.*?)\|(.*?)\|$", PAGE, re.MULTILINE
    ):
        assert lab.strip().strip("`") == (LAB[name] or ""), name
        for network, cell in zip(NETWORKS, cells, strict=True):
            match = re.fullmatch(r" (kept|changed|dropped)(?:: `(\S+)`)? ", cell)
            assert match, cell
            found[network][name] = (match[1], match[2] or "")
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_each_variable_of_the_list_has_a_verdict_and_the_page_says_the_same(network: str) -> None:
    of_file, of_page = verdicts_of_file(network), verdicts_of_page()[network]
    assert list(of_file) == list(of_page) == list(LAB)
    for name, (verdict, line) in of_file.items():
        assert of_page[name] == (verdict, line if verdict == "changed" else ""), name


@pytest.mark.parametrize("network", NETWORKS)
def test_a_verdict_is_what_the_file_does(network: str) -> None:
    is_set = values(network)
    for name, (verdict, line) in verdicts_of_file(network).items():
        if verdict == "kept":
            assert is_set.get(name) == LAB[name] and line == f"{name}={LAB[name]}", name
        elif verdict == "dropped":
            assert name not in is_set and line == "", name
        else:
            new, _, value = line.partition("=")
            assert is_set.get(new) == value and (new, value) != (name, LAB[name]), name
    lines = {line for _, line in verdicts_of_file(network).values() if line}
    assert lines == {
        f"{name}={value}" for name, value in is_set.items()
    }  # and it does nothing else


@pytest.mark.parametrize("network", NETWORKS)
def test_what_costs_bandwidth_inside_a_node_is_set_nowhere_and_sockets_are_within_the_limit(
    network: str,
) -> None:
    is_set = values(network)
    assert "NCCL_P2P_DISABLE" not in is_set and "CUDA_DEVICE_MAX_CONNECTIONS" not in is_set
    assert int(is_set["NCCL_SOCKET_NTHREADS"]) <= 16
    assert int(is_set["NCCL_SOCKET_NTHREADS"]) * int(is_set["NCCL_NSOCKS_PERTHREAD"]) <= 64
    assert is_set["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_infiniband_is_for_one_site_and_never_between_sites() -> None:
    assert values("wan")["NCCL_IB_DISABLE"] == "1" and values("wan")["NCCL_SOCKET_IFNAME"] == "eth0"
    assert not [
        name
        for name in values("site")
        if name in ("NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_NET")
    ]


def test_the_page_gives_a_reason_for_each() -> None:
    why = PAGE.split("## Why")[1]
    headings = re.findall(r"^- ((?:\*\*`[^`]+`\*\*(?: and )?)+)", why, re.MULTILINE)
    named = {name for heading in headings for name in re.findall(r"`([A-Z0-9_]+)=?[^`]*`", heading)}
    assert named == set(LAB)


def test_the_computed_numbers_of_the_page_are_so() -> None:
    per_channel = 4 * 2**20 * 8 / 0.03 / 1e9  # Gbit/s: one buffer in each 30 ms
    said = re.search(r"at most ([\d.]+)\s+Gbit/s,\s+four of them ([\d.]+) \(computed", PAGE)
    assert said and [float(number) for number in said.groups()] == [
        round(per_channel, 1),
        round(4 * per_channel, 1),
    ]
