"""train/torchrun.py: what it prints, next to what its processes do."""

import os
import subprocess
import sys

import pytest

from tests.running import ROOT, wait_for
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
        assert "failed (exitcode: 3)" in err and "master_addr" not in err


@pytest.mark.parametrize(("address", "is_open"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_store_that_listens_on_all_addresses_is_named(capfd, monkeypatch, address, is_open):
    monkeypatch.delenv("K8S_NODE", raising=False)
    with listen(address, 0) as taken:
        port = taken.getsockname()[1]
    Nodes(address, port, rank=0, world_size=1, run_id="run", timeout=60).next_rendezvous()
    assert (f"MASTER_ADDR={address} is a name, or no address" in capfd.readouterr().err) is is_open
