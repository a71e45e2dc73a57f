"""A run's folder: opened for one trainer, its logs, and what an earlier attempt left in it."""

import logging
from typing import Any, TextIO

from record import status
from record.durable import read_object, write_whole
from record.run_paths import RunPaths, list_checkpoints
from record.status import RunFolderError
from settings.config import Config
from train.data.tokenizer import Vocabulary
from train.distributed.world import World, from_first, who_sees

log = logging.getLogger(__name__)


def open_run_folder(paths: RunPaths, world: World) -> tuple[TextIO | None, bool]:
    """Create the folder and hold it against a second trainer; the lock goes with the process.

    Returns the lock, and whether the processes of all nodes see the same folder.
    """
    problem, lock = None, None
    if world.is_first:
        try:
            lock = status.hold_run(paths)
        except RunFolderError as error:
            problem = str(error)
    if problem := from_first(problem):
        raise RunFolderError(problem)
    try:
        return lock, all(who_sees(paths.folder, world))
    except OSError as error:
        raise RunFolderError(
            f"{paths.folder}: cannot be written ({error.strerror}); mend its permissions"
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
        handler = logging.FileHandler(path, encoding="utf-8", delay=world.local_rank > 0)
        rank = "" if world.is_first else f"rank={world.rank} "
        handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(message)s"))
        logging.getLogger().addHandler(handler)


def nothing_left(c: Config, paths: RunPaths, world: World, target: str = "train") -> bool:
    """Whether this run has nothing left to do; says how to go on. target: of make, which trains so."""
    text, again = (
        None,
        "make train" if target == "train" else "the same command with",
    )  # MODEL, DATA and all else
    if world.is_first:
        # If STATUS.json is torn, the checkpoints are verified before the run counts as done.
        state = status.read(paths.status)
        saved = list_checkpoints(paths.checkpoints)
        done = state.get("phase") == "done"
        at = state.get("step", 0) if done else max(saved, default=0)
        by_epochs = target == "finetune" and not c.max_steps
        if at > c.last_step:
            end = (
                f"EPOCHS={c.epochs} of DATA, {c.last_step} steps"
                if by_epochs
                else f"MAX_STEPS={c.last_step}"
            )
            text = f"run {c.run_name} is already at step {at}, past {end}: nothing is left to do"
        elif done and at == c.last_step:
            text = f"run {c.run_name} is done: {at} of {c.last_step} steps, in {paths.folder}"
        if text and saved:
            more = (
                f"EPOCHS={2 * c.epochs}   (the rate goes on along the longer schedule)"
                if by_epochs
                else f"MAX_STEPS={2 * at}"
                + "   (the rate stays at its minimum)" * (target == "train")
            )
            text += f"\n  train it further:  {again} RUN_NAME={c.run_name} {more}"
    if text := from_first(text):
        log.info(
            "%s\n  train another:     %s RUN_NAME=%s-2 SEED=%d\n"
            "  draw it again:     make plots RUN_NAME=%s",
            text,
            again,
            c.run_name,
            c.seed + 1,
            c.run_name,
        )
    return text is not None


def stored_config(paths: RunPaths) -> dict[str, Any]:
    """Return config.json of earlier attempts; {} for a new run. Raises RunFolderError."""
    advice = "Restore it from a copy, or choose another RUN_NAME"
    try:
        stored = read_object(paths.config)
    except FileNotFoundError:
        if list_checkpoints(paths.checkpoints):
            raise RunFolderError(
                f"{paths.config}: is missing, and the run has checkpoints, whose settings it holds. {advice}"
            ) from None
        return {}
    except ValueError as fault:
        raise RunFolderError(f"{paths.config}: {fault}. {advice}") from None
    attempts = stored.get("attempts", [])
    if not isinstance(stored.get("settings"), dict) or not isinstance(attempts, list):
        raise RunFolderError(
            f"{paths.config}: is damaged: it must hold `settings` and `attempts`. {advice}"
        )
    return stored


def keep_tokenizer(paths: RunPaths, vocabulary: Vocabulary) -> None:
    """Copy the run's tokenizer into its folder, so that the folder can be used wherever it is copied to."""
    if not paths.tokenizer.is_file() or paths.tokenizer.read_bytes() != vocabulary.content:
        write_whole(paths.tokenizer, vocabulary.content)


def stored_norm_eps(before: dict[str, Any]) -> float | None:
    """Return the epsilon of RMSNorm from a run's config.json, where INIT_FROM had one of its own.

    It was a setting once: older runs have it among these.
    """
    attempts = before.get("attempts") or [{}]
    stored = attempts[-1].get("norm_eps") or before.get("settings", {}).get("NORM_EPS")
    return None if stored is None else float(stored)
