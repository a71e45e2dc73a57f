"""make train, make export and a run that goes on from the export, as a user's shell calls them."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from settings.init_from import SHAPE
from tests.running import environment, events, train


def export(env, code=0):
    return train(env, command=[sys.executable, "-m", "export"], code=code)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    env = environment(tmp_path_factory.mktemp("run"), data, MAX_STEPS=6)
    train(env)
    return env


def test_a_run_that_starts_from_an_export_begins_where_it_ended(trained, tmp_path):
    run, other = Path(trained["RUNS_DIR"]) / "run", tmp_path / "run"
    folder = run / "export"
    # The run's own settings rule.
    said = export(trained | {"VOCAB_SIZE": "", "N_EMBD": "", "N_LAYER": ""})
    for words in (
        "Verified step 6 of",
        f"from_pretrained('{folder}')",
        "has the hash of what was written",
    ):
        assert words in said
    model = shutil.copytree(folder, tmp_path / "model")
    settings = dict.fromkeys([*SHAPE, "TOKENIZER"], "") | {  # the folder sets them
        "RUNS_DIR": str(tmp_path),
        "INIT_FROM": str(model),
        "MAX_STEPS": "1",
        "LEARNING_RATE": "1e-9",
        "MIN_LEARNING_RATE": "2e-10",
        "EVAL_EVERY": "1",
    }
    train(trained | settings)  # on the shards that are there: nothing is prepared again

    expected = events(run, "eval")[-1]["val_loss"]
    assert events(other, "eval")[-1]["val_loss"] == pytest.approx(expected, abs=1e-4)
    attempt = json.loads((other / "config.json").read_text())["attempts"][0]
    sums = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }
    assert attempt["init_from"] == sums
    assert json.loads((other / "config.json").read_text())["settings"]["N_LAYER"] == 2
    shutil.rmtree(model)  # a run that is resumed needs it no more
    assert "resumed from step_0000001" in train(trained | settings | {"MAX_STEPS": "2"})
    export(trained | {"RUNS_DIR": str(tmp_path)})
    card = (other / "export" / "README.md").read_text()
    assert f"| initial weights | config.json of sha256 {sums['config.json'][:16]}" in card
    assert "\nMIN_LEARNING_RATE=2e-10\n" in card
    assert str(tmp_path) not in card
    assert str(model) not in card


@pytest.mark.slow
def test_a_run_keeps_the_epsilon_that_init_from_brought(trained, tmp_path):
    export(trained)
    folder = shutil.copytree(Path(trained["RUNS_DIR"]) / "run" / "export", tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": 1e-3}))
    env = trained | {
        "RUNS_DIR": str(tmp_path),
        "INIT_FROM": str(folder),
        "TOKENIZER": str(folder / "tokenizer.json"),
    }
    train(env | {"MAX_STEPS": "1"})
    (folder / "config.json").unlink()  # a run that is resumed needs it no more
    assert "resumed from step_0000001" in train(env | {"MAX_STEPS": "2"})
    export(env | {"MAX_STEPS": "2"})
    made = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert facts["rms_norm_eps"] == 1e-5
    assert made["rms_norm_eps"] == 1e-3


def test_settings_that_contradict_the_export_are_all_refused_with_its_values(trained, tmp_path):
    export(trained)
    folder = Path(trained["RUNS_DIR"]) / "run" / "export"
    other = {"RUNS_DIR": str(tmp_path), "INIT_FROM": str(folder), "N_LAYER": "3", "N_HEAD": "4"}
    said = train(trained | other, code=64)
    assert f"N_LAYER=3 (environment): INIT_FROM={folder} has N_LAYER=2. Leave N_LAYER out" in said
    assert f"N_HEAD=4 (environment): INIT_FROM={folder} has N_HEAD=2. Leave N_HEAD out" in said
