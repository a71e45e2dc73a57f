"""Logs made of text, read; real logs of other trainers beside the repository; and runs of this repository."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.logs.runs import Log, read_log
from tests.conftest import SHARED

START = 1763719200.0  # 2025-11-21 10:00:00 UTC

Read = Callable[[str | bytes], Log]
Real = Callable[[str], Path]


@pytest.fixture
def real() -> Real:
    """The path of a real log; skips where there is none."""

    def find(name: str) -> Path:
        path = SHARED / "logs" / name
        if not path.exists():
            pytest.skip(f"no {name} beside the repository (shared/data/logs)")
        return path

    return find


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """What a log of this text has."""

    def take(text: str | bytes) -> Log:
        path = tmp_path / "some.log"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_log(path)

    return take


def write_record(
    folder: Path, records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] | None = None
) -> Path:
    """A run folder with these records, a second apart, and one that a kill cut short."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"schema": 1, "time": START + i, **record} for i, record in enumerate(records)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"schema": 1, "event": "st')
    if settings:
        (folder / "config.json").write_text(json.dumps({"settings": settings}))
    return folder
