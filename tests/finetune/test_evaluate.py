"""finetune/evaluate.py: which runs `make eval` asks questions."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from finetune import chat_eval, evaluate
from settings.config import Config
from tests.train.checkpoint.test_checkpoint import ALONE
from train.generate import eval_run


@pytest.fixture
def c(tmp_path: Path) -> Config:
    return Config(runs_dir=str(tmp_path), run_name="a-run", eval_data="preset.jsonl")


def write_run(c: Config, **settings: str) -> None:
    folder = Path(c.runs_dir) / c.run_name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"settings": settings}))


def ask(monkeypatch: pytest.MonkeyPatch, c: Config, *names: str) -> str:
    """Return what find_questions finds when the user has set these."""
    monkeypatch.setattr(evaluate, "find_explicit", lambda: set(names))
    return evaluate.find_questions(c)


def test_a_fine_tuned_run_is_asked_what_was_given_or_what_it_was_evaluated_with(
    c: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(c, MODEL="base", EVAL_DATA="own.jsonl")
    assert ask(monkeypatch, c) == "own.jsonl"
    assert ask(monkeypatch, c, "EVAL_DATA") == "preset.jsonl"


def test_a_run_fine_tuned_without_eval_data_is_measured_as_others(
    c: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(c, MODEL="base", EVAL_DATA="")
    assert ask(monkeypatch, c) == ""


def test_a_base_run_is_never_asked_and_that_is_logged(
    c: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(c, MODEL="")
    caplog.set_level(logging.INFO)
    assert ask(monkeypatch, c) == "" and not caplog.text
    assert ask(monkeypatch, c, "EVAL_DATA") == ""
    assert "EVAL_DATA=preset.jsonl is not used: a-run is not a fine-tuned run" in caplog.text


def test_weights_of_others_are_asked_what_was_given(
    c: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = dataclasses.replace(c, init_from="models/x")
    assert ask(monkeypatch, c, "INIT_FROM") == ""
    assert ask(monkeypatch, c, "INIT_FROM", "EVAL_DATA") == "preset.jsonl"
    write_run(c, MODEL="base", EVAL_DATA="own.jsonl")
    assert ask(monkeypatch, c, "INIT_FROM", "EVAL_DATA") == "preset.jsonl"
    assert ask(monkeypatch, c, "INIT_FROM") == ""
    assert ask(monkeypatch, c, "INIT_FROM", "RUN_NAME") == "own.jsonl"


def test_questions_decide_what_is_measured(c: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(chat_eval, "measure", lambda c, world: asked.append(c.eval_data) or 0)
    monkeypatch.setattr(eval_run, "evaluate", lambda c, world: asked.append("CORE") or 0)
    write_run(c, MODEL="base", EVAL_DATA="own.jsonl")
    monkeypatch.setattr(evaluate, "find_explicit", set)
    assert evaluate.evaluate(c, ALONE) == 0 and asked == ["own.jsonl"]
    (Path(c.runs_dir) / c.run_name / "config.json").write_text('{"settings": {}}')
    assert evaluate.evaluate(c, ALONE) == 0 and asked == ["own.jsonl", "CORE"]
