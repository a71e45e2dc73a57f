"""The training loop: batch, step, record; now and then evaluate and save."""

import dataclasses
import logging
import time

from torch import nn

from train import checkpoint
from train.batch import Batch, Loader
from train.checkpoint import CheckpointError
from train.config import Config
from train.distributed import World
from train.evaluate import Evaluator, Validation
from train.flops import flops_per_token, mfu, peak_tflops
from train.interrupt import Interrupt
from train.metrics import Recorder
from train.mirror import Mirror
from train.mixture import Gap
from train.model import matmul_weights
from train.optim import Optimizer, set_rate
from train.parallel import bare
from train.runs import RunPaths
from train.schedule import lr_at
from train.status import Status
from train.step import NonFiniteStep, StepNumbers, train_step
from train.tokenizer import Vocabulary

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Job:
    """All that training needs, put together by main.py. `step` counts committed optimizer steps."""

    config: Config
    paths: RunPaths
    world: World
    model: nn.Module
    optimizer: Optimizer
    loader: Loader
    evaluator: Evaluator
    recorder: Recorder
    status: Status
    interrupt: Interrupt
    data_fingerprint: str
    vocabulary: Vocabulary
    compressed_bpb: dict[str, float]
    step: int = 0
    gaps: tuple[Gap, ...] = ()
    evaluated_at: int = 0  # the last step with a validation loss
    sound: set[int] = dataclasses.field(default_factory=set)  # checkpoints that this process verified or wrote
    saved_at: float = dataclasses.field(default_factory=time.monotonic)
    mirror: Mirror | None = None

    @property
    def tokens(self) -> int:
        return self.step * self.config.batch_tokens


def train(job: Job) -> str:
    """Train from where the job stands; returns "done", or "stopped" when told to stop, saved either way."""
    c, first = job.config, True
    stall: dict[str, float] = {}
    rates = Rates(job)
    job.interrupt.training = True
    job.status.phase("first step", step=job.step)
    # due if the last attempt stopped before it was done; told to stop again, this one leaves the checkpoint as it is
    if evaluation_due(job) and evaluate(job, full=False) is None:
        return stop(job)
    while job.step < c.last_step:
        began = time.perf_counter()
        batch = job.loader.batch(job.step, job.gaps)
        data_wait_s = time.perf_counter() - began
        rate = lr_at(job.step + 1, c)
        set_rate(job.optimizer, rate, c)
        numbers = step_or_stop(job, batch)
        job.step += 1
        values = rates.of_step(numbers, time.perf_counter() - began)
        if first:
            job.status.phase("training")
            if c.checkpoints == "on":
                checkpoint.warm_up()

        # recorded before it is saved: a checkpoint never knows a step that the record does not
        job.recorder.step(job.step, job.tokens, first, lr=rate, data_wait_s=data_wait_s, **stall, **values)
        job.status.beat(step=job.step, last_step=c.last_step, loss=numbers.loss)
        first, last, stall = False, job.step == c.last_step, {}
        told = numbers.stop
        if evaluation_due(job) and not told:
            told = evaluate(job, full=False) is None  # the resumed run evaluates here first
        if told or numbers.save or last or (c.save_every and job.step % c.save_every == 0):
            stall = save(job, must=told or last)
        if told:
            return stop(job)
    return "done"


def stop(job: Job) -> str:
    """Told to stop, and saved."""
    job.recorder.event("signal", job.step, job.tokens, name=job.interrupt.asked or "on another rank")
    return "stopped"


def step_or_stop(job: Job, batch: Batch) -> StepNumbers:
    """One optimizer step; a loss or gradient that is not finite is recorded, and ends the run."""
    wants_save = time.monotonic() - job.saved_at > 60 * job.config.save_minutes
    try:
        return train_step(job.model, job.optimizer, batch, job.config.grad_clip, job.world,
                          stop=job.interrupt.asked is not None, save=wants_save)
    except NonFiniteStep as fault:
        names = job.loader.names(fault.samples)
        job.recorder.event("nonfinite", job.step + 1, job.tokens, samples=fault.samples, names=names,
                           loss=fault.loss, grad_norm=fault.grad_norm)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if job.world.is_first:
            log.error("step %d: loss=%s grad_norm=%s; the weights were not touched. Samples %d to %d: %s. Lower "
                      "LEARNING_RATE, or look at these samples; the run can go on from its last checkpoint",
                      job.step + 1, fault.loss, fault.grad_norm, min(fault.samples), max(fault.samples), shown)
        raise


class Rates:
    """Turns a step's time into throughput and utilisation."""

    def __init__(self, job: Job):
        c, weights = job.config, matmul_weights(bare(job.model))
        self.tokens, self.devices = c.batch_tokens, job.world.size
        self.flops = flops_per_token(weights, c.n_layer, c.n_embd, c.seq_len)
        self.causal = flops_per_token(weights, c.n_layer, c.n_embd, c.seq_len, causal=True)
        self.peak = peak_tflops(job.world.device_name, c.dtype)

    def of_step(self, numbers: StepNumbers, seconds: float) -> dict:
        """The step record's values (record.py has their units)."""
        speed = self.tokens / seconds
        return {"loss": numbers.loss, "grad_norm": numbers.grad_norm, "step_ms": 1000 * seconds, "tokens_per_s": speed,
                "mfu": mfu(speed, self.flops, self.devices, self.peak),
                "mfu_causal": mfu(speed, self.causal, self.devices, self.peak), "mem_gib": numbers.mem_gib}


def evaluation_due(job: Job) -> bool:
    """Whether EVAL_EVERY asks for a validation loss at this step; the last has its own, by all the text."""
    every, c = job.config.eval_every, job.config
    return every > 0 and 0 < job.step < c.last_step and job.step % every == 0 and job.evaluated_at != job.step


def evaluate(job: Job, full: bool) -> Validation | None:
    """Validation loss into the record; None, on all ranks, if a signal came to any in between."""
    job.status.phase("evaluating")
    began = time.perf_counter()
    result = job.evaluator(bare(job.model), full, interrupted=lambda: job.interrupt.asked is not None)
    if result:
        job.evaluated_at = job.step
        job.recorder.evaluation(job.step, job.tokens, val_loss=result.loss, val_bpb=result.bpb,
                                scored_tokens=result.tokens, eval_s=time.perf_counter() - began, full=full)
    job.status.phase("training")
    return result


def save(job: Job, must: bool) -> dict[str, float]:
    """Write a checkpoint and delete old ones; returns what the next step's record says of it.

    A failure is said and training goes on, unless nothing could be saved after this (`must`).
    """
    c, began = job.config, time.perf_counter()
    if c.checkpoints == "off":
        return {}
    job.status.phase("saving")
    data = {"step": job.step, "gaps": [dataclasses.astuple(gap) for gap in job.gaps],
            "fingerprint": job.data_fingerprint}
    small = {"tokens": job.tokens, "evaluated_at": job.evaluated_at, "data": data}
    job.saved_at = time.monotonic()
    job.recorder.sync()
    try:
        folder, size, seconds = checkpoint.save(job.paths.checkpoints, job.step, job.model, job.optimizer, small,
                                                job.world)
    except CheckpointError as error:
        if must:
            raise
        job.recorder.say(f"checkpoint failed: {error}. Training goes on; the last good one is untouched")
        job.status.phase("training")
        return {"checkpoint_stall_s": time.perf_counter() - began}
    if job.world.is_first and size:
        job.recorder.event("checkpoint", job.step, job.tokens, seconds=seconds, bytes=size)
        job.recorder.say(f"checkpoint {folder.name}: {size / 2**20:.0f} MiB in {seconds:.2f} s")
        job.sound.add(job.step)
        checkpoint.prune(job.paths.checkpoints, c.keep_last, c.keep_every, job.sound)
    job.status.phase("training")
    return {"checkpoint_stall_s": time.perf_counter() - began}
