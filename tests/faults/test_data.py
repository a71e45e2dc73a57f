"""Data and tokenizers that are not what they were: refused before a step is made, with the file and the remedy; and
texts that are unusual: kept, or counted as left out."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from record import metrics as record_reader
from settings.config import Config
from tests.conftest import make_data
from tests.faults.conftest import STEPS
from tests.running import ROOT, environment, train
from tests.shard_folder import write_source
from tests.train.data.test_prepare import stored_texts
from train.data import prepare, tokenizer

PAGE = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>".ljust(278)


def steps_made(folder):
    path = folder / "run" / "metrics.jsonl"
    return (
        sum(r["event"] == "step" for r in record_reader.read_records(path)) if path.exists() else 0
    )


@pytest.mark.fault(9, 11)
def test_a_shard_that_is_short_or_an_error_page_ends_the_run_before_it_begins(tmp_path):
    own = make_data(tmp_path / "data")
    shard = next((tmp_path / "data").rglob("train_00001.bin"))
    whole = shard.read_bytes()
    for content, words in (
        (whole[:-100], f"{len(whole) - 100} bytes, but the manifest says {len(whole)}"),
        (PAGE, "not a token shard (278 bytes, starts with b\"<?xml version='1.0'?\"; it looks"),
    ):
        shard.write_bytes(content)
        out = train(environment(tmp_path, own), code=78)
        assert f"{shard}: {words}" in out and f"delete {shard} and run: make data, with" in out
        assert "Traceback" not in out and steps_made(tmp_path) == 0


@pytest.mark.slow
@pytest.mark.fault(26)
def test_another_tokenizer_than_that_of_data_or_run_is_refused_by_its_hash(tmp_path):
    """Of the same size, so that nothing else would tell."""
    own = make_data(tmp_path / "data")
    env = environment(tmp_path, own, **STEPS | {"MAX_STEPS": 2})
    train(env)
    path, folder = Path(own["TOKENIZER"]), next((tmp_path / "data").rglob("manifest.json")).parent
    before = tokenizer.load(path).sha256
    text = (
        "".join(pair) for pair in np.random.default_rng(1).choice(list("abcdefghij"), (3000, 40))
    )
    after = tokenizer.train(text, 512, path).sha256
    out = train(env | {"MAX_STEPS": "4"}, code=78)
    assert (
        "make data" in out and steps_made(tmp_path) == 2
    )  # its shards have another folder, which is not there
    other = folder.parent / after[:12]
    folder.rename(other)
    out = train(env | {"MAX_STEPS": "4"}, code=78)
    assert (
        f"{other}: the shards are of tokenizer {before[:12]}, but TOKENIZER gives {after[:12]}"
        in out
    )
    shutil.rmtree(other)
    c = Config.load(env)
    make_shards(c)
    out = train(env | {"MAX_STEPS": "4"}, code=78)
    assert (
        "was trained on other data" in out
        and "The tokenizer, the shards in DATA_DIR" in out
        and "RUN_NAME" in out
    )
    assert before[:12] in out and after[:12] in out and steps_made(tmp_path) == 2


def make_shards(c):
    """Shards of the tokenizer that c names, beside those of another."""
    v = prepare.vocabulary(c)
    folder, name = prepare.source_folder(c, "python-stdlib", v), "python-stdlib"
    shard = (np.arange(4000) % 500, 1, 4000)
    write_source(folder, [shard], [shard], v.sha256, v.size, source=name)


# ---- Text that is given


def row(name, text):
    return json.dumps({"id": name, "text": text}).encode() + b"\n"


def papers(folder: Path, data: dict[str, str], *contents: bytes) -> dict[str, str]:
    """Settings of a source of these files, which is declared next to the data."""
    for name in ("papers", "data/sources"):
        (folder / name).mkdir(parents=True)
    for k, content in enumerate(contents):
        (folder / "papers" / f"{k}.jsonl").write_bytes(content)
    (folder / "data" / "sources" / "papers.toml").write_text(
        f'files = ["{folder}/papers/*"]\nvalidation_fraction = 0.2\nmax_epochs = "unlimited"\n'
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
    plain = [f"abcd {i}" for i in range(30)]
    c = Config.load(
        papers(tmp_path, data, b"".join(row(f"p{i}", t) for i, t in enumerate(plain + AWKWARD)))
    )
    prepare.prepare(c)
    texts = stored_texts(c, "train") + stored_texts(c, "validation")
    assert sorted(texts) == sorted(plain + AWKWARD)


def run_prepare(folder, env, script=""):
    """(exit code, what it said) of make data in a process of its own, with something done first."""
    script += "\nimport sys; from train.data import prepare; sys.exit(prepare.main(['data']))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(folder, {}) | env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=270,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.fault(29)
def test_a_document_of_50_mb_without_a_blank_takes_bounded_memory(tmp_path, data):
    script = (
        "import resource, torch, numpy, pyarrow; from train.data import prepare\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30,) * 2)"
    )
    rows = [
        *(row(f"p{i}", f"abcd {i}") for i in range(30)),
        row("huge", "abcdefgh" * (50 * 2**20 // 8)),
    ]
    code, out = run_prepare(tmp_path, papers(tmp_path, data, b"".join(rows)), script)
    assert code == 0, out
    assert "source papers: 31 documents" in out
