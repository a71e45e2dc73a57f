"""PROFILE=1 on a GPU: its summary beside the sum of the trace's kernels, and which kernels a step really has."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from settings.config import Config
from tests.running import environment, train
from train.model import attention
from train.profile import time_shares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def test_a_profiled_run_says_what_its_kernels_did(tmp_path: Path, data: dict[str, str]) -> None:
    env = environment(
        tmp_path,
        data,
        DEVICE="cuda",
        DTYPE="bfloat16",
        COMPILE="1",
        PROFILE="1",
        MAX_STEPS="10",
        N_EMBD="256",
        N_HEAD="4",
        SEQ_LEN="256",
        BATCH_TOKENS="4096",
        MICRO_BATCH_SIZE="8",
    )
    out = train(env)
    assert "kernels of the GPU" in out
    (path,) = (tmp_path / "run" / "profile").glob("*.json.gz")
    (summary,) = (tmp_path / "run" / "profile").glob("*.txt")
    table = summary.read_text()
    ms = {name: ms for name, (_, ms) in time_shares.read_table(table).items()}
    step_ms = ms.pop(time_shares.A_STEP)
    assert sum(ms.values()) == pytest.approx(step_ms, abs=0.1)
    for name in ("matmul", "attention", "loss", "optimizer"):
        assert ms[name] > 0, f"no kernel was known as one of {name}: {table}"
    # One stream: kernels hardly overlap, so that their time is that of all classes but waits and gaps.
    events = [
        e
        for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if e.get("ph") == "X"
    ]
    steps = [e for e in events if e["name"] == time_shares.STEP and e["cat"] == "user_annotation"]
    busy = sum(
        e["dur"]
        for e in events
        if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        and any(s["ts"] <= e["ts"] < s["ts"] + s["dur"] for s in steps)
    )
    working_ms = len(steps) * (step_ms - ms["data wait"] - ms["host gaps"])
    assert 1000 * working_ms == pytest.approx(busy, rel=0.05)


def kernels(c: Config) -> str:
    """The names of what attention, forward and backward, has the GPU do."""
    device = torch.device("cuda", 0)
    kernel = attention.choose(c, device)
    q, k, v = (
        torch.randn(2, 1024, 8, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def attend() -> None:
        torch.compile(kernel.attend, dynamic=False)(q, k, v, None).sum().backward()

    attend()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        attend()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profiler.key_averages()).lower()


def test_the_kernel_that_the_log_names_is_the_one_that_runs() -> None:
    """cuDNN's where torch prefers it; FlashAttention-3 where that is asked for, which torch would put behind cuDNN's."""
    c = Config(dtype="bfloat16", n_embd=1024, n_head=8).derived()
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        kernel = attention.choose(c, torch.device("cuda", 0))
        names = kernels(c)
        if kernel.name == "sdpa":
            assert ("cudnn" in names) == attention.cudnn_first(torch.device("cuda", 0)), names
            assert "cudnn" in names or "flash" in names or "fmha" in names, names
        else:
            assert "flash" in names and "cudnn" not in names, names
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
