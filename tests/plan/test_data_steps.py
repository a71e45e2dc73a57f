"""plan/finetuning/data_steps.py: the steps of conversations that are on this machine, or why they are not known."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.prepare_data import prepared
from plan.finetuning.data_steps import NotCounted, with_steps
from settings import ROOT, load_preset
from settings.config import Config
from settings.tuning_rules import FITTED
from tests.finetune.making import CHATML, row, their_tokenizer, write_rows


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Fine-tuning of a model without weights on 300 conversations."""
    model = tmp_path / "model"
    their_tokenizer(CHATML).save_pretrained(model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts = {"model_type": "llama", "vocab_size": 400, "intermediate_size": 64, **sizes}
    (model / "config.json").write_text(json.dumps(facts))
    (tmp_path / "empty.env").touch()
    data = write_rows(tmp_path / "chats.jsonl", [row(f"{i}+{i}?", "It is so.") for i in range(300)])
    return load_preset(
        PRESET="finetune",
        MODEL=str(model),
        DATA=str(data),
        DATA_DIR=str(tmp_path / "data"),
        RUNS_DIR=str(tmp_path / "runs"),
        CARDS="2xh100-sxm",
        DEVICE="cpu",
        ENV_FILE=str(tmp_path / "empty.env"),
    )


def test_the_plan_has_the_steps_that_training_will_take(config: Config) -> None:
    names = ("MODEL", "DATA", "DATA_DIR", "RUNS_DIR", "CARDS")
    typed = {name: str(config.values()[name]) for name in names} | {"JSON": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "plan"],
        cwd=ROOT,
        env=os.environ
        | typed
        | {"MAKE_TARGET": "plan", "MAKE_SETTINGS": " ".join(typed), "ENV_FILE": config.env_file},
        capture_output=True,
        text=True,
    )
    assert "not known" not in done.stderr
    plan = json.loads(done.stdout)
    training = prepared(config, Path(config.model), FITTED, 2)
    steps = training.batches(2, training.config.epochs).steps
    assert plan["steps"] == steps > 50
    assert plan["batch_tokens"] == training.config.batch_tokens < config.batch_tokens
    assert plan["tokens"] == steps * training.config.batch_tokens


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"data": "an-owner/chats"}, "is on the Hub, and `make finetune` downloads it."),
        ({"data": "gone.jsonl"}, "there is no such file"),
        ({"model": "an-owner/a-model"}, "`make finetune` downloads it."),
    ],
)
def test_what_is_not_here_is_not_counted_and_not_downloaded(
    config: Config, given: dict[str, str], reason: str
) -> None:
    with pytest.raises(NotCounted, match=reason):
        with_steps(config.replace(**given), FITTED, 1)


def test_a_machine_without_transformers_says_so(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotCounted, match="make setup-finetune"):
        with_steps(config, FITTED, 1)
