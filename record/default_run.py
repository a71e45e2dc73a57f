"""The run that a command is about where RUN_NAME is not given: the one that is running, else the newest."""

from pathlib import Path

from record import locks, status
from record.locks import RunFolderError
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.checks import CHECKS
from settings.config import Config
from settings.declare import Texts
from settings.resolve import resolve
from settings.sources import DEFAULT, ENVIRONMENT
from settings.terminal import complain

# These name a run: its own settings, or the weights that are meant.
NAMING = ("PRESET", "DATA", "INIT_FROM", "MODEL")


def choose_run(
    environ: Texts | None = None,
    root: Path = ROOT,
    must_run: bool = False,
    with_sent: bool = False,
) -> dict[str, str]:
    """Choose a run, and say which on standard error.

    Args:
        must_run: only a run that is running here may be chosen, and none among several.
        with_sent: also those that were sent to a cluster, unless WHERE=local.

    Returns:
        The default of RUN_NAME, for `resolve`. {} if the command names a run, or there is none.

    Raises:
        SettingsError: several runs are running, and one must be named.
    """
    resolved = resolve(environ, root, without=CHECKS)
    config, origins = resolved.config, resolved.origins
    is_named = origins["RUN_NAME"] != DEFAULT or any(
        origins[name] in ("command line", ENVIRONMENT) for name in NAMING
    )
    if is_named or config.where == "cluster":
        return {}
    try:
        with_sent = with_sent and config.where != "local"
        candidates = status.find_runs(root / config.runs_dir, with_sent=with_sent)
    except RunFolderError:  # who looks for the run reports it
        return {}
    runs = [run for run in candidates if not status.is_closed(run)]
    running = [run for run in runs if locks.is_at_work(run)]
    names = ", ".join(run.name for run in running)
    if must_run and len(running) > 1:
        raise SettingsError([f"RUN_NAME: Must name one of the runs that are running: {names}."])
    if must_run:
        runs = running
    if not runs:
        return {}
    chosen = max(running or runs, key=last_change)
    sentence = f"Using {chosen.name} ({'running' if running else 'newest'})."
    others = [run.name for run in running if run is not chosen]
    if others:
        sentence += f" Also running: {', '.join(others)}."
    complain(sentence)
    return {"RUN_NAME": chosen.name}


def require_run(config: Config) -> None:
    """Raise RunFolderError if RUN_NAME names no run and no other weights are given."""
    paths = RunPaths.of(config.runs_dir, config.run_name, ROOT)
    is_there = status.is_run(paths) or paths.checkpoints.is_dir()
    if not config.init_from and not is_there:
        raise RunFolderError(
            f"{status.explain_missing(paths)} `make fetch-run` copies one from the cluster. To use "
            "weights of another folder, set INIT_FROM."
        )


def last_change(run: RunPaths) -> float:
    """Return when a running run was started, or any other was last heard of, as a Unix time."""
    files = [run.lock, run.job]
    if not locks.is_at_work(run):
        files = [run.status, run.metrics, run.config, run.sent]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
