"""Memory, shared memory, open files, ports, compiler and clock: judged on made facts, gathered on this machine."""

import dataclasses
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from doctor import machine
from doctor.machine import Compiler, Meeting
from hardware.host_memory import Memory, read_memory
from plan.run import pretraining_memory
from settings import ROOT
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding

GIB = 2**30


def config(**values: Any) -> Config:
    return dataclasses.replace(Config(), **values).derived()


def told(finding: Finding | None) -> str:
    assert finding
    return f"{finding.level} {finding.text}; {finding.fix}"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# ---- Memory

MEMINFO = "MemTotal:       65536000 kB\nMemAvailable:   33554432 kB\nHugePages_Total:       0\n"


def test_memory_is_what_the_machine_and_every_group_above_leave(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pods/one\n",
            "sys/fs/cgroup/pods/memory.max": str(24 * GIB),
            "sys/fs/cgroup/pods/memory.current": str(20 * GIB),
            "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {6 * GIB}\n",
            "sys/fs/cgroup/pods/one/memory.max": "max\n",
            "sys/fs/cgroup/pods/one/memory.current": str(3 * GIB),
        },
    )
    here = read_memory(root)
    assert (here.available, here.limit, here.limit_free) == (
        32.0 * GIB,
        24.0 * GIB,
        10.0 * GIB,
    )  # 24 - (20 - 6)
    assert here.free == 10 * GIB and here.most == min(24.0 * GIB, here.total)


def test_memory_of_this_machine() -> None:
    here = read_memory()
    total = (
        int(subprocess.run(["getconf", "_PHYS_PAGES"], capture_output=True, check=True).stdout)
        * resource.getpagesize()
    )
    assert here.total == total and 0.01 * total < here.free <= total


# Of a model whose parameters are counted by hand: table, attention, MLP, three norms
SHAPE = {
    "vocab_size": 1024,
    "n_layer": 1,
    "n_head": 1,
    "n_embd": 128,
    "mlp_dim": 256,
    "tie_embeddings": True,
}
N = 1024 * 128 + 4 * 128**2 + 3 * 128 * 256 + 3 * 128
ONE_MOMENT = (4 * 128**2 + 3 * 128 * 256) / N / 3  # which Muon does without, in matrices


@pytest.mark.parametrize(
    ("settings", "processes", "on_gpus", "copied"),
    [
        ({}, 1, False, 1),
        ({}, 4, False, 1),
        ({}, 2, True, 1),
        ({"optimizer": "muon"}, 2, False, 1 - ONE_MOMENT),
        ({"parallel": "hsdp", "shard_ranks": 1}, 2, True, 1),
        ({"parallel": "fsdp"}, 2, False, 1),
        ({"parallel": "fsdp"}, 4, True, 1),
        ({"parallel": "fsdp", "nodes": 2, "master_addr": "a"}, 4, True, 1 / 2),
        ({"parallel": "hsdp", "shard_ranks": 2}, 4, True, 1),
        ({"parallel": "hsdp", "shard_ranks": 8, "nodes": 2, "master_addr": "a"}, 4, True, 1 / 2),
        ({"nodes": 2, "node_rank": 1, "master_addr": "a"}, 1, True, 0),  # the first node writes
        ({"save_every": 0}, 1, True, 0),
    ],
)
def test_memory_that_a_step_and_a_save_take(
    settings: dict[str, Any], processes: int, on_gpus: bool, copied: float
) -> None:
    """Once, on CPU too, where the plan of a step has it already."""
    c = config(**SHAPE | settings)
    without = dataclasses.replace(c, save_every=0)
    step = (
        1e9 if on_gpus else pretraining_memory(without, processes * c.nodes, processes, True).total
    )
    need = machine.needed_bytes(c, processes, on_gpus) - processes * step
    assert need == pytest.approx(
        copied * 12 * N, rel=0.05, abs=1.0
    )  # weights, two moments, and headers


def test_memory_is_judged() -> None:
    c = config(**SHAPE)
    need = machine.needed_bytes(c, 1, False)
    assert told(machine.memory(c, Memory(8.0 * GIB, need, 8.0 * GIB, need), 1, False)).startswith(
        "PASS "
    )
    finding = machine.memory(c, Memory(8.0 * GIB, 8.0 * GIB, 2.0 * GIB, need - 1), 1, False)
    assert (
        finding.level == WARN
        and " free of the 2.0 GiB that this container may take" in finding.text
    )
    assert (
        machine.memory(c, Memory(8.0 * GIB, 8.0 * GIB, need - 1, need - 1), 1, False).level == FAIL
    )
    assert (
        machine.memory(c, Memory(0.5 * GIB, 0.5 * GIB, 0.5 * GIB, 0.5 * GIB), 1, True).level == FAIL
    )  # of a GPU's libraries alone: 1 GB


# ---- /dev/shm, open files


@pytest.mark.parametrize(
    ("free", "processes", "on_gpus", "level"),
    [
        (64 * 2**20, 2, True, FAIL),
        (65 * 2**20, 2, True, WARN),
        (GIB, 2, True, PASS),
        (64 * 2**20, 1, True, PASS),
        (64 * 2**20, 4, False, PASS),
    ],
)
def test_shared_memory_matters_between_gpus(
    free: int, processes: int, on_gpus: bool, level: str
) -> None:
    finding = machine.shm((float(2 * GIB), float(free)), processes, on_gpus)
    assert told(finding).startswith(level) and bool(finding and finding.fix) == (level != PASS)


def test_shared_memory_of_this_machine(tmp_path: Path) -> None:
    assert machine.shm_free(str(tmp_path / "none")) is None and machine.shm(None, 2, True) is None
    df = subprocess.run(
        ["df", "-Pk", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.split("\n")[1]
    found = machine.shm_free(str(tmp_path))
    assert found and found[0] == 1024 * int(df.split()[1])


def test_open_files_that_a_run_needs() -> None:
    c = config(data_mix="a:3,b:1", train_tokens=1_000_000_000)
    # of a 750 M tokens in 8 shards, of b 250 M in 3; two groups of 8 of each
    assert machine.files_needed(c, 1, False) == 128 + (16 + 8) + (16 + 3)
    assert machine.files_needed(c, 2, True) == 128 + 43 + 1024
    assert machine.files_needed(dataclasses.replace(c, nodes=2), 1, True) == 128 + 43 + 1024


def test_open_files_are_judged() -> None:
    assert machine.open_files((1024, 4096), 1024).level == PASS
    assert machine.open_files((1024, 2**20), 1025).fix == "ulimit -n 4096"
    assert machine.open_files((1024, 2000), 1025).fix == "ulimit -n 2000"
    finding = machine.open_files((1024, 2000), 5000)
    assert finding.level == WARN and "raise nofile to 5000" in finding.fix


def test_the_limit_of_open_files_is_this_process_own() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (99, resource.getrlimit(7)[1]));"
        "from doctor import machine; print(machine.files_limit()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "99\n"


# ---- Loopback, ports


@pytest.mark.parametrize(("apart", "fault"), [([], ""), (["unshare", "--net"], "unreachable")])
def test_a_loopback_interface_that_is_down_is_found(apart: list[str], fault: str) -> None:
    if apart and subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no name spaces")
    code = "from doctor import machine; print(machine.loopback(machine.loopback_fault(), 2))"
    done = subprocess.run(
        [*apart, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert fault in done.stdout and ("ip link set lo up" in done.stdout) is bool(fault)


def test_a_port_that_is_taken_is_found(free_port: int) -> None:
    c = config(nodes=2, master_addr=f"127.0.0.1:{free_port}")
    assert machine.meeting(c) == Meeting(("127.0.0.1",))
    assert told(machine.ports(c, machine.meeting(c))).startswith(
        f"PASS port {free_port} is free here"
    )
    with socket.create_server(("", free_port)):
        finding = machine.ports(c, machine.meeting(c))
        assert (
            finding.level == FAIL and finding.code == 64 and "MASTER_ADDR=127.0.0.1:" in finding.fix
        )
        other = dataclasses.replace(c, node_rank=1)  # it calls, and does not listen
        assert told(machine.ports(other, machine.meeting(other))).startswith(
            f"PASS MASTER_ADDR=127.0.0.1:{free_port} is 127.0.0.1;"
        )


def test_a_name_without_an_address_is_told() -> None:
    c = config(nodes=2, master_addr="no-such-host.invalid", node_rank=1)
    finding = machine.ports(c, machine.meeting(c))
    assert finding.level == FAIL and "no address is found for this name" in finding.text


# ---- Compiler, processor, clock

BOTH, NONE = Compiler("gcc", "g++", True), Compiler("", "", True)


@pytest.mark.parametrize(
    ("compile", "found", "on_gpus", "worth", "level", "words"),
    [
        ("auto", NONE, True, None, WARN, "no C compiler"),
        ("1", NONE, True, None, FAIL, "no C compiler"),
        ("1", NONE, False, None, FAIL, "no C++ compiler"),
        ("auto", NONE, False, True, WARN, "no C++ compiler"),
        ("auto", NONE, False, False, PASS, "so short"),
        ("0", NONE, True, True, PASS, "COMPILE=0"),
        ("auto", BOTH, True, None, PASS, "gcc"),
        ("auto", BOTH, False, True, PASS, "g++"),
        ("auto", Compiler("gcc", "g++", False), True, None, WARN, "Python.h"),
        ("auto", Compiler("gcc", "g++", False), False, False, PASS, "so short"),
    ],
)
def test_a_compiler_is_needed_where_something_is_compiled(
    compile: str, found: Compiler, on_gpus: bool, worth: bool | None, level: str, words: str
) -> None:
    finding = machine.compiler(config(compile=compile), found, on_gpus, worth)
    assert told(finding).startswith(level) and words in told(finding)
    assert bool(finding and finding.fix) == (level != PASS)


def test_nothing_is_said_of_a_compiler_where_it_is_not_known_whether_one_is_wanted() -> None:
    assert machine.compiler(config(), NONE, False, None) is None


def test_compilers_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (machine.compiler_here().c, machine.compiler_here().cxx) == ("", "")
    for name in ("cc", "g++"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert (machine.compiler_here().c, machine.compiler_here().cxx) == ("cc", "g++")


@pytest.mark.skipif(sys.platform != "linux", reason="adjtimex is Linux'")
def test_the_kernel_tells_whether_its_clock_is_kept() -> None:
    assert machine.is_kept() in (True, False)
    adjtimex = (
        subprocess.run(["adjtimex", "--print"], capture_output=True, text=True, check=False)
        if Path("/sbin/adjtimex").exists()
        else None
    )
    if adjtimex and adjtimex.returncode == 0:
        status = int(adjtimex.stdout.split("status:")[1].split()[0])
        assert machine.is_kept() == (not status & 64)
