"""What a run listens on, and what a stranger can do there: docs/ports.md."""

import contextlib
import ipaddress
import os
import signal
import socket
import struct
import subprocess
from collections import Counter

import pytest
import torch.distributed as dist

from tests.running import ROOT, environment, train, wait_for, wait_until
from tests.train.diloco.sites import Sites
from tests.train.distributed.listeners import find_listeners, processes_of

LAUNCH = [str(ROOT / "scripts" / "launch.sh")]
ENDLESS = 10**6  # steps


def launch(folder, env, rank=0):
    with open(folder / f"console_{rank}", "w") as out:
        return subprocess.Popen(
            LAUNCH,
            env=env | {"NODE_RANK": str(rank)},
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture
def started(tmp_path):
    """Nothing of what is put in here outlives its test."""
    launchers: list[subprocess.Popen] = []
    yield launchers
    for process in processes_of(tmp_path):
        os.kill(int(process.name), signal.SIGKILL)
    for launcher in launchers:
        launcher.wait()


def is_local(listener):
    return ipaddress.ip_address(listener.host).is_loopback


def is_store(host, port):
    """Ask a port whether it is a store of torch: a greeting, then a ping, which it sends back."""
    validate, ping, greeting, nonce = 0, 13, 0x3C85F7CE, 20
    with socket.create_connection((host, port)) as connection:
        connection.settimeout(1)
        connection.sendall(struct.pack("=BIBI", validate, greeting, ping, nonce))
        with contextlib.suppress(OSError):
            return connection.recv(4) == struct.pack("=I", nonce)
    return False


def test_processes_of_one_machine_listen_on_loopback_only_and_serve_no_store(
    tmp_path, data, started
):
    elsewhere = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    env = environment(tmp_path, data, NPROC=2, MAX_STEPS=ENDLESS) | elsewhere
    started.append(launch(tmp_path, env))
    wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 3,')
    listeners = find_listeners(tmp_path)
    # gloo's, of the two ranks; the launcher and torchrun have none
    assert {listener.program for listener in listeners} == {"train.main"}
    assert all(map(is_local, listeners)) and len(listeners) == 4  # as docs/ports.md has it

    # A stranger who reaches a store of torchrun's writes pickles there, which torchrun reads.
    assert is_store("127.0.0.1", dist.TCPStore("127.0.0.1", 0, is_master=True).port)
    assert not any(is_store(listener.host, listener.port) for listener in listeners)
    last = (tmp_path / "run" / "metrics.jsonl").read_text().count('"event": "step"')
    wait_for(tmp_path / "run" / "metrics.jsonl", f'"step": {last + 50},')
    started[0].send_signal(signal.SIGTERM)
    assert started[0].wait(120) == 75


def test_a_process_is_alone_whatever_job_of_a_cluster_it_is_started_in(tmp_path, data):
    """SLURM, Kubeflow and torchrun export these. torch would wait for seven others, at a port."""
    job = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_PORT": "29777"}
    job |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "other"}
    env = environment(tmp_path, data, NPROC=1, MAX_STEPS=2, START_TIMEOUT_S=60, MAX_RESTARTS=0)
    assert "step=2/2" in train(env | job, command=LAUNCH)


UNSHARE = ["unshare", "--uts", "bash", "-c"]


@pytest.mark.skipif(
    subprocess.run(
        [*UNSHARE, "hostname no-such-host"], capture_output=True, check=False
    ).returncode,
    reason="needs root, to change the host's name",
)
def test_one_machine_needs_no_host_name_that_resolves(tmp_path, data):
    env = environment(tmp_path, data, NPROC=2, MAX_STEPS=2, START_TIMEOUT_S=100)
    command = [*UNSHARE, f"hostname no-such-host && exec {LAUNCH[0]}"]
    assert "2 processes joined, on no-such-host" in train(env, command=command)


def test_a_launcher_that_is_killed_leaves_nothing_behind(tmp_path, data, started):
    started.append(launch(tmp_path, environment(tmp_path, data, NPROC=2, MAX_STEPS=ENDLESS)))
    wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 3,')
    started[0].kill()
    started[0].wait()
    wait_until(lambda: not processes_of(tmp_path))
    # as `make stop` would have: its ranks saved
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_nodes_of_which_the_first_is_on_loopback_listen_there_only(
    tmp_path, data, started, free_port
):
    where = f"127.0.0.1:{free_port}"
    env = environment(
        tmp_path, data, NODES=2, NPROC=1, MASTER_ADDR=where, MAX_STEPS=ENDLESS, START_TIMEOUT_S=120
    )
    started += [launch(tmp_path, env, rank) for rank in (0, 1)]
    wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 3,')
    listeners = find_listeners(tmp_path)
    programs = {listener.program for listener in listeners}
    assert programs == {"train.launcher", "train.torchrun", "train.main"}
    assert all(map(is_local, listeners))


@pytest.mark.slow
def test_sites_of_one_machine_listen_on_loopback_but_for_torchfts_manager(tmp_path, data):
    pytest.importorskip("torchft")
    sites = Sites(tmp_path, data, 2, MAX_STEPS=ENDLESS, SYNC_EVERY=10)
    try:
        sites.wait(0, syncs=1, sites=2)
        listeners = find_listeners(tmp_path)
        programs = Counter(listener.program for listener in listeners)
        assert programs["train.diloco.lighthouse"] == 2
        assert set(programs) == {"train.diloco.lighthouse", "train.main"}
        # torchft gives its manager all addresses: one for each site
        open_ones = [listener.program for listener in listeners if not is_local(listener)]
        assert open_ones == ["train.main"] * 2
    finally:
        sites.end()
