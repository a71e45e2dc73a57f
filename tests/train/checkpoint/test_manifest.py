"""A manifest that is not as it was written is refused; those without a hash are read."""

import json
import math
from operator import itemgetter

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


def test_a_manifest_of_schema_1_is_read_and_has_all_that_is_looked_up(folder, caplog):
    states = json.loads((folder / "MANIFEST.json").read_bytes())
    del states["hash"]
    content = json.dumps(states | {"schema": 1}, indent=1).encode()
    for changed in [content, *flipped(content)]:
        found = parse(changed)
        if found is None:
            assert changed != content
            continue
        itemgetter("files", "evaluated_at")(found)
        itemgetter("gaps", "fingerprint", "opened")(found["data"])
        assert found["step"] == found["data"]["step"] == 3
        itemgetter("exchanges", "turn", "base")(found.get("sites", STATES["sites"]))
        for shards in found["data"]["opened"].values():
            itemgetter("shards", "digest", "round")(shards)
    (folder / "MANIFEST.json").write_bytes(content)
    for _ in range(2):
        manifest.verify(folder)
    assert caplog.text.count("have no hash of their MANIFEST.json") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("guard", []),
        ("guard", {"loss": 5}),
        ("guard", {"grad_norm": ["a"]}),
        *(("data", STATES["data"] | {"gaps": gaps}) for gaps in (5, [[5]], [["a", 1]])),
    ],
)
def test_an_edited_manifest_of_schema_1_is_damaged(folder, key, value):
    states = json.loads((folder / "MANIFEST.json").read_bytes())
    del states["hash"]
    content = json.dumps(states | {"schema": 1, key: value}).encode()
    assert parse(content) is None
