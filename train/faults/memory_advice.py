"""What to change when memory does not suffice: in a step, in an evaluation, while weights are loaded."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from hardware.host_memory import read_memory
from hardware.out_of_memory import is_out_of_memory
from settings import SettingsError
from settings.config import Config
from train.distributed.world import World

RECOMPUTE = ("none", "selective", "full")  # ACTIVATION_CHECKPOINTING: each keeps less


@contextlib.contextmanager
def refuse_out_of_memory(describe: Callable[[], str]) -> Iterator[None]:
    """Raise SettingsError, with a description, where memory does not suffice for what is inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SettingsError([describe()]) from error


def memory_advice(config: Config, world: World) -> str:
    """Say what to change if a step does not fit into memory."""
    now = config.micro_batch(world.size * config.replicas)
    share = config.batch_windows // (world.size * config.replicas)
    fitting = [size for size in range(1, now // 2 + 1) if share % size == 0]
    ways = []
    if fitting:
        ways.append(f"MICRO_BATCH_SIZE={fitting[-1]} (the batch stays as it is, in more parts)")
    stronger = RECOMPUTE[RECOMPUTE.index(config.activation_checkpointing) + 1 :]
    ways += [f"ACTIVATION_CHECKPOINTING={value}" for value in stronger]
    if config.parallel == "ddp":
        ways.append("PARALLEL=fsdp, on more processes")
    if config.model:
        ways += list_tuning_ways(config)
        if not fitting and config.seq_len > 256:
            ways.append(f"SEQ_LEN={config.seq_len // 2} with BATCH_TOKENS as it is")
    return (
        f"MICRO_BATCH_SIZE={now}: a step of {now} sequences of {config.seq_len} tokens does not fit "
        f"into {describe_memory(world)}; set {', or '.join(ways) or 'a smaller model'}"
    )


def loading_advice(config: Config, world: World, size_bytes: float) -> str:
    """Say what to change if the weights of MODEL do not fit, which have so many bytes in its files."""
    processes = "more processes (NPROC, NODES)"
    if config.parallel == "ddp":
        processes = "PARALLEL=fsdp, on more processes"
    return (
        f"MODEL={config.model}: its weights, {size_bytes / 2**30:.1f} GiB in the files, do not fit "
        f"into {describe_memory(world)}; set {', or '.join([processes, *list_tuning_ways(config)])}"
    )


def list_tuning_ways(config: Config) -> list[str]:
    """List how a fine-tuning holds less of its model: adapters, smaller ones, frozen weights in two bytes."""
    is_float32 = config.dtype == "float32"
    if not config.lora_rank:
        return ["LORA_RANK=16 with DTYPE=bfloat16" if is_float32 else "LORA_RANK=16"]
    ways = ["DTYPE=bfloat16"] if is_float32 else []
    if config.lora_rank >= 64:
        ways.append(f"LORA_RANK={config.lora_rank // 2}")
    return ways


def describe_memory(world: World) -> str:
    """Return 'the memory of NVIDIA H200 (139.8 GiB)'."""
    total = read_memory().most
    if world.device.type == "cuda":
        total = torch.cuda.get_device_properties(world.device).total_memory
    return f"the memory of {world.device_name} ({total / 2**30:.1f} GiB)"
