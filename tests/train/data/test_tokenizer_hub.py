"""A tokenizer by the name of its repository: fetched once, by the rules by which data are fetched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.hub import Repository, hub
from tests.running import ROOT

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
def test_a_tokenizer_is_fetched_once_asked_for_again_where_that_may_help_and_refused_with_the_remedy(
    tmp_path: Path, data: dict[str, str]
) -> None:
    from train.data import tokenizer

    path = Path(data["TOKENIZER"])
    manners = {
        "a/good": ("good", 0),
        "a/busy": ("500 file", 2),
        "a/refused": ("403 file", 1000),
        "a/page": ("page file", 1000),
        "a/broken": ("good", 0),
    }
    served = {
        name: Repository(
            {"tokenizer.json": path.read_bytes() if name != "a/broken" else b'{"model": '}, *manner
        )
        for name, manner in manners.items()
    }
    with hub(repositories=served) as server:
        out = subprocess.run(
            [sys.executable, "-c", FETCH, tmp_path, json.dumps([*served, "a/absent"])],
            cwd=ROOT,
            env=os.environ | server.environment(tmp_path),
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert out.returncode == 0, out.stderr
        found = json.loads(out.stdout)
        asked = {
            name: sum(line.startswith("GET ") for line in repository.requests)
            for name, repository in served.items()
        }
    sha256 = tokenizer.load(path).sha256
    assert found["a/good"] == found["a/busy"] == [sha256, sha256]
    assert (
        asked["a/good"] == 1
        and asked["a/busy"] == 3
        and asked["a/refused"] == 1
        and asked["a/page"] == 4
    )
    for name in ("a/refused", "a/page", "a/absent"):
        said, there = found[name]
        assert (
            said.startswith(f"TOKENIZER={name}: neither a file here nor to be had from the hub: ")
            and not there
        )
        assert said.endswith("or give the path of a tokenizer.json")
    assert (
        "https://huggingface.co/a/refused" in found["a/refused"][0]
        and "HF_TOKEN" in found["a/refused"][0]
    )
    assert "web page" in found["a/page"][0]
    assert "not a tokenizer.json (10 bytes" in found["a/broken"][0] and not found["a/broken"][1]
