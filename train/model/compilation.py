"""torch.compile, block by block: one block is compiled and serves all layers, with static shapes.

The names of weights stay as they are, since a module is compiled in place. Text samples, whose length grows
with each token, run as they are written (generate.py).
"""

import logging
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from hardware.flops import flops_per_token
from settings import SettingsError
from settings.config import Config
from train.console import LOG_ONLY
from train.model.loss import SoftmaxPart, softmax_part_to_compile
from train.model.model import Transformer, matmul_weights

log = logging.getLogger(__name__)

# On two CPU cores compiling takes 10 to 20 s and saves a fifth to a quarter of a run in bfloat16, a tenth in float32
# (BENCHMARKS.md). This many FLOPs are two minutes of their work in bfloat16, five in float32.
FLOPS_WORTH_COMPILING_ON_CPU = 5e13
ROWS_AT_ONCE = 256  # of logits, on a CPU


def wanted(c: Config, device: torch.device, model: Transformer) -> bool:
    """Whether to compile, by COMPILE; says so, and why. Raises SettingsError where it is asked for and cannot be."""
    reason = "COMPILE"
    if c.compile == "auto":
        work = (
            c.last_step
            * c.batch_tokens
            * flops_per_token(matmul_weights(model), c.n_layer, c.n_embd, c.seq_len)
        )
        if device.type == "cpu" and sys.platform != "linux":
            log.info("compile=no (COMPILE=1 tries it on this system)", extra=LOG_ONLY)
            return False
        if device.type == "cpu" and work < FLOPS_WORTH_COMPILING_ON_CPU:
            log.info(
                "compile=no (a run of %.1e FLOPs; on a CPU it pays from about %.0e on)",
                work,
                FLOPS_WORTH_COMPILING_ON_CPU,
                extra=LOG_ONLY,
            )
            return False
        reason = "it pays on a GPU" if device.type != "cpu" else f"a run of {work:.1e} FLOPs"
    missing = "" if c.compile == "0" else find_missing(device)
    if missing:
        if c.compile == "1":
            raise SettingsError([f"COMPILE=1: {missing}, or set COMPILE=0"])
        log.warning("compile=no (it would pay, but %s)", missing)
        return False
    how = "no" if c.compile == "0" else "yes, block by block"
    log.info("compile=%s (%s)", how, reason, extra=LOG_ONLY)
    return c.compile != "0"


def find_missing(device: torch.device) -> str:
    """Return what torch.compile lacks here, with the package that brings it; "" if nothing.

    It needs a compiler, of C++ for a CPU and of C for Triton's launchers on a GPU, and Python's headers, which
    all that it compiles includes.
    """
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python.h is missing: install python3-dev"
    if device.type != "cpu":
        found = any(map(shutil.which, ("gcc", "clang", "cc")))
        return "" if found else "there is no C compiler: install gcc"
    from torch._inductor import cpp_builder, exc  # not above: this takes two seconds

    try:
        found = bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        found = False
    return "" if found else "there is no C++ compiler: install g++"


def compile_model(model: Transformer, named: bool = False) -> None:
    """Have the blocks, and the softmax part of the loss, compiled at their first use.

    named: with a mark in each kernel for the CPU, by which a profiler knows them; those of a GPU it knows anyway.
    """
    if named:
        import torch._inductor.config as inductor

        inductor.cpp.enable_kernel_profile = True
    # On a CPU results of norms, and what is between the MLP's matrices, are computed again in backward, which takes a
    # fifteenth off the memory of a small model for about 1% of its time. What else is computed again
    # ACTIVATION_CHECKPOINTING says.
    import torch._functorch.config as functorch  # not above: this takes a second

    functorch.ban_recompute_materialized_backward = next(model.parameters()).device.type != "cpu"
    for layer in model.layers:
        # the pass itself and not the call of the module, in which FSDP2 gathers weights
        layer.forward = torch.compile(layer.forward, dynamic=False)
    model.softmax_part = of_any_length(torch.compile(softmax_part_to_compile))
    model.compiled = True


def of_any_length(part: SoftmaxPart) -> SoftmaxPart:
    """Compiled once for chunks of any number of tokens: the last one, and those of an evaluation, may have fewer. On a
    CPU it gets a few rows at a time, since what it writes for them it writes beside them first."""

    def softmax_part(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows = ROWS_AT_ONCE if logits.device.type == "cpu" else max(1, len(logits))
        total = logits.new_zeros((), dtype=torch.float32)
        factors = logits.new_empty(len(logits), 1, dtype=torch.float32)
        for values, target, factor in zip(
            logits.split(rows), targets.split(rows), factors.split(rows), strict=True
        ):
            for tensor in (values, target):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            loss, factor[:] = part(values, target)
            total += loss
        return total, factors

    return softmax_part
