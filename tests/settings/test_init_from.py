"""INIT_FROM sets the shape of the model, for every command that uses it."""

import json
from pathlib import Path

import pytest

from settings.init_from import SHAPE
from settings.resolve import resolve

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 96,
    "intermediate_size": 200,
    "tie_word_embeddings": False,
    "rope_theta": 5e5,
}
VALUES = {
    "VOCAB_SIZE": 512,
    "N_LAYER": 3,
    "N_HEAD": 6,
    "N_KV_HEAD": 2,
    "N_EMBD": 96,
    "MLP_DIM": 200,
    "TIE_EMBEDDINGS": False,
    "ROPE_THETA": 5e5,
    "QK_NORM": False,
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    (path / "tokenizer.json").write_text("{}")
    return path


def load(folder, target="train", **settings):
    environ = {
        "MAKE_TARGET": target,
        "ENV_FILE": "of-nobody",
        "RUNS_DIR": str(folder.parent / "runs"),
        "INIT_FROM": str(folder),
        "DEVICE": "cpu",
        "DTYPE": "float32",
        **settings,
    }
    return resolve({name: text for name, text in environ.items() if text})


def shape_of(resolved):
    values = resolved.config.values()
    return {name: values[name] for name in SHAPE}


@pytest.mark.parametrize("target", ["", "train", "train-node", "plan", "check-env", "sample"])
@pytest.mark.parametrize("preset", ["tiny", "d16-2xh100"])
def test_the_folder_sets_the_shape_whatever_the_preset_has(folder, target, preset):
    resolved = load(folder, target, PRESET=preset)
    assert shape_of(resolved) == VALUES
    assert resolved.config.tokenizer == f"{folder}/tokenizer.json"
    assert resolved.origins["N_LAYER"] == f"{folder}/config.json"


def test_what_the_commands_line_says_must_be_what_the_folder_has(folder):
    given = {"N_LAYER": "3", "ROPE_THETA": "500000", "MAKE_SETTINGS": "N_LAYER ROPE_THETA"}
    assert load(folder, **given).problems == load(folder).problems
    resolved = load(folder, N_LAYER="4", QK_NORM="1", MAKE_SETTINGS="N_LAYER")
    assert [line for line in resolved.problems if "INIT_FROM" in line] == [
        f"N_LAYER=4 (command line): INIT_FROM={folder} has N_LAYER=3. "
        "Leave N_LAYER out, or choose other weights.",
        f"QK_NORM=1 (environment): INIT_FROM={folder} has QK_NORM=0. "
        "Leave QK_NORM out, or choose other weights.",
    ]


def test_another_tokenizer_may_be_named(folder):
    assert load(folder, TOKENIZER="other.json").config.tokenizer == "other.json"
    (folder / "tokenizer.json").unlink()
    (problem,) = [line for line in load(folder).problems if line.startswith("TOKENIZER")]
    assert "INIT_FROM has its own" in problem


def test_targets_that_do_not_use_it_do_not_look(folder):
    (folder / "config.json").write_text("{")
    assert "is damaged: it is not JSON" in " ".join(load(folder).problems)
    assert "JSON" not in " ".join(load(folder, "status").problems)
    assert "JSON" not in " ".join(load(folder, "finetune").problems)


@pytest.mark.parametrize("target", ["train", "train-node", "pipeline"])
def test_a_folder_that_is_not_there_is_refused_where_training_starts(folder, target):
    absent = folder.parent / "absent"
    assert f"INIT_FROM={absent}: There is no such folder." in " ".join(
        load(absent, target).problems
    )


@pytest.mark.parametrize("target", ["", "plan", "train-8xa100", "status", "sample"])
def test_elsewhere_it_may_be_on_another_machine(folder, target):
    assert "no such folder" not in " ".join(load(folder.parent / "absent", target).problems)


@pytest.mark.parametrize("target", ["", "train", "sample"])
def test_a_run_that_exists_has_its_own_shape_and_needs_no_folder(folder, target):
    stored = load(folder, RUN_NAME="more").config.stored()
    run = folder.parent / "runs" / "more"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"settings": stored, "attempts": [{}]}))
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").unlink()
    folder.rmdir()
    resolved = load(folder, target, RUN_NAME="more")
    assert shape_of(resolved) == VALUES
    assert resolved.config.tokenizer == f"{folder}/tokenizer.json"
    assert not any("INIT_FROM" in line for line in resolved.problems)


def test_a_resume_takes_the_folder_from_the_run_too(folder):
    stored = load(folder, RUN_NAME="more").config.stored()
    run = folder.parent / "runs" / "more"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"settings": stored, "attempts": [{}]}))
    resolved = load(folder, RUN_NAME="more", INIT_FROM="")
    assert shape_of(resolved) == VALUES
    other = load(folder, RUN_NAME="more", N_LAYER="4", MAKE_SETTINGS="N_LAYER")
    assert any("The run was started with N_LAYER=3" in line for line in other.problems)


def test_everything_that_is_wrong_is_said_at_once(folder):
    changes = {"mlp_bias": True, "hidden_size": None, "num_hidden_layers": 10**9, "vocab_size": 3}
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    said = " ".join(load(folder).problems)
    for words in ("mlp_bias=true", "no hidden_size", "N_LAYER=1000000000", "VOCAB_SIZE=3"):
        assert words in said, words


def test_a_file_in_the_place_of_the_folder_is_no_folder(folder, tmp_path):
    path = Path(tmp_path / "model.safetensors")
    path.touch()
    assert "There is no such folder" in " ".join(load(path).problems)
