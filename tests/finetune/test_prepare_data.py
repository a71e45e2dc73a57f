"""finetune/prepare_data.py: DATA for MODEL, from settings to what is printed."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from finetune import prepare_data
from finetune.chat_template import ChatTemplate
from finetune.prepare_data import prepare
from settings import SettingsError, tuning_rules
from settings.config import Config
from tests.finetune.making import CHATML, chat_template, row, their_tokenizer, write_rows
from train.data.sources.source import CorpusError

ROWS = [row(f"q{i}?", f"a{i}") for i in range(100)]


@pytest.fixture(scope="module")
def chatml() -> ChatTemplate:
    return chat_template(CHATML)


def settings(folder: Path, **more: object) -> Config:
    write_rows(folder / "x.jsonl", ROWS)
    values = {
        "data": str(folder / "x.jsonl"),
        "data_dir": str(folder / "data"),
        "seq_len": 64,
        "batch_tokens": 512,
        "micro_batch_size": 4,
    } | more
    return dataclasses.replace(Config(), **values).derived()


def test_what_is_held_out_is_not_trained_on(
    tmp_path: Path, chatml: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path)
    write_rows(tmp_path / "x.jsonl", ROWS * 2)
    monkeypatch.setattr(tuning_rules, "HELD_OUT_CONVERSATIONS", 7)
    data = prepare(config, chatml)
    assert (len(data.held_out), len(data.train)) == (7, 186) and data.evaluation is data.examples
    hashes = data.examples.index["hash"]
    assert not set(hashes[data.train].tolist()) & set(hashes[data.held_out].tolist())
    assert any("evaluation: 7 conversations of DATA" in line for line in data.lines)
    assert data.lines[-1] == "7 copies of what is evaluated with are left out of training"


def test_an_evaluation_file_is_taken_instead(
    tmp_path: Path, chatml: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = write_rows(tmp_path / "e.jsonl", [row("other?", "yes"), ROWS[3], row("q?")])
    config = settings(tmp_path, eval_data=str(held_out))
    data = prepare(config, chatml)
    assert data.held_out.tolist() == [0, 1]
    assert data.train.tolist() == [i for i in range(100) if i != 3]
    text = "\n".join(data.lines)
    assert "EVAL_DATA: dropped 1: no reply of the assistant" in text
    assert "2 conversations of EVAL_DATA" in text
    with monkeypatch.context() as patch:
        patch.setattr(tuning_rules, "HELD_OUT_CONVERSATIONS", 1)
        assert len(prepare(config, chatml).held_out) == 1
    with pytest.raises(CorpusError, match="no conversation is left to train on, since all of it"):
        prepare(dataclasses.replace(config, eval_data=config.data), chatml)


def test_evaluation_batches_hold_the_same_examples_on_any_number_of_ranks(
    tmp_path: Path, chatml: ChatTemplate
) -> None:
    data = prepare(settings(tmp_path), chatml)
    expected = int(data.examples.index["scored"][data.held_out].sum())
    assert len(data.held_out) == 10
    for ranks in (1, 2):
        batches = data.evaluation_batches(ranks)
        scored = 0
        for step in range(batches.steps):
            for rank in range(ranks):
                (micro,) = batches.step(step, rank, ranks).micro_batches
                scored += int((micro.targets >= 0).sum())
        assert scored == expected
        assert sum(batches.step(step).scored for step in range(batches.steps)) == expected


def test_training_batches_are_those_of_the_settings(tmp_path: Path, chatml: ChatTemplate) -> None:
    data = prepare(settings(tmp_path), chatml)
    step = data.batches(2, epochs=1).step(0, 1, 2)
    assert [micro.tokens.shape for micro in step.micro_batches] == [(4, 64)]
    assert step.windows == range(4, 8)
    batches = data.batches(1)
    windows = [batches.window(number) for number in range(batches.packing.windows)]
    assert sorted(np.concatenate(windows).tolist()) == list(range(90))


def test_without_data_the_setting_is_named(chatml: ChatTemplate) -> None:
    with pytest.raises(SettingsError, match=r"DATA is not set.*DATA=chats\.jsonl"):
        prepare(Config(), chatml)


def test_the_command_prints_what_became_of_the_rows_and_shows_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_rows(tmp_path / "x.jsonl", [*ROWS, row("q?")])
    their_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "llama", "max_position_embeddings": 64}'
    )
    (tmp_path / "none.env").write_text("")
    monkeypatch.delenv("PRESET", raising=False)  # as docs/finetune.md has the command
    for name, value in {
        "MODEL": tmp_path / "model",
        "DATA": tmp_path / "x.jsonl",
        "DATA_DIR": tmp_path / "data",
        "SEQ_LEN": 64,
        "ENV_FILE": tmp_path / "none.env",
        "BATCH_TOKENS": 512,
    }.items():
        monkeypatch.setenv(name, str(value))
    assert prepare_data.main() == 0
    out = capsys.readouterr().out
    assert f"DATA:   {tmp_path}/x.jsonl:101: 1 messages: user" in out
    assert "training: 90 examples" in out and "evaluation: 10 conversations" in out
    assert "<|im_start|>assistant\n[[[a" in out and "<|im_end|>]]]" in out

    def fails(code: int, words: str) -> bool:
        return prepare_data.main() == code and words in capsys.readouterr().err

    monkeypatch.setenv("DATA", "")
    assert fails(64, "DATA is not set")
    monkeypatch.setenv("MODEL", "")
    assert fails(64, "MODEL is not set")
    monkeypatch.setenv("MODEL", str(tmp_path))
    shutil.copy(tmp_path / "model" / "config.json", tmp_path)
    assert fails(78, "has no tokenizer_config.json")
