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
    listing = "\\n".join(f"GPU {i}: NVIDIA A100" for i in range(3))
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{listing}\\n'\n")
    smi.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    script = f"import os; from train import tune; print(tune.count_gpus({environment!r}))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.stdout == f"{count}\n"


def test_without_a_driver_there_are_no_gpus(tmp_path):
    assert tune.count_gpus({"CUDA_VISIBLE_DEVICES": "0,1", "PATH": str(tmp_path)}) == 0


def test_what_trainers_on_a_cpu_get(monkeypatch):
    monkeypatch.setattr(tune, "count_cores", lambda: 8)
    monkeypatch.setattr(tune, "is_intel", lambda: True)
    monkeypatch.setattr(sys, "platform", "linux")
    environment: dict[str, str] = {"OMP_NUM_THREADS": ""}
    line = tune.tune(environment, processes=3, gpus=0)
    kept = (
        "MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 "
        "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    )
    assert line == ("launch: processes=3 threads=2 MKL_DYNAMIC=FALSE MKL_CBWR=AUTO")
    assert environment == dict(
        word.split("=", 1)
        for word in (
            "OMP_NUM_THREADS=2 GOMP_SPINCOUNT=10000 MKL_DYNAMIC=FALSE MKL_CBWR=AUTO " + kept
        ).split()
    )
    assert tune.tune(environment, processes=1, gpus=1) == "launch: processes=1 threads=2"


@pytest.mark.parametrize(
    ("own", "whole"),
    [("a=1", "a=1:glibc.malloc.hugetlb=1"), ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0")],
)
def test_what_the_user_has_set_stays(own, whole):
    given = {"OMP_NUM_THREADS": "7", "MKL_DYNAMIC": "TRUE", "MALLOC_MMAP_THRESHOLD_": "5"}
    environment = given | {"GLIBC_TUNABLES": own}
    tune.tune(environment, processes=1, gpus=0)
    assert given.items() <= environment.items() and environment["GLIBC_TUNABLES"] == whole


def test_with_gpus_only_threads_are_set():
    environment: dict[str, str] = {}
    tune.tune(environment, processes=2, gpus=2)
    assert list(environment) == ["OMP_NUM_THREADS"]


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
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert re.match(r"launch: processes=1 threads=\d+ MKL_DYNAMIC=FALSE", done.stdout)
    assert len(done.stdout.splitlines()) == 2
