"""Real logs of other trainers, beside the repository; and logs made of text, read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.logs.attempts import LoggedRun
from analysis.logs.dialect import read_dialects
from analysis.logs.log_runs import Log, read_log
from tests.conftest import SHARED

DIALECTS = read_dialects()
LOGS = SHARED / "logs"


@pytest.fixture
def real() -> Callable[[str], Path]:
    """The path of a real log; skips where there is none."""

    def find(name: str) -> Path:
        if not (LOGS / name).is_file():
            pytest.skip(f"no {name} beside the repository (shared/data/logs)")
        return LOGS / name

    return find


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str | bytes], Log]:
    """What is found in a log of this text."""

    def taken(text: str | bytes) -> Log:
        path = tmp_path / "some.log"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_log(path, DIALECTS)

    return taken


def column(run: LoggedRun, name: str) -> list[float]:
    return [float(v) for v in run.columns[name]]
