"""train/distributed/world.py: who takes part, with what, and what is said where they do not come together."""

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from settings import ROOT
from settings.config import Config
from train.distributed import world as distributed
from train.distributed.world import PeersDiffer, World

CPU = torch.device("cpu")


def world(rank: int = 0, size: int = 4, local: int = 2) -> World:
    return World(
        rank,
        rank % local,
        rank // local,
        size,
        CPU,
        "CPU",
        f"host{rank // local}",
        local,
        tuple(f"host{r // local}" for r in range(size)),
    )


def test_each_node_says_what_it_is_and_the_first_that_all_are_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(
        distributed, "from_all", lambda mine: [(f"host{r // 2}", *mine[1:]) for r in range(4)]
    )
    distributed.introduce(world(0))
    assert (
        f"node 0: host=host0 ranks=0-1 of 4 device=CPU torch={torch.__version__} nccl=none"
        in caplog.text
    )
    assert "4 of 4 processes joined, on host0 (CPU), host1 (CPU)" in caplog.text
    distributed.introduce(world(0), site=2)
    assert caplog.messages[-2].endswith("nccl=none site=2")
    caplog.clear()
    caplog.set_level(
        logging.WARNING
    )  # as in all but the first process: a node's first speaks in its node's log
    for rank in (1, 2, 3):
        distributed.introduce(world(rank))
    assert [record.message[:6] for record in caplog.records] == ["node 1"]


def test_unequal_versions_stop_the_job_and_name_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(mine: tuple) -> list[tuple]:
        host, device, software = mine
        return [
            mine,
            (host, device, software),
            ("host1", device, software | {"torch": "2.11.0"}),
            mine,
        ]

    monkeypatch.setattr(distributed, "from_all", others)
    with pytest.raises(
        PeersDiffer,
        match=rf"torch {torch.__version__.replace('+', '.')} \(rank 3 on host0\), "
        r"torch 2\.11\.0 \(rank 2 on host1\).*make setup",
    ):
        distributed.introduce(world())


@pytest.mark.fault(36)
def test_a_peer_that_does_not_come_is_missed_with_the_place_where_it_was_expected(
    free_port: int,
) -> None:
    code = (
        "import dataclasses, os\nfrom train.distributed import world as distributed\nfrom settings.config import Config\n"
        "c = dataclasses.replace(Config(), device='cpu', start_timeout_s=1).derived()\n"
        "try: distributed.join(c)\nexcept distributed.PeersMissing as error: print(error)"
    )
    env = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        "PATH": "/bin",
    }
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
        timeout=120,
    ).stdout
    assert (
        "rank 0 of 2 on" in out
        and f"127.0.0.1:{free_port} in START_TIMEOUT_S=1" in out
        and "firewall" in out
    )


def test_a_torch_that_cannot_be_told_its_time_out_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import launcher

    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    c = dataclasses.replace(Config(), grace_period_s=159)
    old = tmp_path / "api.py"
    for text, expected in (
        ("timeout = 30", (30.0, False)),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", (99.0, True)),
    ):
        old.write_text(text)
        monkeypatch.setattr(launcher, "api", SimpleNamespace(__file__=str(old)))
        assert distributed.shutdown_timeout_s(c) == expected
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    assert distributed.shutdown_timeout_s(c) == (45.0, True)


def test_each_nodes_launcher_hears_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "progress"
    monkeypatch.setenv("PROGRESS_FILE", str(path))
    distributed.report_progress(world(1), 7)
    assert not path.exists()
    distributed.report_progress(world(2), 8)
    assert path.read_text() == "8\n"
    monkeypatch.setenv("PROGRESS_FILE", str(tmp_path / "absent" / "progress"))
    distributed.report_progress(world(2), 9)
