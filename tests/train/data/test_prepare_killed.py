"""train/data/prepare.py when it is killed, finds the disk full, or meets another: the same bytes in the end."""

import dataclasses
import fcntl
import itertools
import logging
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from settings.config import Config
from tests.killing import killed_at
from tests.train.data.test_prepare import config, content, declare_papers, opened
from train.data import data_paths, prepare
from train.data.manifest import DataError

__all__ = ["config"]  # a fixture


def whole(c: Config) -> dict[str, bytes]:
    """The content without half a pin or tokenizer, which are a few bytes and in nobody's way."""
    return {name: data for name, data in content(c).items() if ".tmp-" not in name}


@pytest.mark.slow
def test_a_prepare_that_is_killed_at_any_write_ends_with_the_same_bytes(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins, tokenizer, shards of two sources, manifests, and what the compressors need."""
    declare_papers(config, "notes", seed=13, compressors=True)
    c = dataclasses.replace(config, data_mix="papers:3,notes:1")
    monkeypatch.setattr(data_paths, "SHARD_TOKENS", 3000)
    prepare.prepare(c)
    undisturbed, differing = content(c), []
    assert sum(name.endswith(".bin") for name in undisturbed) > 4
    for point in itertools.count():
        other = dataclasses.replace(c, data_dir=str(tmp_path / f"killed {point}"))
        if not killed_at(point, partial(prepare.prepare, other)):
            break
        prepare.prepare(other)
        if whole(other) != undisturbed:
            differing.append(point)
    assert differing == []
    assert point > 4 * len(undisturbed)


def test_a_prepare_that_is_killed_again_and_again_ends_with_the_same_bytes(
    config: Config, tmp_path: Path
) -> None:
    prepare.prepare(config)
    other = dataclasses.replace(config, data_dir=str(tmp_path / "killed"))
    attempts = next(
        attempt for attempt in range(100) if not killed_at(29, partial(prepare.prepare, other))
    )
    assert attempts >= 3
    assert whole(other) == content(config)


def outcome(c: Config) -> str:
    """What prepare refuses, or nothing."""
    try:
        prepare.prepare(c)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.fault(7)
def test_a_full_disk_is_said_at_any_write_and_room_lets_it_go_on(
    config: Config, tmp_path: Path
) -> None:
    prepare.prepare(config)
    for room in itertools.count():
        other = dataclasses.replace(config, data_dir=str(tmp_path / f"full {room}"))
        calls = [0]

        def full(_: int, calls: list[int] = calls, room: int = room) -> None:
            calls[0] += 1
            if calls[0] > room:
                raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", full)
            said = outcome(other)
        if not said:
            break
        assert (
            said
            == f"{other.data_dir}: cannot be written (No space left on device); choose another folder with "
            "DATA_DIR, or make room"
        )
        prepare.prepare(other)
        assert content(other) == content(config)
    assert room > 10


# ---- One at a time


def waits(c: Config, held: Path, caplog: pytest.LogCaptureFixture) -> dict[str, bytes]:
    """What a prepare makes while another holds that folder; it goes on to its end when that lets go."""
    caplog.set_level(logging.INFO)
    held.mkdir(parents=True, exist_ok=True)
    second = threading.Thread(target=prepare.prepare, args=(c,))
    with open(held / ".lock", "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second.start()
        deadline = time.monotonic() + 20
        while f"another process prepares data in {held}; waiting for it" not in caplog.messages:
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.01)
        time.sleep(0.1)
        found = content(c)
    second.join(30)
    assert not second.is_alive()
    assert opened(c).manifest["end"] == "all"
    return found


def test_pins_and_tokenizer_wait_for_whoever_holds_the_folder(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    assert waits(config, Path(config.data_dir), caplog) == {}


def test_shards_wait_for_whoever_makes_them_and_nothing_else_does(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    found = waits(config, Path(config.data_dir) / "papers", caplog)
    assert len(found) == 3 and not [
        name for name in found if "manifest" in name or name.endswith(".bin")
    ]
