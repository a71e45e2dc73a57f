"""Putting a run together: everything the loop needs, at the step of the newest checkpoint.

tokenizer and shards -> model, spread over processes -> rehearsal of a step -> checkpoint -> record
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy
import torch

from hardware.nvml import visible_indices
from hardware.out_of_memory import is_out_of_memory
from record.durable import write_whole
from record.metrics import Recorder
from record.provenance import provenance
from record.run_paths import RunPaths
from record.status import Status
from record.trackers.processes import start_trackers
from settings import SettingsError
from settings.config import Config
from settings.resume import compare_with_stored
from train import console
from train.checkpoint import checkpoint
from train.checkpoint.saver import Saver
from train.data import prepare
from train.data.batch import Loader
from train.data.manifest import DataError
from train.data.shards import ShardSet
from train.data.streaming.consumer import Feed
from train.data.streaming.node_transfer import Relay
from train.data.tokenizer import Vocabulary
from train.diloco import hook
from train.distributed import parallel, transport
from train.distributed.parallel import parallelize
from train.distributed.signals import Interrupt
from train.distributed.world import World, from_all, from_first, report_exit, shutdown_timeout_s
from train.evaluate.core.score import open_core
from train.evaluate.validation import Evaluator
from train.faults import recovery, watchdog
from train.faults.guard import Guard
from train.faults.memory_advice import memory_advice
from train.faults.watchdog import Watchdog
from train.job import Job, Pace
from train.model import attention, compilation, hf_import
from train.model.model import build
from train.optim import build_optimizer
from train.run_folder import keep_tokenizer, stored_config, stored_norm_eps
from train.step import rehearse

log = logging.getLogger(__name__)


class Stopwatch:
    """Seconds by phase, from the start of the process."""

    def __init__(self) -> None:
        self.seconds = {"import": process_age_s()}
        self.last = time.monotonic()

    def lap(self, phase: str) -> None:
        """A phase has ended."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now


def process_age_s() -> float:
    """How long this process has been there: what Python and its imports took. 0 where the system does not say."""
    try:
        started = float(
            Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
        ) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return 0.0


def put_together(
    c: Config,
    paths: RunPaths,
    world: World,
    interrupt: Interrupt,
    state: Status,
    shared: bool,
    started: Stopwatch,
) -> Job:
    """Everything the loop needs, at the step of the newest checkpoint."""
    begun = begin(c, paths, world, interrupt, state, shared)
    watch = begun.watch
    data = open_data(c, paths, world, watch, begun.before)
    started.lap("data")

    watch.expect("fetching the CORE bundle", 4 * c.start_timeout_s)
    core = open_core(c, data.vocabulary, world, keep=True) if c.core_every else None

    # later the run's own checkpoints have the weights, and the folder may be gone
    init_from = c.init_from if from_first(not checkpoint.committed(paths.checkpoints)) else ""
    if init_from:
        hf_import.check(init_from, c)
    state.phase("model")
    watch.expect("building the model", c.start_timeout_s)
    torch.set_float32_matmul_precision("highest")
    kernel = attention.choose(c, world.device)
    model = build(
        c,
        world.device,
        kernel,
        parallel.Sharding(c, world) if parallel.is_split(c, world) else None,
        hf_import.read_norm_eps(init_from) if init_from else stored_norm_eps(begun.before),
    )
    attention.log_choice(kernel, c, world.device)
    if init_from:
        hf_import.load(init_from, model)
        log.info("the weights are those of %s", init_from)
    if compilation.wanted(c, world.device, model):
        compilation.compile_model(model, named=c.profile)
    job = gather(c, paths, world, interrupt, state, shared, begun, model, data)
    job.compressed_bpb, job.core = compressed(data.sources), core
    started.lap("model")
    take_up(job, begun, started)
    if c.replicas > 1:
        hook.join(job)
        started.lap("sites")
    hashes = hf_import.hashes(init_from) if init_from and world.is_first else None
    if world.is_first:
        keep_tokenizer(paths, data.vocabulary)
    facts = {"attention": kernel.name, "init_from": hashes, "norm_eps": model.norm.eps}
    return enter(job, begun, started, facts)


@dataclasses.dataclass(frozen=True)
class Begun:
    """An attempt that has begun. before: config.json of those before it; changes: what is set otherwise than then."""

    before: dict[str, Any]
    changes: dict[str, list]
    attempt: int
    watch: Watchdog


def begin(
    c: Config, paths: RunPaths, world: World, interrupt: Interrupt, state: Status, shared: bool
) -> Begun:
    """Compare with what the run was before, and say how it is stopped and saved. Raises SettingsError."""
    before = stored_config(paths) if world.is_first else {}
    before = from_first(before)
    complaints, changes = (
        compare_with_stored(before["settings"], c.values()) if before else ([], {})
    )
    if complaints:
        raise SettingsError([f"{complaint} [{paths.config}]" for complaint in complaints])
    attempt = len(before.get("attempts", []))
    say_how_it_is_stopped(c, world, state)
    say_where_it_is_saved(c, paths, world, shared)
    if world.is_first:
        for line in watchdog.put_away(paths.hang):
            log.warning("the attempt before: %s", line)
    from_first(None)  # the stacks of that attempt are out of the way
    watch = Watchdog(
        paths.hang,
        world.rank,
        world.host,
        lambda: interrupt.told_at if interrupt.training else None,
        at_end=lambda: hung(state),
    )
    watch.expect("opening the data", c.start_timeout_s)
    state.phase("data", attempt=attempt)  # from here on the run is touched, and its status says so
    return Begun(before, changes, attempt, watch)


def gather(
    c: Config,
    paths: RunPaths,
    world: World,
    interrupt: Interrupt,
    state: Status,
    shared: bool,
    begun: Begun,
    model: Any,
    data: "Data",
) -> Job:
    """The job of a model that is built: with its optimizer, spread over processes, and what watches and saves it."""
    optimizer = build_optimizer(model, c)
    if c.save_every != 0 and world.is_first:
        checkpoint.clear_leftovers(paths.checkpoints)  # they may be what takes the room
        checkpoint.check_space(paths.checkpoints, checkpoint.needed_bytes(model, c.replicas))
    weights, everywhere = sum(w.numel() for w in model.parameters()), world.size * c.replicas
    log.info(
        "run=%s device=%s processes=%d parallel=%s dtype=%s parameters=%.2fM steps=%d batch_tokens=%d = %d x %d x "
        "%d x %d (processes x accumulation x sequences x tokens)",
        c.run_name,
        world.device_name,
        everywhere,
        c.parallel if world.size > 1 else "none",
        c.dtype,
        weights / 1e6,
        c.last_step,
        c.batch_tokens,
        everywhere,
        -(-c.batch_windows // (everywhere * data.loader.micro_batch)),
        data.loader.micro_batch,
        c.seq_len,
        extra=console.for_terminals(
            f"model: {weights / 1e6:.1f}M parameters. "
            "Press Ctrl-C to save and stop; run the same command to resume.\n"
        ),
    )
    engine = parallelize(model, c, world)
    recorder = Recorder(paths, world.is_first, begun.attempt, c.last_step, c.log_every)
    saver = Saver(paths.checkpoints, c, world, checkpoint.needed_bytes(model, c.replicas))
    guard = Guard(c.spike_sigmas)
    return Job(
        c,
        paths,
        world,
        engine,
        optimizer,
        data.loader,
        data.evaluator,
        recorder,
        state,
        interrupt,
        begun.watch,
        Pace(c, engine, begun.watch),
        saver,
        guard,
        data.fingerprint,
        data.vocabulary,
        {},
        shared,
        data.feed,
        starved=data.feed is not None,
    )


def take_up(job: Job, begun: Begun, started: Stopwatch) -> None:
    """Rehearse a step at full shape, before a checkpoint is read: what does not fit into memory shows now. Then stand
    where the newest checkpoint does. Raises SettingsError, CheckpointError, DataError."""
    c, compiled = job.config, parallel.bare(job.model).compiled
    job.status.phase("compiling" if compiled else "rehearsing")
    job.watch.expect("compiling" if compiled else "the rehearsal of a step", 4 * c.start_timeout_s)
    began = time.perf_counter()
    try:
        rehearse(job.model, job.optimizer, job.loader.blank())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SettingsError([memory_advice(c, job.world)]) from error
    if compiled:
        log.info("compiled in %.1f s", time.perf_counter() - began)
    transport.say(job)  # gradients have met for the first time
    started.lap("compile" if compiled else "rehearsal")

    job.pace.allow(
        "reading the checkpoint", 4 * c.start_timeout_s, "START_TIMEOUT_S"
    )  # while the first hashes it
    recovery.resume(job, begun.changes)
    started.lap("checkpoint")


def enter(job: Job, begun: Begun, started: Stopwatch, facts: dict[str, Any]) -> Job:
    """Write what this attempt is into the run's config.json and record; facts: of its own."""
    c, world = job.config, job.world
    if world.is_first:
        origin = provenance(world.host, world.size, world.device_name, torch.get_num_threads())
        attempt = (
            origin
            | {
                "compiled": parallel.bare(job.model).compiled,
                "parallel": c.parallel,
                "step": job.step,
                "changes": begun.changes,
            }
            | facts
        )
        whole = {
            "schema": 1,
            "settings": c.stored(),
            "data_fingerprint": job.data_fingerprint,
            "validation_shards": job.evaluator.shards,
            "attempts": [*begun.before.get("attempts", []), attempt],
        }
        write_whole(job.paths.config, json.dumps(whole, indent=1).encode())
    job.recorder.event(
        "resume" if job.step else "start",
        job.step,
        job.tokens,
        changes=begun.changes,
        world_size=world.size * c.replicas,
        startup_s=started.seconds,
    )
    if world.is_first:
        gpus = visible_indices(c.nproc) if world.device.type == "cuda" else []
        job.trackers = start_trackers(c, job.paths, job.recorder.say, gpus)
    return job


@dataclasses.dataclass(frozen=True)
class Data:
    """What training and validation read, and what makes more of it."""

    vocabulary: Vocabulary
    sources: dict[str, ShardSet]
    loader: Loader
    evaluator: Evaluator
    feed: Feed | None
    fingerprint: str


def open_data(
    c: Config, paths: RunPaths, world: World, watch: Watchdog, before: dict[str, Any]
) -> Data:
    """The data of a run, which must be the same on all ranks; before: config.json of its earlier attempts.

    Where shards are still to be made or sent, there is enough of them to begin. Raises DataError.
    """
    relay = Relay.begin(c, world)
    vocabulary = prepare.vocabulary(c)
    streams = from_first(prepare.streams(c, vocabulary))
    held_out = before.get("validation_shards", {})
    if streams:
        held_out = held_out or dict.fromkeys(
            c.mixture, 1
        )  # of each source, however much there is by now
    feed = Feed(c, paths, world.is_first, held_out, streams, relay) if streams or relay else None
    if relay:
        relay.start(vocabulary)
    if feed:
        wait_for_first_data(c, vocabulary, feed, held_out, watch)
    sources = prepare.open_sources(c, vocabulary, partial=feed is not None)
    prepare.refuse_repetition(c, sources, begun=bool(before))
    say_data(c, sources)
    loader = Loader(c, sources, world, vocabulary.end_of_text)
    fingerprint = data_fingerprint(loader, vocabulary, sources)
    refuse_other_data(from_all((fingerprint, content(sources, whole=feed is None))), world)
    held_out = held_out or from_first(
        {name: len(shards.shards["validation"]) for name, shards in sources.items()}
    )
    evaluator = Evaluator(
        c, sources, padded_lengths(vocabulary, c), world, vocabulary.end_of_text, held_out
    )
    return Data(vocabulary, sources, loader, evaluator, feed, fingerprint)


def hung(state: Status) -> None:
    """What a process that hangs still says before it ends."""
    state.phase("crashed", exit_code=watchdog.HUNG)
    report_exit(watchdog.HUNG)


def say_how_it_is_stopped(c: Config, world: World, state: Status) -> None:
    """Warn where what a stop needs, a step and a save, is longer than what is left for it."""
    allowed = float(c.grace_period_s)
    spare = 0
    if world.size > 1:
        allowed, settable = shutdown_timeout_s(c)
        spare = c.grace_period_s - c.shutdown_timeout_s
        if not settable:
            log.warning(
                "torch %s ends processes %.0f s after SIGTERM, whatever GRACE_PERIOD_S=%d says: a save "
                "must be shorter",
                torch.__version__,
                allowed,
                c.grace_period_s,
            )
    last = state.facts
    needed = last.get("step_s", 0.0) + last.get("save_s", 0.0)
    if needed > allowed:
        log.warning(
            "a step and a save took %.0f s the last time, and GRACE_PERIOD_S=%d leaves %.0f s: told to stop, "
            "this run would be killed before its checkpoint is whole. Set GRACE_PERIOD_S=%d",
            needed,
            c.grace_period_s,
            allowed,
            round(1.5 * needed) + spare,
        )


def say_where_it_is_saved(c: Config, paths: RunPaths, world: World, shared: bool) -> None:
    """Say whether the nodes share RUNS_DIR, and refuse what then cannot be saved."""
    if world.nodes == 1:
        return
    ranks = parallel.writers(c, world)
    if shared:
        log.info("all %d nodes share %s", world.nodes, paths.folder)
        return
    if len(ranks) > world.local_size:
        other = (
            f", or set PARALLEL=hsdp with SHARD_RANKS={world.local_size}" if c.replicas == 1 else ""
        )
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


def wait_for_first_data(
    c: Config, vocabulary: Vocabulary, feed: Feed, held_out: dict[str, int], watch: Watchdog
) -> None:
    """Until all ranks see of each source of a run that streams something to train on, and as many validation shards
    as `held_out` has.

    Raises DataError, on all ranks, where its producer cannot make that.
    """
    began = said = time.monotonic()
    ready = False
    while True:
        watch.expect("waiting for the first data", c.start_timeout_s)
        here = prepare.not_begun(c, vocabulary, held_out) if ready else next(iter(c.mixture))
        lacking, told, broken = zip(*from_all((here, feed.ready, feed.broken)), strict=True)
        ready, waited_s = told[0], time.monotonic() - began
        if not any(lacking):
            return
        if problem := max(broken) or from_first(feed.why_not(waited_s, lacking)):
            raise DataError(problem)
        if time.monotonic() - said > 10:
            said = time.monotonic()
            names = ", ".join(sorted(set(lacking) - {""}))
            log.info(
                "waiting for the first data of %s, for %.0f s so far%s",
                names,
                waited_s,
                feed.progress(),
            )
        time.sleep(0.2)


def say_data(c: Config, sources: dict[str, ShardSet]) -> None:
    """Epochs of each source that the schedule will take, and what windows leave over."""
    total = sum(c.mixture.values())
    for name, shards in sources.items():
        windows = sum(shards.windows("train", c.seq_len))
        planned = c.last_step * c.batch_tokens * c.mixture[name] / total
        dropped = shards.total("train", "tokens") - windows * c.seq_len
        epochs = (
            f"{prepare.planned_epochs(c, shards, name):.2f}"
            if shards.ended
            else "n/a, more is being made"
        )
        log.info(
            "data=%s windows=%d dropped_tail_tokens=%d planned_tokens=%.2fM epochs=%s",
            name,
            windows,
            dropped,
            planned / 1e6,
            epochs,
            extra=console.LOG_ONLY,
        )


def data_fingerprint(loader: Loader, vocabulary: Vocabulary, sources: dict[str, ShardSet]) -> str:
    """Of the order of samples and of where they come from; the same for shards that are made and being made."""
    origin = hashlib.sha256(
        repr([(name, shards.key) for name, shards in sources.items()]).encode()
    ).hexdigest()
    return f"{loader.mixture.fingerprint}-{vocabulary.sha256[:12]}-{origin[:12]}"


def content(sources: dict[str, ShardSet], whole: bool) -> str:
    """Of every byte that there is; while more is being made, of the first shards, which all processes see."""
    hashes = [
        (
            name,
            [
                info.xxh3
                for seal in (shards.seals if whole else shards.seals[:1])
                for info in seal.infos()
            ],
        )
        for name, shards in sources.items()
    ]
    return hashlib.sha256(repr(hashes).encode()).hexdigest()[:12]


def refuse_other_data(fingerprints: list[tuple[str, str]], world: World) -> None:
    """Raises DataError unless all processes have the same tokenizer and shards."""
    for rank, found in enumerate(map("-".join, fingerprints)):
        if found != "-".join(fingerprints[0]):
            raise DataError(
                f"rank {rank} on {world.hosts[rank]} has other data than rank 0 on {world.hosts[0]} "
                f"(fingerprints {found} and {'-'.join(fingerprints[0])}): copy DATA_DIR from one to the "
                "other, or run make data there with the same settings"
            )


def padded_lengths(vocabulary: Vocabulary, c: Config) -> numpy.ndarray:
    """(VOCAB_SIZE,) bytes that each id stands for; rows that the tokenizer has no entry for stand for none."""
    lengths = vocabulary.byte_lengths()
    return numpy.pad(lengths, (0, c.vocab_size - len(lengths)))


def compressed(sources: dict[str, ShardSet]) -> dict[str, float]:
    """What general compressors need for the held-out text, where it was measured and there is one source."""
    (first, *others) = sources.values()
    return {} if others else first.manifest.get("compressed_bpb", {})
