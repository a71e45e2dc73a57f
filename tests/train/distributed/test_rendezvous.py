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
from tests.running import wait_until
from train.distributed import rendezvous, run_secret

HOST = socket.gethostname()


class Nodes:
    """Three nodes of one run. Where `serve` was called, node 0's launcher is there.

    Attributes:
        stopped: those that were told to stop.
    """

    def __init__(self, folder, port, threads):
        self.threads = threads
        self.stopped = set()
        self.config = Config(
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
        """Come to the rendezvous, in this thread."""
        return rendezvous.meet(self.of(rank, **changes), 1, lambda: rank in self.stopped)

    def start(self, *ranks, **changes):
        """Come to the rendezvous, in a thread each."""
        return {rank: self.threads.submit(self.meet, rank, **changes) for rank in ranks}

    def status(self):
        return status.read(self.paths.status)

    def wait_for(self, phase):
        wait_until(lambda: self.status().get("phase") == phase, 60)


def results(calls):
    return [call.result(30) for call in calls.values()]


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
    waiting = nodes.start(2, 0)
    nodes.wait_for("waiting for peers 2/3")
    state = nodes.status()
    assert (state["step"], state["loss"], state["missing"]) == (7, 2.5, [1])
    assert results(waiting | nodes.start(1)) == [None] * 3
    out = capfd.readouterr().out
    assert "; missing: 1; they are to reach 127.0.0.1:" in out
    assert out.count("rendezvous: all nodes have joined") == 3


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
    calls = nodes.start(0)
    nodes.wait_for("waiting for peers 1/3")
    calls |= nodes.start(1, start_timeout_s=1)
    time.sleep(2)
    assert not calls[1].done()
    assert results(calls | nodes.start(2)) == [None] * 3


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    ("pid", "words"), [(1, "node 1 trains already, on"), (None, "is still busy")]
)
def test_a_node_whose_number_trains_already_is_told_so(nodes, monkeypatch, pid, words):
    """And not the launcher that started it, whose attempt has failed."""
    nodes.serve()
    assert results(nodes.start(0, 1, 2)) == [None] * 3
    if pid:
        monkeypatch.setattr(rendezvous.os, "getpid", lambda: pid)
    assert words in nodes.meet(1, start_timeout_s=1).why


@pytest.mark.fault(36)
def test_a_taken_port_is_named_with_one_that_is_free(nodes):
    with (
        socket.create_server(("127.0.0.1", nodes.config.registry_port)),
        pytest.raises(rendezvous.CannotServe, match=r"for example MASTER_ADDR=127.0.0.1:\d+"),
    ):
        nodes.serve()


@pytest.mark.parametrize("stopped", [0, 2])
@pytest.mark.parametrize("pod", [False, True])
def test_a_node_that_is_told_to_stop_takes_the_others_along_and_as_a_pod_comes_back(
    nodes, monkeypatch, stopped, pod
):
    if pod:
        monkeypatch.setenv("K8S_NODE", "machine")
    nodes.serve()
    calls = nodes.start(0, 2)
    nodes.wait_for("waiting for peers 2/3")
    nodes.stopped.add(stopped)
    end = (143, f"node {stopped} ({HOST}) was told to stop")
    if pod:
        assert calls[stopped].result(30) == end
        nodes.stopped.clear()
        assert results(calls | nodes.start(stopped, 1)) == [None] * 3
    else:
        assert results(calls) == [end] * 2
        assert (nodes.status()["phase"], nodes.status()["exit_code"]) == ("stopped", 143)


@pytest.mark.parametrize("ending", [0, 2])
def test_a_node_that_cannot_go_on_tells_those_that_wait_for_it(nodes, ending):
    """Of node 0 there is no launcher yet when its data cannot be prepared."""
    if ending:
        nodes.serve()
    waiting = nodes.start(*{0, 1, 2} - {ending})
    rendezvous.announce_end(nodes.of(ending), 78, "DATA=x: no such file")
    why = f"node {ending} ({HOST}) has ended with exit code 78: DATA=x: no such file"
    assert results(waiting) == [(78, why)] * 2


def test_a_launcher_stays_until_all_have_heard_how_it_ends(nodes, monkeypatch):
    monkeypatch.setattr(rendezvous, "LINGER_S", 30.0)
    codes = []

    def come_late():
        time.sleep(1)
        codes.extend(nodes.meet(rank).code for rank in (1, 2))

    with rendezvous.registry_of(nodes.config):
        rendezvous.announce_end(nodes.config, 70, "")
        threading.Thread(target=come_late).start()
    assert codes == [70, 70]


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
    rendezvous.announce_end(nodes.config, code, "")
    state = nodes.status()
    assert (state["phase"], state["exit_code"], state["step"]) == (*after, 7)


@pytest.mark.parametrize(
    ("rank", "facts", "settings", "logs", "code"),
    [
        (0, {}, {}, 3, 0),
        (2, {}, {}, 3, 0),
        # One whose end is still to be made wants all nodes.
        (1, {"phase": "sampling"}, {}, 3, 69),
        (1, {"step": 3}, {}, 3, 69),
        (1, {"step": None}, {}, 3, 69),
        (1, {}, {"max_steps": 2000}, 3, 69),
        # They do not share the folder.
        (1, {}, {}, 2, 69),
    ],
)
def test_only_a_run_that_is_done_on_a_shared_disk_needs_no_rendezvous(
    nodes, capfd, rank, facts, settings, logs, code
):
    (nodes.paths.folder / "logs").mkdir()
    for node in range(logs):
        nodes.paths.node_log(node).touch()
    last = nodes.config.last_step
    (nodes.paths.checkpoints / f"step_{last:07d}").mkdir(parents=True)
    state = json.dumps({"phase": "done", "step": last} | facts)
    nodes.paths.status.write_text(state)
    assert nodes.meet(rank, start_timeout_s=0, **settings).code == code
    assert ("rendezvous: run run is done: " in capfd.readouterr().out) == (code == 0)
    assert nodes.paths.status.read_text() == state


# ---- The run's secret


def test_node_0_makes_a_secret_that_others_read_or_are_told_to_copy(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(run_secret, "is_loopback", lambda host: False)
    nodes.serve()
    path = run_secret.path_of(nodes.config)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    line = path.read_text().strip()
    # A terminal shows it, and a log where it is.
    assert run_secret.describe_file(nodes.config, is_private=True).endswith(line)
    assert line not in run_secret.describe_file(nodes.config, is_private=False)
    apart = {"runs_dir": str(tmp_path / "other")}
    code, why = nodes.meet(2, **apart)
    assert code == 64 and "RUN_SECRET is not set" in why
    assert "copy the line RUN_SECRET=... that node 0 prints into .env" in why
    code, why = nodes.meet(2, **apart, run_secret="of-another-run-than-this")
    assert code == 64 and "RUN_SECRET differs from the secret of the run" in why
    run_secret.make_secret(nodes.config)
    assert line == path.read_text().strip()  # made once
    calls = nodes.start(0, 1) | nodes.start(2, **apart, run_secret=line.partition("=")[2])
    assert results(calls) == [None] * 3


def test_what_may_differ_between_nodes_and_what_is_secret_is_not_sent():
    secrets = {"hf_token": "hf_secret", "run_secret": "of-this-run-alone"}
    config = Config(**secrets, data_dir="elsewhere", nodes=2).derived()
    facts = rendezvous.facts_of(config, 4)
    assert facts["settings"]["NPROC"] == 4 and facts["settings"]["SEED"] == 1337
    assert "secret" not in json.dumps(facts) and "elsewhere" not in json.dumps(facts)
    assert "RUN_SECRET" not in config.stored()
