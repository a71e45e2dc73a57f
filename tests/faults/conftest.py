"""What the tests of faults share: runs that nothing happened to, made once for all."""

import contextlib
import fcntl
import os

import pytest

from tests.conftest import make_data
from tests.running import ROOT, environment, train

LAUNCH = [str(ROOT / "scripts" / "launch.sh")]
STEPS = {"MAX_STEPS": 24, "SAVE_EVERY": 8, "EVAL_TOKENS": 256, "SAMPLE_TOKENS": 0}


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder for all processes that test at the same time."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def made_once(folder):
    """Whether the caller is to fill this folder; the others wait until it has."""
    folder.mkdir(exist_ok=True)
    with open(folder / ".making", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not (folder / ".made").exists()
        (folder / ".made").touch()


@pytest.fixture(scope="session")
def data(shared):
    """Settings that find a DATA_DIR for TINY. Do not write to it."""
    folder = shared / "data"
    with made_once(folder) as mine:
        if mine:
            make_data(folder / "tiny")
    return {"DATA_DIR": str(folder / "tiny"), "TOKENIZER": str(folder / "tiny" / "tokenizer.json")}


def reference(folder, data, nproc):
    with made_once(folder) as mine:
        if mine:
            train(environment(folder, data, NPROC=nproc, **STEPS), command=LAUNCH)
    return folder / "run"


@pytest.fixture(scope="session")
def alone(shared, data):
    """A run of one process and STEPS."""
    return reference(shared / "alone", data, 1)


@pytest.fixture(scope="session")
def pair(shared, data):
    """A run of two processes and STEPS."""
    return reference(shared / "pair", data, 2)
