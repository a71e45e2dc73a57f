"""make data DATA=...: shards of text of one's own, without a declaration, and the settings of such a run."""

import gzip
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plan import data_wanted
from settings import SettingsError, load_config, load_preset
from settings.config import SETTINGS
from settings.finding import FAIL, WARN
from tests.faults.hub import Repository, hub
from tests.running import ROOT
from train.data import prepare
from train.data.data_paths import fit_vocabulary, source_of
from train.data.sources.source import CorpusError


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("~/My Novels.txt", "my-novels"),
        ("texts/", "texts"),
        ("papers.jsonl.gz#body", "papers"),
        ("my/Texts/**/*.jsonl.gz", "texts"),
        ("texts/part-*.jsonl", "part"),
        ("hf:roneneldan/TinyStories", "tinystories"),
        ("hf:a/Wiki_40B:en:train#text", "wiki-40b"),
        ("/data/日本語", "data"),
        (f"{'long ' * 20}.txt", "long-long-long-long-long-long-long-long"),
    ],
)
def test_a_run_is_named_after_its_data(data, name):
    config = load_preset(PRESET="tiny", DATA=data)
    assert (config.run_name, config.mixture) == (f"tiny-{name}", {name: 1})
    assert load_preset(PRESET="tiny", DATA=data, RUN_NAME="mine").run_name == "mine"
    source = source_of(config, name)
    assert source.place and source.name == name
    assert load_preset(DATA="papers/").data == "papers"  # as a shell completes it


def test_data_is_of_fine_tuning_with_a_model_and_never_beside_a_mixture():
    for settings in ({"MODEL": "m"}, {"PRESET": "finetune"}):
        config = load_preset(**{"PRESET": "tiny", "DATA": "chats.jsonl"} | settings)
        assert not config.pretrains_on_data
        assert config.run_name == config.preset
    with pytest.raises(SettingsError, match=r"DATA_MIX \(environment\): .* together with DATA\."):
        load_preset(DATA="a.txt", DATA_MIX="usmle:1")


@pytest.fixture
def make(tmp_path, caplog):
    """Prepares the shards of a run on this data: its exit code, what it says, and its settings."""

    def make(data, **more):
        caplog.clear()
        settings = {"DATA": str(data), "DATA_DIR": str(tmp_path / "data"), "VOCAB_SIZE": "300"}
        config = load_preset(**settings | more)
        with caplog.at_level(logging.INFO):
            code = prepare.exit_code(lambda: prepare.prepare(config, whole=True))
        return code, caplog.text, config

    return make


def shards_of(config):
    (shards,) = prepare.open_sources(config, prepare.vocabulary(config)).values()
    return shards


def test_a_folder_of_text_becomes_shards_with_some_held_out(tmp_path, make):
    texts = tmp_path / "Notes"
    texts.mkdir()
    for number in range(60):
        lines = [f"note {number}, line {line}\n" for line in range(40)]
        (texts / f"{number}.md").write_text("".join(lines))
    code, said, config = make(texts, TRAIN_TOKENS="100000")
    assert code == 0, said
    shards = shards_of(config)
    total = sum(path.stat().st_size for path in texts.iterdir())
    held_out = shards.total("validation", "text_bytes")
    assert shards.total("train", "text_bytes") + held_out == total
    assert 0 < held_out < total / 5 and shards.manifest.source == "notes"
    assert not (ROOT / "sources" / "notes.toml").exists()


@pytest.mark.fault(12)
def test_a_data_set_of_the_hub_is_fetched_by_its_name(tmp_path):
    rows = [{"id": str(n), "story": f"Once there were {n} trees.\n" * 20} for n in range(900)]
    content = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0)
    (tmp_path / "empty.env").touch()
    settings = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "ENV_FILE": str(tmp_path / "empty.env"),
        "DATA": "hf:a/Late#story",
        "DATA_DIR": str(tmp_path / "data"),
        "VOCAB_SIZE": "300",
        "TRAIN_TOKENS": "100000",
    }
    late = Repository({"train.jsonl.gz": content}, "500 file", 1)
    with hub(repositories={"a/Late": late}) as server:
        done = subprocess.run(
            [sys.executable, "-m", "train.data.prepare", "data"],
            cwd=ROOT,
            env=settings | server.environment(tmp_path),
            text=True,
            capture_output=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert " tokens to train on, " in done.stdout


def test_a_text_of_few_words_shrinks_the_vocabulary_that_the_preset_chose(
    tmp_path, monkeypatch, caplog
):
    path = tmp_path / "few.txt"
    path.write_text("".join(f"line {n % 100} of few words\n\n" for n in range(9000)))
    settings = {"DATA": str(path), "DATA_DIR": str(tmp_path / "data"), "PRESET": "tiny"}
    (tmp_path / "none.env").write_text("")
    more = {"ENV_FILE": str(tmp_path / "none.env"), "TRAIN_TOKENS": "1M"}
    for name in os.environ.keys() & SETTINGS.keys():
        monkeypatch.delenv(name)
    for name, value in (settings | more).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        assert prepare.main(["data"]) == 0
    assert caplog.text.count("few different words: VOCAB_SIZE=") == 1
    config = fit_vocabulary(load_config())
    size = prepare.vocabulary(config).size
    assert config.vocab_size == size < load_config().vocab_size == 4096
    assert data_wanted.epochs(config)[0].counted and shards_of(config).ended
    monkeypatch.setenv("VOCAB_SIZE", "4096")
    assert prepare.main(["data"]) == 78 and f"set VOCAB_SIZE={size}" in caplog.text
    assert fit_vocabulary(load_config()).vocab_size == 4096
    monkeypatch.setenv("VOCAB_SIZE", str(size))
    assert prepare.main(["data"]) == 0


def test_the_plan_says_what_data_is_before_how_often_it_would_be_repeated(tmp_path):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat) + "\n")
    with pytest.raises(CorpusError, match="They are for fine-tuning"):
        data_wanted.epochs(load_preset(DATA=str(path), DATA_DIR=str(tmp_path)))


def test_text_that_is_repeated_too_often_is_refused_with_its_size(tmp_path, make):
    path = tmp_path / "short.txt"
    path.write_text("".join(f"line {n}\n" for n in range(4000)))
    code, said, _ = make(path, TRAIN_TOKENS="5M")
    assert code == 78
    assert re.search(r"short is repeated \S+ times: 5M tokens are wanted, and it has ", said)
    fits = re.search(
        r"Use at least 78,[0-9]+ tokens of text, or set TRAIN_TOKENS=(\d+) or less\.", said
    )
    assert fits
    assert make(path, TRAIN_TOKENS=fits[1])[0] == 0


def test_the_plan_refuses_what_is_repeated_too_often_and_counts_what_is_read(
    tmp_path,
):
    texts = tmp_path / "texts"
    (texts / ".git").mkdir(parents=True)
    (texts / ".git" / "pack").write_bytes(b"x" * 10**7)
    (texts / "figure.png").write_bytes(b"\0" * 10**7)
    (texts / "essay.txt").write_text("word " * 11_400)
    settings = {"PRESET": "tiny", "DATA": str(texts), "DATA_DIR": str(tmp_path / "data")}
    c = load_preset(**settings)
    (found,) = data_wanted.epochs(c)
    assert found.there_tokens == pytest.approx(0.95 * 57_000 / 3.5, rel=0.01)
    (finding,) = data_wanted.findings(c, [found])
    assert finding.level == FAIL
    fits = re.search(r"The limit is 64 times: .* set TRAIN_TOKENS=(\d+) or less\.", finding.fix)
    assert fits
    less = load_preset(**settings, TRAIN_TOKENS=fits[1])
    assert data_wanted.findings(less, data_wanted.epochs(less))[0].level == WARN


def test_of_little_text_one_document_is_held_out_if_there_are_two(tmp_path, make):
    path = tmp_path / "few.jsonl"
    texts = [f"{n}: {Path(__file__).read_text()}" for n in range(3)]  # the hash holds out none
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 2))
    for _ in range(2):
        code, said, config = make(path, TRAIN_TOKENS="20000", WARMUP_TOKENS="0")
        assert code == 0, said
    shards = shards_of(config)
    assert shards.total("train", "documents") == 4
    assert shards.total("validation", "documents") == 2  # equal ones are held out together
    path.write_text((json.dumps({"text": "the same " * 200}) + "\n") * 600)
    code, said, _ = make(path)
    assert code == 78 and "Has only one document, or all are equal. One must be held out." in said
