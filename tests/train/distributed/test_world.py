"""train/distributed/world.py: who takes part, with what, and what they do together."""

import dataclasses
import errno
import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from record.exit_codes import BAD_DATA, MACHINE_FAULT, NODES_MISSING
from settings import ROOT, SettingsError
from settings.config import Config
from tests.processes import run_ranks
from train.data.manifest import DataError
from train.distributed import world as distributed
from train.distributed.pod import exit_code_of
from train.distributed.world import World, raise_together


def world(rank=0, size=4, local=2):
    cpu = torch.device("cpu")
    host = f"host{rank // local}"
    hosts = tuple(f"host{other // local}" for other in range(size))
    return World(rank, rank % local, rank // local, size, cpu, "CPU", host, local, hosts)


def test_each_node_says_what_it_is_and_the_first_that_all_are_there(caplog, monkeypatch):
    monkeypatch.setenv("LAUNCH_CHOICES", "threads=2")
    caplog.set_level(logging.INFO)
    distributed.log_topology(world(0), site=2)
    node = f"node 0: host=host0 ranks=0-1 of 4 device=CPU torch={torch.__version__} nccl=none"
    joined = "4 processes joined, on host0, host1"
    assert caplog.messages == [f"{node} site=2 threads=2", joined]
    caplog.clear()
    caplog.set_level(logging.WARNING)  # all ranks but the first; a node's first has the node's log
    for rank in (1, 2, 3):
        distributed.log_topology(world(rank))
    assert [message[:6] for message in caplog.messages] == ["node 1"]


@pytest.mark.fault(36)
@pytest.mark.parametrize("where", ["on this machine", "at 127.0.0.1:"])
def test_a_peer_that_does_not_come_is_missed_with_the_place_where_it_was_expected(
    tmp_path, free_port, where
):
    code = (
        "import dataclasses\nfrom train.distributed import world as distributed\nfrom settings.config import Config\n"
        "c = dataclasses.replace(Config(), device='cpu', start_timeout_s=1).derived()\n"
        "try: distributed.join(c)\nexcept distributed.PeersMissing as error: print(error)"
    )
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PATH": "/bin"}
    env["MASTER_PORT"] = str(free_port)
    if where == "on this machine":
        env["RANKS_FILE"] = str(tmp_path / "ranks")
    else:
        where += str(free_port)
    command = [sys.executable, "-c", code]
    out = subprocess.run(
        command, env=env, cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout
    assert "rank 0 of 2 on" in out
    assert f"{where} in START_TIMEOUT_S=1" in out


class Unpicklable(Exception):
    """As HTTP errors of the Hub: made of more than a message."""

    exit_code = 78

    def __init__(self, message, response):
        super().__init__(message)


def raise_in_turn(rank, folder):
    """What each of three processes raises, with errors on some of them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    group = dist.new_group([0, 2])
    raise_together(None)
    with pytest.raises(Unpicklable, match=r"^rank 1: gone$") as raised:
        raise_together(Unpicklable("gone", 404) if rank else None)
    assert raised.value.exit_code == 78
    with pytest.raises(SettingsError, match="rank 2: Invalid setting:\n    SEED=x") as refused:
        raise_together(SettingsError(["SEED=x"]) if rank == 2 else None)
    assert refused.value.problems == ["SEED=x"]
    if rank != 1:
        with pytest.raises(ValueError, match="rank 2: bad"):
            raise_together(ValueError("bad") if rank == 2 else None, group)
    file = folder / "no folder"
    file.touch()
    with pytest.raises(OSError, match="File exists"):
        distributed.who_sees(file, world(rank, 3, 1))
    assert distributed.who_sees(folder / "runs", world(rank, 3, 1)) == [True] * 3
    dist.destroy_process_group()


def test_an_error_of_one_rank_is_raised_by_all(tmp_path):
    run_ranks(raise_in_turn, (tmp_path,), 3)
    assert list((tmp_path / "runs").iterdir()) == []


def raise_on_a_bad_machine(rank, folder, node):
    """Two nodes of two processes, of which rank 3 finds that its volume is gone."""
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "K8S_NODE": node}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    reason = OSError(errno.ESTALE, "Stale file handle")
    error = DataError("a shard cannot be read")
    error.__cause__ = reason
    with pytest.raises(DataError) as raised:
        raise_together(error if rank == 3 else None)
    expected = BAD_DATA
    if node:
        expected = MACHINE_FAULT if rank in (2, 3) else NODES_MISSING
    assert exit_code_of(raised.value, raised.value.exit_code) == expected
    dist.destroy_process_group()


@pytest.mark.parametrize("node", ["", "node-7"])
def test_a_fault_of_one_machine_only_restarts_the_others(tmp_path, node):
    run_ranks(raise_on_a_bad_machine, (tmp_path, node), 4)


def test_a_torch_whose_shutdown_timeout_cannot_be_set_is_known(monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    config = dataclasses.replace(Config(), grace_period_s=159)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    assert distributed.shutdown_timeout_s(config) == 30.0
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.0+cpu"))
    assert distributed.shutdown_timeout_s(config) == 99.0
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    assert distributed.shutdown_timeout_s(config) == 45.0


def test_the_first_process_to_fail_tells_the_launcher_why(tmp_path, monkeypatch):
    path = tmp_path / "exit-code"
    monkeypatch.setenv("EXIT_CODE_FILE", str(path))
    distributed.report_exit(0)  # another may still fail
    assert not path.exists()
    distributed.report_exit(78, "no shard")
    distributed.report_exit(1, "rank 0 is gone")
    assert path.read_text() == "78\nno shard\n"


def test_each_nodes_launcher_hears_of_a_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "progress"
    monkeypatch.setenv("PROGRESS_FILE", str(path))
    distributed.report_progress(world(1), 7)
    assert not path.exists()
    distributed.report_progress(world(2), 8)
    assert path.read_text() == "8\n"
    monkeypatch.setenv("PROGRESS_FILE", str(tmp_path / "absent" / "progress"))
    distributed.report_progress(world(2), 9)
