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

from tests.killing import killed_at
from tests.train.data.test_prepare import config, content, declare_papers, opened
from train.data import data_paths, prepare
from train.data.manifest import DataError

__all__ = ["config"]  # a fixture


def whole(c):
    """The content without half a pin or tokenizer, which are a few bytes and in nobody's way."""
    return {name: data for name, data in content(c).items() if ".tmp-" not in name}


@pytest.mark.slow
def test_a_prepare_that_is_killed_at_any_write_ends_with_the_same_bytes(
    config, tmp_path, monkeypatch
):
    """Pins, tokenizer, shards of two sources, manifests, and what the compressors need."""
    declare_papers(config, "notes", seed=13, compressors=True)
    c = dataclasses.replace(config, data_mix="papers:3,notes:1")
    monkeypatch.setattr(data_paths, "SHARD_TOKENS", 3000)
    prepare.prepare(c)
    undisturbed = content(c)
    for point in itertools.count():
        other = dataclasses.replace(c, data_dir=str(tmp_path / f"killed {point}"))
        if not killed_at(point, partial(prepare.prepare, other)):
            break
        prepare.prepare(other)
        assert whole(other) == undisturbed, point
    assert point > 4 * len(undisturbed) > 40


@pytest.mark.fault(7)
def test_a_full_disk_is_said_at_any_write_and_room_lets_it_go_on(config, tmp_path, monkeypatch):
    prepare.prepare(config)
    for room in itertools.count():
        other = dataclasses.replace(config, data_dir=str(tmp_path / f"full {room}"))
        calls = itertools.count()

        def full(_, calls=calls, room=room):
            if next(calls) >= room:
                raise OSError(28, "No space left on device")

        said = ""
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", full)
                prepare.prepare(other)
        except DataError as error:
            said = str(error)
        if not said:
            break
        assert said == (
            f"{other.data_dir}: cannot be written (No space left on device); choose another folder "
            "with DATA_DIR, or make room"
        )
        prepare.prepare(other)
        assert content(other) == content(config)
    assert room > 10


@pytest.mark.parametrize(("held", "files"), [("", 0), ("papers", 3)])
def test_whoever_prepares_waits_for_another_that_does(config, caplog, held, files):
    """For pins and tokenizer in DATA_DIR, for shards in the source's folder; it goes on when that lets go."""
    caplog.set_level(logging.INFO)
    folder = Path(config.data_dir, held)
    folder.mkdir(parents=True)
    second = threading.Thread(target=prepare.prepare, args=(config,))
    with open(folder / ".lock", "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second.start()
        deadline = time.monotonic() + 20
        while f"another process prepares data in {folder}; waiting for it" not in caplog.messages:
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.01)
        time.sleep(0.1)
        found = content(config)
        assert len(found) == files and not any(name.endswith(".bin") for name in found)
    second.join(30)
    assert opened(config).manifest.end == "all"
