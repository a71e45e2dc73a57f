"""finetune/prepare_data.py: DATA for MODEL from settings to what is said, as a user has it."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from finetune import prepare_data
from finetune.prepare_data import prepare
from finetune.template import Theirs
from settings import SettingsError, tuning_rules
from settings.config import Config
from tests.finetune.making import CHATML, row, their_tokenizer, theirs, write_rows
from train.data.sources.source import CorpusError

ROWS = [row(f"q{i}?", f"a{i}") for i in range(100)]


@pytest.fixture(scope="module")
def chatml() -> Theirs:
    return theirs(CHATML)


def settings(folder: Path, **more: object) -> Config:
    values = {
        "data": str(folder / "x.jsonl"),
        "data_dir": str(folder / "data"),
        "seq_len": 64,
        "batch_tokens": 512,
        "micro_batch_size": 4,
    } | more
    return dataclasses.replace(Config(), **values).derived()


def test_what_is_held_out_is_not_trained_on(
    tmp_path: Path, chatml: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "x.jsonl", ROWS * 2)
    monkeypatch.setattr(tuning_rules, "HELD_OUT_CONVERSATIONS", 7)
    d = prepare(settings(tmp_path), chatml)
    assert (len(d.held_out), len(d.train)) == (7, 186) and d.evaluation is d.examples
    hashes = d.examples.index["hash"]
    assert not set(hashes[d.train].tolist()) & set(hashes[d.held_out].tolist())
    text = "\n".join(d.lines)
    assert (
        "evaluation: 7 conversations of DATA" in text
        and "7 copies of what is evaluated with are left out" in text
    )
    assert "100 examples say the same as another one" in text


def test_an_evaluation_file_is_taken_instead(
    tmp_path: Path, chatml: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "x.jsonl", ROWS)
    write_rows(tmp_path / "e.jsonl", [row("other?", "yes"), ROWS[3], row("q?")])
    c = settings(tmp_path, eval_data=str(tmp_path / "e.jsonl"))
    d = prepare(c, chatml)
    assert d.held_out.tolist() == [0, 1] and d.train.tolist() == [i for i in range(100) if i != 3]
    text = "\n".join(d.lines)
    assert (
        "EVAL_DATA: dropped 1: no message of the assistant" in text
        and "2 conversations of EVAL_DATA" in text
    )
    with monkeypatch.context() as patch:
        patch.setattr(tuning_rules, "HELD_OUT_CONVERSATIONS", 1)
        assert len(prepare(c, chatml).held_out) == 1
    with pytest.raises(
        CorpusError, match="no conversation is left to train on, since all of it is in EVAL_DATA"
    ):
        prepare(dataclasses.replace(c, eval_data=c.data), chatml)


def test_exercises_are_made_for_an_evaluation_too(tmp_path: Path, chatml: Theirs) -> None:
    write_rows(tmp_path / "x.jsonl", ROWS)
    d = prepare(settings(tmp_path, eval_data="exercises", seed=5, seq_len=256), chatml)
    rows = (tmp_path / "data" / "exercises" / "5" / "held_out.jsonl").read_text().splitlines()
    assert len(d.evaluation.index) == len(rows) == 400 and len(d.held_out) == 200
    assert len(d.train) == 100 and "200 conversations of EVAL_DATA" in "\n".join(d.lines)


def test_evaluation_batches_hold_the_same_examples_on_any_number_of_ranks(
    tmp_path: Path, chatml: Theirs
) -> None:
    write_rows(tmp_path / "x.jsonl", ROWS)
    d = prepare(settings(tmp_path), chatml)
    expected = int(d.examples.index["scored"][d.held_out].sum())
    assert len(d.held_out) == 10
    for ranks in (1, 2):
        b = d.evaluation_batches(ranks)
        scored = [
            (micro.targets >= 0).sum()
            for step in range(b.steps)
            for rank in range(ranks)
            for micro in b.step(step, rank, ranks).micro_batches
        ]
        assert sum(scored) == expected == sum(b.step(step).scored for step in range(b.steps))


def test_training_batches_are_those_of_the_settings(tmp_path: Path, chatml: Theirs) -> None:
    write_rows(tmp_path / "x.jsonl", ROWS)
    d = prepare(settings(tmp_path), chatml)
    step = d.batches(2, epochs=1).step(0, 1, 2)
    assert [micro.tokens.shape for micro in step.micro_batches] == [
        (4, 64)
    ] and step.windows == range(4, 8)
    every = np.concatenate([d.batches(1).window(i) for i in range(d.batches(1).packing.windows)])
    assert sorted(every.tolist()) == list(range(90))


def test_without_data_the_setting_is_named(chatml: Theirs) -> None:
    with pytest.raises(SettingsError, match=r"DATA is not set.*DATA=chats\.jsonl"):
        prepare(Config(), chatml)


def test_the_command_says_what_became_of_the_rows_and_shows_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_rows(tmp_path / "x.jsonl", [*ROWS, row("q?")])
    their_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "llama", "max_position_embeddings": 64}'
    )
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
    (tmp_path / "none.env").write_text("")
    assert prepare_data.main() == 0
    out = capsys.readouterr().out
    assert (
        f"DATA: dropped 1: no message of the assistant\nDATA:   {tmp_path}/x.jsonl:101: 1 messages: user"
        in out
    )
    assert "training: 90 examples" in out and "evaluation: 10 conversations" in out
    assert "<|im_start|>assistant\n[[[a" in out and "<|im_end|>]]]" in out
    monkeypatch.setenv("DATA", "")
    assert (
        prepare_data.main() == prepare_data.BAD_SETTING
        and "DATA is not set" in capsys.readouterr().err
    )
    monkeypatch.setenv("MODEL", "")
    assert (
        prepare_data.main() == prepare_data.BAD_SETTING
        and "MODEL is not set" in capsys.readouterr().err
    )
    monkeypatch.setenv("MODEL", str(tmp_path))
    shutil.copy(tmp_path / "model" / "config.json", tmp_path)
    assert (
        prepare_data.main() == prepare_data.BAD_DATA
        and "there is no tokenizer_config.json" in capsys.readouterr().err
    )
