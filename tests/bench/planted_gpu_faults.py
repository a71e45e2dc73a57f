"""Plants faults that only a GPU would show, one at a time, and prints what the rehearsal says of each, as JSON.

A process of its own: the stand-in for CUDA must be loaded before torch, and cannot be unloaded.
"""

import contextlib
import inspect
import json
import sys
import textwrap
from unittest import mock

from bench.gpu_rehearsal.rehearsal import check_plan, rehearse  # before torch

import torch  # isort: skip
import torch.nn.functional as F

from bench.gpu_rehearsal.cases import config_of
from train import assemble, step
from train.distributed.fsdp_waits import Waits
from train.model import attention, kv_cache, loss, model
from train.optim import Optimizer


def norm_on_the_cpu(self, x):
    return x * torch.ones(x.shape[-1])


def sdpa_without_groups(q, k, v, mask=None):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2)


def build_in_bfloat16(*arguments, build=assemble.build_model):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def clip_with_a_read(gradients, norm, largest, clip=step.clip):
    gradients[0].sum().item()
    clip(gradients, norm, largest)


def attend_with_a_view():
    """LayerCache.attend, with a view where it has a reshape."""
    source = textwrap.dedent(inspect.getsource(kv_cache.LayerCache.attend))
    other = source.replace("y.reshape(", "y.view(")
    assert other != source
    names = dict(vars(kv_cache))
    exec(other, names)
    return names["attend"]


def build_cache_in_float32(self, n_layer, shape, dtype, device, build=kv_cache.KVCache.__init__):
    build(self, n_layer, shape, torch.float32, device)


def mask_on_the_host(bounds, B, T, build=model.document_mask):
    return build(bounds.cpu(), B, T)


def norm_with_a_graph_break(self, x, forward=model.RMSNorm.forward):
    torch._dynamo.graph_break()
    return forward(self, x)


def step_in_bfloat16(self, update=Optimizer.step):
    update(self)
    for weight, part in self.owner.items():
        part.state[weight]["exp_avg"] = part.state[weight]["exp_avg"].bfloat16()


# name -> the words of a case, what is replaced, and by what
FAULTS = {
    "none": ("rtx4090 gqa fsdp", None),
    "tensor on the CPU": ("h100", (model.RMSNorm, "forward", norm_on_the_cpu)),
    "weights in bfloat16": ("h100", (assemble, "build_model", build_in_bfloat16)),
    "no enable_gqa": ("h100 gqa", (attention, "sdpa", sdpa_without_groups)),
    "second read": ("h100 ddp", (step, "clip", clip_with_a_read)),
    "cache in float32": ("h100", (kv_cache.KVCache, "__init__", build_cache_in_float32)),
    "mask on the host": ("a100 float32 doc_mask", (model, "document_mask", mask_on_the_host)),
    "moments in bfloat16": ("h100", (Optimizer, "step", step_in_bfloat16)),
    "larger chunks of logits": ("h100", (loss, "CHUNK_TOKENS", 2 * loss.CHUNK_TOKENS)),
    "graph break": ("h100 COMPILE=1", (model.RMSNorm, "forward", norm_with_a_graph_break)),
    "waits that are not timed": ("a100 hsdp", (Waits, "watch", lambda *_: None)),
    "view in the cache": ("rtx4090 gqa", (kv_cache.LayerCache, "attend", attend_with_a_view())),
}


def find(words, fault):
    config = config_of([*words.split(), "N_LAYER=1", "SEQ_LEN=256"])
    with mock.patch.object(*fault) if fault else contextlib.nullcontext():
        try:
            check_plan(rehearse(config))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


json.dump({name: find(*planted) for name, planted in FAULTS.items()}, sys.stdout)
