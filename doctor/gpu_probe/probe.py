"""What this machine can do, measured by as many processes as train on it: one of them. doctor/probing.py starts it.

    python -m doctor.gpu_probe.start DEVICE NPROC PORT PART SETTINGS UNTIL LIMIT
    -> python -m doctor.gpu_probe.probe PART SETTINGS PROCESSES UNTIL LIMIT      a process each

PART is ceilings, or step (probe_step.py). SETTINGS are those of the run that are not the defaults, as JSON; UNTIL is
the Unix time at which it means to be through, LIMIT the one at which it ends, whatever it waits for. It writes JSON
lines: the first process what was found, any other one only what went wrong with it.
"""

import functools
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from doctor.gpu_probe import messages, probe_step, worker
from doctor.gpu_probe.probe_step import introduce, say
from hardware.model_size import parameters
from hardware.out_of_memory import is_out_of_memory
from settings import SettingsError
from settings.config import Config
from train.distributed.world import (
    World,
    all_gather_object,
    broadcast_object,
    join,
    leave,
    sum_over_ranks,
)

SIZES = {
    "cpu": (1024, 2048, 4096),
    "cuda": (4096, 8192, 16384),
}  # of square products; the best one counts
LONGEST_S = 1.5  # for one type and size
GROUP_S = 0.05  # products timed together, since a GPU is told of them ahead
ARRAY = 2**30  # bytes of each of the triad's on a GPU, and at most on a CPU
OF_A_CORE = (
    2**25
)  # bytes of each on a CPU for each core: four times a cache of 8 MiB, as STREAM wants
BUFFER = {
    "cpu": 2**26,
    "cuda": 2**30,
}  # bytes of a gradient that are sent, at most: more is as fast


def ceilings(c: Config, world: World, until: float) -> None:
    """Products, memory and links, one after the other, all processes at once."""
    left = broadcast_object(
        until - time.time()
    )  # that of one: all must make as many calls of each other
    types = ["float32", "bfloat16"] if has_bfloat16(world.device) else ["float32"]
    shares = {"matmul": 0.6 if world.size > 1 else 0.8, "memory": 0.1, "link": 0.2}
    introduce(world)
    for dtype in types:
        say(world, phase=f"products in {dtype}")
        each_s = min(
            LONGEST_S, shares["matmul"] * left / len(types) / len(SIZES[world.device.type])
        )
        if dtype == types[-1]:
            say(world, busy=True)
        found = products(world, dtype, each_s)
        say(world, matmul={dtype: all_gather_object(found)})
    say(world, phase="memory")
    say(world, memory=all_gather_object(triad_gb_s(world, min(2.0, shares["memory"] * left))))
    if world.size > 1:
        say(world, phase="links")
        say(world, link=link(c, world, min(5.0, shares["link"] * left)))


def has_bfloat16(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


# ---------------------------------------------------------------------------------------------------
# Products and memory
# ---------------------------------------------------------------------------------------------------


def products(world: World, dtype: str, each_s: float) -> float:
    """TFLOP/s of this process's products of that type, sums in float32 (no TF32), at the size that is best."""
    torch.set_float32_matmul_precision("highest")
    best = 0.0
    for size in SIZES[world.device.type]:
        a, b = (
            torch.randn(size, size, device=world.device).to(getattr(torch, dtype)) for _ in range(2)
        )
        product = torch.empty_like(a)

        def once(a: torch.Tensor = a, b: torch.Tensor = b, product: torch.Tensor = product) -> None:
            torch.mm(a, b, out=product)

        broadcast_object(None)  # all together: they share power, and on a CPU memory
        took = statistics.median(times(once, each_s))
        best = max(best, 2.0 * size**3 / took / 1e12)
        if broadcast_object(8 * took > each_s):  # the next size has eight times the work
            break
    return best


def triad_gb_s(world: World, seconds: float) -> float:
    """GB/s of a = b + 3 c on this process's device, the fastest pass, as STREAM counts it: two arrays read, one
    written, and not what a CPU reads of the third in order to write it (McCalpin 1995)."""
    size = ARRAY
    if world.device.type == "cpu":  # which all processes share
        size = max(2**28, min(ARRAY, OF_A_CORE * (os.cpu_count() or 1))) // world.size
    count = size // 4
    a, b, c = (torch.full((count,), value, device=world.device) for value in (0.0, 1.0, 2.0))
    broadcast_object(None)
    return 12.0 * count / min(times(lambda: torch.add(b, c, alpha=3.0, out=a), seconds)) / 1e9


def times(once: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds that one call took, by group of calls, for about so long: three groups at least, behind a first call, but
    never for twice as long where one would do."""
    once()
    each = took(once, 1)
    group = max(1, round(GROUP_S / each))
    found: list[float] = []
    began = time.perf_counter()
    while (gone := time.perf_counter() - began) < seconds or len(found) < (
        3 if gone < 2 * seconds else 1
    ):
        found.append(took(once, group))
    return found


def took(once: Callable[[], Any], calls: int) -> float:
    """Seconds of one of so many calls."""
    worker.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        once()
    worker.synchronize()
    return (time.perf_counter() - began) / calls


# ---------------------------------------------------------------------------------------------------
# Between processes
# ---------------------------------------------------------------------------------------------------


def link(c: Config, world: World, seconds: float) -> dict[str, float]:
    """bus_gb_s: of an all-reduce of a float32 gradient, or of BUFFER bytes of it; latency_us: of a single number."""
    size = min(4 * parameters(c).total, BUFFER[world.device.type])
    gradient, number = (torch.zeros(n, device=world.device) for n in (size // 4, 1))
    medians = []
    for values, calls_at_most in ((gradient, 50), (number, 500)):
        sum_over_ranks(values)  # connects
        send = functools.partial(sum_over_ranks, values)
        calls = broadcast_object(max(3, min(calls_at_most, int(seconds / 2 / took(send, 3)))))
        medians.append(statistics.median(took(send, 1) for _ in range(calls)))
    return {
        "bus_gb_s": bus_gb_s(size, medians[0], world.size),
        "latency_us": medians[1] * 1e6,
        "bytes": size,
        "seconds": medians[0],
    }


def bus_gb_s(size: int, seconds: float, processes: int) -> float:
    """GB/s that each process sends, and receives, in an all-reduce of `size` bytes: in a ring each part of 1/n goes
    round twice but for one hop, n - 1 times to be summed and n - 1 times to be handed out. nccl-tests calls it the bus
    bandwidth; unlike size / seconds it does not fall with the number of processes where links are what limits."""
    return 2 * (processes - 1) / processes * size / seconds / 1e9


# ---------------------------------------------------------------------------------------------------
# A process
# ---------------------------------------------------------------------------------------------------


def main(part: str, settings: str, processes: int, until: float, limit: float) -> int:
    signal.setitimer(signal.ITIMER_REAL, max(0.1, limit - time.time()))  # SIGALRM, which ends it
    c = Config(**{name.lower(): value for name, value in json.loads(settings).items()}).derived()
    try:
        if part == "step":
            probe_step.measure(c, join(c), until, limit)
        else:  # whatever the batch and the type of the run
            c = c.replace(dtype="float32", micro_batch_size=1, batch_tokens=processes * c.seq_len)
            ceilings(c, join(c), until)
        leave()
    except SettingsError as error:
        messages.say(refused=error.problems[0])
        return 64
    except Exception as error:
        if is_out_of_memory(error):
            messages.say(out_of_memory=str(error).splitlines()[0])
        else:
            traceback.print_exc()
            messages.say(failed=f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
    )
