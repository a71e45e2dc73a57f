"""How much of a capped link the outer all-reduce fills: the striped engine beside one gloo group, at 2 and 4 sites.

A ring all-reduce of B bytes sends 2 (S - 1) / S of B out of each of S sites. That, as bits by seconds, over the cap is
the share that is quoted; what the relay counted, headers and retransmissions included, stands beside it. What is summed
is as large as what the efficiency is measured with (ratio.py), and checked to the bit. Foreign load is what others took
of this machine, with the kernel's work for the network, which it books on no process.
"""

from collections.abc import Iterator
from typing import Any

from bench.run import spread
from bench.wan_lab.crew import crew
from bench.wan_lab.network import Link, Network
from doctor.gpu_probe.foreign_load import worst

ROUNDS = {"striped": 4, "gloo": 2}  # the slow one is known well enough by two
KINDS = (("striped", "bfloat16"), ("gloo", "float32"))
WIDTH = {"float32": 4, "bfloat16": 2}


def payload_bytes(elements: int, dtype: str, sites: int) -> float:
    """That a ring all-reduce sends out of each site."""
    return 2 * (sites - 1) / sites * WIDTH[dtype] * elements


def share(size: float, seconds: float, gbit: float) -> float:
    """Per cent of a link's cap."""
    return 100 * 8 * size / seconds / (gbit * 1e9)


def turns(
    network: Network,
    kind: str,
    dtype: str,
    elements: int,
    streams: int,
    rounds: int,
    wait_s: float = 0,
) -> list[dict[str, Any]]:
    """All-reduces by all sites of a network, each behind so long a wait; one more comes first, to warm up."""
    arguments = [
        [kind, dtype, str(elements), str(site), str(network.sites), str(streams), str(wait_s)]
        for site in range(network.sites)
    ]
    with crew(network, "bench.wan_lab.reduce", arguments) as workers:
        workers.turn()
        return [workers.turn() for _ in range(rounds)]


def measure(network: Network, kind: str, dtype: str, elements: int, streams: int) -> dict[str, Any]:
    """Seconds and shares of a link."""
    sites, gbit = network.sites, network.link.gbit
    rounds = turns(network, kind, dtype, elements, streams, ROUNDS[kind])
    size = payload_bytes(elements, dtype, sites)
    return {
        "sites": sites,
        "kind": kind,
        "dtype": dtype,
        "elements": elements,
        "asked_gbit": gbit,
        "asked_one_way_ms": network.link.one_way_ms,
        "streams": streams if kind == "striped" else 1,
        "rounds": [
            {
                "seconds": taken["seconds"],
                "sent_bytes": taken["sent_bytes"],
                "payload_bytes": size,
                "foreign_percent": taken["foreign_percent"],
                "share": share(size, taken["seconds"], gbit),
                "wire_share": share(taken["sent_bytes"], taken["seconds"], gbit),
            }
            for taken in rounds
        ],
    }


def found(link: Link, elements: int, streams: int) -> Iterator[dict[str, Any]]:
    for sites in (2, 4):
        with Network(sites, link) as network:
            for kind, dtype in KINDS:
                yield measure(network, kind, dtype, elements, streams)


HEADER = (
    "| sites | all-reduce | bytes of a sum | seconds | of the capped link, % | counted on the wire, % | "
    "sent by a site, MB | foreign load, % |",
    "|---|---|---|---|---|---|---|---|",
)
NAMES = {"striped": "the engine's, {streams} connections", "gloo": "one gloo group"}


def row(taken: dict[str, Any]) -> str:
    rounds = taken["rounds"]
    return (
        "| "
        + " | ".join(
            [
                str(taken["sites"]),
                f"{NAMES[taken['kind']].format(**taken)}, {taken['dtype']}",
                f"{WIDTH[taken['dtype']] * taken['elements'] / 1e6:.0f} MB",
                spread([r["seconds"] for r in rounds], 2),
                spread([r["share"] for r in rounds]),
                spread([r["wire_share"] for r in rounds]),
                spread([r["sent_bytes"] / 1e6 for r in rounds]),
                worst(rounds),
            ]
        )
        + " |"
    )
