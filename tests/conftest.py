"""What tests share: a tiny recipe, and token shards of it that need no corpus."""

import argparse
import dataclasses
import faulthandler
import os
import random
import signal
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from hardware import ports
from settings.config import SETTINGS, Config
from tests.shard_folder import write_source
from train.data import tokenizer
from train.data.sources.pin import pin

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"

# Settings of a model that trains in milliseconds, as a subprocess is given them: all that shapes
# a run in presets/tiny.env has a value here, so that no test depends on the preset, nor on the
# processor that it chooses a precision for.
TINY = {
    "DTYPE": "float32",
    "DATA_MIX": "python-stdlib:1",
    "VOCAB_SIZE": "512",
    "N_LAYER": "2",
    "N_HEAD": "2",
    "N_EMBD": "32",
    "QK_NORM": "0",
    "OPTIMIZER": "adamw",
    "SEQ_LEN": "32",
    "BATCH_TOKENS": "512",
    "MICRO_BATCH_SIZE": "4",
    "TRAIN_TOKENS": "20480",
    "WARMUP_TOKENS": "2048",
    "LEARNING_RATE": "3e-3",
    "MIN_LEARNING_RATE": "3e-4",
    "EVAL_TOKENS": "512",
    "SAMPLE_TOKENS": "8",
    "LOG_EVERY": "5",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=parse_part, metavar="I/N", help="run part I of N (from 1) of the tests"
    )


def parse_part(text: str) -> tuple[int, int]:
    """Return I and N of "I/N"."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"--part={text} must be I/N with I from 1 to N, as in 2/4")
    return int(part), int(parts)


def pytest_configure(config: pytest.Config) -> None:
    # What is started in the background of a shell ignores these from birth, and so would all that
    # the tests start.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    # Each of pytest's workers, up to 8, has ports of its own: another could take what one has found
    # before the process that it is for listens.
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        share = len(ports.RANGE) // 8
        ports.RANGE = ports.RANGE[share * (int(worker.removeprefix("gw")) % 8) :][:share]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts than --part."""
    if not config.getoption("part"):
        return
    part, parts = config.getoption("part")
    others = [item for item in items if part_of(item.nodeid, parts) != part]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


def part_of(nodeid: str, parts: int) -> int:
    """Return the part of a test, from 1: the same on every machine, and for all its parameters."""
    function = nodeid.partition("[")[0]
    return zlib.crc32(function.encode()) % parts + 1


@pytest.fixture(autouse=True)
def _signal_handlers_end_with_the_test() -> Iterator[None]:
    """Take back the handlers of a command that a test ran in this process.

    A handler of `make upload` swallowed the Ctrl-C of a test of `make logs`, 400 tests later.
    """
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a test with a time limit of its own, by its mark, as long for a hang in C code."""
    if limit := item.get_closest_marker("timeout"):
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        seconds = limit.args[0] if limit.args else limit.kwargs["timeout"]
        faulthandler.dump_traceback_later(seconds + 20, exit=True, file=stderr)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let pytest's workers test whole files, and not repeat a test that has ended its worker."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            for tests in self.assigned_work[node].values():
                for nodeid, completed in tests.items():
                    if not completed:
                        tests[nodeid] = True  # else it would be given to the next worker
                        super().remove_node(node)
                        return nodeid
            return super().remove_node(node)

    return Scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """What a test draws without a generator of its own is the same each time, whichever tests ran before it."""
    random.seed(20)
    np.random.seed(20)  # libraries draw from it
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test, or what it calls, adds to the environment is not there for the next one."""
    before = dict(os.environ)
    yield
    before["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def same_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTYPE=auto, as the default preset has it, is the same whatever processor runs the tests."""
    monkeypatch.setattr("settings.config.choose_dtype", lambda device: "float32")


@pytest.fixture
def tiny() -> Config:
    """The recipe of TINY."""
    values = {name.lower(): SETTINGS[name].parse(value) for name, value in TINY.items()}
    return dataclasses.replace(Config(), **values).derived()


def make_data(folder: Path, tokens: int = 20_000) -> dict[str, str]:
    """A DATA_DIR with random token shards of the default source; returns the settings that find it."""
    from train.data import prepare

    rng = np.random.default_rng(7)
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(400)]
    path = folder / "tokenizer.json"
    text = (" ".join(rng.choice(words, 200)) for _ in range(50))
    vocabulary = tokenizer.train(text, 512, path)
    settings = {
        "DATA_DIR": str(folder),
        "TOKENIZER": str(path),
    }
    c = dataclasses.replace(Config(), data_dir=str(folder), tokenizer=str(path), vocab_size=512)
    pinned = pin(prepare.source_of(c, "python-stdlib"), folder / "python-stdlib")
    shards = prepare.source_folder(c, "python-stdlib", vocabulary)
    lengths = vocabulary.byte_lengths()
    made = []
    for size in (tokens // 2, tokens // 3, 2000):
        ids = np.repeat(rng.integers(7, 512, -(-size // 2)), 2)[:size]  # pairs: something to learn
        made.append((ids, 3, int(lengths[ids].sum())))
    write_source(
        shards,
        made[:2],
        made[2:],
        vocabulary.sha256,
        512,
        source="python-stdlib",
        revision=pinned.revision,
        key=pinned.key,
    )
    return settings


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that find a DATA_DIR for TINY. Do not write to it."""
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on, nor on the next."""
    return ports.free_ports(2)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen]]:
    """Whatever is put in here is gone at the end of the test."""
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
