"""A run's folder that somebody else made may have links for files: what a run writes does not follow them."""

import contextlib
import logging
import os
from types import SimpleNamespace

import pytest

from analysis.tables import write_csv
from record import account
from record.durable import write_whole
from record.locks import RunFolderError, hold, hold_run, open_console
from record.recorder import Recorder
from record.run_paths import RunPaths
from tests.train.checkpoint.test_find import make
from tests.train.making import ALONE
from train import run_folder
from train.checkpoint import find
from train.data.prepare import one_at_a_time
from train.hooks.trackers import TrackioTracker

CONTENT = "of the user\n"


@contextlib.contextmanager
def log_to(paths):
    handlers = list(logging.getLogger().handlers)
    try:
        run_folder.log_to_files(paths, ALONE)
        logging.getLogger().error("a line")
        yield
    finally:
        for handler in set(logging.getLogger().handlers) - set(handlers):
            logging.getLogger().removeHandler(handler)
            handler.close()


def prepare(paths):
    return one_at_a_time(paths.folder / "text")


def replace(paths):
    write_whole(paths.status, b"{}")
    return contextlib.nullcontext()


def tabulate(paths):
    write_csv(paths.folder / "training.csv", ["step"], [[1]])
    return contextlib.nullcontext()


WRITERS = {
    ".lock": hold_run,
    ".job": lambda paths: hold(paths.job, "works on this run"),
    "train.log": log_to,
    "logs/node_0.log": log_to,
    "console.log": lambda paths: open_console(paths.console_log),
    "metrics.jsonl": lambda paths: contextlib.closing(Recorder(paths, True, 0, 10, 5)),
    "STATUS.json": replace,
    "training.csv": tabulate,
    "text/.lock": prepare,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("exists", [True, False])
def test_what_a_run_writes_is_never_a_file_elsewhere(tmp_path, name, exists):
    elsewhere = tmp_path / "elsewhere"
    if exists:
        elsewhere.write_text(CONTENT)
    paths = RunPaths(tmp_path / "run")
    link = paths.folder / name
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with contextlib.suppress(RunFolderError, OSError), WRITERS[name](paths):
        pass
    if exists:
        assert elsewhere.read_text() == CONTENT
    else:
        assert not elsewhere.exists()
    # Nor by another name of the same file, as `cp -al` makes.
    if exists:
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.hardlink_to(elsewhere)
        with contextlib.suppress(RunFolderError), WRITERS[name](paths):
            pass
        assert elsewhere.read_text() == CONTENT
    # The name is right: without the link, it is this that is written.
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    with WRITERS[name](paths):
        assert link.exists()


def test_a_lock_with_two_names_is_taken_by_nobody_else(tmp_path):
    """A backup by hard links, while the run trains."""
    paths = RunPaths(tmp_path / "run")
    with hold_run(paths):
        (tmp_path / "backup").hardlink_to(paths.lock)
        with pytest.raises(RunFolderError, match="locked by another process"):
            hold_run(paths)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_checkpoint_that_is_a_link_is_replaced_and_deleted_as_a_link(tmp_path, is_there):
    """As of one that somebody has moved to another disk, which may not be mounted."""
    elsewhere = tmp_path / "elsewhere"
    if is_there:
        make(tmp_path, 1).rename(elsewhere)
    root = tmp_path / "checkpoints"
    root.mkdir()
    for name in ("step_0000001", "step_0000002", ".trash-step_0000003-abc"):
        (root / name).symlink_to(elsewhere)
    make(root, 2, 4, 5)
    find.prune(root, keep_last=2, keep_every=0)
    assert sorted(path.name for path in root.iterdir()) == ["step_0000004", "step_0000005"]
    assert [path.name for path in elsewhere.glob("MANIFEST.json")] == ["MANIFEST.json"] * is_there


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_the_samples_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "gpu_metrics_20260101_000000.csv")
    assert account.find_energy_kwh(tmp_path, 60.0, 1) is None


def test_trackio_writes_through_no_link(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path)
    link = paths.folder / "trackio" / "runs.db"
    monkeypatch.setenv("TRACKIO_DIR", str(link.parent))
    link.parent.mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=f"{link}: is a link"):
        TrackioTracker.open(SimpleNamespace(paths=paths))
