"""The training loop: batch, step, record; now and then evaluate and save."""

import logging
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from hardware.flops import flops_per_token, mfu, peak_tflops
from train.checkpoint import checkpoint
from train.checkpoint.checkpoint import CheckpointError
from train.checkpoint.saver import Saved, best
from train.data.manifest import DataError
from train.diloco import hook
from train.distributed.parallel import bare
from train.distributed.world import from_all, from_first
from train.evaluate.core.metric import Result
from train.evaluate.core.score import CoreFailed
from train.evaluate.validation import FULL_SET, EvaluationFailed, Validation
from train.faults import recovery
from train.faults.crowding import Crowding
from train.faults.straggler import Stragglers
from train.job import Job
from train.model.model import matmul_weights
from train.optim import set_rate
from train.profile.profiling import Profile
from train.schedule import lr_at
from train.step import Clock, StepNumbers, not_finite, train_step

log = logging.getLogger(__name__)

LOOK_S = 0.2  # between two looks at whether data have come
SAID_S = 60.0  # between two lines about a long wait
SHARE = 0.02  # of the time, from which on it is said what evaluations take


def train(job: Job, profile: Profile | None = None) -> str:
    """Train from where the job stands; returns "done", or "stopped" when told to stop, saved either way."""
    c, first, waited_s = job.config, True, 0.0
    clock, rates, stragglers = Clock(job.world.device), Rates(job), Stragglers(job.world.hosts)
    is_alone = job.world.size == 1 and job.site is None and job.feed is None  # waits for nobody
    crowding = Crowding.on(job.world.device) if is_alone else None
    job.interrupt.training = True
    job.status.phase("first step", step=job.step)
    # due if the last attempt stopped before it was done; told to stop again, this one leaves the checkpoint as it is
    if job.starved:
        told, waited_s = wait_for_data(job)
        if told:
            return stop(job)
        recovery.check_data(job)
    if evaluate_if_due(job):
        return stop(job)
    while job.step < c.last_step or hook.is_unfinished(job):
        if (job.late or first or job.step >= c.last_step) and job.site:
            told = hook.begin(job)
            if told or job.step >= c.last_step:
                save(job, must=True)
            if told:
                return stop(job)
            if job.step >= c.last_step:
                continue
        if job.starved:
            told, more_s = wait_for_data(job)
            if told:
                save(job, must=True)
                return stop(job)
            waited_s += more_s
        tell_producer(job)
        job.pace.begin(job.step + 1)
        if profile:
            profile.begin()
        clock.start()
        began = time.perf_counter()
        batch = job.loader.batch(job.step, job.gaps)
        data_wait_s = time.perf_counter() - began
        rate = lr_at(job.step + 1, c)
        set_rate(job.optimizer, rate, c)
        numbers = train_step(
            job.model,
            job.optimizer,
            batch,
            c.grad_clip,
            job.world,
            clock=clock,
            stop=job.interrupt.asked is not None,
            save=wants_save(job),
            starved=will_starve(job),
            judge=job.guard.judge if batch.whole else not_finite,
        )
        if profile:
            profile.end()
        seconds = time.perf_counter() - began
        job.starved = numbers.starved or (numbers.refused is not None and job.feed is not None)
        note(job, job.saver.poll())
        if numbers.refused:
            hook.settle(job)  # what it may go back to is what the sites have in common then
            recovery.refuse(job, numbers, seconds)
            if numbers.stop:
                save(job, must=True)
                return stop(job)
            continue
        job.step += 1
        job.guard.taken(job.step, numbers.loss, numbers.grad_norm)
        if first:
            job.status.phase("training")
            if c.save_every != 0:
                job.saver.warm_up(job.model, job.optimizer, job.outer)
        job.pace.end(seconds)

        # recorded before it is saved: a checkpoint never knows a step that the record does not
        values = rates.of_step(numbers, seconds + waited_s)
        values |= report_straggler(job, stragglers, numbers) | take_stalls(job)
        if crowding and (sentence := crowding.after_step()):
            job.recorder.say(sentence)
        job.recorder.step(
            job.step, job.tokens, lr=rate, data_wait_s=data_wait_s + waited_s, **values
        )
        job.status.beat(step=job.step, last_step=c.last_step, loss=numbers.loss, step_s=seconds)
        if profile:
            profile.between()
        told = numbers.stop
        if job.site:
            told = hook.after_step(job, last=not told) or told
        first, last, waited_s = False, job.step == c.last_step, 0.0
        if not told:
            told = evaluate_if_due(job)  # the resumed run evaluates here first
        full_every = c.keep_every if c.checkpoint_mode == "lite" else 0
        due = any(every and job.step % every == 0 for every in (c.save_every, full_every))
        if told or numbers.save or last or is_best(job) or due:
            save(job, must=told or last)
        if told:
            return stop(job)
    return "done"


def report_straggler(job: Job, stragglers: Stragglers, numbers: StepNumbers) -> dict[str, Any]:
    """Say which rank is slow, if one is. Returns what the step's record says of it."""
    slow = stragglers.find(job.step, numbers.own_s)
    if slow is None:
        return {}
    job.recorder.say(
        f"straggler: rank {slow['rank']} on {slow['host']} takes {slow['times']:.1f} times as "
        "long as the others, who wait for it"
    )
    return {"straggler": slow}


def take_stalls(job: Job) -> dict[str, Any]:
    """Return what the step's record says of a site and of waits for it and for checkpoints."""
    values: dict[str, Any] = {}
    if job.site:
        values["replica"] = job.config.site_rank
    if job.exchange_stall_s:
        values["exchange_stall_s"], job.exchange_stall_s = job.exchange_stall_s, 0.0
    if job.last_stall_s:
        values["checkpoint_stall_s"], job.last_stall_s = job.last_stall_s, 0.0
    return values


def stop(job: Job) -> str:
    """Told to stop, and saved."""
    job.recorder.event(
        "signal", job.step, job.tokens, name=job.interrupt.asked or "on another rank"
    )
    return "stopped"


def wants_save(job: Job) -> bool:
    """Whether this rank would have a checkpoint behind the step that begins; the first rank's wish counts."""
    return job.save_soon or time.monotonic() - job.saved_at > 60 * job.config.save_minutes


class Rates:
    """Turns a step's time into throughput and utilisation."""

    def __init__(self, job: Job):
        c = job.config
        self.tokens, self.devices, self.job = c.batch_tokens, job.world.size * c.replicas, job
        self.flops, self.causal = job.flops or of_pretraining(job)
        self.peak = peak_tflops(job.world.device_name, c.dtype)

    def of_step(self, numbers: StepNumbers, seconds: float) -> dict:
        """The step record's values (record/metrics.py has their units)."""
        c, site = self.job.config, self.job.site
        there = site.present if site else c.replicas  # a site that is away does nothing
        speed, devices = (
            self.tokens / seconds * there / c.replicas,
            self.devices // c.replicas * there,
        )
        return {
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "step_ms": 1000 * seconds,
            "tokens_per_s": speed,
            "mfu": mfu(speed, self.flops, devices, self.peak),
            "mfu_causal": mfu(speed, self.causal, devices, self.peak),
            "mem_gib": numbers.mem_gib,
        }


def of_pretraining(job: Job) -> tuple[float, float]:
    """FLOPs of a token, with full and with causal attention, of a model of ours of which all weights are trained."""
    c, weights = job.config, matmul_weights(bare(job.model))
    return (
        flops_per_token(weights, c.n_layer, c.n_embd, c.seq_len),
        flops_per_token(weights, c.n_layer, c.n_embd, c.seq_len, causal=True),
    )


# ---------------------------------------------------------------------------------------------------
# Data that are still being made
# ---------------------------------------------------------------------------------------------------


def will_starve(job: Job) -> bool:
    """Whether this rank has not the data of the step after the one that begins."""
    return (
        job.feed is not None
        and job.step + 1 < job.config.last_step
        and bool(job.loader.lacking(job.step + 1, job.gaps))
    )


def wait_for_data(job: Job) -> tuple[bool, float]:
    """All ranks together, until each has the data of the next step: (told to stop, seconds waited).

    Raises DataError, on all ranks and with a checkpoint behind it, where there is no use in waiting.
    """
    assert job.feed
    c, began, waited_s, say_at_s = job.config, time.perf_counter(), 0.0, 2.0
    job.pace.allow("waiting for data", c.start_timeout_s, "START_TIMEOUT_S")
    while True:
        tell_producer(job, now=True)
        job.watch.expect("waiting for data", c.start_timeout_s)
        lacking, told, broken = zip(
            *from_all(
                (
                    job.loader.lacking(job.step, job.gaps),
                    job.interrupt.asked is not None,
                    job.feed.broken,
                )
            ),
            strict=True,
        )
        if (stopping := any(told)) or not any(lacking):
            break
        if problem := max(broken) or from_first(job.feed.why_not(waited_s, lacking)):
            saved = ", saved" if job.step and c.save_every != 0 else ""
            if saved:
                save(job, must=True)
            raise DataError(
                f"{problem}. The run stands at step {job.step}{saved}; the same command goes on"
            )
        time.sleep(LOOK_S)
        waited_s = time.perf_counter() - began
        if waited_s > say_at_s:
            job.status.phase("data")
            names = ", ".join(sorted(set(lacking) - {""}))
            job.recorder.say(
                f"waiting for data: {names}, for {waited_s:.0f} s so far{job.feed.progress()}"
            )
            say_at_s = waited_s + min(max(waited_s, 5.0), SAID_S)
    job.pace.restore()
    job.starved = False
    if waited_s > 2.0 and not stopping:
        job.recorder.say(
            f"waited {waited_s:.1f} s for data at step {job.step}: their producer is slower than training"
        )
        job.status.phase("training")
    return stopping, waited_s


def tell_producer(job: Job, now: bool = False) -> None:
    """Tell the producer where training is, now and then, and delete what it is through with; where too much is left,
    that is behind no checkpoint, have one made."""
    if job.feed is None or not job.world.is_first or not (now or job.feed.due):
        return
    saved = checkpoint.committed(job.paths.checkpoints)
    behind = (
        saved[-2] if len(saved) > 1 else 0
    )  # an older one may be asked for, where the newest does not verify
    at, until, beyond = (job.loader.taken(step, job.gaps) for step in range(job.step, job.step + 3))
    through = (
        at if job.config.save_every == 0 else job.loader.taken(min(behind, job.step), job.gaps)
    )
    job.feed.tell(at, until)
    # other ranks may be looking already whether they have the step behind the one that begins
    job.feed.make_room(job.loader.sources, job.loader.mixture.orders, at, beyond, through)
    if job.feed.over and job.loader.groups(at) != job.loader.groups(through):
        job.save_soon = True


# ---------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------


def evaluation_due(job: Job) -> bool:
    """Whether EVAL_EVERY asks for a validation loss at this step, or KEEP_BEST at the last, which has another one by
    all the text."""
    c, step = job.config, job.step
    due = (
        step % c.eval_every == 0
        if step < c.last_step and c.eval_every
        else c.keep_best and step == c.last_step
    )
    return due and step > 0 and job.evaluated_at != step


def core_due(job: Job) -> bool:
    """Whether CORE_EVERY asks for that metric at this step, or it is the last."""
    every, step = job.config.core_every, job.step
    return (
        job.core is not None
        and step > 0
        and job.core_at != step
        and (step % every == 0 or step >= job.config.last_step)
    )


def evaluate_if_due(job: Job) -> bool:
    """What is to be evaluated at this step; returns whether a signal came to any rank in between."""
    return (evaluation_due(job) and evaluate(job, full=False)[0]) or (
        job.step < job.config.last_step and core_due(job) and evaluate_core(job)
    )


def evaluate(job: Job, full: bool) -> tuple[bool, Validation | None]:
    """Validation loss into the record: whether a signal came to any rank in between, and the numbers, if there are
    any, on all ranks. Where it fails the run goes on without them."""
    job.status.phase("evaluating")
    began, limit_s = time.perf_counter(), 60 * job.config.eval_minutes * (FULL_SET if full else 1)
    result, values = None, dict[str, Any](val_loss=None, val_bpb=None, scored_tokens=0)
    try:
        result = job.evaluator(
            job.model,
            full,
            interrupted=lambda: job.interrupt.asked is not None,
            limit_s=limit_s,
            progress=patience(job, limit_s),
        )
        if result:
            values = result.record()
    except EvaluationFailed as error:
        values["error"] = str(error)
        job.recorder.say(f"the evaluation at step {job.step} failed, and training goes on: {error}")
    told, seconds = result is None and "error" not in values, time.perf_counter() - began
    if not told:
        is_first = job.evaluated_at == 0
        job.evaluated_at = job.step
        if not full:
            job.validated = (job.step, result.loss) if result else None
        if not full and not is_first:  # the first may have been compiled
            say_share(job, "EVAL_EVERY", job.config.eval_every, seconds)
        job.recorder.evaluation(job.step, job.tokens, **values, eval_s=seconds, full=full)
    job.pace.restore()
    job.status.phase("training")
    return told, result


def evaluate_core(job: Job) -> bool:
    """The CORE metric into the record; returns whether a signal came to any rank in between. Where it fails the run
    goes on without it."""
    assert job.core
    job.status.phase("evaluating")
    began, limit_s = time.perf_counter(), 60 * job.config.eval_minutes
    counts, values = None, dict[str, Any](core=None)
    try:
        counts = job.core(
            job.model,
            interrupted=lambda: job.interrupt.asked is not None,
            limit_s=limit_s,
            progress=patience(job, limit_s),
        )
        if counts:
            found = Result.of(job.core.bundle.tasks, counts, job.core.bundle.missing)
            values = found.record()
            job.recorder.say(f"step {job.step}: {found.words()}")
    except CoreFailed as error:
        values["core_error"] = str(error)
        job.recorder.say(f"CORE at step {job.step} failed, and training goes on: {error}")
    told, seconds = counts is None and "core_error" not in values, time.perf_counter() - began
    if not told:
        job.core_at = job.step
        say_share(job, "CORE_EVERY", job.config.core_every, seconds)
        job.recorder.event("eval", job.step, job.tokens, **values, core_s=seconds, eval_s=seconds)
    job.pace.restore()
    job.status.phase("training")
    return told


def patience(job: Job, limit_s: float) -> Callable[[str], None]:
    """What an evaluation is to call as it goes on, for the watchdog to know how long each part may take."""
    most_s = limit_s + job.config.train_timeout_s
    job.pace.allow("an evaluation", most_s, "EVAL_MINUTES")

    def progress(what: str) -> None:
        batch_s = max(job.pace.limit_s, job.config.start_timeout_s)  # the first may be compiled
        job.watch.expect("an evaluation", batch_s if what == "batch" else most_s, "EVAL_MINUTES")

    return progress


def say_share(job: Job, setting: str, every: int, seconds: float) -> None:
    """Say, once a setting, that evaluations take more than SHARE of the time, if steps are as long as they were."""
    if not every or not job.pace.times or setting in job.shares_said:
        return
    share = seconds / (seconds + every * median(job.pace.times))
    if share > SHARE:
        job.shares_said.add(setting)
        enough = seconds * (1 / SHARE - 1) / median(job.pace.times)  # steps in between
        job.recorder.say(
            f"an evaluation took {seconds:.1f} s, which at {setting}={every} is {100 * share:.1f}% of the "
            f"time: {setting}={math.ceil(enough / 100) * 100} or less to score would make it less than "
            f"{100 * SHARE:g}%"
        )


def is_best(job: Job) -> bool:
    """Whether KEEP_BEST asks for a checkpoint here: this step was evaluated, and no checkpoint was better.

    Those that are there are asked: one that failed, or was put aside when the run went back, is none.
    """
    if not job.config.keep_best or not job.validated or job.validated[0] != job.step:
        return False
    job.pace.allow("a checkpoint", job.saver.limit_s)
    job.saver.wait()
    found, loss = (
        from_first(best(job.paths.checkpoints) if job.world.is_first else None),
        job.validated[1],
    )
    job.pace.restore()
    return not math.isnan(loss) and (found is None or loss < found[0])


# ---------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------


def save(job: Job, must: bool) -> None:
    """Begin a checkpoint, which training waits for only as long as it takes to copy; `must`: to its end.

    A failure is said and training goes on, unless nothing could be saved after this (`must`): CheckpointError.
    """
    c, began = job.config, time.perf_counter()
    if c.save_every == 0:
        return
    job.status.phase("saving")
    job.pace.allow("a checkpoint", job.saver.limit_s)
    job.saved_at, job.save_soon = time.monotonic(), False
    job.recorder.sync()
    job.saver.wait()
    note(job, job.saver.poll())
    hook.settle(job)
    job.saver.start(job.step, job.model, job.optimizer, recovery.states(job), job.outer)
    if must:
        job.saver.wait()
        ended = job.saver.poll()
        note(job, ended)
        if problem := from_first(ended and ended.problem):
            raise CheckpointError(problem)
    from_all(
        None
    )  # one may have had to write without a copy: the others' next step would wait for it in vain
    job.pace.restore()
    job.last_stall_s += time.perf_counter() - began
    job.status.phase("training")


def note(job: Job, ended: Saved | None) -> None:
    """Say and record how a save has ended, on the first rank."""
    if ended is None or not job.world.is_first:
        return
    if ended.problem:
        again = job.saver.misses == 1
        job.save_soon = again
        kept = "Training goes on, the last good one is untouched"
        if not job.saver.sound:
            kept = "Training goes on. No checkpoint of this run exists yet"
        job.recorder.say(
            f"checkpoint failed: {ended.problem}. {kept}; "
            + ("saving is tried again now" if again else f"{job.saver.misses} in a row have failed")
        )
    elif ended.size:
        job.recorder.event(
            "checkpoint",
            ended.step,
            ended.step * job.config.batch_tokens,
            seconds=ended.seconds,
            bytes=ended.size,
        )
        job.recorder.say(
            f"checkpoint {ended.folder.name}: {ended.size / 2**20:.0f} MiB in {ended.seconds:.2f} s",
            terminal="",
        )
        job.status.beat(save_s=ended.seconds)
