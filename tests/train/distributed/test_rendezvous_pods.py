"""train/distributed/rendezvous.py in pods: nodes that are told to stop and come back, runs that are done, and nodes' sites."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from record import locks, status
from settings.config import Config
from tests.train.distributed.test_rendezvous import Nodes, nodes
from tests.train.distributed.test_rendezvous_ends import command, said
from train.distributed import rendezvous, wan
from train.distributed.registry import Verdict

__all__ = ["nodes"]  # a fixture

POD = ("K8S_NODE", "machine")


# ---- Told to stop, and started again


@pytest.mark.parametrize("stopped", [0, 2])
def test_the_others_wait_for_a_node_that_was_told_to_stop(nodes: Nodes, stopped: int) -> None:
    pods = {rank: command(nodes, rank, "meet", "1", **dict([POD])) for rank in (0, 2)}
    nodes.wait_for("waiting for peers 2/3")
    pods[stopped].send_signal(signal.SIGTERM)
    code, text = said(pods[stopped])
    assert (
        code == 143
        and f"roll call: node {stopped} ({socket.gethostname()}) was told to stop" in text
    )
    if not stopped:
        assert status.read(nodes.paths.status)["phase"] == "stopped"
    for rank in (stopped, 1):
        pods[rank] = command(nodes, rank, "meet", "1", **dict([POD]))
    for rank, pod in pods.items():
        code, text = said(pod)
        assert code == 0 and "all nodes have joined" in text, f"node {rank}: {text}"
        assert "told to stop" not in text


def test_who_waits_for_node_0_has_as_long_again_once_it_has_been_there(nodes: Nodes) -> None:
    """It may leave when a caller's own patience is nearly over, and pods take a while to come back."""
    with socket.create_server(("127.0.0.1", nodes.config.master_port)) as listener:
        nodes.start(1, timeout_s=9)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(json.dumps({"roll_call": 1}).encode() + b"\n")
            assert json.loads(connection.makefile().readline())["node_rank"] == 1
            time.sleep(7)
    time.sleep(2.5)
    nodes.start(0)
    nodes.start(2)
    assert nodes.verdict(1) == Verdict(0)


def test_a_run_that_a_machine_which_is_gone_still_holds_is_waited_for(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shared disk has it for some minutes; by hand that is refused at once."""
    monkeypatch.setattr(locks, "RELEASE_S", 0.2)
    monkeypatch.setenv(*POD)
    pod = dataclasses.replace(nodes.config, start_timeout_s=4)
    with ThreadPoolExecutor() as threads:
        with locks.hold_run(nodes.paths):
            told = threads.submit(rendezvous.meet, pod, 1)
            with pytest.raises(TimeoutError):
                told.result(timeout=1)
        assert told.result(timeout=10).code == 69  # it has held the roll call, to which nobody came


# ---- Done


def finish(nodes: Nodes, **facts: Any) -> None:
    """Leave the run as one that all three nodes have finished, in a folder that they share."""
    (nodes.paths.folder / "logs").mkdir()
    for rank in range(3):
        nodes.paths.node_log(rank).touch()
    nodes.paths.status.write_text(
        json.dumps({"phase": "done", "step": nodes.config.last_step} | facts)
    )


def meet(nodes: Nodes, rank: int, **settings: Any) -> Verdict:
    """The outcome of a roll call for which only this node is there."""
    return rendezvous.meet(
        dataclasses.replace(nodes.config, node_rank=rank, start_timeout_s=1, **settings), 1
    )


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_node_of_a_run_that_is_done_waits_for_nobody(
    nodes: Nodes, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(nodes)
    before = nodes.paths.status.read_text()
    for part in ("call", "receive"):
        monkeypatch.setattr(rendezvous, part, lambda *_: pytest.fail("a roll call was made"))
    code, why = meet(nodes, rank)
    last = nodes.config.last_step
    assert code == rendezvous.RUN_IS_DONE
    assert why == f"run run is done: {last} of {last} steps, in {nodes.paths.folder}"
    assert nodes.paths.status.read_text() == before


@pytest.mark.parametrize("settings", [{"max_steps": 2000}, {"train_tokens": 20_000_000}])
def test_a_run_that_is_to_go_on_is_not_done(nodes: Nodes, settings: dict[str, int]) -> None:
    finish(nodes)
    assert nodes.config.last_step < dataclasses.replace(nodes.config, **settings).last_step
    for rank in (0, 1):
        assert meet(nodes, rank, **settings).code == 69


@pytest.mark.parametrize(
    "facts", [{"phase": "sampling"}, {"phase": "crashed"}, {"step": 3}, {"step": None}]
)
def test_a_run_whose_end_is_still_to_be_made_wants_all_nodes(
    nodes: Nodes, facts: dict[str, Any]
) -> None:
    """The evaluation behind the last step too: a checkpoint of that step does not make it done."""
    finish(nodes, **facts)
    (nodes.paths.checkpoints / f"step_{nodes.config.last_step:07d}").mkdir(parents=True)
    assert meet(nodes, 1).code == 69


def test_a_run_past_the_last_step_is_done(nodes: Nodes) -> None:
    finish(nodes, phase="stopped", step=900)
    for name in ("step_0000100", "step_0000900", "step_x", ".trash-5"):
        (nodes.paths.checkpoints / name).mkdir(parents=True)
    code, why = meet(nodes, 1, max_steps=800)
    assert code == rendezvous.RUN_IS_DONE and "already at step 900, past step 800" in why
    assert meet(nodes, 1, max_steps=900).code == 69


def test_nodes_that_do_not_share_the_folder_meet_as_before(nodes: Nodes) -> None:
    finish(nodes)
    nodes.paths.node_log(2).unlink()
    assert [meet(nodes, rank).code for rank in (0, 1)] == [69, 69]


def test_the_command_says_by_its_code_that_a_run_is_done(nodes: Nodes) -> None:
    finish(nodes)
    code, text = said(command(nodes, 1, "meet", "1", "a-zone", "a-machine"))
    assert code == 10 and text.startswith("roll call: run run is done: ")


# ---- Sites


def members(*sites: str, device: str = "CPU") -> list[dict[str, Any]]:
    return [
        {
            "node_rank": rank,
            "host": f"pt-{rank}",
            "site": site,
            "machine": f"gpu-{rank}.example.org",
            "device": device,
            "settings": {"NPROC": 2},
        }
        for rank, site in enumerate(sites)
    ]


def where(
    nodes: Nodes,
    caplog: pytest.LogCaptureFixture,
    found: list[dict[str, Any]],
    c: Config | None = None,
) -> list[tuple[str, str]]:
    caplog.clear()
    rendezvous.say_where(c or nodes.config, found, nodes.paths)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_nodes_of_one_site_and_of_none_that_is_known(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    one = where(nodes, caplog, members("ucsd", "ucsd"))
    assert one == [
        ("INFO", "node 0 (pt-0): site=ucsd machine=gpu-0.example.org processes=2 device=CPU"),
        ("INFO", "node 1 (pt-1): site=ucsd machine=gpu-1.example.org processes=2 device=CPU"),
        ("INFO", "one site: ucsd"),
    ]
    for sites in (("", ""), ("ucsd", "")):
        assert where(nodes, caplog, members(*sites))[2:] == [("INFO", "sites: unknown")]
    bare = [
        {"node_rank": 0, "host": "a"},
        {"node_rank": 1, "host": "b"},
    ]  # of a node that tells less
    assert (
        where(nodes, caplog, bare)[0][1]
        == "node 0 (a): site=unknown machine=unknown processes=n/a device=n/a"
    )


def test_nodes_at_several_sites_are_told_what_that_costs(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "empty.env").touch()
    xlarge = Config.load({"PRESET": "xlarge-8xa100", "ENV_FILE": str(tmp_path / "empty.env")})
    device = "NVIDIA A100-SXM4-80GB"
    *_, (level, text) = where(
        nodes, caplog, members("ksu", "osu", "sdsu", "mu", device=device), xlarge
    )
    assert (
        level == "WARNING"
        and "the nodes are at 4 sites: ksu, mu, osu, sdsu; in every step 8.0 GB of" in text
    )
    assert "6% or 37% of the time" in text and "SYNC=diloco" in text
    assert text.endswith(wan.sentence(xlarge, 4, 8, device))
    assert f"roll call: {text}\n" in nodes.paths.train_log.read_text()
    *_, (_, text) = where(nodes, caplog, members("ksu", "", "mu"))
    assert "at 2 sites: ksu, mu (that of node 1 is not known); in every step" in text


def test_node_0_says_where_all_are_before_anything_starts(nodes: Nodes) -> None:
    pods = [
        command(nodes, rank, "meet", "1", site, f"machine-{rank}")
        for rank, site in enumerate(("a", "b", "a"))
    ]
    texts = []
    for pod in pods:
        code, text = said(pod)
        assert code == 0
        texts.append(text)
    assert (
        f"roll call: node 1 ({socket.gethostname()}): site=b machine=machine-1 processes=1 device=CPU"
        in texts[0]
    )
    assert "roll call: the nodes are at 2 sites: a, b; in every step" in texts[0]
    assert all("sites" not in text for text in texts[1:])


def test_the_device_is_told_without_torch(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendezvous.device_of(dataclasses.replace(nodes.config, device="cpu")) == "CPU"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rendezvous.device_of(nodes.config) == "CPU"
    stub = tmp_path / "nvidia-smi"
    stub.write_text("#!/bin/sh\necho NVIDIA A100-SXM4-80GB\necho NVIDIA A100-SXM4-80GB\n")
    stub.chmod(0o755)
    assert rendezvous.device_of(nodes.config) == "NVIDIA A100-SXM4-80GB"
    stub.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert rendezvous.device_of(nodes.config) == "CPU"
    code = "import sys, train.distributed.rendezvous; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=rendezvous.ROOT, check=False).returncode
        == 0
    )
