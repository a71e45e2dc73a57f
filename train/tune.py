"""Threads, memory and logging of the processes that compute, which are set by environment variables.

    python -m train.tune [--cpu] PROCESSES MODULE [ARGUMENT...]    become MODULE, tuned so

What the user has set stays.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from record.run_paths import RunPaths
from settings.visible_gpus import ask_nvidia_smi, visible_gpus

MMAP_THRESHOLD = 2**30  # bytes
TRIM_THRESHOLD = 2**32
GROWING_SEGMENTS = "expandable_segments:True"
SPIN_COUNT = "10000"  # tens of microseconds
SMI_S = 120  # without persistence mode, a driver takes some seconds for each GPU
FLIGHT_RECORDER_SIZE = "2000"  # operations

# What tells a process of a run its rank and its launcher. A batch system, or the torchrun in whose job
# a run is started, may have set the same for its own processes. MASTER_ADDR is a setting.
RANKS = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_PORT",
    "RANKS_FILE",
    "EXIT_CODE_FILE",
    "PROGRESS_FILE",
    "LAUNCHER_PID",
    "LAUNCHED_AT",
    "LAUNCH_CHOICES",
}
TORCHRUN = ("PET_", "TORCHELASTIC_")  # its options, and what it sets


def forget_ranks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove what would make a process that is started alone, or by us, one of somebody else's job."""
    for name in list(environment):
        if name in RANKS or name.startswith(TORCHRUN):
            del environment[name]


def count_gpus(environment: Mapping[str, str]) -> int:
    """Count the GPUs that a process started here would see, without importing torch."""
    if shutil.which("nvidia-smi", path=environment.get("PATH")) is None:
        return 0
    try:
        listing = ask_nvidia_smi("--list-gpus", limit_s=SMI_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"nvidia-smi has not answered in {SMI_S} s: the GPU driver hangs. Restart the machine, or "
            "set DEVICE=cpu."
        ) from None
    count = len([line for line in listing.splitlines() if line.startswith("GPU")])
    visible = visible_gpus(environment)
    if visible is None:
        return count
    for position, name in enumerate(visible):
        if name.isdecimal() and int(name) >= count:  # CUDA ignores everything from here on
            return position
    return len(visible)


def count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def tune(environment: dict[str, str], processes: int, gpus: int) -> str:
    """Set threads and memory for this many trainers on this machine. Returns what was chosen.

    Without GPUs, MKL multiplies on several threads in the same order each time. It is free to do
    otherwise, and a resumed run may then differ in the last bits. MKL_CBWR is set only on Intel
    processors, where it takes no time. Large blocks are kept for the next step, because getting
    every page anew from the system costs page faults, and glibc (2.35 and later) uses huge pages.
    Torch's own THP_MEM_ALLOC_ENABLE takes a tenth more memory and no less time.

    A thread that waits for the others spins, by default for long. Where other processes use the cores
    too, it keeps a core from the thread that it waits for, and a step takes several times as long.

    On a GPU, segments of memory grow in place, so that free pieces between blocks do not add up.
    """
    set_default(environment, "OMP_NUM_THREADS", str(max(1, count_cores() // processes)))
    chosen = [f"processes={processes}", f"threads={environment['OMP_NUM_THREADS']}"]
    if gpus == 0:
        if not environment.get("OMP_WAIT_POLICY"):  # which says how to wait
            set_default(environment, "GOMP_SPINCOUNT", SPIN_COUNT)
        set_default(environment, "MKL_DYNAMIC", "FALSE")
        chosen.append(f"MKL_DYNAMIC={environment['MKL_DYNAMIC']}")
        if is_intel():
            set_default(environment, "MKL_CBWR", "AUTO")
        if environment.get("MKL_CBWR"):
            chosen.append(f"MKL_CBWR={environment['MKL_CBWR']}")
        if sys.platform == "linux":
            keep_large_blocks(environment)
    elif not environment.get("PYTORCH_CUDA_ALLOC_CONF"):  # its old name, which torch prefers
        set_default(environment, "PYTORCH_ALLOC_CONF", GROWING_SEGMENTS)
    return " ".join(chosen)


def keep_large_blocks(environment: dict[str, str]) -> None:
    set_default(environment, "MALLOC_MMAP_THRESHOLD_", str(MMAP_THRESHOLD))
    set_default(environment, "MALLOC_TRIM_THRESHOLD_", str(TRIM_THRESHOLD))
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb=" not in tunables:
        tunables = f"{tunables}:glibc.malloc.hugetlb=1".lstrip(":")
        environment["GLIBC_TUNABLES"] = tunables


def set_default(environment: dict[str, str], name: str, value: str) -> None:
    """Set a variable that is absent or empty."""
    environment[name] = environment.get(name) or value


def is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def record_nccl(environment: dict[str, str], paths: RunPaths) -> None:
    """Have NCCL write its last operations to hang/ when one hangs, and its transports to logs/."""
    for folder in (paths.hang, paths.node_log(paths.node).parent):
        with contextlib.suppress(OSError):  # the trainer reports it better
            folder.mkdir(parents=True, exist_ok=True)
    size = environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or FLIGHT_RECORDER_SIZE
    file = environment.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") or f"{paths.hang}/nccl_rank_"
    set_default(environment, "TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    set_default(environment, "TORCH_FR_BUFFER_SIZE", size)
    set_default(environment, "TORCH_FR_DUMP_TEMP_FILE", file)
    if not environment.get("NCCL_DEBUG"):
        # NCCL fills in host and process.
        log = paths.node_log(paths.node).with_name(f"nccl_node_{paths.node}.%h.%p")
        environment["NCCL_DEBUG"] = "INFO"
        set_default(environment, "NCCL_DEBUG_SUBSYS", "INIT,ENV,NET,GRAPH")
        set_default(environment, "NCCL_DEBUG_FILE", str(log))


def main(words: list[str]) -> None:
    """Become another module, with the threads and the allocator of training."""
    environment = dict(os.environ)
    gpus = 0
    if words[0] == "--cpu":
        words = words[1:]
    else:
        gpus = count_gpus(environment)
    print(f"launch: {tune(environment, int(words[0]), gpus)}", flush=True)
    os.execve(sys.executable, [sys.executable, "-m", *words[1:]], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
