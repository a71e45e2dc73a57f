"""A manifest that is not as it was written is refused."""

import json
import math

import pytest

from tests.train.checkpoint.test_checkpoint import save, trained
from train.checkpoint import manifest
from train.checkpoint.manifest import OtherFormat

STATES = {  # as train/checkpoint/resume.py has them
    "tokens": 1536,
    "evaluated_at": 3,
    "val_loss": math.nan,
    "core_at": 0,
    "data": {
        "step": 3,
        "gaps": [(2, 16)],
        "fingerprint": "0123-4567-89ab",
        "opened": {"text": {"shards": 2, "digest": "abcdef", "round": False}},
    },
    "guard": {"loss": [6.25, 5e-07], "skips": 0},
    "sites": {"exchanges": 1, "turn": 2, "base": 0, "finished": -1},
}


@pytest.fixture
def folder(tiny, tmp_path):
    return save(tmp_path, 3, *trained(tiny, 1), STATES)[0]


def flipped(content):
    """A content with each of its bits flipped in turn."""
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        yield bytes(changed)


def parse(content):
    """What a manifest holds; None if it is refused."""
    try:
        return manifest.parse_manifest(content, "step_0000003")
    except (OtherFormat, *manifest.DAMAGE):
        return None


def test_every_flipped_bit_of_a_manifest_is_noticed_or_changes_nothing(folder):
    content = (folder / "MANIFEST.json").read_bytes()
    written = repr(parse(content))
    assert "nan" in written and "[2, 16]" in written
    passed = [found for changed in flipped(content) if (found := parse(changed)) is not None]
    assert {repr(found) for found in passed} <= {written}
    assert len(passed) < 10  # such as 5e-07 and 5E-07


def test_a_manifest_without_a_hash_is_damaged(folder):
    states = json.loads((folder / "MANIFEST.json").read_bytes())
    del states["hash"]
    for schema in (1, 2, 3):
        assert parse(json.dumps(states | {"schema": schema}).encode()) is None
