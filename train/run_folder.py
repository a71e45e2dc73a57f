"""A run's folder: opened for one trainer, its logs, and what an earlier attempt left in it."""

import logging
import os
from pathlib import Path
from typing import Any, TextIO

from record import locks, status
from record.durable import write_whole
from record.locks import RunFolderError
from record.regular_file import limit_silence, only_regular
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
    broadcast_object,
    launcher_pid,
    raise_on_all_ranks,
    report_exit,
    set_timeout,
    who_sees,
)

log = logging.getLogger(__name__)

VERIFY_S = 3600.0  # the last checkpoint, on a slow disk


def open_run_folder(paths: RunPaths, world: World) -> tuple[TextIO | None, bool]:
    """Create the folder and hold it against a second trainer; the lock goes with the process.

    Returns the lock, and whether the processes of all nodes see the same folder.
    """
    lock = None
    with raise_on_all_ranks(RunFolderError):
        if world.is_first:
            lock = locks.hold_run(paths, pid=launcher_pid())
            other = status.find_trainer(paths)
            if other not in (0, os.getpid()):
                raise RunFolderError(
                    f"{paths.folder}: process {other} trains this run, though its {paths.lock.name} was "
                    f"removed. Stop it first: kill {other}"
                )
    try:
        return lock, all(who_sees(paths.folder, world))
    except OSError as error:
        raise RunFolderError(
            f"{paths.folder}: cannot be written ({error.strerror or error}). Fix its permissions, or choose "
            "another place with RUNS_DIR"
        ) from error


class LogFile(logging.FileHandler):
    """A log that is opened as everything is that a run writes. Raises OSError."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=only_regular)


def log_to_files(paths: RunPaths, world: World) -> None:
    """train.log from the first rank, logs/node_N.log from the first process of each node, and from the others
    logs/rank_N.log, if they have anything to complain of."""
    files = [paths.train_log] if world.is_first else []
    files.append(
        paths.rank_log(world.rank) if world.local_rank else paths.node_log(world.node_rank)
    )
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handler = LogFile(path, encoding="utf-8", delay=world.local_rank > 0)
        except OSError as error:
            raise RunFolderError(
                f"{path}: cannot be written ({error.strerror}). Free some space, fix its permissions, or remove it, "
                "and run the same command"
            ) from error
        rank = "" if world.is_first else f"rank={world.rank} "
        handler.setFormatter(Printable(f"%(asctime)s {rank}%(message)s"))
        logging.getLogger().addHandler(handler)


def is_finished(c: Config, paths: RunPaths, world: World, target: str = "train") -> bool:
    """Return whether this run has nothing left to do. If so, say how to continue.

    target: the make target of this training, train or finetune.
    """
    set_timeout(VERIFY_S, [])  # the others wait while the first rank verifies it
    end = ""
    with raise_on_all_ranks(CheckpointError):
        if world.is_first:
            with limit_silence(paths.folder, c.start_timeout_s, report_exit):
                end = describe_end(c, paths, target)
    end = broadcast_object(end)
    if end:
        log.info("%s", end)
    return bool(end)


def describe_end(c: Config, paths: RunPaths, target: str) -> str:
    """Say that the run is at its end, and what to do next; "" if it is not."""
    # What STATUS.json says holds only with a checkpoint that verifies, and so does a folder's name.
    state = status.read(paths.status)
    steps = list_checkpoints(paths.checkpoints)
    is_done = status.is_done(state, c.last_step)
    if not is_done and max(steps, default=0) <= c.last_step:
        return ""
    saved = newest_of_run(c, paths)
    step = saved
    if is_done and not steps:  # SAVE_EVERY=0
        step = state["step"]
    elif saved < c.last_step or (saved == c.last_step and not is_done):
        return ""  # the resume names what is damaged, and goes on from there
    end = f"run {c.run_name} is done: {step} of {c.last_step} steps, in {paths.folder}"
    if target == "train" and c.min_learning_rate == 0 and step * c.batch_tokens >= c.train_tokens:
        tokens = format_tokens(2 * c.train_tokens)
        return (
            f"{end}\nThe learning rate is 0, so more steps change nothing. To train longer, set "
            f"{name_new_run(paths.folder.with_name(f'{c.run_name}-longer'))} TRAIN_TOKENS={tokens}."
        )
    if not saved:
        return end
    further = f"MAX_STEPS={2 * step}"
    if target == "finetune" and not c.max_steps:
        further = f"EPOCHS={2 * c.epochs}"
    return f"{end}\nTo train it further, set {further}."


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
        if not has_content(paths.tokenizer, vocabulary.content):
            write_whole(paths.tokenizer, vocabulary.content)
    except OSError as error:
        raise RunFolderError(
            f"{paths.tokenizer}: cannot be written ({error.strerror}). Move it away, or choose another "
            "RUN_NAME."
        ) from error


def has_content(path: Path, content: bytes) -> bool:
    """Return whether a file has this content. Raises OSError."""
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def stored_norm_eps(before: dict[str, Any]) -> float | None:
    """Return the epsilon of RMSNorm from a run's config.json; None if it has none."""
    attempts = before.get("attempts")
    return attempts[-1].get("norm_eps") if attempts else None
