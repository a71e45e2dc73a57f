"""What to change where memory does not suffice: in a step, in an evaluation, while weights are loaded."""

import os

import torch

from settings.config import Config
from train.distributed.world import World

HARDER = {
    "none": ("selective", "full"),
    "selective": ("full",),
    "full": (),
}  # of ACTIVATION_CHECKPOINTING


def memory_advice(c: Config, world: World, evaluating: bool = False) -> str:
    """What to change where a step does not fit, or a batch of an evaluation."""
    now, share = (
        c.micro_batch(world.size * c.replicas),
        c.batch_windows // (world.size * c.replicas),
    )
    smaller = max((n for n in range(1, now // 2 + 1) if share % n == 0), default=None)
    if evaluating and smaller:
        return (
            f"MICRO_BATCH_SIZE={now}: {now} windows of held-out text at once do not fit into "
            f"{room(world)}; set MICRO_BATCH_SIZE={smaller}"
        )
    ways = (
        [f"MICRO_BATCH_SIZE={smaller} (the batch stays as it is, in more parts)"] if smaller else []
    )
    ways += [f"ACTIVATION_CHECKPOINTING={how}" for how in HARDER[c.activation_checkpointing]]
    ways += ["PARALLEL=fsdp, on more processes"] if c.parallel == "ddp" else []
    ways += of_tuning(c) if c.model else []
    if c.model and not smaller and c.seq_len > 256:
        ways += [f"SEQ_LEN={c.seq_len // 2} with BATCH_TOKENS as it is"]
    return (
        f"MICRO_BATCH_SIZE={now}: a step of {now} sequences of {c.seq_len} tokens does not fit into {room(world)}; "
        f"set {', or '.join(ways) or 'a smaller model'}"
    )


def loading_advice(c: Config, world: World, size_bytes: float) -> str:
    """What to change where the weights of MODEL, so many bytes in its files, do not."""
    ways = [
        "PARALLEL=fsdp, on more processes"
        if c.parallel == "ddp"
        else "more processes (NPROC, NODES)"
    ]
    return (
        f"MODEL={c.model}: its weights, {size_bytes / 2**30:.1f} GiB in the files, do not fit into {room(world)}; "
        f"set {', or '.join([*ways, *of_tuning(c)])}"
    )


def of_tuning(c: Config) -> list[str]:
    """How a fine-tuning holds less of its model: adapters in the place of all weights, of fewer numbers, and what is
    frozen in two bytes."""
    if not c.lora_rank:
        return ["LORA_RANK=16" + (" with DTYPE=bfloat16" if c.dtype == "float32" else "")]
    fewer = [f"LORA_RANK={c.lora_rank // 2}"] if c.lora_rank >= 64 else []
    return (["DTYPE=bfloat16"] if c.dtype == "float32" else []) + fewer


def room(world: World) -> str:
    """'the memory of NVIDIA H200 (139.8 GiB)'"""
    total = (
        torch.cuda.get_device_properties(world.device).total_memory
        if world.device.type == "cuda"
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    return f"the memory of {world.device_name} ({total / 2**30:.1f} GiB)"
