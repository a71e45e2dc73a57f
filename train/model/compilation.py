"""torch.compile, block by block: one block is compiled and serves all layers, with static shapes.

The names of weights stay as they are, since a module is compiled in place. Text samples, whose length grows with each
token, are generated without it (kv_cache.py).
"""

import contextlib
import logging
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from hardware.flops import flops_per_token
from settings import SettingsError
from settings.config import Config
from train.console import LOG_ONLY
from train.data.manifest import DataError
from train.model.loss import SoftmaxPart, softmax_part
from train.model.model import Transformer, matmul_weights

log = logging.getLogger(__name__)

# On two CPU cores compiling takes 10 to 20 s and saves a fifth to a quarter of a run in bfloat16, a tenth in float32
# (BENCHMARKS.md). This many FLOPs are two minutes of their work in bfloat16, five in float32.
FLOPS_WORTH_COMPILING_ON_CPU = 5e13
ROWS_AT_ONCE = 256  # of logits, on a CPU
# What the system says of a library that is cut short, or is none.
DAMAGED_LIBRARY = ("file too short", "invalid ELF header")


def wanted(c: Config, device: torch.device, model: Transformer) -> bool:
    """Return whether to compile, by COMPILE, and log why. Raises SettingsError for COMPILE=1 without a compiler."""
    refusal = ""
    if c.compile == "0":
        refusal = "COMPILE=0"
    elif c.compile == "auto" and device.type == "cpu":
        refusal = find_reason_against(c, model)
    if refusal:
        log.info("compile=no (%s)", refusal, extra=LOG_ONLY)
        return False
    missing = find_missing(device)
    if missing and c.compile == "1":
        raise SettingsError([f"COMPILE=1: {missing}, or set COMPILE=0"])
    if missing:
        log.warning("compile=no (it would pay, but %s)", missing)
        return False
    log.info("compile=yes, block by block (COMPILE=%s)", c.compile, extra=LOG_ONLY)
    return True


def find_reason_against(c: Config, model: Transformer) -> str:
    """Return why a run on a CPU does not repay compiling; "" if it does."""
    if sys.platform != "linux":
        return "COMPILE=1 tries it on this system"
    each = flops_per_token(matmul_weights(model), c.n_layer, c.n_embd, c.seq_len)
    work = c.last_step * c.batch_tokens * each
    if work < FLOPS_WORTH_COMPILING_ON_CPU:
        pays = FLOPS_WORTH_COMPILING_ON_CPU
        return f"a run of {work:.1e} FLOPs; on a CPU it pays from about {pays:.0e} on"
    return ""


def find_missing(device: torch.device) -> str:
    """Return what torch.compile lacks here, with the package that brings it; "" if nothing.

    It needs a compiler, of C++ for a CPU and of C for Triton's launchers on a GPU, and Python's headers, which
    all that it compiles includes.
    """
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python.h is missing: install python3-dev"
    if device.type != "cpu":
        has_compiler = any(map(shutil.which, ("gcc", "clang", "cc")))
        return "" if has_compiler else "there is no C compiler: install gcc"
    from torch._inductor import cpp_builder, exc  # not above: this takes two seconds

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "there is no C++ compiler: install g++"
    return ""


def as_written(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run a model as it is written inside, also if it was compiled: each length would need a graph of its own."""
    if getattr(model, "compiled", False):  # setting the stance imports the compiler
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def compile_model(model: Transformer, named: bool = False) -> None:
    """Have the blocks, and the softmax part of the loss, compiled at their first use.

    Args:
        model: compiled in place.
        named: whether each kernel for the CPU gets a mark by which a profiler knows it; it knows those of a GPU anyway.
    """
    # not above: these take a second
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    if named:
        inductor.cpp.enable_kernel_profile = True
    # On a CPU, results of norms and of what is between the MLP's matrices are recomputed in backward, which takes a
    # fifteenth off the memory of a small model for about 1% of its time. ACTIVATION_CHECKPOINTING says what else is.
    functorch.ban_recompute_materialized_backward = model.rotary.device.type != "cpu"
    for layer in model.layers:
        # the pass itself and not the call of the module, in which FSDP2 gathers weights
        layer.forward = torch.compile(layer.forward, dynamic=False)
    model.softmax_part = of_any_length(torch.compile(softmax_part))
    model.compiled = True


@contextlib.contextmanager
def refuse_damaged_cache() -> Iterator[None]:
    """Raise DataError where torch loads a damaged kernel from its cache, which it does not verify.

    A machine that loses power while it compiles leaves such files behind.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        if not any(sign in text for sign in DAMAGED_LIBRARY):
            raise
        from torch._inductor.runtime.cache_dir_utils import cache_dir  # above it would take seconds

        folder = cache_dir()
        raise DataError(
            f"torch.compile's cache in {folder} is damaged, as after a power failure. Delete it and "
            f"start again: rm -r {folder}"
        ) from error


def of_any_length(part: SoftmaxPart) -> SoftmaxPart:
    """Return the softmax part compiled once for any number of tokens: the last chunk has fewer, and an evaluation's.

    On a CPU it gets a few rows at a time, since what it writes for them it writes beside them first.
    """

    def by_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows = ROWS_AT_ONCE if logits.device.type == "cpu" else max(1, len(logits))
        total = logits.new_zeros((), dtype=torch.float32)
        factors = []
        for values, target in zip(logits.split(rows), targets.split(rows), strict=True):
            torch._dynamo.maybe_mark_dynamic(values, 0)
            torch._dynamo.maybe_mark_dynamic(target, 0)
            loss, factor = part(values, target)
            total += loss
            factors.append(factor)
        return total, torch.cat(factors)

    return by_rows
