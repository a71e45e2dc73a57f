"""train/data/prepare.py: what is damaged, missing or does not fit is refused in a sentence, and its remedy mends it."""

import dataclasses
import logging
import re
import shutil
from pathlib import Path

import pytest

from settings.config import Config
from tests.train.data.test_prepare import config, declare, declare_papers, opened, settings
from train.data import prepare
from train.data.manifest import DataError
from train.data.sources.source import CorpusError

__all__ = ["config"]  # a fixture


@pytest.mark.fault(10)
def test_all_that_is_damaged_is_named_by_verify_with_code_78(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bits, sizes, pages and what is not there, in both sources."""
    declare_papers(config, "notes", seed=13)
    c = dataclasses.replace(config, data_mix="papers:1,notes:1")
    settings(monkeypatch, c)
    caplog.set_level(logging.INFO)
    assert prepare.main([]) == 0
    assert prepare.main(["verify"]) == 0
    for name in c.mixture:
        count = len(list(opened(c, name).folder.glob("*.bin")))
        assert count > 5 and f"data: {name}: {count} shards, all hashes match" in caplog.messages
    papers, notes = opened(c, "papers").folder, opened(c, "notes").folder
    wrong = {
        papers / "train_00001.bin": "damaged",
        papers / "validation_00000.bin": "damaged",
        papers / "train_00002.bin": "bytes, but the manifest says",
        papers / "train_00003.bin": "cannot be read",
        notes / "train_00000.bin": "it looks like an error page",
    }
    for path, what in wrong.items():
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(
            {"d": whole, "b": whole[:-2], "c": whole, "i": b"<html>403</html>"}[what[0]]
        )
        if what == "cannot be read":
            path.unlink()
    caplog.clear()
    assert prepare.main(["verify"]) == 78
    (said,) = caplog.messages
    assert len(said.splitlines()) == len(wrong)
    for path, what in wrong.items():
        (line,) = [line for line in said.splitlines() if line.startswith(f"{path}: ")]
        assert what in line and "make data" in line
    for path in wrong:  # what the messages say
        path.unlink(missing_ok=True)
    assert prepare.main(["data"]) == 0 and prepare.main(["verify"]) == 0


def test_verify_refuses_what_training_would_though_every_byte_is_right(config: Config) -> None:
    prepare.prepare(config)
    path = next(Path(config.data_dir).rglob("tokenizer.json"))
    c = dataclasses.replace(config, tokenizer=str(path))
    prepare.verify(c)
    with pytest.raises(DataError, match="set VOCAB_SIZE=300"):
        prepare.verify(dataclasses.replace(c, vocab_size=256))


@pytest.mark.parametrize(
    ("environ", "argv", "code", "words"),
    [
        ({"DATA_MIX": "wiki:1"}, [], 78, "DATA_MIX names wiki, which is no source"),
        ({"SEED": "x"}, [], 64, "SEED=x"),
        (
            {},
            ["verify"],
            78,
            "has not been prepared with its current declaration; prepare the data with: make data",
        ),
        (
            {"TOKENIZER": "a/b"},
            ["verify"],
            78,
            "there is no tokenizer yet; prepare the data with: make data",
        ),
        ({"TOKENIZER": "absent.json"}, [], 78, "absent.json: cannot be read"),
    ],
)
def test_faults_end_with_their_code_and_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict,
    caplog: pytest.LogCaptureFixture,
    argv: list[str],
    code: int,
    words: str,
) -> None:
    for name, value in {"DATA_DIR": str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    assert prepare.main(argv) == code
    assert words in caplog.messages[-1]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_a_size_that_holds_it(
    config: Config,
) -> None:
    prepare.prepare(config)
    path = next(Path(config.data_dir).rglob("tokenizer.json"))
    small = dataclasses.replace(config, tokenizer=str(path), vocab_size=256)
    with pytest.raises(
        DataError, match="the tokenizer has 300 entries, but VOCAB_SIZE=256; set VOCAB_SIZE="
    ) as raised:
        prepare.prepare(small)
    size = int(str(raised.value).split("set VOCAB_SIZE=")[1])
    prepare.prepare(dataclasses.replace(small, vocab_size=size))


@pytest.mark.fault(26)
def test_shards_of_another_tokenizer_in_its_place_are_refused(config: Config) -> None:
    """As when folders are copied by hand."""
    prepare.prepare(config)
    here = opened(config).folder
    other = dataclasses.replace(config, vocab_size=310)
    prepare.prepare(other)
    there = opened(other).folder
    assert here != there
    shutil.rmtree(there)
    shutil.copytree(here, there)
    with pytest.raises(
        DataError, match=rf"{there}: .* tokenizer {here.name}, but TOKENIZER gives {there.name}"
    ):
        prepare.prepare(other)


@pytest.mark.fault(28)
@pytest.mark.parametrize(("fraction", "word"), [(1e-9, "validation"), (1 - 1e-9, "training")])
def test_a_split_without_a_document_is_an_error(config: Config, fraction: float, word: str) -> None:
    prepare.prepare(config)
    path = next(Path(config.data_dir).rglob("tokenizer.json"))
    declare(
        config,
        "papers",
        files=[str(Path(config.data_dir).parent / "papers" / "*.jsonl")],
        validation_fraction=fraction,
    )
    with pytest.raises(DataError, match=f"holds no {word} document; prepare more text"):
        prepare.prepare(dataclasses.replace(config, tokenizer=str(path)))


def test_a_source_that_fails_while_it_is_read_is_not_blamed_on_the_disk(config: Config) -> None:
    """It changes between the pin and the reading."""
    prepare.prepare(config)
    (Path(config.data_dir).parent / "papers" / "b.jsonl").write_bytes(b"cut")
    shutil.rmtree(opened(config).folder)
    with pytest.raises(
        CorpusError, match=r"b\.jsonl: 3 bytes, not \d+.*it changed since papers was prepared"
    ):
        prepare.make_source(config, "papers", prepare.vocabulary(config))


@pytest.mark.fault(8)
def test_a_file_in_the_place_of_data_dir_is_named(config: Config) -> None:
    Path(config.data_dir).write_text("in the way")
    with pytest.raises(
        DataError, match=rf"{re.escape(config.data_dir)}: cannot be written \(.*\); .*DATA_DIR"
    ):
        prepare.prepare(config)
