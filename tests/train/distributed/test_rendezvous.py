"""train/distributed/rendezvous.py as launchers call it, in threads here, with a real registry on loopback."""

import contextlib
import dataclasses
import json
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hardware.ports import free_ports
from record import status
from record.run_paths import RunPaths
from settings.config import Config
from train.distributed import rendezvous, run_secret
from train.distributed.registry import Verdict

HOST = socket.gethostname()


class Nodes:
    """Three nodes of one run. Where `serve` was called, node 0's launcher is there.

    Attributes:
        stopped: those that were told to stop.
    """

    def __init__(self, folder, port, threads):
        self.threads = threads
        self.stopped = set()
        self.config = dataclasses.replace(
            Config(),
            nodes=3,
            master_addr=f"127.0.0.1:{port}",
            runs_dir=str(folder),
            run_name="run",
            batch_tokens=12288,
            start_timeout_s=20,
        ).derived()
        self.paths = RunPaths(folder / "run")
        self.paths.folder.mkdir()
        self.stack = contextlib.ExitStack()

    def serve(self):
        self.stack.enter_context(rendezvous.registry_of(self.config))

    def of(self, rank, **changes):
        return dataclasses.replace(self.config, node_rank=rank, **changes)

    def meet(self, rank, **changes):
        """Come to the roll call, in this thread."""
        return rendezvous.meet(self.of(rank, **changes), 1, lambda: rank in self.stopped)

    def start(self, rank, **changes):
        """Come to the roll call, in a thread."""
        return self.threads.submit(self.meet, rank, **changes)

    def wait_for(self, phase):
        deadline = time.monotonic() + 60
        while status.read(self.paths.status).get("phase") != phase:
            assert time.monotonic() < deadline, status.read(self.paths.status)
            time.sleep(0.02)

    def finish(self, **facts):
        """Leave the run as one that all nodes have finished, in a folder that they share."""
        (self.paths.folder / "logs").mkdir(exist_ok=True)
        for rank in range(3):
            self.paths.node_log(rank).touch()
        done = {"phase": "done", "step": self.config.last_step} | facts
        self.paths.status.write_text(json.dumps(done))


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "BEAT_S", 0.05)
    monkeypatch.setattr(rendezvous, "LINGER_S", 1.0)
    monkeypatch.delenv("K8S_NODE", raising=False)
    with ThreadPoolExecutor() as threads:
        nodes = Nodes(tmp_path, free_ports(2), threads)
        with nodes.stack:
            yield nodes


@pytest.mark.fault(36)
def test_three_nodes_meet_and_their_status_tells_who_is_missing(nodes, capfd):
    nodes.paths.status.write_text(json.dumps({"phase": "crashed", "step": 7, "loss": 2.5}))
    nodes.serve()
    waiting = [nodes.start(rank) for rank in (2, 0)]
    nodes.wait_for("waiting for peers 2/3")
    state = status.read(nodes.paths.status)
    assert (state["step"], state["loss"], state["missing"]) == (7, 2.5, [1])
    waiting.append(nodes.start(1))
    assert [node.result(30) for node in waiting] == [Verdict(0)] * 3
    out = capfd.readouterr().out
    assert "; missing: 1; they are to reach 127.0.0.1:" in out
    assert out.count("roll call: all nodes have joined") == 3


@pytest.mark.fault(36)
def test_nodes_without_their_first_give_up_and_say_what_to_look_at(nodes, capfd):
    code, why = nodes.meet(1, start_timeout_s=1)
    assert code == 69
    assert "node 0 was not reached in 1 s: 127.0.0.1:" in why
    assert "refuses connections: nothing is started there yet" in why
    said = capfd.readouterr().out
    assert said.count("refuses connections") == 2  # once for several tries, and at the end


@pytest.mark.fault(36)
def test_while_node_0_calls_the_roll_its_patience_counts_and_no_longer(nodes, monkeypatch):
    monkeypatch.setattr(rendezvous, "GONE_S", 0.5)
    nodes.serve()
    assert "node 0 is still busy" in nodes.meet(1, start_timeout_s=1).why  # nobody calls it
    first = nodes.start(0)
    nodes.wait_for("waiting for peers 1/3")
    second = nodes.start(1, start_timeout_s=1)
    time.sleep(2)
    assert not second.done()
    third = nodes.start(2)
    assert [node.result(30).code for node in (first, second, third)] == [0, 0, 0]


@pytest.mark.fault(36)
def test_a_taken_port_is_named_with_one_that_is_free(nodes):
    with (
        socket.create_server(("127.0.0.1", nodes.config.registry_port)),
        pytest.raises(rendezvous.CannotServe, match=r"for example MASTER_ADDR=127.0.0.1:\d+"),
    ):
        nodes.serve()


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_node_that_is_told_to_stop_while_it_waits_takes_the_others_along(nodes, stopped):
    nodes.serve()
    waiting = [nodes.start(rank) for rank in (0, 2)]
    nodes.wait_for("waiting for peers 2/3")
    nodes.stopped.add(stopped)
    for node in waiting:
        assert node.result(30) == (143, f"node {stopped} ({HOST}) was told to stop")
    state = status.read(nodes.paths.status)
    assert (state["phase"], state["exit_code"]) == ("stopped", 143)


@pytest.mark.parametrize("stopped", [0, 2])
def test_in_pods_the_others_wait_for_a_node_that_was_told_to_stop(nodes, monkeypatch, stopped):
    monkeypatch.setenv("K8S_NODE", "machine")
    nodes.serve()
    pods = {rank: nodes.start(rank) for rank in (0, 2)}
    nodes.wait_for("waiting for peers 2/3")
    nodes.stopped.add(stopped)
    assert pods[stopped].result(30).code == 143
    nodes.stopped.clear()
    for rank in (stopped, 1):
        pods[rank] = nodes.start(rank)
    assert [pod.result(30) for pod in pods.values()] == [Verdict(0)] * 3


@pytest.mark.parametrize("ending", [0, 2])
def test_a_node_that_cannot_go_on_tells_those_that_wait_for_it(nodes, ending):
    """Of node 0 there is no launcher yet when its data cannot be prepared."""
    if ending:
        nodes.serve()
    waiting = [nodes.start(rank) for rank in range(3) if rank != ending]
    rendezvous.over(nodes.of(ending), 78, "DATA=x: no such file")
    why = f"node {ending} ({HOST}) has ended with exit code 78: DATA=x: no such file"
    assert [node.result(30) for node in waiting] == [(78, why)] * 2


def test_a_launcher_stays_until_all_have_heard_how_it_ends(nodes, monkeypatch):
    monkeypatch.setattr(rendezvous, "LINGER_S", 30.0)
    heard = []

    def late():
        time.sleep(1)
        heard.append([nodes.meet(rank).code for rank in (1, 2)])

    with rendezvous.registry_of(nodes.config):
        rendezvous.over(nodes.config, 70, "")
        threading.Thread(target=late).start()
    assert heard == [[70, 70]]


@pytest.mark.parametrize(
    ("phase", "code", "after"),
    [
        ("waiting for peers 3/3", 64, ("refused", 64)),
        ("waiting for peers 1/3", 75, ("stopped", 75)),
        ("training", 1, ("training", 1)),
    ],
)
def test_a_trainer_that_ended_before_it_said_anything_waits_for_no_peers(
    nodes, monkeypatch, phase, code, after
):
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.1)
    nodes.paths.status.write_text(json.dumps({"phase": phase, "exit_code": 1, "step": 7}))
    rendezvous.over(nodes.config, code, "")
    state = status.read(nodes.paths.status)
    assert (state["phase"], state["exit_code"], state["step"]) == (*after, 7)


# ---- A run that is done


@pytest.mark.parametrize("rank", [0, 2])
def test_a_node_of_a_run_that_is_done_waits_for_nobody(nodes, capfd, rank):
    nodes.finish()
    before = nodes.paths.status.read_text()
    assert nodes.meet(rank).code == rendezvous.RUN_IS_DONE
    assert capfd.readouterr().out.startswith("roll call: run run is done: ")
    assert nodes.paths.status.read_text() == before


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        ({"phase": "sampling"}, {}),
        ({"step": 3}, {}),
        ({"step": None}, {}),
        ({}, {"max_steps": 2000}),
    ],
)
def test_a_run_whose_end_is_still_to_be_made_wants_all_nodes(nodes, facts, settings):
    nodes.finish(**facts)
    (nodes.paths.checkpoints / f"step_{nodes.config.last_step:07d}").mkdir(parents=True)
    assert nodes.meet(1, start_timeout_s=0, **settings).code == 69


def test_nodes_that_do_not_share_the_folder_meet_as_before(nodes):
    nodes.finish()
    nodes.paths.node_log(2).unlink()
    assert nodes.meet(1, start_timeout_s=0).code == 69


# ---- The run's secret


def test_node_0_makes_a_secret_that_others_read_or_are_told_to_copy(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(run_secret, "is_loopback", lambda host: False)
    nodes.serve()
    path = run_secret.path_of(nodes.config)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    line = path.read_text().strip()
    apart = {"runs_dir": str(tmp_path / "other")}
    code, why = nodes.meet(2, **apart)
    assert code == 64
    assert "RUN_SECRET is not set" in why
    assert "copy the line RUN_SECRET=... that node 0 prints into .env" in why
    code, why = nodes.meet(2, **apart, run_secret="of-another-run-than-this")
    assert code == 64
    assert "RUN_SECRET differs from the secret of the run" in why
    told = apart | {"run_secret": line.partition("=")[2]}
    calls = [nodes.start(0), nodes.start(1), nodes.start(2, **told)]
    assert [call.result(30) for call in calls] == [Verdict(0)] * 3


def test_a_terminal_shows_the_secret_and_a_log_where_it_is(nodes, monkeypatch):
    monkeypatch.setattr(run_secret, "is_loopback", lambda host: False)
    run_secret.make_secret(nodes.config)
    line = run_secret.path_of(nodes.config).read_text().strip()
    assert run_secret.describe_file(nodes.config, is_private=True).endswith(line)
    assert line not in run_secret.describe_file(nodes.config, is_private=False)
    run_secret.make_secret(nodes.config)
    assert line == run_secret.path_of(nodes.config).read_text().strip()  # made once


def test_what_may_differ_between_nodes_and_what_is_secret_is_not_sent():
    config = dataclasses.replace(
        Config(),
        hf_token="hf_secret",
        run_secret="of-this-run-alone",
        data_dir="elsewhere",
        nodes=2,
    )
    facts = rendezvous.facts_of(config.derived(), 4)
    assert facts["settings"]["NPROC"] == 4
    assert facts["settings"]["SEED"] == 1337
    assert "secret" not in json.dumps(facts) and "elsewhere" not in json.dumps(facts)
    assert "RUN_SECRET" not in config.stored()
