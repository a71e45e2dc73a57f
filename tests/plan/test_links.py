"""plan/network/links.py: what make net-probe measured, by hand, and that make plan takes it where nobody sets a link."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plan.fleet import fleet_of
from plan.network import links
from plan.network.links import Flow, Links, Pair
from plan.planner import make_plan
from plan.report import report
from settings import ROOT, load_config

NOON = datetime.datetime(2026, 11, 22, 12, 0).timestamp()
FAST, SLOW = Pair(0, 1, 0.2, 0.3, 9.0, 20.0), Pair(0, 2, 31.0, 40.0, 0.2, 0.9)


def measured(
    sites: tuple[str, ...], pairs: tuple[Pair, ...], at_once: tuple[Flow, ...] = ()
) -> Links:
    return Links(NOON, tuple(f"h{i}" for i in range(len(sites))), sites, 8, pairs, at_once)


@pytest.mark.parametrize(
    ("found", "settings"),
    [
        # sites that nobody named: each node is one
        (measured(("", "", ""), (FAST, SLOW)), {"WAN_GBIT": "0.9", "WAN_RTT_MS": "31"}),
        # two nodes at one site, whose link to the other both share while all send: 0.5 + 0.3
        (
            measured(
                ("a", "a", "b"), (FAST, SLOW), (Flow(0, 2, 0.5), Flow(1, 2, 0.3), Flow(2, 0, 0.85))
            ),
            {"WAN_GBIT": "0.8", "WAN_RTT_MS": "31", "LAN_GBIT": "20"},
        ),
        (measured(("a", "a"), (FAST,), (Flow(0, 1, 17.5),)), {"LAN_GBIT": "17.5"}),
        (
            measured(("", ""), (Pair(0, 1, problem="refused"), Pair(1, 0, 5.0, 6.0, 0.1, 0.2345))),
            {"WAN_GBIT": "0.234", "WAN_RTT_MS": "5"},
        ),
        (measured(("", ""), (Pair(0, 1, problem="refused"),), (Flow(0, 1, None),)), {}),
    ],
)
def test_what_make_plan_is_given(found: Links, settings: dict[str, str]) -> None:
    assert found.settings == settings
    assert links.of_json(links.to_json(found)) == found


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    found = measured(("", ""), (SLOW,))
    assert links.read(str(tmp_path)) is None
    path = links.write(str(tmp_path / "runs"), found)
    assert (
        path == tmp_path / "runs" / "net_probe.json" and links.read(str(tmp_path / "runs")) == found
    )
    assert [file.name for file in path.parent.iterdir()] == ["net_probe.json"]
    for text in ("", "{}", '{"schema": 2}', '{"schema": 1, "when": 1}', "[1]"):
        path.write_text(text)
        assert links.read(str(tmp_path / "runs")) is None


def test_make_plan_takes_them_where_nobody_sets_them(tmp_path: Path) -> None:
    links.write(
        str(tmp_path / "runs"), measured(("", "", ""), (Pair(0, 1, 40.0, 50.0, 1.0, 2.5), SLOW))
    )
    (tmp_path / "empty.env").touch()

    def printed(**more: str) -> str:
        given = (
            os.environ
            | {
                "ENV_FILE": str(tmp_path / "empty.env"),
                "RUNS_DIR": str(tmp_path / "runs"),
                "PRESET": "xlarge-8xa100",
                "NODES": "4",
                "SITES": "4",
            }
            | more
        )
        done = subprocess.run(
            [sys.executable, "-m", "plan"],
            cwd=ROOT,
            env=given,
            text=True,
            check=False,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    assert (
        "0.9 Gbit/s and 40 ms between them, measured on 22 Nov 2026 by make net-probe" in printed()
    )
    assert "3 Gbit/s and 40 ms between them." in printed(WAN_GBIT="3")
    assert "1 Gbit/s and 30 ms between them." in printed(RUNS_DIR=str(tmp_path / "others"))


def test_a_plan_says_who_measured_only_of_what_was(tmp_path: Path) -> None:
    links.write(str(tmp_path), measured(("", ""), (SLOW,)))

    def said(**more: str) -> str:
        c = load_config(
            {
                "ENV_FILE": "",
                "MASTER_ADDR": "planned",
                "PRESET": "xlarge-8xa100",
                "NODES": "4",
                "SITES": "4",
                "RUNS_DIR": str(tmp_path),
            }
            | more
        )
        plan = make_plan(c, fleet_of(c), datetime.datetime(2026, 11, 22), places=())
        return " ".join(report(plan).split())

    assert "measured on" not in said() and "measured on" not in said(WAN_GBIT="0.9")
    assert "measured on" in said(WAN_GBIT="0.9", WAN_RTT_MS="31")
    c = links.loaded(
        lambda defaults: load_config({"ENV_FILE": "", "RUNS_DIR": str(tmp_path)}, defaults=defaults)
    )
    assert (c.wan_gbit, c.wan_rtt_ms, c.lan_gbit) == (0.9, 31, 25)
