"""A tokenizer by the name of its repository: fetched once, by the rules by which data are fetched."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.faults.hub import Repository, hub

FETCH = """
import json, sys
from pathlib import Path
from train.data import tokenizer
from train.data.sources import hub

hub.FIRST_PAUSE_S = 0.01
hub.TRIES = 4
found = {}
for name in json.loads(sys.argv[2]):
    target = Path(sys.argv[1]) / name / "tokenizer.json"
    try:
        found[name] = [tokenizer.from_hub(name, "", target).sha256, tokenizer.from_hub(name, "", target).sha256]
    except tokenizer.TokenizerError as error:
        found[name] = [str(error), target.exists()]
print(json.dumps(found))
"""


@pytest.mark.fault(12)
def test_a_tokenizer_is_fetched_once_and_refused_with_the_remedy(
    tmp_path: Path, data: dict[str, str]
) -> None:
    """By the rules by which data are fetched."""
    content = Path(data["TOKENIZER"]).read_bytes()
    served = {
        "a/good": Repository({"tokenizer.json": content}, "500 file", 2),
        "a/refused": Repository({"tokenizer.json": content}, "403 file"),
        "a/broken": Repository({"tokenizer.json": b'{"model": '}),
    }
    with hub(repositories=served) as server:
        found, _ = server.run(tmp_path, FETCH, tmp_path, json.dumps([*served, "a/absent"]))
    assert found["a/good"] == [hashlib.sha256(content).hexdigest()] * 2
    asked = [line for line in served["a/good"].requests if line.startswith("GET ")]
    assert len(asked) == 3
    for name in ("a/refused", "a/absent"):
        said, there = found[name]
        assert f"TOKENIZER={name}: neither a file here nor to be had from the hub: " in said
        assert f"https://huggingface.co/{name}" in said and "HF_TOKEN" in said
        assert said.endswith("or give the path of a tokenizer.json") and not there
    assert "not a tokenizer.json (10 bytes" in found["a/broken"][0] and not found["a/broken"][1]
