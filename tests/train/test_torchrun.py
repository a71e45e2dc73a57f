"""train/torchrun.py: what it prints, next to what its processes do."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, wait_for, wait_until
from tests.train.distributed.listeners import processes_of
from train import torchrun
from train.distributed.signed_http import listen
from train.torchrun import Nodes

WORKER = """
import os, time
open(f"started{os.environ['RANK']}", "w").write("yes")
time.sleep(60 if SLEEPS else 0)
raise SystemExit(3)
"""


@pytest.mark.parametrize("is_stopped", [True, False])
def test_torchrun_tells_of_failures_and_not_of_a_stop(tmp_path, is_stopped):
    (tmp_path / "worker.py").write_text(f"SLEEPS = {is_stopped}\n{WORKER}")
    path = f"{ROOT}:{tmp_path}"
    process = subprocess.Popen(
        [sys.executable, "-m", "train.torchrun", "--nproc-per-node=2", "-m", "worker"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    if is_stopped:
        for rank in range(2):
            wait_for(tmp_path / f"started{rank}", "yes", seconds=60)
        process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    if is_stopped:
        assert err == ""
    else:
        assert re.fullmatch(r"rank [01] \(pid [0-9]+\) ended with exit code 3\n", err)


def test_of_a_process_that_has_said_why_it_ended_torchrun_says_nothing(tmp_path):
    (tmp_path / "worker.py").write_text(
        "from train.distributed.world import report_exit\n"
        "report_exit(78, 'no shard')\n"
        "raise SystemExit(78)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "train.torchrun", "--nproc-per-node=2", "-m", "worker"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
        | {"EXIT_CODE_FILE": str(tmp_path / "code")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert (tmp_path / "code").read_text() == "78\nno shard\n"


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
def test_a_torchrun_that_is_killed_leaves_nothing_behind_whatever_it_started(tmp_path):
    (tmp_path / "worker.py").write_text(f"SLEEPS = True\n{WORKER}")
    process = subprocess.Popen(
        [sys.executable, "-m", "train.torchrun", "--nproc-per-node=2", "-m", "worker"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
        | {"RUNS_DIR": str(tmp_path)},  # by which they are found
    )
    for rank in range(2):
        wait_for(tmp_path / f"started{rank}", "yes", seconds=60)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(tmp_path))


LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "train.torchrun", "--nproc-per-node=2", "-m", "worker"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
def test_a_stopped_torchrun_ends_with_its_launcher(tmp_path):
    (tmp_path / "worker.py").write_text(f"SLEEPS = True\n{WORKER}")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
        | {"RUNS_DIR": str(tmp_path)},  # by which they are found
        start_new_session=True,  # as DETACH=1 does
    )
    for rank in range(2):
        wait_for(tmp_path / f"started{rank}", "yes", seconds=60)
    (pid,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(pid), signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not processes_of(tmp_path))


def test_a_rank_whose_torchrun_died_before_it_could_look_does_not_start(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    done = subprocess.run(
        [sys.executable, "-m", "train.end_with_parent", str(os.getppid()), "worker"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("started*"))


@pytest.mark.parametrize(
    ("words", "is_local"),
    [
        (["--nproc-per-node=2"], True),
        (["--nnodes=2", "--master-addr=127.0.0.1"], True),
        (["--nnodes=2", "--master-addr=10.0.0.1"], False),
    ],
)
def test_ranks_of_one_machine_use_loopback_whatever_the_user_has_chosen(
    tmp_path, monkeypatch, words, is_local
):
    chosen = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANKS_FILE", "")
    given = {}
    monkeypatch.setattr(torchrun.torchrun, "run", lambda options: given.update(os.environ))
    monkeypatch.setattr(torchrun.socket, "getfqdn", socket.getfqdn)
    torchrun.start(torchrun.torchrun.parse_args([*words, "-m", "worker"]), tmp_path)
    for name, value in chosen.items():
        assert given[name] == ("lo" if is_local else value)


def test_what_torch_cannot_do_on_one_machine_is_not_asked_of_it(tmp_path):
    (tmp_path / "worker.py").write_text(
        "import os, sys\n"
        "names = 'TORCH_DISTRIBUTED_DEBUG', 'GLOO_DEVICE_TRANSPORT'\n"
        "sys.stdout.write(repr([os.environ.get(name) for name in names]) + '\\n')\n"
    )
    chosen = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "GLOO_DEVICE_TRANSPORT": "TCP_TLS"}
    done = subprocess.run(
        [sys.executable, "-m", "train.torchrun", "--nproc-per-node=1", "-m", "worker"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"} | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['INFO', None]\n"
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in done.stderr


@pytest.mark.parametrize(("address", "is_open"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_store_that_listens_on_all_addresses_is_named(capfd, monkeypatch, address, is_open):
    monkeypatch.delenv("K8S_NODE", raising=False)
    with listen(address, 0) as taken:
        port = taken.getsockname()[1]
    Nodes(address, port, rank=0, world_size=1, run_id="run", timeout=60).next_rendezvous()
    assert (f"MASTER_ADDR={address} is a name, or no address" in capfd.readouterr().err) is is_open
