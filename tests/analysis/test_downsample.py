"""analysis/energy/downsample.py on files made by hand, and spikes of the loss: by numbers worked out here."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from analysis.curves import spikes
from analysis.energy.downsample import BUCKETS, sampled
from tests.analysis.test_samples import WALL, sidecar, write

SECONDS = 400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two GPUs, 100 samples a second: 300 W with a peak of 700, and 500 W. A gap of 40 s. The network once a second."""
    t = np.arange(0, SECONDS, 0.01)
    there = (t < 100) | (t >= 140)
    first = np.where(np.abs(t - 200.005) < 0.006, 700.0, 300.0)
    write(
        tmp_path,
        "1",
        t[there],
        {
            "gpu0_power_w": first[there],
            "gpu0_energy_j": 300 * t[there],
            "gpu1_power_w": np.full(there.sum(), 500.0),
            "gpu1_energy_j": 500 * t[there],
        },
        sidecar(),
    )
    rows = [
        f",{s:.4f},{'' if s == 0 else 2_000_000 * (s % 2) + 1_000_000},250000,{'' if s == 0 else 500000},0"
        for s in range(int(SECONDS))
    ]
    head = "timestamp,elapsed_sec," + ",".join(
        f"net_{name}_{way}_bytes_per_s" for name in ("eth0", "ib0:1") for way in ("in", "out")
    )
    (tmp_path / "gpu_slow_1.csv").write_text("\n".join([head, *rows]) + "\n")
    return tmp_path


def test_power_energy_and_network_of_each_stretch(folder: Path) -> None:
    found = sampled(folder)
    assert found and found.gpus == 2 and len(found.time) == BUCKETS
    assert found.time[0] == pytest.approx(WALL + SECONDS / BUCKETS / 2, abs=0.01)
    elapsed = found.time - WALL
    known = np.isfinite(found.power_w)
    assert (
        not known[(elapsed > 100.2) & (elapsed < 139.8)].any()
        and known[(elapsed < 99.8) | (elapsed > 140.2)].all()
    )
    calm = known & (np.abs(elapsed - 200) > 0.3)
    assert found.power_w[calm] == pytest.approx(400) and found.power_low_w[calm] == pytest.approx(
        300
    )
    assert found.power_high_w[calm].max() == 500 and found.power_high_w[known].max() == 700
    assert found.energy_kwh[-1] == pytest.approx(
        800 * SECONDS / 3.6e6, rel=1e-3
    )  # the counter went on in the gap
    assert found.energy_kwh[BUCKETS // 8] == pytest.approx(800 * SECONDS / 8 / 3.6e6, rel=0.01)
    assert found.in_mb_s is not None and found.out_mb_s is not None
    assert sorted(set(found.in_mb_s[np.isfinite(found.in_mb_s)])) == [
        1.5,
        3.5,
    ]  # without the empty cells of the first
    assert np.isfinite(
        found.in_mb_s[(elapsed > 1.2) & (elapsed < 398.8)]
    ).all()  # ten stretches have one sample
    assert set(found.out_mb_s[np.isfinite(found.out_mb_s)]) == {0.25}


def test_the_network_is_of_the_nodes_that_are_sampled_then(tmp_path: Path) -> None:
    """10 MB/s of node 0 from 0 to 100 s, 30 of node 1 from 50 to 150 s, nothing of either from 150 to 160 s, and node 0
    again from 160 to 200 s. A row in the slow file that is no text is the only one that is left out."""
    for stamp, node, begin, end, rate in (
        ("1", 0, 0, 100, 10),
        ("2", 1, 50, 150, 30),
        ("3", 0, 160, 200, 10),
    ):
        t = np.arange(begin, end, 0.1) - begin
        write(
            tmp_path,
            stamp,
            t,
            {"gpu0_energy_j": 500 * t},
            wall=WALL + begin,
            about=sidecar(f"h{node}", f"b{node}", 5000.0 + begin, WALL + begin, node=node),
        )
        rows = "".join(
            f"x,{s}.0,power_cap,{rate}000000,{2 * rate}000000\n" for s in range(end - begin)
        )
        (tmp_path / f"gpu_slow_{stamp}.csv").write_bytes(
            b"timestamp,elapsed_sec,gpu0_throttle,net_e_in_bytes_per_s,net_e_out_bytes_per_s\n"
            + rows.encode()
            + b"\377\376\n"
        )
    found = sampled(tmp_path)
    assert found and found.in_mb_s is not None and found.out_mb_s is not None
    at = [int(np.searchsorted(found.time, WALL + second)) for second in (20, 80, 120, 155, 180)]
    assert found.in_mb_s[at].tolist() == pytest.approx([10, 40, 30, np.nan, 10], nan_ok=True)
    assert found.out_mb_s[at].tolist() == pytest.approx([20, 80, 60, np.nan, 20], nan_ok=True)


def test_without_a_sampler_there_is_nothing_and_without_a_slow_file_no_network(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "gpu_slow_1.csv").unlink()
    found = sampled(folder)
    assert found and found.in_mb_s is None and found.out_mb_s is None
    (tmp_path / "empty").mkdir()
    assert sampled(tmp_path / "empty") is None


def spikes_in(loss: np.ndarray) -> list[int]:
    return spikes(SimpleNamespace(columns={"loss": loss, "step": np.arange(len(loss)) + 1.0}))  # type: ignore[arg-type]


def test_spikes_are_the_first_steps_far_above_those_before() -> None:
    random = np.random.default_rng(0)
    loss = 3 + 8 * np.exp(-np.arange(5000) / 200) + 0.05 * random.normal(size=5000)
    assert spikes_in(loss) == []
    loss[2000:2003] += 1.5  # one
    loss[3000] += 0.3  # 6 of its deviations: none
    loss[4000] = np.nan
    loss[4100] += 2
    loss[50] = 99  # in the first window
    assert spikes_in(loss) == [2001, 4101]
    assert (
        spikes_in(np.full(500, 3.0))
        == []
        == spikes_in(np.full(100, np.nan))
        == spikes_in(loss[:100])
    )
