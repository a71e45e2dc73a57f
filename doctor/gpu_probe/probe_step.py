"""One optimizer step at the shape of a run, by the trainer's own functions, and how long a whole one takes.

A step of n micro-batches takes T(1) + (n - 1) m: the first micro-batch, the synchronisation and the update are in T(1)
once, and each further micro-batch adds the same m, its forward and backward pass into gradients that are there. Where
n of them take too long, T(1) and m are measured apart.

The tokens are random, the weights too; with DOC_MASK each window is one document, which is the costliest. The wait for
data, which training hides, and its evaluations and checkpoints are not in it.
"""

import statistics
import time
from typing import Any

import torch

from doctor.gpu_probe import free_memory, messages, worker
from settings.config import Config
from train.data.batch import Batch, document_bounds, to_device
from train.distributed.parallel import Sharding, grad_sync, is_split, local, parallelize
from train.distributed.world import World, all_gather_object, broadcast_object
from train.model import attention, compilation
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.step import dry_run, train_step

ROUNDS = 3  # of a step that is composed
MOST_ROUNDS = 30  # of one that is taken whole
RATE = 1e-6  # so small that no loss runs away, since a step that is refused makes no update


def composed_s(first_s: float, further_s: float, micro_batches: int) -> float:
    """The formula above: T(n) of T(1) and m."""
    return first_s + (micro_batches - 1) * further_s


def planned(first_s: float, further_s: float, micro_batches: int, left_s: float) -> tuple[int, int]:
    """(rounds, passes) that fit into the time that is left: whole steps where ROUNDS of them do, and then no passes
    apart, or else ROUNDS, in each of which a step of one micro-batch and some passes, one at least, are taken."""
    whole = composed_s(first_s, further_s, micro_batches)
    if micro_batches == 1 or ROUNDS * whole <= left_s:
        return max(1, min(MOST_ROUNDS, int(left_s / whole))), 0
    fits = int((left_s / ROUNDS - first_s) / further_s) - 1  # behind one that is not timed
    return ROUNDS, max(1, min(micro_batches - 1, fits))


class Stepper:
    """The trainer's step, on random tokens."""

    def __init__(self, c: Config, world: World):
        self.c, self.world, self.peak_gib = c, world, 0.0
        self.micro_batch = c.micro_batch(world.size)
        say(world, phase="building the model")
        torch.set_float32_matmul_precision("highest")
        self.kernel = attention.choose(c, world.device)
        sharding = Sharding(c, world) if is_split(c, world) else None
        model = build(c, world.device, self.kernel, sharding, is_filled=False)
        for weight in model.parameters():
            local(weight).data.normal_(0.0, 0.02)
        if compilation.wanted(c, world.device, model):
            compilation.compile_model(model)
        self.compiled, self.optimizer = model.compiled, build_optimizer(model, c)
        set_rate(self.optimizer, RATE, c)
        self.engine = parallelize(model, c, world)
        windows = torch.randint(c.vocab_size, (self.micro_batch, c.seq_len + 1)).numpy()
        tokens = to_device(windows, world.device)
        bounds = [to_device(document_bounds(windows[:, :-1], end_of_text=-1), world.device)]
        self.inputs = (tokens[:, :-1], tokens[:, 1:], *(bounds if c.doc_mask else ()))
        say(world, phase="compiling" if self.compiled else "rehearsing a step")
        dry_run(self.engine, self.optimizer, self.inputs)

    def take(self, micro_batches: int) -> float:
        """Seconds of a step of so many micro-batches."""
        windows = micro_batches * self.micro_batch
        batch = Batch(
            [self.inputs] * micro_batches,
            windows * self.world.size * self.c.seq_len,
            range(windows),
        )
        worker.synchronize()
        began = time.perf_counter()
        self.peak_gib = train_step(
            self.engine, self.optimizer, batch, self.c.grad_clip, self.world
        ).mem_gib
        worker.synchronize()
        return time.perf_counter() - began

    def take_passes(self, count: int) -> float:
        """Seconds of one of so many micro-batches behind the first of a step, as train_step takes them."""
        began = 0.0
        for i in range(1 + count):
            if i == 1:
                worker.synchronize()
                began = time.perf_counter()
            with grad_sync(self.engine, enabled=False):
                loss, _ = self.engine(*self.inputs)
                (loss * 1e-6).backward()
        worker.synchronize()
        seconds = (time.perf_counter() - began) / count
        self.optimizer.zero_grad(set_to_none=True)
        return seconds


def measure(c: Config, world: World, until: float, limit: float) -> None:
    """Say what a step takes, in time and memory. Called by all processes."""
    if world.device.type == "cpu":
        free_memory.keep_within(1 / world.size)
    introduce(world)
    step = Stepper(c, world)
    n = -(-c.batch_windows // (world.size * step.micro_batch))
    say(world, phase="taking steps")
    step.take(1)  # the first update makes room for moments
    firsts = [step.take(1)]
    passes = [step.take_passes(1)] if n > 1 else []
    rounds, apart = broadcast_object(
        planned(firsts[0], passes[0] if n > 1 else 0.0, n, until - time.time())
    )
    wholes: list[float] = []
    while len(wholes) < rounds and len(firsts) <= rounds:
        began = time.time()
        if apart:
            passes.append(step.take_passes(apart))
            firsts.append(step.take(1))
        else:
            wholes.append(step.take(n))
        done, now = max(len(wholes), len(firsts) - 1), time.time()
        if broadcast_object(
            2 * now - began > (until if done >= ROUNDS else limit - 1)
        ):  # another one would end too late
            break
    first, further = statistics.median(firsts), statistics.median(passes or [0.0])
    whole = composed_s(first, further, n) if apart else statistics.median(wholes)
    say(
        world,
        step={
            "step_s": whole,
            "tokens_per_s": c.batch_tokens / whole,
            "peak_gib": step.peak_gib,
            "micro_batch": step.micro_batch,
            "micro_batches": n,
            "composed": apart > 0,
            "rounds": len(wholes) or len(firsts),
            "first_s": first,
            "further_s": further,
            "spread": [min(wholes or firsts), max(wholes or firsts)],
            "compiled": step.compiled,
            "attention": step.kernel.name,
        },
    )


def introduce(world: World) -> None:
    """Say who takes part. Called by all processes."""
    uuid = (
        str(torch.cuda.get_device_properties(world.device).uuid)
        if world.device.type == "cuda"
        else ""
    )
    say(
        world,
        names=all_gather_object(world.device_name),
        uuids=all_gather_object(uuid),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
    )


def say(world: World, **values: Any) -> None:
    """A line of JSON, of the first process only."""
    if world.is_first:
        messages.say(**values)
