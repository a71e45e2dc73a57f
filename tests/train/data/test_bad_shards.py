"""Shards that cannot be trained on are named before training, in one sentence."""

import json

import pytest

from tests.conftest import make_data
from tests.running import environment, events, train


@pytest.mark.fault(10)
def test_a_flipped_bit_in_a_shard_is_found_before_it_is_trained_on(tmp_path):
    own = make_data(tmp_path / "data")
    shard = next((tmp_path / "data").rglob("train_00000.bin"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 4
    shard.write_bytes(content)
    out = train(environment(tmp_path, own), code=78)
    assert f"{shard}: damaged" in out
    assert events(tmp_path / "run", "step") == []


@pytest.mark.fault(27)
def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    own = make_data(tmp_path / "data")
    manifest = next((tmp_path / "data").rglob("manifest.json"))
    content = json.loads(manifest.read_text())
    content["seals"][0]["train"]["max_id"] = 600
    manifest.write_text(json.dumps(content))
    out = train(environment(tmp_path, own), code=78)
    assert "token id 600" in out
    assert "VOCAB_SIZE=512" in out
    assert "601" in out


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path, data):
    out = train(environment(tmp_path, data, VOCAB_SIZE=384), code=78)
    assert "512 entries" in out
    assert "VOCAB_SIZE=512" in out
