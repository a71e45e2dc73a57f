"""Check the image in itself, at the end of its build, as the user that pods run as.

    python docker/check.py TORCH_BACKEND [flash-attn]

A build machine usually has no GPU: what needs one is only loaded.
"""

import ctypes
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

from record.provenance import version
from settings import ROOT
from settings.config import Config
from train.model import attention

USER = (1000, 1000)
KERNELS = ("flash_attn", "flash_attn_interface")  # as in train/model/attention.py


def check_user() -> str:
    """Pods expect this user, who must not be able to change the code."""
    user = (os.getuid(), os.getgid())
    assert user == USER, f"it runs as {user}"
    for path in (ROOT, ROOT / "train", Path(sys.prefix)):
        assert not os.access(path, os.W_OK), f"{path} can be written"
    return f"uid {user[0]}, {(ROOT / 'REVISION').read_text().strip()}"


def check_torch() -> str:
    build = torch.__version__.partition("+")[2] or "cpu"
    assert build == sys.argv[1], f"torch is the build {build}, not TORCH_BACKEND={sys.argv[1]}"
    return f"{torch.__version__}, Python {sys.version.split()[0]}"


def check_attention() -> str:
    """The kernel agrees with the formula, and installed ones load next to this torch."""
    kernel = attention.choose(Config().derived(), torch.device("cpu"))
    query, key, value = torch.randn(3, 2, 64, 4, 32).unbind()  # each (B, T, H, D)
    output = kernel.attend(query, key, value, None)
    expected = attention.MATH.attend(query, key, value, None)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)
    installed = [name for name in KERNELS if importlib.util.find_spec(name)]
    for name in installed:
        importlib.import_module(name)
    assert installed or "flash-attn" not in sys.argv, "FLASH_ATTN_WHEEL brought no kernel"
    return ", ".join([kernel.name, *installed])


def check_finetune() -> str:
    importlib.import_module("finetune.main")
    return f"transformers {version('transformers')}, peft {version('peft')}"


def check_network() -> str:
    """Without libibverbs, NCCL silently uses TCP instead of InfiniBand."""
    ctypes.CDLL("libibverbs.so.1")
    return "libibverbs for InfiniBand and RoCE"


def check_compile() -> str:
    """torch.compile needs g++ and a folder for caches; Triton needs Python.h."""
    numbers = torch.randn(1000)
    compiled = torch.compile(torch.sin)
    torch.testing.assert_close(compiled(numbers), numbers.sin())
    header = Path(sysconfig.get_path("include"), "Python.h")
    assert header.exists(), f"{header} is missing"
    return "torch.compile works"


CHECKS: dict[str, Callable[[], str]] = {
    "user": check_user,
    "torch": check_torch,
    "attention": check_attention,
    "finetune": check_finetune,
    "network": check_network,
    "compile": check_compile,
}


def main() -> int:
    failures = 0
    for name, check in CHECKS.items():
        try:
            print(f"image: {name:<10} {check()}")
        except Exception as error:  # whatever it is, whoever builds must read it
            print(f"image: {name:<10} failed: {error}", file=sys.stderr)
            failures += 1
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
