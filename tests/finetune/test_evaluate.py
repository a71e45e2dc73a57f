"""finetune/evaluate.py: what `make eval` measures."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune import benchmarks, chat_eval, evaluate, model_folder
from finetune.model_folder import Weights
from settings import ROOT, SettingsError
from settings.config import Config
from tests.finetune.models import models
from tests.train.checkpoint.test_checkpoint import ALONE
from train.generate import eval_run
from train.model.hf_import import ForeignError

__all__ = ["models"]  # a fixture

TUNED = {"MODEL": "base", "EVAL_DATA": "own.jsonl"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(runs_dir=str(tmp_path), run_name="a-run", eval_data="given.jsonl")


@pytest.mark.parametrize(
    ("settings", "given", "asked"),
    [
        (TUNED, "", "own.jsonl"),
        (TUNED, "EVAL_DATA", "given.jsonl"),
        ({"MODEL": "base"}, "", ""),
        ({"MODEL": ""}, "", ""),
        ({"MODEL": ""}, "EVAL_DATA", ""),
        ({}, "INIT_FROM", ""),
        ({}, "INIT_FROM EVAL_DATA", "given.jsonl"),
    ],
)
def test_questions_are_those_given_or_those_of_the_run(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, str],
    given: str,
    asked: str,
) -> None:
    monkeypatch.setattr(evaluate, "find_explicit", lambda: set(given.split()))
    caplog.set_level(logging.INFO)
    assert evaluate.find_questions(config, settings) == asked
    is_base = settings == {"MODEL": ""} and bool(given)
    assert ("EVAL_DATA=given.jsonl: a-run was not fine-tuned" in caplog.text) == is_base


@pytest.mark.parametrize("typed", ["RUN_NAME EVAL_DATA", "RUN_NAME"])
def test_questions_typed_for_a_run_that_was_not_fine_tuned_are_refused(
    tmp_path: Path, typed: str
) -> None:
    """From the environment or .env they are for other runs, which is said (the test above)."""
    run = tmp_path / "base"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"settings": {"MODEL": "", "PRESET": "tiny"}}))
    settings = {"RUNS_DIR": str(tmp_path), "RUN_NAME": "base", "EVAL_DATA": "q.jsonl"}
    settings |= {"EVAL_TOKENS": "1", "CORE_BUNDLE": "none", "DEVICE": "cpu"}
    (tmp_path / "empty.env").touch()
    done = subprocess.run(
        [sys.executable, "-m", "finetune.evaluate"],
        cwd=ROOT,
        env=os.environ
        | settings
        | {"MAKE_TARGET": "eval", "MAKE_SETTINGS": typed, "ENV_FILE": str(tmp_path / "empty.env")},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 64
    problem = "EVAL_DATA=q.jsonl: base was not fine-tuned, so it cannot be asked."
    refusal = f"{problem} Fine-tune it first: make finetune MODEL=base"
    assert problem in said and (refusal in said) == ("EVAL_DATA" in typed)


@pytest.mark.parametrize(
    ("given", "is_of_run"),
    [("", True), ("INIT_FROM", False), ("INIT_FROM RUN_NAME", True)],
)
def test_a_folder_is_meant_if_it_alone_is_named(
    config: Config, monkeypatch: pytest.MonkeyPatch, given: str, is_of_run: bool
) -> None:
    folder = Path(config.runs_dir) / "a-run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"settings": TUNED}))
    monkeypatch.setattr(model_folder, "find_explicit", lambda: set(given.split()))
    config = config.replace(init_from="models/x")
    assert model_folder.stored_settings(config) == (TUNED if is_of_run else {})


def test_what_is_set_decides_what_is_measured(
    config: Config, monkeypatch: pytest.MonkeyPatch, models: dict[str, Path]
) -> None:
    measured: list[Any] = []
    settings: dict[str, str] = {}
    folder = models["llama"]
    monkeypatch.setattr(evaluate, "find_explicit", set)
    monkeypatch.setattr(evaluate, "stored_settings", lambda c: settings)
    monkeypatch.setattr(evaluate, "open_together", lambda c, world: Weights(folder, settings))

    def note(what: str) -> int:
        measured.append(what)
        return 0

    monkeypatch.setattr(chat_eval, "measure", lambda c, *more: note(c.eval_data))
    monkeypatch.setattr(benchmarks, "measure", lambda c, *more: note("benchmarks"))
    monkeypatch.setattr(eval_run, "evaluate", lambda c, world: note("CORE"))

    def measure(of: dict[str, str], **more: str) -> Any:
        nonlocal settings
        settings = of
        assert evaluate.evaluate(config.replace(**more), ALONE) == 0
        return measured.pop()

    assert measure({"MODEL": ""}) == "CORE"
    assert measure(TUNED) == "own.jsonl"
    assert measure(TUNED, benchmarks="arc_easy") == "benchmarks"
    assert measure({"MODEL": "base"}) == "CORE"
    folder = models["gemma2"]
    with pytest.raises(
        ForeignError, match=r"need a Llama or a Qwen3.*model_type=.gemma2.*EVAL_DATA"
    ):
        measure({"MODEL": "base"})
    with pytest.raises(SettingsError, match="HF_ALLOW_CODE_EVAL=1 make eval BENCHMARKS=humaneval"):
        measure(TUNED, benchmarks="humaneval")
