"""Putting a run together: everything the loop needs, at the step of the newest checkpoint.

tokenizer and shards -> model, spread over processes -> rehearsal of a step -> checkpoint -> record
"""

import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from record.durable import write_whole
from record.provenance import provenance
from record.recorder import Recorder
from record.run_paths import RunPaths
from record.status import Status
from settings import SettingsError
from settings.config import Config
from settings.resume import compare_with_stored
from train import console
from train.checkpoint import checkpoint, find, resume
from train.checkpoint.identity import Identity, hash_unnamed
from train.checkpoint.saver import Saver
from train.distributed import parallel, transport
from train.distributed.parallel import parallelize
from train.distributed.signals import Interrupt
from train.distributed.world import (
    World,
    broadcast_object,
    report_exit,
    seconds_since_launch,
    set_timeout,
    shutdown_timeout_s,
)
from train.evaluate.core.score import Core, open_core
from train.faults import watchdog
from train.faults.deadlines import Deadlines
from train.faults.guard import Guard
from train.faults.memory_advice import memory_advice, refuse_out_of_memory
from train.faults.recovery import Recovery
from train.faults.watchdog import Watchdog
from train.hooks.diloco import DiLoCo
from train.hooks.evaluation import Evaluation
from train.hooks.final_sample import FinalSample
from train.hooks.hook import Hook
from train.hooks.profiler import Profiler
from train.hooks.save_reports import SaveReports
from train.hooks.stragglers import Stragglers
from train.hooks.streamed_data import StreamedData
from train.hooks.trackers import Trackers
from train.job import Job, Rates, count_flops
from train.model import attention, compilation, hf_import
from train.model.model import Transformer, build
from train.open_data import Data, open_data
from train.optim import build_optimizer
from train.run_folder import keep_tokenizer, stored_config, stored_norm_eps
from train.step import dry_run

log = logging.getLogger(__name__)

# For a collective: a process that is stopped for a night and goes on has lost nothing.
COLLECTIVE_S = 7 * 24 * 3600.0


class Stopwatch:
    """Seconds by phase, from when the launcher started this process."""

    def __init__(self) -> None:
        self.seconds = {"import": seconds_since_launch()}
        self.last = time.monotonic()

    def lap(self, phase: str) -> None:
        """A phase has ended."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An attempt at a run.

    Attributes:
        is_shared: whether all nodes see the run's folder.
        before: config.json of the attempts before it; {} for the first.
        identity: of the run, made by the first attempt.
        number: of the attempt, from 0.
        changes: settings that are other than then: name -> [old, new].
        watch: ends what hangs.
    """

    config: Config
    paths: RunPaths
    world: World
    interrupt: Interrupt
    status: Status
    stopwatch: Stopwatch
    is_shared: bool
    before: dict[str, Any]
    identity: Identity
    changes: dict[str, list]
    watch: Watchdog

    @property
    def number(self) -> int:
        return len(self.before.get("attempts", []))


def begin_attempt(
    config: Config,
    paths: RunPaths,
    world: World,
    interrupt: Interrupt,
    status: Status,
    stopwatch: Stopwatch,
    is_shared: bool,
) -> Attempt:
    """Compare with the attempts before, and watch from here on for what hangs. Raises SettingsError."""
    before: dict[str, Any] = broadcast_object(stored_config(paths) if world.is_first else {})
    identity = Identity.of(before, config, broadcast_object(uuid.uuid4().hex))
    changes: dict[str, list] = {}
    if before:
        complaints, changes = compare_with_stored(before["settings"], config.values())
        if complaints:
            raise SettingsError([f"{complaint} [{paths.config}]" for complaint in complaints])
    warn_short_grace_period(config, world, status)
    check_shared_folder(config, paths, world, is_shared)
    if world.is_first:
        for line in watchdog.quarantine_stacks(paths.hang):
            log.warning("the attempt before: %s", line)
    broadcast_object(None)  # the stacks of that attempt are out of the way
    watch = Watchdog(paths.hang, world.rank, world.hosts, at_end=lambda: on_hang(status))
    watch.expect("opening the data", config.start_timeout_s)
    set_timeout(COLLECTIVE_S, [])  # from here on the watchdog ends what hangs
    attempt = Attempt(
        config,
        paths,
        world,
        interrupt,
        status,
        stopwatch,
        is_shared,
        before,
        identity,
        changes,
        watch,
    )
    # From here on the run is touched, and its status says so.
    status.phase("data", attempt=attempt.number)
    return attempt


def build_job(attempt: Attempt) -> Job:
    """Build everything that pretraining needs, at the step of the newest checkpoint."""
    config, world, paths = attempt.config, attempt.world, attempt.paths
    stored_shards = attempt.before.get("validation_shards", {})
    data = open_data(config, paths, world, attempt.watch, stored_shards, bool(attempt.before))
    attempt.stopwatch.lap("data")
    core = None
    if config.core_every:
        attempt.watch.expect("fetching the CORE bundle", 4 * config.start_timeout_s)
        core = open_core(config, data.vocabulary, world)
    # Later the run's own checkpoints have the weights, and the folder may be gone.
    init_from = config.init_from if broadcast_object(not find.committed(paths.checkpoints)) else ""
    attempt.status.phase("model")
    attempt.watch.expect("building the model", config.start_timeout_s)
    model = build_model(attempt, init_from)
    job = create_job(attempt, model, data, count_flops(config, model))
    job.hooks = list_hooks(job, data, core)
    attempt.stopwatch.lap("model")
    dry_run_and_resume(job, attempt, is_streamed=data.streaming is not None)
    for hook in job.hooks:
        hook.join(job)
    if config.replicas > 1:
        attempt.stopwatch.lap("sites")
    if world.is_first:
        keep_tokenizer(paths, data.vocabulary)
    facts = {
        "attention": model.kernel.name,
        "init_from": hf_import.hashes(init_from) if init_from and world.is_first else None,
        "norm_eps": model.norm.eps,
    }
    record_attempt(job, attempt, data.evaluator.shards, facts)
    return job


def list_hooks(job: Job, data: Data, core: Core | None) -> list[Hook]:
    """List the features of this run, in the order in which the loop calls them."""
    config, world = job.config, job.world
    hooks = (
        Trackers(),
        SaveReports(),
        StreamedData(data.streaming) if data.streaming else None,
        DiLoCo() if config.replicas > 1 else None,  # before what is evaluated or saved
        Evaluation(data.evaluator, core, data.compressed),
        FinalSample(),
        Stragglers(world.hosts) if world.size > 1 else None,
        Profiler() if config.profile else None,  # last: no other hook is in what it records
    )
    return [hook for hook in hooks if hook]


def build_model(attempt: Attempt, init_from: str) -> Transformer:
    """Build the model, with the weights of INIT_FROM where a run begins with it."""
    config, world = attempt.config, attempt.world
    norm_eps = stored_norm_eps(attempt.before)
    if init_from:
        hf_import.check(init_from, config)
        norm_eps = hf_import.read_norm_eps(init_from)
    torch.set_float32_matmul_precision("highest")
    kernel = attention.choose(config, world.device)
    sharding = parallel.Sharding(config, world) if parallel.is_split(config, world) else None
    model = build(config, world.device, kernel, sharding, norm_eps)
    apart = ""
    if config.doc_mask:
        apart = f", documents kept apart by {'their bounds' if kernel.by_bounds else 'a mask'}"
    log.info("attention=%s%s", kernel.name, apart, extra=console.LOG_ONLY)
    if init_from:
        hf_import.load(init_from, model)
        log.info("the weights are those of %s", init_from)
    if compilation.wanted(config, world.device, model):
        compilation.compile_model(model, named=config.profile)
    return model


def create_job(attempt: Attempt, model: Any, data: Any, flops: tuple[float, float]) -> Job:
    """Create the job of a model that is built, spread over processes, without its hooks.

    data: has loader, fingerprint and vocabulary. flops: of a token, with full and with causal attention.
    """
    config, paths, world = attempt.config, attempt.paths, attempt.world
    optimizer = build_optimizer(model, config)
    need = checkpoint.needed_bytes(model, config.replicas)
    if config.save_every != 0 and world.is_first:
        find.clear_leftovers(paths.checkpoints)  # they may be what takes the room
        checkpoint.check_space(paths.checkpoints, need)
    recorder = Recorder(paths, world.is_first, attempt.number, config.last_step, config.log_every)
    saver = Saver(paths.checkpoints, config, world, need, attempt.is_shared)
    engine = parallelize(model, config, world)
    set_timeout(COLLECTIVE_S, parallel.groups_of(engine))
    job = Job(
        config=config,
        paths=paths,
        world=world,
        model=engine,
        optimizer=optimizer,
        loader=data.loader,
        data_fingerprint=data.fingerprint,
        identity=attempt.identity,
        vocabulary=data.vocabulary,
        recorder=recorder,
        status=attempt.status,
        interrupt=attempt.interrupt,
        deadlines=Deadlines(config, attempt.watch),
        saver=saver,
        recovery=Recovery(Guard(config.spike_sigmas)),
        rates=Rates(config, world, flops),
    )
    log_start(job)
    return job


def log_start(job: Job) -> None:
    """Say how large the model is, and how a batch divides over processes."""
    config, world, micro_batch = job.config, job.world, job.loader.micro_batch
    millions = sum(weight.numel() for weight in job.model.parameters()) / 1e6
    processes = world.size * config.replicas
    log.info(
        "run=%s device=%s processes=%d parallel=%s dtype=%s parameters=%.2fM steps=%d batch_tokens=%d = %d x %d x "
        "%d x %d (processes x accumulation x sequences x tokens)",
        config.run_name,
        world.device_name,
        processes,
        config.parallel if world.size > 1 else "none",
        config.dtype,
        millions,
        config.last_step,
        config.batch_tokens,
        processes,
        -(-config.batch_windows // (processes * micro_batch)),
        micro_batch,
        config.seq_len,
        extra=console.for_terminals(
            f"model: {millions:.1f}M parameters. "
            "Press Ctrl-C to save and stop; run the same command to resume.\n"
        ),
    )


def dry_run_and_resume(job: Job, attempt: Attempt, is_streamed: bool = False) -> None:
    """Rehearse a step at full shape, then stand where the newest checkpoint does.

    The rehearsal comes first, so that what does not fit into memory shows before a checkpoint is read.
    Raises SettingsError, CheckpointError, DataError.
    """
    config, is_compiled = job.config, parallel.unwrap(job.model).compiled
    job.status.phase("compiling" if is_compiled else "rehearsing")
    if is_compiled:
        log.info("compiling (about a minute)")
    limit_s = 4 * config.start_timeout_s
    attempt.watch.expect("the rehearsal of a step", limit_s)
    with (
        refuse_out_of_memory(lambda: memory_advice(config, job.world)),
        compilation.refuse_damaged_cache(),
    ):
        dry_run(job.model, job.optimizer, job.loader.blank())
    transport.log_transport(job)  # gradients have met for the first time
    attempt.stopwatch.lap("compile" if is_compiled else "rehearsal")
    # The others wait while the first hashes the checkpoint.
    with job.activity("reading the checkpoint", limit_s, "START_TIMEOUT_S"):
        resume.resume(job, attempt.changes, is_streamed)
        if job.identity.adopted is None:  # once, all that have no identity
            unnamed = hash_unnamed(job.paths.checkpoints) if job.world.is_first else []
            job.identity.adopted = broadcast_object(unnamed)
    attempt.stopwatch.lap("checkpoint")


def record_attempt(
    job: Job, attempt: Attempt, validation_shards: Mapping[str, int], facts: dict[str, Any]
) -> None:
    """Write what this attempt is into the run's config.json and record. facts: of its own."""
    config, world = job.config, job.world
    if world.is_first:
        origin = provenance(world.host, world.size, world.device_name, torch.get_num_threads())
        this = {
            **origin,
            "compiled": parallel.unwrap(job.model).compiled,
            "parallel": config.parallel,
            "step": job.step,
            "changes": attempt.changes,
            **facts,
        }
        whole = {
            "schema": 1,
            # A setting that is gone keeps its value: NEAR_DUPLICATES decides where the shards are.
            "settings": attempt.before.get("settings", {}) | config.stored(),
            "identity": job.identity.stored(),
            "data_fingerprint": job.data_fingerprint,
            "validation_shards": validation_shards,
            "attempts": [*attempt.before.get("attempts", []), this],
        }
        write_whole(job.paths.config, json.dumps(whole, indent=1).encode())
    job.recorder.event(
        "resume" if job.step else "start",
        job.step,
        job.tokens,
        changes=attempt.changes,
        world_size=world.size * config.replicas,
        startup_s=attempt.stopwatch.seconds,
    )


def on_hang(state: Status) -> None:
    """What a process that hangs still says before it ends."""
    state.phase("crashed", exit_code=watchdog.HUNG)
    report_exit(watchdog.HUNG)


def warn_short_grace_period(c: Config, world: World, status: Status) -> None:
    """Warn where what a stop needs, a step and a save, is longer than what is left for it."""
    allowed = float(c.grace_period_s)
    spare = 0
    if world.size > 1:
        allowed = shutdown_timeout_s(c)
        spare = c.grace_period_s - c.shutdown_timeout_s
    needed = status.facts.get("step_s", 0.0) + status.facts.get("save_s", 0.0)
    if needed > allowed:
        log.warning(
            "a step and a save took %.0f s the last time, and GRACE_PERIOD_S=%d leaves %.0f s: told to stop, "
            "this run would be killed before its checkpoint is whole. Set GRACE_PERIOD_S=%d",
            needed,
            c.grace_period_s,
            allowed,
            round(1.5 * needed) + spare,
        )


def check_shared_folder(c: Config, paths: RunPaths, world: World, is_shared: bool) -> None:
    """Say if the nodes do not share RUNS_DIR. Raises SettingsError if the run then cannot be saved."""
    if world.nodes == 1 or is_shared:
        return
    if len(parallel.writers(c, world)) > world.local_size:
        other = ""
        if c.replicas == 1:
            other = f", or set PARALLEL=hsdp with SHARD_RANKS={world.local_size}"
        raise SettingsError(
            [
                f"PARALLEL={c.parallel}: a copy of the weights lies on several nodes, which do not share "
                f"{paths.folder}; put RUNS_DIR on a disk that they share{other}"
            ]
        )
    log.info(
        "the nodes do not share %s: the first keeps the checkpoints, and sends them to the others at a resume",
        paths.folder,
    )
