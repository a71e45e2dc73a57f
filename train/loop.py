"""The training loop: batch, learning rate, step, record, and now and then a checkpoint. All else is a hook.

Hooks return what they want (train/hooks/hook.py); whether the run stops, saves or goes back is decided here.
"""

import time
from collections.abc import Iterable
from typing import Any

from train.data.batch import Batch
from train.data.manifest import DataError
from train.distributed.world import all_gather_object
from train.hooks.hook import Requests
from train.job import Job
from train.optim import set_rate
from train.schedule import lr_at
from train.step import StepNumbers, clock_of, not_finite, train_step
from train.when_to_save import is_save_due, save


def train(job: Job) -> bool:
    """Train to the last step. Returns False if told to stop before; the run is saved either way."""
    job.interrupt.training = True
    job.status.phase("first step", step=job.step, can_save=job.config.save_every != 0)
    requests = collect(hook.at_start(job) for hook in job.hooks)
    if "stop" not in requests:
        requests = take_steps(job)
    save(job, wait=True)
    if "stop" not in requests:
        requests = collect(hook.at_end(job) for hook in job.hooks)
    if "stop" not in requests:
        return True
    name = job.interrupt.asked or "on another rank"
    job.recorder.event("signal", job.step, job.tokens, name=name)
    return False


def take_steps(job: Job) -> Requests:
    """Take steps up to the last one, or until all ranks want to stop. Returns what was requested last."""
    config = job.config
    clock = clock_of(job.model, job.world.device)
    requests: Requests = frozenset()
    while job.step < config.last_step and "stop" not in requests:
        requests = collect(hook.before_step(job) for hook in job.hooks)
        if "stop" in requests:
            break
        job.deadlines.begin_step(job.step + 1)
        clock.start()
        began = time.perf_counter()
        batch = job.loader.batch(job.step, job.gaps)
        data_wait_s = time.perf_counter() - began
        learning_rate = lr_at(job.step + 1, config)
        set_rate(job.optimizer, learning_rate, config)
        numbers = train_step(
            job.model,
            job.optimizer,
            batch,
            config.grad_clip,
            job.world,
            clock=clock,
            requests=requests | job.all_requests(),
            check_step=job.guard.check_step if batch.whole else not_finite,
        )
        step_s = time.perf_counter() - began
        requests = numbers.requests
        if numbers.skipped:
            refuse_bad_data(job, batch)
            job.recovery.skip_step(job, numbers, step_s)
            if job.guard.must_go_back:
                job.recovery.roll_back(job)
        else:
            job.deadlines.end_step(step_s)
            values = job.rates.of_step(numbers, step_s + job.waited_s)
            values |= {"lr": learning_rate, "data_wait_s": data_wait_s + job.waited_s}
            record_step(job, numbers, step_s, values)
            for hook in job.hooks:
                requests |= hook.between_steps(job, requests) or frozenset()
            if is_save_due(job, requests):
                save(job)
    return requests


def refuse_bad_data(job: Job, batch: Batch) -> None:
    """Save the run and raise DataError, on all ranks, if one of them could not read its samples.

    The weights have seen nothing of the bad shard: its step was skipped on all ranks.
    """
    problems = all_gather_object(batch.problem)
    for rank, problem in enumerate(problems):
        if problem:
            save(job, wait=True)
            raise DataError(
                f"{job.world.hosts[rank]}, rank {rank}: {problem}. Then run the same command to resume"
            )


def record_step(job: Job, numbers: StepNumbers, step_s: float, values: dict[str, Any]) -> None:
    """Count and record a step that was taken. values: what the record has of it."""
    job.step += 1
    job.waited_s = 0.0
    job.guard.applied(job.step, numbers.loss, numbers.grad_norm)
    for hook in job.hooks:
        values |= hook.after_step(job, numbers)
    # The record comes first: a checkpoint never knows a step that the record does not.
    job.recorder.step(job.step, job.tokens, **values)
    if not job.status.has_trained:
        job.status.phase("training")
    job.status.beat(step=job.step, last_step=job.config.last_step, loss=numbers.loss, step_s=step_s)


def collect(answers: Iterable[Requests | None]) -> Requests:
    """Return what hooks request, called one by one. Once one wants to stop, the others are not called."""
    requests: Requests = frozenset()
    for answer in answers:
        requests |= answer or frozenset()
        if "stop" in requests:
            break
    return requests
