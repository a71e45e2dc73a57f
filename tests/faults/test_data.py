"""Data and tokenizers that are not what they were: refused before a step is made, with the file and the remedy; and
texts that are unusual: kept, or counted as left out."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from settings import load_config
from tests import running
from tests.conftest import make_data
from tests.faults.trial import STEPS, Trial
from tests.shard_folder import write_source
from tests.train.data.test_prepare import stored_texts
from train.data import prepare, tokenizer


@pytest.mark.slow
@pytest.mark.fault(26)
def test_another_tokenizer_than_that_of_data_or_run_is_refused_by_its_hash(tmp_path):
    """Of the same size, so that nothing else would tell."""
    own = Trial(tmp_path, make_data(tmp_path / "data"), **STEPS)
    own.train(MAX_STEPS=2)
    path = Path(own.where["TOKENIZER"])
    folder = next((own.folder / "data").rglob("manifest.json")).parent
    before = tokenizer.load(path).sha256
    letters = np.random.default_rng(1).choice(list("abcdefghij"), (3000, 40))
    after = tokenizer.train(map("".join, letters), 512, path).sha256
    # Its shards have another folder, which is not there.
    assert "make data" in own.train(code=78)
    other = folder.parent / after[:12]
    folder.rename(other)
    words = f"{other}: the shards are of tokenizer {before[:12]}, but TOKENIZER gives {after[:12]}"
    assert words in own.train(code=78)
    shutil.rmtree(other)
    shard = (np.arange(4000) % 500, 1, 4000)
    write_source(other, [shard], [shard], after, 512, source="python-stdlib")
    out = own.train(code=78)
    for words in ("was trained on other data", "shards in DATA_DIR", "RUN_NAME", before[:12]):
        assert words in out
    assert after[:12] in out and len(own.steps) == 2


# ---- Text that is given


def papers(folder, data, texts):
    """Settings of a source of documents by name, which is declared next to the data."""
    rows = [json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()]
    (folder / "papers.jsonl").write_text("".join(rows))
    (folder / "data" / "sources").mkdir(parents=True)
    (folder / "data" / "sources" / "papers.toml").write_text(
        f'files = ["{folder}/papers.jsonl"]\nvalidation_fraction = 0.2\nmax_epochs = "unlimited"\n'
    )
    return {
        "DATA_MIX": "papers:1",
        "DATA_DIR": str(folder / "data"),
        "TOKENIZER": data["TOKENIZER"],
        "VOCAB_SIZE": "512",
    }


AWKWARD = [
    "\ufeffa mark at its head",
    "lines\r\nof\rtwo kinds\r\n",
    "naïve 日本語 \U0001f642",
    "\u202eright to left",
    "\x1b[31mred",
    " blanks at both ends \t",
]


@pytest.mark.fault(30)
def test_text_with_bom_and_carriage_returns_is_kept_to_the_byte(tmp_path, data):
    texts = [f"abcd {i}" for i in range(30)] + AWKWARD
    c = load_config(papers(tmp_path, data, dict(zip(map(str, range(36)), texts, strict=True))))
    prepare.prepare(c)
    stored = stored_texts(c, "train") + stored_texts(c, "validation")
    assert sorted(stored) == sorted(texts)


@pytest.mark.slow
@pytest.mark.fault(29)
def test_a_document_of_50_mb_without_a_blank_takes_bounded_memory(tmp_path, data):
    script = (
        "import resource, torch, numpy, pyarrow, sys; from train.data import prepare\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30,) * 2)\n"
        "sys.exit(prepare.main(['data']))"
    )
    texts = {f"p{i}": f"abcd {i}" for i in range(30)} | {"huge": "abcdefgh" * (50 * 2**20 // 8)}
    env = running.environment(tmp_path, papers(tmp_path, data, texts))
    out = running.train(env, command=[sys.executable, "-c", script])
    assert "source papers: 31 documents" in out
