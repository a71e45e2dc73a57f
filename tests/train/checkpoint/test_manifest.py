"""A manifest that is not as it was written is refused."""

import json
import math

import pytest

from tests.train.checkpoint.test_checkpoint import save, trained
from tests.train.checkpoint.test_find import make
from tests.train.making import ALONE
from train.checkpoint import find, manifest
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
    "sites": {"exchanges": 1, "turn": 2, "base": 0, "finished": -1, "away": [[1, 2]]},
    "run": {"id": "0a1b", "attempt": "2c3d", "settings": {"SEED": 1}},
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


FORMS = {
    "step": [3.0, True, "3", None],
    "data": [None, [], 5],
    "data.step": [2, 3.0, None],
    "data.fingerprint": [None, 5],
    "data.gaps": [None, {"a": 1}, [2], [[2]], [[2, "x"]], [[2, 16, 1]]],
    "data.opened": [None, [], {"text": 5}, {"text": {"shards": 2, "digest": 5, "round": False}}],
    "evaluated_at": [None, 2.5],
    "core_at": ["a"],
    "val_loss": ["2.5", []],
    "mode": ["lite", 5],
    "tensors": ["many"],
    "moments": [False],
    "guard": ["text", [], None],
    "guard.loss": [5, "text", ["a"], [None]],
    "guard.skips": ["a", None],
    "sites": [5, "text", [], {}, None],
    "sites.away": [None, 5, [1]],
    "sites.finished": [None],
    "run": ["text", [], {}, None],
    "run.settings": [None, []],
}
MISSING = (
    "step",
    "data",
    "data.step",
    "data.fingerprint",
    "data.gaps",
    "data.opened",
    "run.id",
    "run.attempt",
)


def reseal(folder, change):
    """Change what a manifest says, and give it the hash of that."""
    content = manifest.load_manifest(folder)
    change(content)
    (folder / "MANIFEST.json").write_bytes(manifest.seal_manifest(content))


@pytest.mark.fault(14)
@pytest.mark.parametrize("name", [*FORMS, *MISSING])
def test_a_resealed_manifest_is_set_aside_unless_it_has_the_form_of_what_a_resume_reads(
    tmp_path, name, caplog
):
    states = {key: value for key, value in STATES.items() if key != "data"}
    make(tmp_path, 2)
    *parents, last = name.split(".")
    values = FORMS.get(name, [])
    for value in [*values, KeyError] if name in MISSING else values:

        def change(content, value=value):
            for parent in parents:
                content = content[parent]
            if value is KeyError:
                del content[last]
            else:
                content[last] = value

        folder = make(tmp_path, 3, **states)
        manifest.verify(folder)
        reseal(folder, change)
        assert find.latest_for_all(tmp_path, ALONE)[0].name == "step_0000002", value
        assert find.committed(tmp_path) == [2]
        assert "step_0000003: MANIFEST.json is missing or damaged (it" in caplog.text
