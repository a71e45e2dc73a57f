"""The image's look at itself: versions, user, attention, compiler. By docker/check.sh, at the end of a build.

    python docker/check.py TORCH_BACKEND [flash-attn]

A build machine has no GPU, as a rule. What needs one is said to be there, or not; what does not is tried.
"""

import ctypes
import importlib
import importlib.util
import os
import platform
import sys
import sysconfig
from pathlib import Path

import torch

from record.provenance import commit, version
from settings.config import Config
from train.model import attention

OPTIONAL = {
    "flash-attn": "flash_attn",
    "fa3": "flash_attn_interface",
}  # kernel -> module, as in train/model/attention.py


def say(what: str, found: str) -> None:
    sys.stdout.write(f"image: {what:<10} {found}\n")


def python_and_user() -> list[str]:
    problems = []
    say("python", f"{platform.python_version()} in {sys.prefix}")
    say("user", f"uid {os.getuid()}, gid {os.getgid()}")
    if (os.getuid(), os.getgid()) != (1000, 1000):
        problems.append(f"it runs as {os.getuid()}:{os.getgid()}; pods expect 1000:1000")
    root = Path(__file__).resolve().parent.parent
    problems += [
        f"{path} can be written by the user of the processes"
        for path in (root, root / "train", sys.prefix)
        if os.access(path, os.W_OK)
    ]
    found = commit()
    say("revision", f"{found['git'] or 'unknown'}{' and changes' if found['git_dirty'] else ''}")
    return problems


def torch_build(backend: str) -> list[str]:
    build = torch.__version__.partition("+")[2] or "cpu"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    say(
        "torch",
        f"{torch.__version__} ({cuda}), numpy {version('numpy')}, {torch.cuda.device_count()} GPUs seen",
    )
    if build != backend:
        return [f"torch is the build {build}, and TORCH_BACKEND={backend} was asked for"]
    return []


def kernels(wanted: str) -> list[str]:
    """Which attention there is: what is chosen here agrees with the formula, and what is installed can be loaded."""
    problems, installed = [], []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = attention.choose(Config().derived(), device)
    q, k, v = torch.randn(3, 2, 64, 4, 32, device=device).unbind()  # each (B, T, H, D)
    difference = (
        (kernel.attend(q, k, v, None) - attention.MATH.attend(q, k, v, None)).abs().max().item()
    )
    if not difference < 1e-4:
        problems.append(f"attention by {kernel.name} is off by {difference:.1e}")
    for name, module in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            continue
        try:
            importlib.import_module(module)
            installed.append(name)
        except (ImportError, OSError) as error:
            problems.append(
                f"{module} does not load beside torch {torch.__version__}: {error}; FLASH_ATTN_WHEEL must "
                "be a build for this torch, CUDA and Python"
            )
    if wanted and not installed and not problems:
        problems.append(f"FLASH_ATTN_WHEEL brought no module {' or '.join(OPTIONAL.values())}")
    on_gpu = ", ".join([*installed, "sdpa"])
    say(
        "attention",
        f"{kernel.name} on {device.type}; what ATTENTION=auto can take on a GPU: {on_gpu}",
    )
    return problems


def fine_tuning() -> list[str]:
    """A model of transformers' with adapters of peft's takes a step, without asking anybody for anything."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        importlib.import_module("finetune.main")
        small = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        tuned = get_peft_model(LlamaForCausalLM(small), LoraConfig(r=2, target_modules=["q_proj"]))
        tokens = torch.arange(8)[None]
        tuned(input_ids=tokens, labels=tokens).loss.backward()
    except Exception as error:  # whatever is wrong in it: the sentence is for who builds
        return [
            f"fine-tuning fails: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
        ]
    trained = [name for name, weight in tuned.named_parameters() if weight.grad is not None]
    say("finetune", f"transformers {version('transformers')}, peft {version('peft')}")
    return (
        [] if trained and all("lora_" in name for name in trained) else [f"LoRA trains {trained}"]
    )


def transports() -> list[str]:
    """NCCL loads libibverbs by itself, and takes TCP without a word where there is none."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        return [f"libibverbs does not load ({error}): NCCL would pass over InfiniBand"]
    say(
        "network",
        "libibverbs, by which NCCL takes InfiniBand and RoCE where a container has their devices",
    )
    return []


def compilers() -> list[str]:
    """A function through torch.compile: g++, Python's headers and a folder for caches, all of them as this user."""
    x = torch.randn(1000)
    compiled = torch.compile(lambda x: (x.sin() * 2).relu().sum())
    try:
        agree = torch.allclose(compiled(x), (x.sin() * 2).relu().sum(), rtol=1e-4)
    except Exception as error:  # whatever is wrong in it: the sentence is for who builds
        return [f"torch.compile fails: {str(error).strip().splitlines()[-1]}"]
    header = Path(sysconfig.get_path("include"), "Python.h")
    say("compile", f"torch.compile works; {header} for Triton")
    return [] if agree else ["torch.compile computes something else"]


def main() -> int:
    backend, wanted = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    problems = [
        *python_and_user(),
        *torch_build(backend),
        *kernels(wanted),
        *fine_tuning(),
        *transports(),
        *compilers(),
    ]
    for problem in problems:
        sys.stderr.write(f"image: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
