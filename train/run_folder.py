"""A run's folder: opened for one trainer, its logs, and what an earlier attempt left in it."""

import logging
from typing import Any, TextIO

from record import locks, status
from record.durable import write_whole
from record.locks import RunFolderError
from record.regular_file import limit_silence
from record.run_paths import RunPaths, list_checkpoints
from settings.config import Config
from settings.declare import format_tokens
from settings.resolve import name_new_run
from settings.resume import RunConfigError, read_run_config
from train.checkpoint.find import find_verified, folder_of
from train.checkpoint.identity import check_identity
from train.checkpoint.manifest import CheckpointError, load_manifest
from train.console import Printable
from train.data.tokenizer import Vocabulary
from train.distributed.world import (
    World,
    from_first,
    launcher_pid,
    report_exit,
    set_timeout,
    together,
    who_sees,
)

log = logging.getLogger(__name__)

VERIFY_S = 3600.0  # the last checkpoint, on a slow disk


def open_run_folder(paths: RunPaths, world: World) -> tuple[TextIO | None, bool]:
    """Create the folder and hold it against a second trainer; the lock goes with the process.

    Returns the lock, and whether the processes of all nodes see the same folder.
    """
    lock = None
    with together(RunFolderError):
        if world.is_first:
            lock = locks.hold_run(paths, pid=launcher_pid())
    try:
        return lock, all(who_sees(paths.folder, world))
    except OSError as error:
        raise RunFolderError(
            f"{paths.folder}: cannot be written ({error.strerror or error}). Fix its permissions, or choose "
            "another place with RUNS_DIR"
        ) from None


def log_to_files(paths: RunPaths, world: World) -> None:
    """train.log from the first rank, logs/node_N.log from the first process of each node, and from the others
    logs/rank_N.log, if they have anything to complain of."""
    files = [paths.train_log] if world.is_first else []
    files.append(
        paths.rank_log(world.rank) if world.local_rank else paths.node_log(world.node_rank)
    )
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # to open a pipe could wait for ever
            raise RunFolderError(
                f"{path}: is not a regular file. Remove it, and run the same command"
            )
        handler = logging.FileHandler(path, encoding="utf-8", delay=world.local_rank > 0)
        rank = "" if world.is_first else f"rank={world.rank} "
        handler.setFormatter(Printable(f"%(asctime)s {rank}%(message)s"))
        logging.getLogger().addHandler(handler)


def is_finished(c: Config, paths: RunPaths, world: World, target: str = "train") -> bool:
    """Return whether this run has nothing left to do. If so, say how to continue.

    target: the make target of this training, train or finetune.
    """
    set_timeout(VERIFY_S, [])  # the others wait while the first rank verifies it
    end = ""
    with together(CheckpointError):
        if world.is_first:
            with limit_silence(paths.folder, c.start_timeout_s, report_exit):
                end = describe_end(c, paths, target)
    end = from_first(end)
    if end:
        log.info("%s", end)
    return bool(end)


def describe_end(c: Config, paths: RunPaths, target: str) -> str:
    """Say that the run is at its end, and what to do next; "" if it is not."""
    # What STATUS.json says holds only with a checkpoint that verifies, and so does a folder's name.
    state = status.read(paths.status)
    listed = list_checkpoints(paths.checkpoints)
    is_done = status.is_done(state, c.last_step)
    if not is_done and max(listed, default=0) <= c.last_step:
        return ""
    saved = newest_of_run(c, paths)
    step = saved
    if is_done and not listed:  # SAVE_EVERY=0
        step = state["step"]
    elif saved < c.last_step or (saved == c.last_step and not is_done):
        return ""  # the resume names what is damaged, and goes on from there
    last, further = f"MAX_STEPS={c.last_step}", f"MAX_STEPS={2 * step}"
    if target == "finetune" and not c.max_steps:
        last, further = f"EPOCHS={c.epochs} of DATA, {c.last_step} steps", f"EPOCHS={2 * c.epochs}"
    end = f"run {c.run_name} is done: {step} of {c.last_step} steps, in {paths.folder}"
    if c.early_end:
        end = (
            f"run {c.run_name} stopped at {c.early_end}, in {paths.folder}; "
            "run the same command without it to resume"
        )
    if step > c.last_step:
        end = f"run {c.run_name} is already at step {step}, past {last}: nothing is left to do"
    if target == "train" and c.min_learning_rate == 0 and step * c.batch_tokens >= c.train_tokens:
        tokens = format_tokens(2 * c.train_tokens)
        return (
            f"{end}\nThe learning rate is 0, so more steps change nothing. To train longer, set "
            f"{name_new_run(paths.folder.with_name(f'{c.run_name}-longer'))} TRAIN_TOKENS={tokens}."
        )
    if saved:
        end += f"\nTo train it further, set {further}."
    return end


def newest_of_run(c: Config, paths: RunPaths) -> int:
    """Return the step of the newest checkpoint that verifies; 0 if none does.

    Raises CheckpointError if it is of another run.
    """
    steps, _ = find_verified(paths.checkpoints, 1)
    if not steps:
        return 0
    folder = folder_of(paths.checkpoints, steps[0])
    check_identity(read_run_config(paths.config), c, folder, load_manifest(folder))
    return steps[0]


def stored_config(paths: RunPaths) -> dict[str, Any]:
    """Return config.json of earlier attempts; {} for a new run. Raises RunFolderError."""
    try:
        stored = read_run_config(paths.config)
    except RunConfigError as error:
        raise RunFolderError(str(error)) from None
    if not stored and list_checkpoints(paths.checkpoints):
        raise RunFolderError(
            f"{paths.config}: is missing, but the run has checkpoints, which need its settings. "
            "Restore it from a copy, or choose another RUN_NAME."
        )
    return stored


def keep_tokenizer(paths: RunPaths, vocabulary: Vocabulary) -> None:
    """Copy the run's tokenizer into its folder, so that the folder can be used wherever it is copied to."""
    try:
        if not paths.tokenizer.is_file() or paths.tokenizer.read_bytes() != vocabulary.content:
            write_whole(paths.tokenizer, vocabulary.content)
    except OSError as error:
        raise RunFolderError(
            f"{paths.tokenizer}: cannot be written ({error.strerror}). Move it away, or choose another "
            "RUN_NAME."
        ) from None


def stored_norm_eps(before: dict[str, Any]) -> float | None:
    """Return the epsilon of RMSNorm from a run's config.json, where INIT_FROM had one of its own.

    It was a setting once: older runs have it among these.
    """
    attempts = before.get("attempts") or [{}]
    stored = attempts[-1].get("norm_eps") or before.get("settings", {}).get("NORM_EPS")
    return None if stored is None else float(stored)
