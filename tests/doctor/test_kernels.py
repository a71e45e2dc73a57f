"""What torch sees and would use, asked of a real process, and judged on made facts."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from doctor import by_torch, kernels
from doctor.gpus import Gpu, Seen
from doctor.kernels import ByTorch
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding

CARD = Gpu("NVIDIA A100-SXM4-80GB", "GPU-aa11", "550.90.07", (8, 0), 81920, 4)
TWO = Seen((CARD, CARD), (CARD, CARD))
GOOD = ByTorch("2.13.0+cu126", (CARD.name, CARD.name), kernel="sdpa", worth_compiling=True)


def config(**values: Any) -> Config:
    return dataclasses.replace(Config(), **values).derived()


def told(finding: Finding | None) -> str:
    assert finding
    return f"{finding.level} {finding.text}; {finding.fix}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU takes")
def test_a_process_of_torch_tells_what_this_machine_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env").touch()
    for name, value in {
        "PRESET": "tiny",
        "ENV_FILE": str(tmp_path / "env"),
        "DTYPE": "bfloat16",
        "SEQ_LEN": "256",
        "BATCH_TOKENS": "8192",
        "TRAIN_TOKENS": "1M",
    }.items():
        monkeypatch.setenv(name, value)
    found = kernels.by_torch()
    assert found == ByTorch(torch.__version__, kernel="math")  # short windows in bfloat16 on a CPU
    assert told(kernels.attention(config(), found)).startswith(
        "PASS math on the CPU: two batched products"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU takes")
def test_whether_it_pays_to_compile_is_told_by_the_work() -> None:
    facts = {
        "version": torch.__version__,
        "gpus": [],
        "problem": "",
        "kernel": "sdpa",
        "refused": "",
    }
    assert by_torch.facts(config(train_tokens=10**5)) == facts | {"worth_compiling": False}
    # a trillion tokens at 6 N FLOPs each, with N > 1e6
    assert by_torch.facts(config(train_tokens=10**12)) == facts | {"worth_compiling": True}
    refused = by_torch.facts(config(attention="fa3", dtype="bfloat16"))
    assert refused["kernel"] == "" and refused["refused"].endswith("set ATTENTION=auto or sdpa")


def test_a_torch_that_does_not_load_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "torch").mkdir()
    for text, level, words in (
        (
            "raise ImportError('libcudart.so.13: cannot open shared object file')",
            FAIL,
            "torch does not load: ImportError: libcudart.so.13",
        ),
        ("import time; time.sleep(30)", WARN, "torch was not loaded within 1 s"),
    ):
        (tmp_path / "torch" / "__init__.py").write_text(text)
        found = kernels.by_torch(limit_s=1.0 if level == WARN else 60.0)
        assert told(kernels.loaded(found)).startswith(level) and words in told(
            kernels.loaded(found)
        )
        assert (
            kernels.attention(config(), found) is None
            and kernels.seen_alike(config(), TWO, found) is None
        )
    assert kernels.loaded(GOOD) is None


@pytest.mark.parametrize(("device", "level"), [("auto", WARN), ("cuda", FAIL)])
def test_torch_must_compute_on_what_nvidia_smi_lists(device: str, level: str) -> None:
    c = config(device=device)
    assert told(kernels.seen_alike(c, TWO, GOOD)) == "PASS torch computed on each of them; "
    fewer = dataclasses.replace(GOOD, gpus=(CARD.name,))
    assert told(kernels.seen_alike(c, TWO, fewer)).startswith(
        f"{level} torch 2.13.0+cu126 sees 1 GPUs, and nvidia-smi 2 GPUs"
    )
    broken = dataclasses.replace(
        GOOD, gpus=(), problem="CUDA error 802: system not yet initialized"
    )
    assert "computed on 0 of 2 GPUs: CUDA error 802" in told(kernels.seen_alike(c, TWO, broken))
    assert (
        kernels.seen_alike(c, Seen(), GOOD) is None
        and kernels.seen_alike(config(device="cpu"), TWO, GOOD) is None
    )


def test_what_torch_does_counts_more_than_versions() -> None:
    fits, old = Finding("driver", PASS, "fits"), Finding("driver", FAIL, "too old")
    works, broken = Finding("gpus-torch", PASS, "computed"), Finding("gpus-torch", FAIL, "sees 0")
    assert kernels.stronger(fits, works) == [fits, works] and kernels.stronger(fits, broken) == [
        fits,
        broken,
    ]
    assert kernels.stronger(old, works) == [works]  # by a package of forward compatibility
    assert (
        kernels.stronger(old, broken) == [old] == kernels.stronger(old, None)
        and kernels.stronger(None, None) == []
    )


def test_the_kernel_that_would_be_used_is_told() -> None:
    assert told(kernels.attention(config(), GOOD)) == (
        "PASS sdpa on NVIDIA A100-SXM4-80GB: torch's scaled_dot_product_attention; "
    )
    refused = dataclasses.replace(
        GOOD, kernel="", refused="ATTENTION=fa3: no Hopper; x; set ATTENTION=auto or sdpa"
    )
    finding = kernels.attention(config(), refused)
    assert told(finding) == "FAIL ATTENTION=fa3: no Hopper; x; set ATTENTION=auto or sdpa"
    assert finding and finding.code == 64
    assert (
        kernels.attention(config(device="cuda"), dataclasses.replace(GOOD, gpus=())) is None
    )  # gpus has said it
