"""What `make net-probe` measured between the nodes of a run, for the plan to stand on.

    RUNS_DIR/net_probe.json     the last measurement; make plan takes its links where WAN_GBIT, WAN_RTT_MS or LAN_GBIT
                                are not set, and says so

Between sites the slowest counts, since an exchange waits for it: of all pairs, and of all sites sending at once.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from record.durable import write_whole
from settings import ROOT
from settings.config import Config

SCHEMA = 1
FILE = "net_probe.json"


@dataclasses.dataclass(frozen=True)
class Pair:
    """From one node to another. rtt_ms: the median, rtt_p95_ms: of 95 in 100; one_gbit, many_gbit: with one connection
    and with several, of payload. None: not measured; problem: why."""

    start: int
    end: int
    rtt_ms: float | None = None
    rtt_p95_ms: float | None = None
    one_gbit: float | None = None
    many_gbit: float | None = None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Flow:
    """From one node to another while all send; gbit: None where it was not measured."""

    start: int
    end: int
    gbit: float | None


@dataclasses.dataclass(frozen=True)
class Links:
    """hosts, sites: of each node; a site is "" where that is not known. streams: connections of many_gbit and of flows;
    when: Unix seconds."""

    when: float
    hosts: tuple[str, ...]
    sites: tuple[str, ...]
    streams: int
    pairs: tuple[Pair, ...]
    at_once: tuple[Flow, ...] = ()

    @property
    def known(self) -> bool:
        """Whether each node's site is."""
        return all(self.sites)

    def far(self, start: int, end: int) -> bool:
        """Whether there is a WAN between two nodes; where sites are not known each node counts as one."""
        return not self.known or self.sites[start] != self.sites[end]

    @property
    def settings(self) -> dict[str, str]:
        """NAME -> value: what make plan is to be given; none where nothing was measured."""
        wan, lan, round_trips = self.out_of_sites(), [], [0.0]
        for pair in self.pairs:
            if self.far(pair.start, pair.end):
                wan.append(pair.many_gbit)
                round_trips.append(pair.rtt_ms or 0.0)
            else:
                lan.append(pair.many_gbit)
        for flow in self.at_once:
            if not self.far(flow.start, flow.end):
                lan.append(flow.gbit)
        values = {
            "WAN_GBIT": slowest(wan),
            "WAN_RTT_MS": max(round_trips),
            "LAN_GBIT": slowest(lan),
        }
        return {name: f"{value:.3g}" for name, value in values.items() if value}

    def out_of_sites(self) -> list[float | None]:
        """Gbit/s that each site sent to others, of all its nodes, while all sent."""
        sums: dict[str, float] = {}
        for flow in self.at_once:
            if self.far(flow.start, flow.end) and flow.gbit is not None:
                site = self.sites[flow.start] if self.known else str(flow.start)
                sums[site] = sums.get(site, 0.0) + flow.gbit
        return list(sums.values())

    @property
    def date(self) -> str:
        return time.strftime("%d %b %Y", time.localtime(self.when))


def slowest(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


# ---------------------------------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------------------------------


def path_of(runs_dir: str) -> Path:
    return (ROOT / runs_dir).absolute() / FILE


def to_json(links: Links) -> str:
    return (
        json.dumps(
            {"schema": SCHEMA, **dataclasses.asdict(links), "settings": links.settings}, indent=1
        )
        + "\n"
    )


def of_json(text: str) -> Links | None:
    """None where it is another thing."""
    try:
        content: Any = json.loads(text)
        if not isinstance(content, dict) or content.pop("schema") != SCHEMA:
            return None
        content.pop("settings", None)
        return Links(
            **content
            | {
                "hosts": tuple(content["hosts"]),
                "sites": tuple(content["sites"]),
                "pairs": tuple(Pair(**pair) for pair in content["pairs"]),
                "at_once": tuple(Flow(**flow) for flow in content.get("at_once", ())),
            }
        )
    except (ValueError, KeyError, TypeError):
        return None


def write(runs_dir: str, links: Links) -> Path:
    """Whole or not at all. Raises OSError."""
    path = path_of(runs_dir)
    write_whole(path, to_json(links).encode())
    return path


def read(runs_dir: str) -> Links | None:
    """None where nothing was measured, or it cannot be read."""
    try:
        return of_json(path_of(runs_dir).read_text(encoding="utf-8"))
    except OSError:
        return None


def loaded(load: Callable[[dict[str, str]], Config]) -> Config:
    """Settings with these links in the place of declared defaults. load: loads them, given such places."""
    c = load({})
    links = read(c.runs_dir)
    return load(links.settings) if links else c


def describe(c: Config) -> str:
    """', measured on 22 Nov 2026 by make net-probe', where c's links between sites are those."""
    links = read(c.runs_dir)
    settings = links.settings if links else {}
    same = {
        name: float(value) == getattr(c, name.lower())
        for name, value in settings.items()
        if name != "LAN_GBIT"
    }
    return (
        f", measured on {links.date} by make net-probe"
        if links and same and all(same.values())
        else ""
    )
