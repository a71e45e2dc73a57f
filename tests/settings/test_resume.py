"""What a resumed run takes from the one that was started, and what it refuses."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from record.exit_codes import BAD_DATA, BAD_SETTING
from settings import Config, SettingsError
from settings.config import SETTINGS
from settings.declare import FREE, FROZEN, TRACKED, format_value
from settings.names import CONSTANTS, REPLACEMENTS
from settings.resolve import Resolved, resolve
from settings.resume import RunConfigError, compare_with_stored
from tests.settings.test_sources import root, typed

__all__ = ["root"]


def store(root: Path, **settings: Any) -> None:
    """Make a run that was started with these settings, by preset `big`."""
    (root / "presets").mkdir(parents=True, exist_ok=True)
    (root / "presets" / "big.env").write_text("N_LAYER=8\nLEARNING_RATE=3e-3\n")
    folder = root / "runs" / "run"
    folder.mkdir(parents=True)
    stored = Config(n_layer=8, preset="big", run_name="run").derived().stored() | settings
    (folder / "config.json").write_text(json.dumps({"settings": stored}))


def resume(root: Path, **environ: str) -> Resolved:
    return resolve({"MAKE_TARGET": "train", "RUN_NAME": "run", **environ}, root)


# ---- Stored values as a source


def test_stored_values_beat_preset_and_defaults(root: Path) -> None:
    store(root, N_EMBD=512, LEARNING_RATE=0.5)
    resolved = resume(root)
    config = resolved.config
    assert (config.preset, config.n_layer, config.n_embd, config.learning_rate) == (
        "big",
        8,
        512,
        0.5,
    )
    assert resolved.origins["N_EMBD"] == "runs/run/config.json" and resolved.problems == []


def test_what_is_set_explicitly_beats_stored_values(root: Path) -> None:
    store(root, SEED=1, N_EMBD=512)
    (root / ".env").write_text("N_EMBD=64\n")
    config = resume(root, **typed(SEED="5")).config
    assert (config.seed, config.n_embd) == (5, 64)
    stored = json.loads((root / "runs" / "run" / "config.json").read_text())["settings"]
    refusals, _ = compare_with_stored(stored, config.values())
    assert sorted(refusal.split(":")[0] for refusal in refusals) == ["N_EMBD=64", "SEED=5"]


def test_a_change_of_a_frozen_setting_is_refused_before_anything_starts(root: Path) -> None:
    store(root)
    for target, is_refused in (("train", True), ("check-env", True), ("plan", False)):
        problems = resume(root, MAKE_TARGET=target, SEED="5").problems
        expected = ["SEED=5: The run was started with SEED=1337, which cannot change."]
        assert [text.split(" Set ")[0] for text in problems] == (expected if is_refused else [])
    (problem,) = resume(root, SEED="x").problems
    assert problem.startswith("SEED=x (environment): Must be")


def test_another_preset_that_is_chosen_explicitly_is_meant(root: Path) -> None:
    store(root)
    (root / "presets" / "other.env").write_text("LEARNING_RATE=0.25\n")
    config = resume(root, PRESET="other").config
    assert config.learning_rate == 0.25 and config.n_layer == 8


def test_the_preset_that_the_run_was_started_with_is_taken_even_if_it_has_changed(
    root: Path,
) -> None:
    store(root)
    (root / "presets" / "big.env").write_text("N_LAYER=12\nSAVE_EVERY=7\n")
    config = resume(root, PRESET="big").config
    assert (config.n_layer, config.save_every) == (8, 7)


def test_a_default_that_follows_from_other_settings_follows_again(root: Path) -> None:
    store(root)
    config = resume(root, LEARNING_RATE="0.5").config
    assert config.min_learning_rate == 0.05
    store(root / "other", LEARNING_RATE=3e-3, MIN_LEARNING_RATE=3e-3 / 10)  # as before rounding
    assert resume(root / "other", LEARNING_RATE="0.5").config.min_learning_rate == 0.05


def test_what_does_not_shape_the_result_is_chosen_anew(root: Path) -> None:
    store(root, MAX_STEPS=10, DETACH=True, KEEP_LAST=9)
    config = resume(root).config
    assert (config.max_steps, config.detach, config.keep_last) == (None, False, 3)


def test_only_targets_that_resume_read_the_run(root: Path) -> None:
    store(root)
    for target, layers in (
        ("train", 8),
        ("plan", 8),
        ("settings", 8),
        ("sample", 4),
        ("train-8xa100", 4),
        ("", 4),
    ):
        environ = {"MAKE_TARGET": target, "RUN_NAME": "run", "PRESET": "tiny"}
        assert resolve(environ, root).config.n_layer == layers, target


@pytest.mark.parametrize(
    "content", ["[1,2]", "", "{", "{}", '{"settings": 1}', "[" * 100_000, "\x00", "null"]
)
def test_a_strange_config_is_named(root: Path, content: str) -> None:
    store(root)
    path = root / "runs" / "run" / "config.json"
    path.write_text(content)
    with pytest.raises(RunConfigError) as caught:
        resume(root)
    assert str(caught.value) == (
        f"{path}: is damaged, or is not the config.json of a run. "
        "Restore it from a copy, or choose another RUN_NAME."
    )
    assert (caught.value.exit_code, SettingsError.exit_code) == (BAD_DATA, BAD_SETTING)


def test_a_config_that_cannot_be_opened_is_named(root: Path) -> None:
    store(root)
    path = root / "runs" / "run" / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunConfigError, match="is damaged"):
        resume(root)
    path.unlink()
    path.symlink_to("config.json")
    with pytest.raises(RunConfigError, match=r"cannot be read \(.*symbolic links\)"):
        resume(root)


def test_a_stored_value_that_is_none_is_named(root: Path) -> None:
    store(root, N_EMBD=[1])
    (problem,) = resume(root).problems
    assert problem.startswith("N_EMBD=[1] (runs/run/config.json): Must be an integer")


# ---- Comparison


def change(name: str, value: Any) -> Any:
    """Return another value of the same type."""
    kind = SETTINGS[name].kind
    if kind is bool:
        return not value
    return f"{value}x" if kind is str else (value or 0) + kind(1)


@pytest.mark.fault(31)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_change_is_refused_tracked_or_free(name: str) -> None:
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


def test_the_value_to_resume_with_is_that_of_the_run_to_the_last_digit() -> None:
    stored = Config(rope_theta=1234567.0).derived().stored()
    (refusal,), _ = compare_with_stored(stored, Config(rope_theta=1234568.0).derived().values())
    text = refusal.split("Set ROPE_THETA=")[1].split(",")[0]
    assert SETTINGS["ROPE_THETA"].parse(text) == 1234567.0


def test_a_setting_that_the_run_did_not_know_counts_as_its_default() -> None:
    stored = Config().derived().stored()
    del stored["QK_NORM"], stored["LEARNING_RATE"]
    assert compare_with_stored(stored, Config().derived().values()) == ([], {})
    now = Config(qk_norm=True, learning_rate=0.5).derived().values()
    refusals, changes = compare_with_stored(stored, now)
    assert len(refusals) == 1 and changes["LEARNING_RATE"] == [0.001, 0.5]


# ---- Settings that are gone


def test_a_removed_setting_passes_with_the_value_that_is_built_in(root: Path) -> None:
    lines = [f"{name}={format_value(value)}\n" for name, value in CONSTANTS.items()]
    (root / ".env").write_text("".join(lines) + "".join(f"{name}=\n" for name in others()))
    assert resolve({}, root).problems == []
    assert not SETTINGS.keys() & (CONSTANTS.keys() | REPLACEMENTS.keys())


def others() -> set[str]:
    return REPLACEMENTS.keys() - CONSTANTS.keys()


def test_another_value_of_a_removed_setting_is_refused_with_what_replaces_it(root: Path) -> None:
    (root / ".env").write_text("MASTER_PORT=1234\nHANG_S=45\nADAM_EPS=1e-08\nEXPORT_SHARD_GB=5\n")
    problems = resolve({}, root).problems
    assert [problem.split(":")[0] for problem in problems] == [
        "HANG_S (.env line 2)",
        "MASTER_PORT (.env line 1)",
    ]
    assert "MASTER_ADDR=HOST:PORT" in problems[1] and "always 30." in problems[0]


def test_a_run_of_an_earlier_version_goes_on_unless_a_constant_shaped_it(root: Path) -> None:
    store(root, ADAM_EPS=1e-8, NORM_EPS=1e-5, GROUP_SHARDS=8, HANG_S=45, SYNC_ALPHA=0.0)
    assert resume(root).problems == []
    now = resume(root).config.values()
    stored = {"ADAM_EPS": 1e-6, "HANG_S": 45, "NORM_EPS": 1e-6, "MUON_MOMENTUM": None}
    (refusal,), _ = compare_with_stored(now | stored, now)
    assert refusal.startswith("The run was started with ADAM_EPS=1e-06, but it is always 1e-08")
