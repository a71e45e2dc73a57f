"""What a resumed run takes from the one that was started, and what it refuses."""

import json
import os
import re
from typing import Any

import pytest

from record.exit_codes import BAD_DATA, BAD_SETTING
from settings import Config, SettingsError
from settings.config import SETTINGS
from settings.declare import FREE, FROZEN, TRACKED
from settings.resolve import resolve
from settings.resume import RunConfigError, compare_with_stored, read_run_config
from tests.settings.test_sources import root

__all__ = ["root"]


def store(root, **settings):
    """Make a run that was started with these settings, by preset `big`."""
    (root / "presets" / "big.env").write_text(
        "N_LAYER=12\nMLP_DIM=768\nSAVE_EVERY=7\nLEARNING_RATE=3e-3\n"
    )
    folder = root / "runs" / "run"
    folder.mkdir(parents=True)
    stored = Config(n_layer=8, preset="big", run_name="run").derived().stored() | settings
    (folder / "config.json").write_text(json.dumps({"settings": stored}))


def resume(root, **environ):
    return resolve({"MAKE_TARGET": "train", "RUN_NAME": "run", **environ}, root)


# ---- Stored values as a source


OTHER = "LEARNING_RATE=0.25\n"  # another preset
CASES: list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = [
    # stored by a run of the preset `big`, given for the resume, what it has then
    ({}, {}, {"PRESET": "big", "N_LAYER": 8, "SAVE_EVERY": 7}),
    (
        {"SEED": 1, "LEARNING_RATE": 0.5},
        {"LEARNING_RATE": "0.4"},
        {"SEED": 1, "LEARNING_RATE": 0.4},
    ),
    ({}, {"PRESET": "other"}, {"LEARNING_RATE": 0.25, "N_LAYER": 8}),
    ({}, {"PRESET": "big"}, {"LEARNING_RATE": 0.001, "N_LAYER": 8, "SAVE_EVERY": 7}),
    ({}, {"LEARNING_RATE": "0.5"}, {"MIN_LEARNING_RATE": 0.05}),  # derived again
    # derived no more
    (
        {"LR_SCHEDULE": "wsd", "TRAIN_TOKENS": 50_000_000, "DECAY_TOKENS": 10_000_000},
        {"LR_SCHEDULE": "cosine"},
        {"DECAY_TOKENS": None},
    ),
    # kept to the last bit where nothing is given
    (
        {"LEARNING_RATE": 3e-3, "MIN_LEARNING_RATE": 1 / 7000},
        {"LEARNING_RATE": "0.002"},
        {"MIN_LEARNING_RATE": 1 / 7000},
    ),
    # equal to a default that the preset has changed
    ({"N_EMBD": 256, "MLP_DIM": 704}, {}, {"MLP_DIM": 704}),
    (
        {"MAX_STEPS": 10, "DETACH": True, "KEEP_LAST": 9},
        {},
        {"MAX_STEPS": None, "DETACH": False, "KEEP_LAST": 3},
    ),
]


@pytest.mark.parametrize(("stored", "given", "expected"), CASES)
def test_a_resumed_run_keeps_what_shaped_it_unless_it_is_set_explicitly(
    root, stored, given, expected
):
    store(root, **stored)
    (root / "presets" / "other.env").write_text(OTHER)
    resolved = resume(root, **given)
    values = resolved.config.values()
    assert {name: values[name] for name in expected} == expected and resolved.problems == []
    assert resolved.origins["N_LAYER"] == "runs/run/config.json"


def test_a_plan_of_named_cards_takes_no_number_of_processes_from_the_run(root):
    store(root, NPROC=2)
    for cards, nproc in {"1xl4": None, "": 2}.items():
        resolved = resume(root, MAKE_TARGET="plan", CARDS=cards)
        assert resolved.config.nproc == nproc and resolved.problems == []


def test_a_change_of_a_frozen_setting_is_refused_before_anything_starts(root):
    store(root)
    refusal = "SEED=5: The run was started with SEED=1337, which cannot change. Set SEED=1337, or "
    for target in ("train", "train-node", "finetune", "check-env"):
        (problem,) = resume(root, MAKE_TARGET=target, SEED="5", PRESET="big").problems
        assert problem == f"{refusal}choose another RUN_NAME."
    for target, n_layer in {"plan": 8, "restart": 8, "settings": 8, "sample": 12, "": 12}.items():
        resolved = resume(root, MAKE_TARGET=target, SEED="5", PRESET="big")
        assert resolved.problems == [] and resolved.config.n_layer == n_layer, target
    (problem,) = resume(root, SEED="x").problems
    assert problem.startswith("SEED=x (environment): Must be")


def test_a_typed_setting_that_the_target_does_not_use_is_refused_once(root):
    store(root)
    (problem,) = resume(root, MAKE_SETTINGS="LORA_RANK", LORA_RANK="8", MAKE_GOALS="train").problems
    assert "Not used by make train" in problem


def test_a_setting_that_the_target_ignores_is_not_compared(root):
    store(root)
    (root / ".env").write_text("MODEL=tiny\nLORA_RANK=8\n")
    resolved = resume(root, EPOCHS="3")
    assert (
        resolved.problems == []
        and "MODEL (.env line 1), LORA_RANK (.env line 2), EPOCHS" in str(resolved.warnings)
    )
    stored = json.loads((root / "runs/run/config.json").read_text())["settings"]
    assert compare_with_stored(stored, resolved.config.values()) == ([], {})
    problems = resume(root, MAKE_TARGET="finetune").problems
    assert [problem.split("=")[0] for problem in problems] == ["MODEL", "LORA_RANK"]


def test_a_refused_setting_is_named_without_those_that_follow_from_it(root):
    store(root)
    for given in ({"N_EMBD": "512"}, {"N_HEAD": "2", "N_KV_HEAD": "1"}, {"MLP_DIM": "100"}):
        problems = resume(root, **given).problems
        assert [problem.split("=")[0] for problem in problems] == list(given)


@pytest.mark.parametrize(
    "content", ["[1,2]", "", "{}", '{"settings": 1}', "[" * 100_000, "\udcff", "null"]
)
def test_a_strange_config_is_named(root, content):
    store(root)
    path = root / "runs" / "run" / "config.json"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(RunConfigError) as caught:
        resume(root)
    assert re.fullmatch(
        rf"{path}: is (empty|damaged: it is not .*|not the config.json of a run)\. "
        r"Restore it from a copy, or choose another RUN_NAME\.",
        str(caught.value),
    )
    assert (caught.value.exit_code, SettingsError.exit_code) == (BAD_DATA, BAD_SETTING)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunConfigError, match="is not a file"):
        resume(root)
    path.unlink()
    path.symlink_to("config.json")
    with pytest.raises(RunConfigError, match=r"cannot be read \(.*symbolic links\)"):
        resume(root)


def test_a_stored_value_that_is_none_is_named(root):
    store(root, N_EMBD=[1])
    (problem,) = resume(root).problems
    assert problem.startswith("N_EMBD=[1] (runs/run/config.json): Must be an integer")


# ---- Comparison


def change(name, value):
    """Return another value of the same type."""
    kind = SETTINGS[name].kind
    if kind is bool:
        return not value
    return f"{value}x" if kind is str else (value or 0) + kind(1)


@pytest.mark.fault(31)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_change_is_refused_tracked_or_free(name):
    stored = json.loads(json.dumps(Config().derived().stored()))
    before = Config().derived().values()
    now = before | {name: change(name, before[name])}
    refusals, changes = compare_with_stored(stored, now)
    resume_class = SETTINGS[name].resume
    assert changes == ({name: [before[name], now[name]]} if resume_class == TRACKED else {})
    assert len(refusals) == (resume_class == FROZEN)
    for refusal in refusals:
        assert refusal.startswith(f"{name}=") and "RUN_NAME" in refusal
    assert resume_class in (FREE, TRACKED, FROZEN)


def test_a_setting_that_the_run_did_not_know_counts_as_its_default():
    stored = Config().derived().stored()
    del stored["QK_NORM"], stored["LEARNING_RATE"]
    assert compare_with_stored(stored, Config().derived().values()) == ([], {})
    now = Config(qk_norm=True, learning_rate=0.5).derived().values()
    refusals, changes = compare_with_stored(stored, now)
    assert len(refusals) == 1 and changes["LEARNING_RATE"] == [0.001, 0.5]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("identity", "x"),
        ("identity", None),
        ("identity", {"id": 5, "attempts": ["a"], "adopted": None}),
        ("identity", {"id": "a", "attempts": None, "adopted": None}),
        ("identity", {"id": "a", "attempts": [5], "adopted": None}),
        ("identity", {"id": "a", "attempts": ["a"], "adopted": 5}),
        ("validation_shards", {"text": "two"}),
        ("validation_shards", []),
        ("attempts", [{"norm_eps": "small"}]),
    ],
)
def test_what_a_run_stored_of_itself_is_refused_by_name_where_it_was_edited(tmp_path, name, value):
    path = tmp_path / "config.json"
    known = {"settings": {}, "attempts": [{"norm_eps": 1e-5}]}
    known |= {"identity": {"id": "a", "attempts": ["a"], "adopted": []}}
    known |= {"validation_shards": {"text": 2}}
    path.write_text(json.dumps(known))
    assert read_run_config(path) == known
    path.write_text(json.dumps(known | {name: value}))
    message = f"{path}: its `{name}` was edited or is damaged. Restore it from a copy"
    with pytest.raises(RunConfigError, match=message) as refusal:
        read_run_config(path)
    assert refusal.value.exit_code == BAD_DATA  # which the launcher does not try again
