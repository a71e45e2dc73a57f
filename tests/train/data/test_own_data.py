"""make data DATA=...: shards of text of one's own, without a declaration, and the settings of such a run."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plan import data_wanted
from settings import SettingsError
from settings.config import Config
from settings.finding import FAIL, WARN
from tests.faults.hub import Repository, hub
from tests.running import ROOT
from train.data import prepare
from train.data.data_paths import source_of


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
def test_a_run_is_named_after_its_data(data: str, name: str) -> None:
    config = Config.of_preset(PRESET="tiny", DATA=data)
    assert (config.run_name, config.mixture) == (f"tiny-{name}", {name: 1})
    assert Config.of_preset(PRESET="tiny", DATA=data, RUN_NAME="mine").run_name == "mine"
    source = source_of(config, name)
    assert source.place and source.name == name
    assert Config.of_preset(DATA="papers/").data == "papers"  # as a shell completes it


def test_data_of_fine_tuning_is_no_source_of_pretraining() -> None:
    for settings in ({"MODEL": "m"}, {"PRESET": "finetune"}):
        config = Config.of_preset(**{"PRESET": "tiny", "DATA": "chats.jsonl"} | settings)
        assert not config.pretrains_on_data
        assert config.run_name == config.preset


def test_data_and_a_mixture_are_refused_together() -> None:
    with pytest.raises(SettingsError, match=r"DATA_MIX \(environment\): .* together with DATA\."):
        Config.of_preset(DATA="a.txt", DATA_MIX="usmle:1")


def prepare_data(folder: Path, data: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Prepare the shards of a run on this data in a process of its own."""
    settings = {"DATA": data, "DATA_DIR": str(folder / "data"), "VOCAB_SIZE": "300"}
    (folder / "empty.env").touch()
    return subprocess.run(
        [sys.executable, "-m", "train.data.prepare", "data"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "ENV_FILE": str(folder / "empty.env")}
        | settings
        | more,
        text=True,
        capture_output=True,
        check=False,
    )


def test_a_folder_of_text_becomes_shards_with_some_held_out(tmp_path: Path) -> None:
    texts = tmp_path / "Notes"
    texts.mkdir()
    for number in range(60):
        lines = [f"note {number}, line {line}\n" for line in range(40)]
        (texts / f"{number}.md").write_text("".join(lines))
    done = prepare_data(tmp_path, str(texts), TRAIN_TOKENS="100000")
    assert done.returncode == 0, done.stderr
    c = Config.of_preset(DATA=str(texts), DATA_DIR=str(tmp_path / "data"), VOCAB_SIZE="300")
    (shards,) = prepare.open_sources(c, prepare.vocabulary(c)).values()
    total = sum(path.stat().st_size for path in texts.iterdir())
    held_out = shards.total("validation", "text_bytes")
    assert shards.total("train", "text_bytes") + held_out == total
    assert 0 < held_out < total / 5
    manifest = json.loads((shards.folder / "manifest.json").read_text())
    assert manifest["source"] == "notes"
    (pin,) = (tmp_path / "data" / "notes").glob("pin-*.json")
    files = json.loads(pin.read_text())["files"]
    assert [(Path(name).name, size) for name, size, _ in files] == [
        (path.name, path.stat().st_size) for path in sorted(texts.iterdir())
    ]
    assert not (ROOT / "sources" / "notes.toml").exists()


@pytest.mark.fault(12)
def test_a_data_set_of_the_hub_is_fetched_by_its_name(tmp_path: Path) -> None:
    rows = [{"id": str(n), "story": f"Once there were {n} trees.\n" * 20} for n in range(900)]
    content = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0)
    files = {"train.jsonl.gz": content}
    repositories = {
        "a/Stories": Repository(files),
        "a/Late": Repository(files, "500 file", 1),
        "a/Closed": Repository(files, "401 about"),
    }
    with hub(repositories=repositories) as server:
        results = {
            name: prepare_data(
                tmp_path, f"hf:{name}#story", TRAIN_TOKENS="100000", **server.environment(tmp_path)
            )
            for name in repositories
        }
    for name in ("a/Stories", "a/Late"):
        assert results[name].returncode == 0, results[name].stderr
        assert " tokens to train on, " in results[name].stdout
    closed = results["a/Closed"]
    assert closed.returncode == 78
    assert "HF_TOKEN" in closed.stdout + closed.stderr
    assert "Traceback" not in closed.stderr


def test_text_that_is_repeated_too_often_is_refused_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("".join(f"line {n}\n" for n in range(4000)))
    done = prepare_data(tmp_path, str(path), TRAIN_TOKENS="5M")
    assert done.returncode == 78
    said = done.stderr + done.stdout
    assert re.search(
        r"short is repeated \S+ times: 5,001,216 tokens are wanted, and it has \S+", said
    )
    fits = re.search(r"Use more text, or set TRAIN_TOKENS=(\d+) or less\.", said)
    assert fits
    done = prepare_data(tmp_path, str(path), TRAIN_TOKENS=fits[1])
    assert done.returncode == 0


def test_the_plan_refuses_what_is_repeated_too_often_and_counts_what_is_read(
    tmp_path: Path,
) -> None:
    texts = tmp_path / "texts"
    (texts / ".git").mkdir(parents=True)
    (texts / ".git" / "pack").write_bytes(b"x" * 10**7)
    (texts / "figure.png").write_bytes(b"\0" * 10**7)
    (texts / "essay.txt").write_text("word " * 11_400)
    settings = {"PRESET": "tiny", "DATA": str(texts), "DATA_DIR": str(tmp_path / "data")}
    c = Config.of_preset(**settings)
    (found,) = data_wanted.epochs(c)
    assert found.there_tokens == pytest.approx(0.95 * 57_000 / 3.5, rel=0.01)
    (finding,) = data_wanted.findings(c, [found])
    assert finding.level == FAIL
    fits = re.search(r"The limit is 64 times: .* set TRAIN_TOKENS=(\d+) or less\.", finding.fix)
    assert fits
    less = Config.of_preset(**settings, TRAIN_TOKENS=fits[1])
    assert data_wanted.findings(less, data_wanted.epochs(less))[0].level == WARN


def test_of_little_text_one_document_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    texts = [f"{n}: {Path(__file__).read_text()}" for n in range(3)]  # the hash holds out none
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 2))
    for _ in range(2):
        done = prepare_data(tmp_path, str(path), TRAIN_TOKENS="20000", WARMUP_TOKENS="0")
        assert done.returncode == 0, done.stdout + done.stderr
    c = Config.of_preset(DATA=str(path), DATA_DIR=str(tmp_path / "data"), VOCAB_SIZE="300")
    (shards,) = prepare.open_sources(c, prepare.vocabulary(c)).values()
    assert shards.total("train", "documents") == 4
    assert shards.total("validation", "documents") == 2  # equal ones are held out together


def test_text_that_has_no_two_documents_is_refused_before_shards_are_made(tmp_path: Path) -> None:
    path = tmp_path / "same.jsonl"
    path.write_text(json.dumps({"text": "the same " * 200}) + "\n")
    path.write_text(path.read_text() * 600)
    done = prepare_data(tmp_path, str(path))
    assert done.returncode == 78
    assert "Has only one document, or all are equal. One must be held out." in (
        done.stdout + done.stderr
    )
    assert not list((tmp_path / "data").rglob("*.bin"))
