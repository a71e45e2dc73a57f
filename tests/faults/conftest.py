"""What the tests of faults share: runs that nothing happened to, made once for all."""

import contextlib
import fcntl
import os

import pytest

from tests.conftest import make_data
from tests.faults.trial import STEPS, Trial


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder for all processes that test at the same time."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def make_once(folder, make):
    """Call make(), which fills this folder, in one process; the others wait until it has."""
    folder.mkdir(exist_ok=True)
    with open(folder / ".making", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".made").exists():
            make()
            (folder / ".made").touch()


@pytest.fixture(scope="session")
def data(shared):
    """Settings that find a DATA_DIR for TINY. Do not write to it."""
    folder = shared / "data" / "tiny"
    make_once(folder.parent, lambda: make_data(folder))
    return {"DATA_DIR": str(folder), "TOKENIZER": str(folder / "tokenizer.json")}


@pytest.fixture(scope="session")
def alone(shared, data):
    """A run of one process and STEPS."""
    trial = Trial(shared / "alone", data, **STEPS)
    make_once(trial.folder, trial.train)
    return trial


@pytest.fixture(scope="session")
def pair(shared, data):
    """A run of two processes and STEPS."""
    trial = Trial(shared / "pair", data, **STEPS, NPROC=2)
    make_once(trial.folder, trial.train)
    return trial


@pytest.fixture
def trial(tmp_path, data):
    """A run of STEPS in the test's folder."""
    with contextlib.closing(Trial(tmp_path, data, **STEPS)) as trial:
        yield trial
