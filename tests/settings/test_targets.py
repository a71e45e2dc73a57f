"""A setting is used by a make target or refused: on make's command line, and from other sources."""

import os
import re
import subprocess
import sys

import pytest

from scripts.train import load, name_target
from settings import ROOT, SettingsError
from settings.config import SETTINGS
from settings.resolve import build_environment, find_explicit, resolve, set_target
from settings.targets import (
    ALL_SETTINGS,
    DRY_RUN,
    EITHER,
    EVERY,
    PRETRAIN,
    PREVIEW,
    RESUME,
    TARGET_DEFAULTS,
    VARIABLES,
)
from settings.targets import TARGETS as DECLARED
from tests.settings.test_make import MAKEFILE, TARGETS
from tests.settings.test_sources import root, typed
from train import start_node

__all__ = ["root"]

NO_SETTINGS = set(re.findall(r"^([a-z0-9-]+):.*\n\t\$\(REFUSE_SETTINGS\)", MAKEFILE, re.MULTILINE))


def resolve_typed(root, target, **settings):
    return resolve({"MAKE_TARGET": target, "PRESET": "tiny", **typed(**settings)}, root)


def test_every_target_uses_settings_or_refuses_them():
    assert set(TARGETS) == EVERY | NO_SETTINGS == DECLARED and not EVERY & NO_SETTINGS
    named = {target for users in VARIABLES.values() for target in users}
    assert named | RESUME | EITHER | TARGET_DEFAULTS.keys() <= set(TARGETS)
    for declared in SETTINGS.values():
        assert declared.used_by <= set(TARGETS) and declared.used_by >= ALL_SETTINGS


@pytest.mark.parametrize("target", TARGETS)
def test_a_setting_is_used_or_refused_on_the_command_line(root, target):
    examples = {name: declared.example for name, declared in SETTINGS.items()}
    (root / "mine").touch()
    examples |= {"PRESET": "tiny", "ENV_FILE": "mine", "DRY_RUN": "0"}
    for name in (
        "MODEL",
        "HF_TOKEN",
        "RUN_SECRET",
        "WANDB_API_KEY",
    ):  # changes what is used; secrets
        del examples[name]
    problems = resolve_typed(root, target, **examples).problems
    refused = {
        problem.split()[0] for problem in problems if f"Not used by make {target}." in problem
    }
    unused = {name for name in examples if target not in SETTINGS[name].used_by}
    assert refused == unused - {"DRY_RUN"}


def test_a_setting_is_refused_if_what_it_needs_is_not_set(root):
    assert not resolve_typed(
        root, "plan", SYNC="diloco", NODES="2", SITES="2", SYNC_EVERY="5"
    ).problems
    (problem,) = resolve_typed(root, "plan", SYNC_EVERY="5").problems
    assert problem == "SYNC_EVERY (command line): Has no effect without SYNC=diloco."
    (problem,) = resolve_typed(root, "finetune", LORA_ALPHA="5").problems
    assert "LORA_RANK" in problem
    assert resolve_typed(root, "finetune", LORA_ALPHA="5", LORA_RANK="2").config.lora_alpha == 5


@pytest.mark.parametrize(
    ("target", "settings", "need"),
    [
        ("train", {"SITES": "3"}, "without SYNC=diloco"),
        ("train-8xa100", {"SITES": "4", "NODES": "4"}, "without SYNC=diloco"),
        ("pipeline", {"SITES": "2", "NODES": "2"}, "without SYNC=diloco"),
        ("train", {"MASTER_ADDR": "10.0.0.5"}, "with NODES=1"),
        ("train", {"LAN_GBIT": "100"}, "with NODES=1"),
        ("train", {"WAN_GBIT": "10"}, "with SITES=1"),
        ("train", {"SAVE_MINUTES": "5", "SAVE_EVERY": "0"}, "with SAVE_EVERY=0"),
        ("finetune", {"KEEP_LAST": "5", "SAVE_EVERY": "0"}, "with SAVE_EVERY=0"),
        ("train", {"KEEP_BEST": "1", "EVAL_EVERY": "0"}, "with EVAL_EVERY=0"),
        ("train", {"DATA_CACHE_GB": "5", "DATA_STREAM": "0"}, "with DATA_STREAM=0"),
        ("train", {"EVAL_EXAMPLES": "20"}, "with CORE_EVERY=0"),
        ("train", {"CORE_BUNDLE": "none"}, "with CORE_EVERY=0"),
        ("sample", {"SAMPLE_TOP_K": "3", "SAMPLE_TEMPERATURE": "0"}, "with SAMPLE_TEMPERATURE=0"),
        ("train", {"WANDB_ENTITY": "lab", "WANDB_MODE": "disabled"}, "with WANDB_MODE=disabled"),
        ("finetune", {"LORA_DROPOUT": "0.1"}, "with LORA_RANK=0"),
    ],
    ids=str,
)
def test_a_setting_without_effect_is_refused_with_what_it_needs(root, target, settings, need):
    name = next(iter(settings))
    (problem,) = resolve_typed(root, target, **settings).problems
    assert problem == f"{name} (command line): Has no effect {need}."
    environ = {"MAKE_TARGET": target, "PRESET": "tiny", **settings}
    resolved = resolve(environ, root)
    assert resolved.problems == []
    assert f"Not used here: {name} (environment)" in resolved.warnings[-1]
    assert resolved.config.values()[name] == SETTINGS[name].default


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("plan", {"SITES": "4", "NODES": "4", "WAN_GBIT": "10"}),  # plans DDP across sites
        ("plan", {"LAN_GBIT": "100"}),  # and for more nodes
        ("net-probe", {"SITES": "4", "NODES": "4", "MASTER_ADDR": "10.0.0.5"}),
        ("eval", {"EVAL_EXAMPLES": "20", "CORE_BUNDLE": "none"}),
        ("train", {"EVAL_EXAMPLES": "20", "CORE_EVERY": "100"}),
        ("train", {"KEEP_LAST": "5", "SAVE_EVERY": "100"}),
        ("train", {"SITES": "2", "NODES": "2", "SYNC": "diloco", "WAN_GBIT": "10"}),
    ],
    ids=str,
)
def test_what_has_an_effect_is_accepted(root, target, settings):
    assert resolve_typed(root, target, **settings).problems == []


FOLDER = {"SYNC": "diloco", "SITES": "2", "NODES": "2", "NODE_RANK": "1"}


@pytest.mark.parametrize("target", ["plots", "chat", "energy", "status", "stop", "export"])
def test_what_only_finds_a_run_is_no_use_of_a_setting(root, target):
    problems = resolve_typed(root, target, **FOLDER).problems
    assert len(problems) == len(FOLDER)
    assert all("in the environment or in .env" in problem for problem in problems)
    folder = resolve({"MAKE_TARGET": target, **FOLDER}, root).config.run_folder
    assert folder == "runs/tiny/site_1"
    (root / ".env").write_text("\n".join(f"{name}={text}" for name, text in FOLDER.items()))
    assert resolve({"MAKE_TARGET": target}, root).config.run_folder == folder


def test_eval_is_given_questions_by_another_name_than_training(root):
    (problem,) = resolve_typed(root, "eval", DATA="chats.jsonl").problems
    assert problem.endswith("EVAL_DATA names questions to ask a fine-tuned run.")


def test_logs_are_of_the_node_that_is_named(root):
    assert resolve_typed(root, "logs", NODE_RANK="2").problems == []
    for name in ("SITES", "NODES"):
        assert not SETTINGS[name].used_by & {"plots", "chat", "energy", "compare", "runs", "logs"}
    for target in ("compare", "runs"):
        assert resolve_typed(root, target, RUN_NAME="a").problems


def test_a_preview_takes_what_the_previewed_target_takes(root):
    assert not resolve_typed(root, "plan", MODEL="gpt2", LORA_RANK="8").problems
    (problem,) = resolve_typed(root, "plan", MODEL="gpt2", N_LAYER="8").problems
    assert problem.startswith("N_LAYER (command line): Not used by make plan.")
    assert not resolve_typed(root, "plan", N_LAYER="8").problems


def test_the_environment_is_named_and_env_only_if_it_looks_meant(root):
    (root / ".env").write_text("LORA_RANK=8\nLOG_DIR=logs\nJOB_NAME=mine\nSYNC_EVERY=5\n")
    environ = {"MAKE_TARGET": "train", "EPOCHS": "3", "LOG_DIR": "logs", "SEED": "4"}
    resolved = resolve(environ, root)
    assert resolved.problems == []
    first, second = resolved.warnings
    assert first == "From the environment: SEED=4"
    ignored = re.findall(r"(\w+) \((.*?)\)", second)
    assert sorted(ignored) == [
        ("EPOCHS", "environment"),
        ("LOG_DIR", "environment"),
        ("LORA_RANK", ".env line 1"),
        ("SYNC_EVERY", ".env line 4"),
    ]
    assert resolved.config.sync_every == 30  # what has no effect has its default
    assert resolve({"MAKE_TARGET": "plots"}, root).warnings == []


def test_a_model_that_is_ignored_does_not_turn_pretraining_into_fine_tuning(root):
    (root / ".env").write_text("MODEL=gpt2\n")
    for target in PRETRAIN - PREVIEW - {"pipeline"}:
        defaults = {"MASTER_ADDR": "a", "PRESET": "tiny"}
        assert resolve({"MAKE_TARGET": target}, root, defaults).config.model == "", target


def test_a_fine_tuning_is_planned_with_the_preset_that_it_would_have(root):
    (root / "presets/finetune.env").write_text("SEQ_LEN=64\n")
    environ = {"MAKE_TARGET": "plan", **typed(MODEL="gpt2")}
    config = resolve(environ, root).config
    assert (config.preset, config.seq_len) == ("finetune", 64)
    assert resolve({"PRESET": "tiny", **environ}, root).config.preset == "tiny"
    assert resolve({"MAKE_TARGET": "plan"}, root).config.preset == "tiny"


def test_what_other_programs_export_stops_no_target_that_does_not_use_it(root):
    exported = {"DEVICE": "sda", "STEP": "build", "NAME": "DESKTOP-1"}
    status = resolve({"MAKE_TARGET": "status", **exported}, root)
    assert status.problems == []
    ignored = "Warning: Not used here: STEP (environment), DEVICE (environment)."
    assert status.warnings[-1] == ignored
    assert resolve({"MAKE_TARGET": "settings", "NAME": "DESKTOP-1"}, root).problems == []
    (problem,) = resolve({"MAKE_TARGET": "train", **exported}, root).problems
    assert problem.startswith("DEVICE=sda (environment): ")


@pytest.mark.parametrize("source", ["environment", ".env"])
def test_a_dry_run_is_never_the_real_one(root, source):
    environ = {"DRY_RUN": "1"} if source == "environment" else {}
    (root / ".env").write_text("" if environ else "DRY_RUN=1\n")
    for target in TARGETS:
        problems = resolve({"MAKE_TARGET": target, "PRESET": "tiny", **environ}, root).problems
        refusals = [problem for problem in problems if problem.startswith("DRY_RUN (")]
        assert len(refusals) == (target not in DRY_RUN), target


def test_a_module_takes_settings_from_its_command_line(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"MAX_STEPS": "5"})
    config = load(["RUN_NAME=zz", "node", "MAX_STEPS=7", "DATA_MIX="], start_node.PRETRAIN)
    assert (config.run_name, config.max_steps) == ("zz", 7)
    assert find_explicit() >= {"RUN_NAME", "MAX_STEPS"}
    assert os.environ["MAX_STEPS"] == "7"  # for the processes that it starts
    for words, problem in (
        (["MAX_STEPS=x"], "MAX_STEPS=x (command line)"),
        (["MAX_STEP=7"], "MAX_STEP (command line)"),
        (["nodes"], "nodes: Must be NAME=value or finetune or node"),
        (["--nodes=2"], "--nodes=2: Must be NAME=value"),
    ):
        with pytest.raises(SettingsError) as raised:
            load(words, start_node.PRETRAIN)
        assert raised.value.exit_code == 64 and problem in str(raised.value)


@pytest.mark.parametrize(
    "module", ["scripts.train", "finetune.prepare_data", "train.data.prepare", "monitor"]
)
def test_a_module_refuses_a_word_that_is_none(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "no-word"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 64 and "no-word: Must be NAME=value" in done.stdout + done.stderr


def test_of_several_targets_one_must_use_a_setting(root):
    environ = {"MAKE_TARGET": "train", "MAKE_GOALS": "train eval", "PRESET": "tiny"}
    typed_ = typed(MAX_STEPS="3", STEP="3", EPOCHS="2")
    (problem,) = resolve(environ | typed_, root).problems
    assert problem.startswith("EPOCHS (command line): Not used by make eval, train.")


def test_a_module_that_make_did_not_start_does_what_its_target_does(monkeypatch):
    makefile = (ROOT / "Makefile").read_text()
    started = re.findall(
        r"^([a-z0-9-]+):.*\n\t@\$\(PY\) -m scripts.train(.*)$", makefile, re.MULTILINE
    )
    assert len(started) == 5
    for target, words in started:
        assert name_target(words.split()) == target
    monkeypatch.setenv("MAKE_TARGET", "")  # so that it is taken back at the end
    del os.environ["MAKE_TARGET"]
    set_target("train")
    assert os.environ["MAKE_TARGET"] == "train"
    # A pipeline starts its stages with settings of their own, which all count.
    for started in ("restart", build_environment({})["MAKE_TARGET"]):
        monkeypatch.setenv("MAKE_TARGET", started)
        set_target("train")
        assert os.environ["MAKE_TARGET"] == started
