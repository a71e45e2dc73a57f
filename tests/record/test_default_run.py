"""record/default_run.py: the run that is meant where RUN_NAME is not given."""

import os

import pytest

from record.default_run import choose_run
from record.locks import hold
from record.run_paths import RunPaths
from settings import SettingsError


class Runs:
    """Runs in a folder; each is newer than the one before."""

    def __init__(self, folder):
        self.folder = folder
        self.held = []
        self.count = 0
        (folder / "empty.env").touch()

    def add(self, name, running=False, file="config"):
        paths = RunPaths(self.folder / "runs" / name)
        paths.folder.mkdir(parents=True)
        path = getattr(paths, file)
        if running:
            self.held.append(hold(paths.job, "works on this run"))
            path = paths.job
        else:
            path.write_text("{}")
        self.count += 1
        os.utime(path, (self.count, self.count))

    def choose(self, typed="", must_run=False, with_sent=False, **settings):
        environ = {
            "RUNS_DIR": str(self.folder / "runs"),
            "ENV_FILE": str(self.folder / "empty.env"),
            "MAKE_SETTINGS": typed,
            **settings,
        }
        return choose_run(environ, self.folder, must_run, with_sent).get("RUN_NAME")


@pytest.fixture
def runs(tmp_path):
    runs = Runs(tmp_path)
    yield runs
    for lock in runs.held:
        lock.close()


def test_without_a_run_the_default_name_stays(runs, capsys):
    assert runs.choose() is None
    assert capsys.readouterr().err == ""


def test_the_newest_run_is_meant(runs, capsys):
    for name in ("a", "c", "b"):
        runs.add(name)
    assert runs.choose() == "b" and runs.choose(must_run=True) is None
    assert capsys.readouterr().err == "Using b (newest).\n"


def test_a_running_one_is_meant_before_a_newer_one_and_the_others_are_named(runs, capsys):
    runs.add("early", running=True)
    runs.add("late", running=True)
    runs.add("done")
    assert runs.choose() == "late"
    assert capsys.readouterr().err == "Using late (running). Also running: early.\n"


def test_stop_takes_the_one_that_is_running_and_guesses_none_of_several(runs):
    runs.add("a", running=True)
    runs.add("done")
    assert runs.choose(must_run=True) == "a"
    runs.add("b", running=True)
    with pytest.raises(SettingsError, match="a, b"):
        runs.choose(must_run=True)


@pytest.mark.parametrize(
    ("typed", "settings"),
    [
        ("", {"RUN_NAME": "a"}),
        ("PRESET", {"PRESET": "tiny"}),
        ("DATA", {"DATA": "novel.txt"}),
        ("INIT_FROM", {"INIT_FROM": "models/x"}),
        ("WHERE", {"WHERE": "cluster"}),
    ],
)
def test_a_command_that_names_its_run_is_left_alone(runs, typed, settings):
    runs.add("b", running=True)
    assert runs.choose(typed, **settings) is None


def test_a_run_that_was_sent_to_a_cluster_is_one_of_them_where_that_can_be_looked_at(runs):
    runs.add("here")
    runs.add("there", file="sent")
    assert runs.choose() == "here" and runs.choose(with_sent=True) == "there"
    assert runs.choose(with_sent=True, WHERE="local") == "here"
