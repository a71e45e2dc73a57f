"""train/tune.py: the GPUs that are counted, and the variables that trainers get."""

import os
import re
import subprocess
import sys

import pytest

from record.run_paths import RunPaths
from settings import ROOT
from train import tune


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("0, 2", 2),
        ("1", 1),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,1,-1,2", 2),
        ("0,3,1", 1),
        ("MIG-a,MIG-b,MIG-c,MIG-d", 4),
    ],
)
def test_gpus_are_counted_as_cuda_sees_them(tmp_path, visible, count):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor i in 0 1 2; do echo GPU $i: NVIDIA A100; done\n")
    smi.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    script = f"from train import tune; print(tune.count_gpus({environment!r}))"
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, cwd=ROOT, env=environment, text=True) == f"{count}\n"
    smi.unlink()
    assert tune.count_gpus(environment | {"PATH": str(tmp_path)}) == 0  # no driver


CPU = {
    "OMP_NUM_THREADS": "2",
    "GOMP_SPINCOUNT": "10000",
    "MKL_DYNAMIC": "FALSE",
    "MKL_CBWR": "AUTO",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
GPU = {"OMP_NUM_THREADS": "2", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
MINE = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}
MY_OLD_NAME = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
OWN = {"OMP_NUM_THREADS": "7", "MKL_DYNAMIC": "TRUE", "MALLOC_MMAP_THRESHOLD_": "5"}


@pytest.mark.parametrize(
    ("given", "gpus", "expected"),
    [
        ({"OMP_NUM_THREADS": ""}, 0, CPU),
        ({}, 2, GPU),
        ({"PYTORCH_ALLOC_CONF": ""}, 2, GPU),
        (MINE, 2, GPU | MINE),
        (MY_OLD_NAME, 2, {"OMP_NUM_THREADS": "2"} | MY_OLD_NAME),
        (
            OWN | {"GLIBC_TUNABLES": "a=1"},
            0,
            CPU | OWN | {"GLIBC_TUNABLES": "a=1:glibc.malloc.hugetlb=1"},
        ),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
            0,
            CPU | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
        ),
    ],
)
def test_what_trainers_get_and_what_the_user_has_set_stays(monkeypatch, given, gpus, expected):
    monkeypatch.setattr(tune, "count_cores", lambda: 8)
    monkeypatch.setattr(tune, "is_intel", lambda: True)
    monkeypatch.setattr(sys, "platform", "linux")
    environment = dict(given)
    line = tune.tune(environment, processes=3, gpus=gpus)
    assert environment == expected
    chosen = [
        f"{name}={expected[name]}" for name in ("MKL_DYNAMIC", "MKL_CBWR") if name in expected
    ]
    threads = expected["OMP_NUM_THREADS"]
    assert line == " ".join([f"processes=3 threads={threads}", *chosen])


def test_nccl_writes_what_it_does_to_the_run(tmp_path):
    environment: dict[str, str] = {}
    tune.record_nccl(environment, RunPaths(tmp_path))
    assert environment == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/hang/nccl_rank_",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH",
        "NCCL_DEBUG_FILE": f"{tmp_path}/logs/nccl_node_0.%h.%p",
    }
    assert (tmp_path / "hang").is_dir() and (tmp_path / "logs").is_dir()
    own = dict.fromkeys(environment, "7")
    tune.record_nccl(own, RunPaths(tmp_path))
    assert set(own.values()) == {"7"}
    older = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "NCCL_DEBUG": "WARN"}
    tune.record_nccl(older, RunPaths(tmp_path))
    assert older["TORCH_FR_BUFFER_SIZE"] == "9" and "NCCL_DEBUG_FILE" not in older


def test_a_module_gets_them_as_a_program():
    command = [sys.executable, "-m", "train.tune", "--cpu", "1", "platform"]
    out = subprocess.check_output(command, cwd=ROOT, text=True)
    assert re.match(r"launch: processes=1 threads=\d+ MKL_DYNAMIC=FALSE", out)
    assert len(out.splitlines()) == 2


def test_a_process_that_is_started_alone_forgets_whose_rank_it_was():
    """What torchrun, our launcher or a batch system has set; RANKS_FILE is where ranks of one machine meet."""
    job = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "RANKS_FILE", "LAUNCHER_PID"]
    job += ["PET_NNODES", "TORCHELASTIC_RUN_ID", "EXIT_CODE_FILE", "PROGRESS_FILE"]
    environment = dict.fromkeys(job, "1") | {"MASTER_ADDR": "10.0.0.1", "PATH": "/bin"}
    tune.forget_ranks(environment)
    assert environment == {"MASTER_ADDR": "10.0.0.1", "PATH": "/bin"}
