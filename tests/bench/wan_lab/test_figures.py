"""make wan-lab: what it makes of what it measures, and where it says that it cannot run. No namespaces."""

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.wan_lab import __main__ as run
from bench.wan_lab import engine, final_loss, ratio, training
from bench.wan_lab.crew import prepare_data
from bench.wan_lab.network import CannotRun, Link, Network, compile_relay, what_is_missing
from settings.config import Config

# ---- The link


def test_a_packet_takes_half_a_millisecond_of_a_link_at_most_and_is_never_too_small() -> None:
    assert [Link(gbit).mtu for gbit in (0, 0.01, 0.1, 1, 10)] == [65000, 1500, 6250, 62500, 65000]


def test_half_of_the_delay_is_on_each_of_two_links() -> None:
    assert Link(1, 15, 0.01).as_given(",") == "1000,1000,7.5,0.01"
    assert str(Link(0.04, 15)) == "40 Mbit/s, 15 ms one way"
    assert str(Link(2, 7.5, 0.001)) == "2 Gbit/s, 7.5 ms one way, 0.1% lost"
    assert str(Link()) == "no WAN"


def test_the_lab_asks_for_the_wan_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Config(wan_gbit=10, wan_rtt_ms=50)
    assert run.asked_link(c) == Link(10, 25, 0)
    monkeypatch.setattr(run, "LOST_PERCENT", 2)
    assert run.asked_link(c) == Link(10, 25, 0.02)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_relay_compiles_without_a_warning_and_refuses_what_is_no_site(tmp_path: Path) -> None:
    done = subprocess.run(
        [compile_relay(tmp_path), "a,b"], text=True, capture_output=True, check=False
    )
    assert done.returncode == 64 and "NAMESPACE,ADDRESS" in done.stderr


# ---- Where it cannot run


def test_each_thing_that_is_missing_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("bench.wan_lab.network.TUN", tmp_path / "tun")
    monkeypatch.setattr(
        "shutil.which", lambda tool: None if tool in ("ip", "gcc") else f"/bin/{tool}"
    )
    root, tun, ip, gcc = what_is_missing()
    assert "root" in root and "sudo" in root
    assert "tun is not there" in tun and "--device" in tun
    assert "command ip" in ip and "apt-get install iproute2" in ip
    assert "command gcc" in gcc and "apt-get install gcc libc6-dev" in gcc


def test_it_ends_with_78_where_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "what_is_missing", lambda: ["it needs root: sudo"])
    monkeypatch.setenv("WAN_LAB", "link")
    assert run.main() == 78
    assert "cannot run here:\n  it needs root: sudo\n" in capsys.readouterr().err
    monkeypatch.setenv("WAN_LAB", "links")
    assert run.main() == 64


def test_a_second_lab_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import contextlib

    monkeypatch.setattr("bench.wan_lab.network.LOCK", tmp_path / "lock")
    with contextlib.ExitStack() as one, contextlib.ExitStack() as other:
        Network.lock(one)
        with pytest.raises(CannotRun, match="another lab is at work"):
            Network.lock(other)


# ---- The engine alone


def test_the_share_is_payload_by_time_by_cap() -> None:
    """A ring of four sends each quarter six times: 1.5 times the sum's bytes leave each site."""
    assert engine.payload_bytes(1_000_000, "bfloat16", 4) == 3e6
    assert engine.payload_bytes(1_000_000, "float32", 2) == 4e6
    assert engine.share(125e6, 2.0, 1.0) == 50.0
    taken = {
        "sites": 4,
        "kind": "striped",
        "dtype": "bfloat16",
        "elements": 66_800_000,
        "streams": 8,
        "rounds": [
            {
                "seconds": s,
                "sent_bytes": 204e6,
                "share": 80 / s,
                "wire_share": 82 / s,
                "foreign_percent": 3.0 * s,
            }
            for s in (2.0, 1.0, 4.0)
        ],
    }
    assert (
        engine.row(taken).count("|") == engine.HEADER[0].count("|") == engine.HEADER[1].count("|")
    )
    assert engine.row(taken) == (
        "| 4 | the engine's, 8 connections, bfloat16 | 134 MB | 2.00 (1.00-4.00) | 40 (20-80) "
        "| 41 (20-82) | 204 (204-204) | 12 |"
    )


# ---- The preset's ratio


def test_the_scaled_preset_keeps_the_ratio_of_the_preset_s_own_arithmetic() -> None:
    """Parameters and FLOPs a token as presets/xlarge-8xa100.env has them; eight A100 of 312 TFLOP/s at half of that."""
    scale = ratio.scaled()
    step_s = 524_288 * 9_224_847_360 / (8 * 312e12 * 0.5)
    assert scale.parameters == 1_336_248_320 and scale.step_s == pytest.approx(step_s)
    assert scale.wait_s / scale.elements == pytest.approx(step_s / 1_336_248_320, rel=1e-6)
    slow = ratio.scaled(slower=4)  # on a quarter of the link
    assert slow.wait_s == scale.wait_s and slow.elements == pytest.approx(scale.elements / 4, abs=1)


def test_efficiency_is_computing_by_all() -> None:
    scale = ratio.Scaled(1000, 20.0, 1, 1)
    found = ratio.described(
        scale,
        "DDP",
        1,
        [{"seconds": 4.0, "compute_s": 1.0, "sent_bytes": 8e6, "foreign_percent": None}],
    )
    assert found["rounds"][0]["efficiency"] == 25.0
    assert ratio.row(found).count("|") == ratio.HEADER[0].count("|") == ratio.HEADER[1].count("|")
    assert ratio.row(found) == (
        "| DDP | 0.0 | 1 | 1.00 (1.00-1.00) | 4.00 (4.00-4.00) | 25 (25-25) |  |  |  "
        "| 8.0 (8.0-8.0) | n/a |"
    )


def test_the_wan_alone_is_the_slowest_sum_beside_the_computing() -> None:
    assert (
        ratio.of_wan([{"compute_s": 6.0, "network_s": 1.0}, {"compute_s": 6.0, "network_s": 2.0}])
        == 0.75
    )


# ---- Training


def test_on_the_slower_link_traffic_takes_the_same_share_of_a_step() -> None:
    full = ratio.Scaled(1_000_000_000, 4.0, 1, 1)
    slow = training.slower(Link(1, 15), full, 3_000_000, 0.2)
    assert 3_000_000 / (slow.gbit * 0.2) == pytest.approx(1_000_000_000 / (1 * 4.0))
    assert slow.one_way_ms == 15


def step(at: float) -> dict[str, Any]:
    return {"event": "step", "time": at}


def sync(
    at: float, outer: int, digest: str, fragment: int = 0, committed: bool = True
) -> dict[str, Any]:
    return {
        "event": "sync",
        "time": at,
        "outer_step": outer,
        "fragment": fragment,
        "hash": digest,
        "committed": committed,
    }


def test_a_pause_is_the_longest_wait_beyond_a_usual_step_in_its_time() -> None:
    records = [step(at) for at in (0, 1, 2, 3, 9, 10, 11, 31)]
    assert training.longest_pause(records, 2.5, 12.0) == 5.0
    assert training.longest_pause(records, 9.5, 12.0) == 0.0


def test_steps_are_lost_to_failed_syncs_of_that_time_only() -> None:
    gaps = [
        {"event": "gap", "time": at, "from": begin, "to": end, "reason": reason}
        for at, begin, end, reason in (
            (1, 0, 10, "failed sync"),
            (5, 20, 30, "failed sync"),
            (6, 0, 500, "away"),
        )
    ]
    assert training.steps_lost(gaps, 4.0, 7.0) == 10


def test_hashes_are_compared_where_all_sites_have_the_sync() -> None:
    one = [sync(1, 1, "z"), sync(5, 2, "a"), sync(6, 3, "b"), sync(7, 4, "c")]
    other = [
        sync(1, 1, "y"),
        sync(5, 2, "a"),
        sync(6, 3, "x"),
        sync(7, 5, "c"),
        sync(8, 4, "c", committed=False),
    ]
    assert training.hashes([one, other], since=4) == {"exchanges": 2, "equal": 1}


def test_rows_of_training_have_all_columns() -> None:
    columns = training.HEADER[0].count("|")
    trained = {
        "name": "ddp",
        "link": "40 Mbit/s",
        "step_s": 4.0,
        "share": 5.0,
        "sent_bytes_per_step": [2e7] * 4,
        "val_loss": 5.5,
        "tokens": 122880,
    }
    lost = {
        "name": "site 3 killed",
        "back_s": 9.0,
        "paused_s": 5.0,
        "others_lost_steps": 10,
        "site_gaps": [[20, 60, "away"]],
        "equal": 2,
        "exchanges": 2,
    }
    assert training.row(trained).count("|") == training.row(lost).count("|") == columns
    assert "| 9.0 | 5.0; 10 | 20-60 | 2 of 2 |" in training.row(lost)


# ---- Loss


def test_the_spread_of_losses_is_that_over_seeds() -> None:
    taken = [{"name": "DDP", "val_loss": value} for value in (3.0, 4.0, 5.0)]
    taken += [
        {"name": "DiLoCo, H=30", "val_loss": value, "worse_percent": 10 * value}
        for value in (3.3, 4.4, 5.5)
    ]
    first, second = final_loss.summary(taken).splitlines()
    assert first == "DDP: loss 4.000 (3.000-5.000); standard deviation over seeds 1.0000"
    assert second.startswith(
        "DiLoCo, H=30: loss 4.400 (3.300-5.500), 44.00 (33.00-55.00) % more than DDP; "
    )


def test_results_are_written_as_they_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_part(c: Config, folder: Path) -> Any:
        seen = itertools.chain([{"a": 1}], iter([{"a": 2}]))
        yield "link", ("| a |", "|---|"), seen, lambda taken: f"| {taken['a']} |"

    monkeypatch.setattr(run, "parts", one_part)
    path = run.lab(Config(runs_dir=str(tmp_path)))
    assert path.parent.parent == tmp_path / "wan-lab"
    content = json.loads(path.read_text())
    assert (
        content["schema"] == 1
        and content["link"] == [{"a": 1}, {"a": 2}]
        and "cpu" in content["machine"]
    )
    assert "| a |\n|---|\n| 1 |\n| 2 |\n" in capsys.readouterr().out


def test_data_that_cannot_be_prepared_are_said() -> None:
    with pytest.raises(RuntimeError, match="VOCAB_SIZE=7"):
        prepare_data({"VOCAB_SIZE": "7"})
