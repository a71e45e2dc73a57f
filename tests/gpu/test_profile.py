"""PROFILE=1 on a GPU: its kernels are in the trace; and which kernels attention really has."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from bench import whole_run
from settings.config import Config
from tests.running import environment, train
from train.model import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def test_a_profiled_run_has_its_kernels_in_trace_and_table(
    tmp_path: Path, data: dict[str, str]
) -> None:
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
    train(env)
    (path,) = (tmp_path / "run" / "profile").glob("*.json.gz")
    (table,) = (tmp_path / "run" / "profile").glob("*.txt")
    assert "Self CUDA time total" in table.read_text()
    events = [
        event
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if event.get("ph") == "X"
    ]
    shares = whole_run.of_trace(events)["percent"]
    assert sum(shares.values()) == pytest.approx(100)
    for name in ("matmul", "attention", "other work"):
        assert shares[name] > 0, f"no kernel was known as one of {name}: {shares}"


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
