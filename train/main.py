"""Entry point of the trainer, started by scripts/launch.sh: put a run together, train it, say how it ended.

    settings -> processes -> run folder -> tokenizer and shards -> model -> checkpoint -> loop -> evaluation, sample

Exit codes: 0 done, 64 a setting is bad, 75 saved and stopped on request, 78 data or environment are bad,
1 anything else.
"""

import gc
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
import warnings
from typing import Any, TextIO, cast

import numpy
import tokenizers
import torch

from train import attention, checkpoint, compilation, loop, prepare, status
from train.batch import Loader
from train.checkpoint import CheckpointError
from train.config import Config, compare_for_resume
from train.corpus import CorpusError, source
from train.distributed import World, from_first, join, leave, report_exit
from train.evaluate import Evaluator
from train.interrupt import Interrupt, Stopped
from train.loop import Job
from train.metrics import Recorder
from train.mirror import Mirror
from train.mixture import Gap
from train.model import Transformer, build
from train.optim import build_optimizer
from train.parallel import bare, parallelize, settle
from train.runs import RunPaths
from train.sample import continue_text
from train.settings import ROOT, SettingsError
from train.shards import DataError, ShardSet
from train.status import Status
from train.step import NonFiniteStep
from train.tokenizer import TokenizerError, Vocabulary, write_whole

log = logging.getLogger(__name__)


class RunFolderError(Exception):
    """The run folder cannot be used; the message says why and what to do."""


def main() -> int:
    """Run to an exit code. Whatever goes wrong is said in one sentence, and in full where it is a fault of ours."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.raiseExceptions = False  # a closed terminal must not end a run, nor fill its log
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP, in one process
    interrupt = Interrupt()
    state: Status | None = None
    job: Job | None = None
    in_doubt = False
    try:
        c, remarks = Config.load_with_remarks()
        world = join(c)
        if not world.is_first:
            logging.getLogger().setLevel(logging.WARNING)
        paths = RunPaths.of(c.runs_dir, c.run_name, ROOT)
        lock = open_run_folder(paths, world)
        log_to_files(paths, world)
        for remark in remarks:
            log.info("%s", remark)
        if nothing_left(c, paths, world):
            code = 0
        else:
            state = status_of(c, paths, world)
            job = put_together(c, paths, world, interrupt, state)
            code = run(job)
        del lock
    except SettingsError as error:
        log.error("%s", error)
        code = 64
    except (DataError, TokenizerError, CorpusError, CheckpointError, RunFolderError) as error:
        log.error("%s", error)
        code = 78
    except Stopped as stop:
        log.info("stopped by %s before training; there is nothing to save", stop)
        code, in_doubt = 75, str(stop) == "SIGTERM"
    except NonFiniteStep:
        code = 1  # said where it happened
    except Exception:
        log.exception("the trainer failed")
        code = 1
    if job and code not in (0, 75):
        job.recorder.event("end", job.step, job.tokens, reason="crashed")
        job.recorder.close()
    if state and code and state.is_going_on:
        state.phase("stopped" if code == 75 else "crashed", exit_code=code)
    report_exit(code, in_doubt)
    if job and job.mirror:
        job.mirror.close(hurried=lambda: code not in (0, 75) or interrupt.asked is not None)
    interrupt.release()
    job = None  # the engine goes before the process group that it uses: the other way round hangs at exit
    gc.collect()
    leave()
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads any more; without this Python would exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def run(job: Job) -> int:
    """Train, and when all steps are done evaluate and sample. Returns the exit code."""
    c = job.config
    if loop.train(job) == "stopped":
        return stopped(job)
    result = loop.evaluate(job, full=True)
    if result is None:
        return stopped(job)
    if job.world.is_first:
        conclude(job, result.bpb, result.text_bytes)
    job.recorder.event("end", job.step, job.tokens, reason="done")
    job.recorder.close()
    job.status.phase("done", step=job.step, last_step=c.last_step, exit_code=0)
    return 0


def stopped(job: Job) -> int:
    kept = "saved" if job.config.checkpoints == "on" else "CHECKPOINTS=off, so nothing was saved"
    job.recorder.event("end", job.step, job.tokens, reason="stopped")
    job.recorder.say(f"stopped by {job.interrupt.asked or 'another rank'} behind step "
                     f"{job.step}/{job.config.last_step}, {kept}; the same command goes on")
    job.recorder.close()
    job.status.phase("stopped", step=job.step, exit_code=75)
    from_first(None)  # leave together: torchrun ends the others as soon as one has left
    return 75


def conclude(job: Job, bpb: float, text_bytes: int) -> None:
    """The last words of a run: bits per byte beside general compressors, and a sample."""
    c = job.config
    others = job.compressed_bpb if job.evaluator.full_is_all else {}
    beside = "".join(f"; {name} needs {value:.3f}" for name, value in others.items())
    job.recorder.say(f"validation: {bpb:.3f} bits per byte on {text_bytes} held-out bytes{beside}")
    if not c.sample_tokens:
        return
    job.status.phase("sampling")
    model, prompt = cast(Transformer, bare(job.model)), source(job.loader.mixture.names[0]).prompt
    text = continue_text(model, job.vocabulary, prompt, c.sample_tokens, c.seed)
    try:
        write_whole(job.paths.sample, (text + "\n").encode())
    except OSError as error:  # it is said below, and the run is whole without it
        job.recorder.say(f"{job.paths.sample}: cannot be written ({error.strerror})")
    job.recorder.say(f"sample, step {job.step}:\n" + "\n".join("    " + line for line in text.splitlines()))


# ---------------------------------------------------------------------------------------------------
# The run folder
# ---------------------------------------------------------------------------------------------------

def open_run_folder(paths: RunPaths, world: World) -> TextIO | None:
    """Create the folder and hold it against a second trainer; the lock goes with the process."""
    problem, lock = None, None
    if world.is_first:
        try:
            paths.checkpoints.mkdir(parents=True, exist_ok=True)
            paths.plots.mkdir(exist_ok=True)
            lock = open(paths.lock, "a+", encoding="utf-8")  # noqa: SIM115 (held until the process ends)
            status.take(lock)
            lock.truncate(0)
            lock.write(f"pid {os.getpid()} on {world.host}")
            lock.flush()
        except BlockingIOError:
            lock.seek(0)  # type: ignore[union-attr]
            problem = (f"{paths.folder}: another process trains this run ({lock.read()}); "  # type: ignore[union-attr]
                       "wait for it, stop it, or choose another RUN_NAME")
        except OSError as error:
            problem = (f"{error.filename or paths.folder}: cannot be written ({error.strerror}); "
                       "choose another place with RUNS_DIR, or mend its permissions")
    if problem := from_first(problem):
        raise RunFolderError(problem)
    return lock


def log_to_files(paths: RunPaths, world: World) -> None:
    """train.log from the first rank, logs/node_N.log from the first process of each node, and from the others
    logs/rank_N.log, if they have anything to complain of."""
    files = [paths.train_log] if world.is_first else []
    files.append(paths.rank_log(world.rank) if world.local_rank else paths.node_log(world.node_rank))
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8", delay=world.local_rank > 0)
        rank = "" if world.is_first else f"rank={world.rank} "
        handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(message)s"))
        logging.getLogger().addHandler(handler)


def nothing_left(c: Config, paths: RunPaths, world: World) -> bool:
    """Whether this run has nothing left to do; says how to go on."""
    text = None
    if world.is_first:
        state, saved = status.read(paths.status), checkpoint.committed(paths.checkpoints)
        done = state.get("phase") == "done"
        at = state.get("step", 0) if done else max(saved, default=0)
        if at > c.last_step:
            text = f"run {c.run_name} is already at step {at}, past MAX_STEPS={c.last_step}: nothing is left to do"
        elif done and at == c.last_step:
            text = f"run {c.run_name} is done: {at} of {c.last_step} steps, in {paths.folder}"
        if text and saved:
            text += (f"\n  train it further:  make train RUN_NAME={c.run_name} MAX_STEPS={2 * at}   "
                     "(the rate stays at its minimum)")
    if text := from_first(text):
        log.info("%s\n  train another:     make train RUN_NAME=%s-2 SEED=%d\n"
                 "  draw it again:     make plots RUN_NAME=%s", text, c.run_name, c.seed + 1, c.run_name)
    return text is not None


def status_of(c: Config, paths: RunPaths, world: World) -> Status:
    """The run's status, with step and loss of the last attempt until this one has its own."""
    last = status.read(paths.status)
    return Status(paths.status, world.is_first, run=c.run_name, host=world.host, last_step=c.last_step,
                  **{key: last[key] for key in ("step", "loss") if key in last})


def stored_config(paths: RunPaths) -> dict[str, Any]:
    """config.json of an earlier attempt; {} for a new run."""
    try:
        return dict(json.loads(paths.config.read_text()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunFolderError(f"{paths.config}: damaged ({error}); restore it, or choose another RUN_NAME") from None


def provenance(world: World) -> dict[str, Any]:
    """Where and with what an attempt runs."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {"time": time.time(), "host": world.host, "world_size": world.size, "device": world.device_name,
            "threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__,
            "numpy": numpy.__version__, "tokenizers": tokenizers.__version__,
            "git": git.stdout.strip() or None, "git_dirty": bool(dirty.stdout.strip())}


# ---------------------------------------------------------------------------------------------------
# Putting a run together
# ---------------------------------------------------------------------------------------------------

def put_together(c: Config, paths: RunPaths, world: World, interrupt: Interrupt, state: Status) -> Job:
    """Everything the loop needs, at the step of the newest checkpoint."""
    before = stored_config(paths)
    complaints, changes = compare_for_resume(before["settings"], c) if before else ([], {})
    if complaints:
        raise SettingsError([f"{complaint} [{paths.config}]" for complaint in complaints])
    attempt = len(before.get("attempts", []))
    state.phase("data", attempt=attempt)  # from here on the run is touched, and its status says so
    vocabulary = prepare.vocabulary(c)
    sources = prepare.open_sources(c, vocabulary)
    say_data(c, sources)

    state.phase("model")
    torch.set_float32_matmul_precision("highest")
    kernel = attention.choose(c, world.device)
    model = build(c, world.device, kernel)
    attention.log_choice(kernel, c, world.device)
    if compilation.wanted(c, world.device, model):
        compilation.compile_model(model)
    optimizer = build_optimizer(model, c)
    loader = Loader(c, sources, world, vocabulary.end_of_text)
    if c.checkpoints == "on" and world.is_first:
        checkpoint.check_space(paths.checkpoints, checkpoint.needed_bytes(model))
    weights = sum(w.numel() for w in model.parameters())
    log.info("run=%s device=%s processes=%d dtype=%s parameters=%.2fM steps=%d batch_tokens=%d = %d x %d x %d x %d "
             "(processes x accumulation x sequences x tokens)", c.run_name, world.device_name, world.size, c.dtype,
             weights / 1e6, c.last_step, c.batch_tokens, world.size,
             -(-c.batch_windows // (world.size * loader.micro_batch)), loader.micro_batch, c.seq_len)

    job = Job(c, paths, world, parallelize(model, world), optimizer, loader,
              Evaluator(c, sources, padded_lengths(vocabulary, c), world, vocabulary.end_of_text),
              Recorder(paths, world.is_first, attempt, c.last_step, c.log_every), state, interrupt,
              data_fingerprint(loader, vocabulary, sources), vocabulary, compressed(sources))
    resume(job, changes)
    if world.is_first:
        attempts = [*before.get("attempts", []), provenance(world) | {
            "attention": kernel.name, "compiled": model.compiled, "step": job.step, "changes": changes}]
        content = {"schema": 1, "settings": c.stored(), "data_fingerprint": job.data_fingerprint, "attempts": attempts}
        write_whole(paths.config, json.dumps(content, indent=1).encode())
    job.recorder.event("resume" if job.step else "start", job.step, job.tokens, changes=changes, world_size=world.size)
    if world.is_first:
        job.mirror = Mirror.start(c, paths, job.recorder.say)
    if model.compiled:
        state.phase("compiling")
    began = time.perf_counter()
    settle(job.model, loader.batch(job.step, job.gaps).micro_batches[0])
    if model.compiled:
        log.info("compiled in %.1f s", time.perf_counter() - began)
    return job


def resume(job: Job, changes: dict[str, list]) -> None:
    """Take up the newest checkpoint that verifies, if there is one."""
    found = checkpoint.latest_for_all(job.paths.checkpoints)
    if found is None:
        return
    folder, manifest = found
    data = manifest["data"]
    if data["fingerprint"] != job.data_fingerprint:
        raise DataError(f"{folder}: was trained on other data (fingerprint {data['fingerprint']}, now "
                        f"{job.data_fingerprint}): the tokenizer or the shards in DATA_DIR have changed. Bring those "
                        "back, or choose another RUN_NAME")
    checkpoint.load_into(folder, job.model, job.optimizer)
    job.evaluated_at = manifest["evaluated_at"]
    job.step, job.gaps = data["step"], tuple(Gap(*gap) for gap in data["gaps"])
    job.sound.add(job.step)
    log.info("resumed from %s at step %d/%d", folder.name, job.step, job.config.last_step)
    for name, (old, new) in changes.items():
        log.info("changed since then: %s=%s, was %s", name, new, old)


def say_data(c: Config, sources: dict[str, ShardSet]) -> None:
    """Epochs of each source that the schedule will take, and what windows leave over."""
    total = sum(c.mixture.values())
    for name, shards in sources.items():
        windows = sum(shards.windows("train", c.seq_len))
        planned = c.last_step * c.batch_tokens * c.mixture[name] / total
        dropped = shards.total("train", "tokens") - windows * c.seq_len
        log.info("data=%s windows=%d dropped_tail_tokens=%d planned_tokens=%.2fM epochs=%.2f", name, windows, dropped,
                 planned / 1e6, planned / max(1, windows * c.seq_len))


def data_fingerprint(loader: Loader, vocabulary: Vocabulary, sources: dict[str, ShardSet]) -> str:
    """Of the order of samples and of every byte in them."""
    hashes = [(name, [info.xxh3 for info in shards.shards["train"]]) for name, shards in sources.items()]
    content = hashlib.sha256(repr(hashes).encode()).hexdigest()
    return f"{loader.mixture.fingerprint}-{vocabulary.sha256[:12]}-{content[:12]}"


def padded_lengths(vocabulary: Vocabulary, c: Config) -> numpy.ndarray:
    """(VOCAB_SIZE,) bytes that each id stands for; rows that the tokenizer has no entry for stand for none."""
    lengths = vocabulary.byte_lengths()
    return numpy.pad(lengths, (0, c.vocab_size - len(lengths)))


def compressed(sources: dict[str, ShardSet]) -> dict[str, float]:
    """What general compressors need for the held-out text, where it was measured and there is one source."""
    (first, *others) = sources.values()
    return {} if others else first.manifest.get("compressed_bpb", {})


if __name__ == "__main__":
    sys.exit(main())
