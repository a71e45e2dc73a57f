"""Where a setting comes from, and what each source may hold."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from settings import ROOT, Config, SettingsError, explain_error, load_config
from settings.config import SETTINGS
from settings.resolve import resolve
from settings.resume import RunConfigError

SECRET = "hf_AbCdEfGh123"


@pytest.fixture
def root(tmp_path):
    """A repository with one empty preset and no .env."""
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "tiny.env").touch()
    return tmp_path


def read(root, env_file="", **environ):
    """Resolve the settings with this .env and environment."""
    (root / ".env").write_bytes(env_file.encode(errors="surrogateescape"))
    return resolve(environ, root)


def typed(**settings):
    """Return the environment that make gives a command with these settings."""
    return {**settings, "MAKE_SETTINGS": " ".join(settings)}


def test_a_prompt_that_a_shell_exports_is_not_that_of_make_sample(root):
    """As zsh does. Without make, the environment is where a prompt comes from."""
    resolved = read(root, PROMPT="%n@%m", MAKE_TARGET="sample")
    assert resolved.config.prompt == ""
    (warning,) = resolved.warnings
    assert warning.startswith("PROMPT (environment) is not used")
    assert read(root, PROMPT="%n@%m", MAKE_TARGET="train").warnings == []
    assert read(root, "PROMPT=Once\n", PROMPT="%n", MAKE_TARGET="sample").config.prompt == "Once"
    words = typed(PROMPT="Once") | {"MAKE_TARGET": "sample"}
    assert read(root, **words).config.prompt == "Once"
    assert read(root, PROMPT="Once").config.prompt == "Once"


# ---- Which source wins


def test_each_of_the_five_sources_wins_over_those_below_it(root):
    (root / "presets" / "tiny.env").write_text("SEED=2\n")
    everywhere = {"SEED": "4"}

    def find(env_file, **environ):
        resolved = read(root, env_file, **environ)
        assert resolved.problems == []
        return resolved.config.seed, resolved.origins["SEED"]

    assert find("SEED=3\n", **typed(SEED="5")) == (5, "command line")
    assert find("SEED=3\n", **everywhere) == (4, "environment")
    assert find("#\nSEED=3\n") == (3, ".env line 2")
    assert find("") == (2, "presets/tiny.env line 1")
    (root / "presets" / "tiny.env").write_text("")
    assert find("") == (1337, "default")


def test_the_sources_above_choose_env_file_and_preset(root):
    (root / "presets" / "big.env").write_text("N_LAYER=7\n")
    (root / "mine").write_text("PRESET=big\nSEED=9\n")
    resolved = read(root, "SEED=1\n", ENV_FILE="mine")
    assert resolved.explicit == {"ENV_FILE", "PRESET", "SEED"}
    config = resolved.config
    assert (config.seed, config.n_layer, config.run_name) == (9, 7, "big")
    assert read(root, ENV_FILE="mine", PRESET="tiny").config.n_layer == 4


def test_the_defaults_of_a_target_rank_between_presets_and_declarations(root):
    (root / "presets" / "big.env").write_text("N_LAYER=7\n")
    defaults = {"PRESET": "big", "N_LAYER": "5", "SEED": "6"}
    config = resolve({}, root, defaults).config
    assert (config.preset, config.n_layer, config.seed) == ("big", 7, 6)
    config = resolve({"PRESET": "tiny", "SEED": "8"}, root, defaults).config
    assert (config.preset, config.n_layer, config.seed) == ("tiny", 5, 8)


def test_an_empty_value_counts_as_not_set(root):
    (root / "presets" / "tiny.env").write_text("SEED=2\nN_LAYER=\n")
    resolved = read(root, "SEED=\nN_HEAD=\n", **dict.fromkeys(SETTINGS, ""), MAKE_SETTINGS="SEED")
    assert resolved.problems == [] and resolved.explicit == set()
    assert resolved.config == Config(seed=2).derived()


# ---- Names


@pytest.mark.fault(23)
def test_data_that_is_empty_on_the_command_line_is_refused(root):
    (problem,) = resolve({**typed(DATA=""), "PRESET": "tiny"}, root).problems
    assert problem.startswith("DATA (command line): Is empty. Name a file, a folder or hf:OWNER")
    assert not resolve({"DATA": "", "PRESET": "tiny"}, root).problems


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("LEARNIN_RATE", "LEARNING_RATE"),
        ("LR", "LEARNING_RATE"),
        ("BATCH_SIZE", "BATCH_TOKENS"),
        ("seed", "SEED"),
        ("TENSORBOARD", "TRACKERS=tensorboard"),
        ("CHAT", "make chat, or make eval EVAL_DATA=questions.jsonl"),
        ("QQQQQQ", ""),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(root, name, suggestion):
    hint = f"Did you mean {suggestion}?" if suggestion else "`make settings` lists them."
    for place, resolved in (
        ("command line", read(root, **typed(**{name: "1"}))),
        (".env line 1", read(root, f"{name}=1\n")),
    ):
        assert resolved.problems == [f"{name} ({place}): There is no such setting. {hint}"]


@pytest.mark.fault(23)
@pytest.mark.parametrize("name", ["LEARNIN_RATE", "LR", "LEARNINGRATE"])
def test_a_near_miss_in_the_environment_is_a_warning(root, name):
    environ = {name: "1", "HOME": "/root", "LS_COLORS": "x", "QQQQQQ": "1"}
    resolved = read(root, **environ)
    warning = f"Warning: {name} (environment) is ignored. Did you mean LEARNING_RATE?"
    assert resolved.problems == [] and resolved.warnings == [warning]
    with pytest.raises(SettingsError) as error:  # also where something else is wrong
        load_config({**environ, "N_LAYER": "x"}, root)
    assert str(error.value).splitlines()[1:3] == [warning, "Invalid setting:"]


def test_values_from_the_environment_are_listed_without_secrets(root):
    resolved = read(
        root, "N_HEAD=2\n", SEED="4", HF_TOKEN=SECRET, PATH="/bin", **typed(N_LAYER="3")
    )
    assert resolved.warnings == ["From the environment: HF_TOKEN=(secret) SEED=4"]


def test_variables_of_make_and_of_the_build_are_no_settings(root):
    variables = typed(VENV="/opt/v", TORCH_BACKEND="cpu")
    assert read(root, MAKE_TARGET="setup", **variables).problems == []
    (problem,) = read(root, MAKE_TARGET="train", **variables).problems
    assert problem.startswith("TORCH_BACKEND (command line): Not used by make train. Used by: make")


# ---- Env files


@pytest.mark.parametrize(
    "line",
    [
        "A=x\\t",
        "export HF_TOKEN={}",
        "HF_TOKEN = {}",
        'HF_TOKEN="{}"',
        "HF_TOKEN='{}'",
        "HF_TOKEN={} # mine",
        "HF_TOKEN: {}",
        "HF_TOKN={}",
        "HF_TOKEN={} ",
        "HF_TOKEN={}\r",
        " HF_TOKEN={}",
        "\ufeffHF_TOKEN={}",
        "{}",
        "={}",
        "1A={}",
    ],
)
def test_a_line_that_readers_understand_differently_is_refused_and_not_shown(root, line):
    (problem,) = read(root, "#\n" + line.format(SECRET) + "\n").problems
    assert problem.startswith(".env: Save it with Unix") or ".env line 2" in problem
    assert SECRET not in problem


@pytest.mark.parametrize(
    "value", ["a$b$(touch x)`id`", "a\"b'c\\", "two words#3", "=a=b", "äö 你好 🎉", "x" * 10_000]
)
def test_a_value_in_an_env_file_is_taken_byte_for_byte(root, value):
    assert read(root, f"PROMPT={value}\n").config.prompt == value


def test_every_bad_line_is_reported(root):
    env_file = "A B\nSEED='1'\nNO_SUCH=1\nN_HEAD=x\nexport N_HEAD=1\nN_LAYER=1\nN_LAYER=1\n"
    assert len(read(root, env_file).problems) == 6
    windows = read(root, "\ufeff" + env_file.replace("\n", "\r\n")).problems
    assert len(windows) == 7 and "Unix line ends" in windows[0]


def test_a_file_that_cannot_be_read_is_named(root):
    assert read(root, "A=\udcff\n").problems == [
        ".env: Must be a file with NAME=value lines, in UTF-8."
    ]
    assert read(root, PRESET="tin").problems == [
        "PRESET=tin: Must be one of tiny. Did you mean tiny?"
    ]
    (root / ".env").unlink()
    (root / ".env").symlink_to("absent")  # is not taken for none
    assert resolve({}, root).problems == [".env: Cannot be read: No such file or directory."]
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("absent")
    for path in (
        "presets",
        "loop",
        "dangling",
        "/dev/null",
        "/dev/zero",
        "a" * 5000,
        "/dev/null/x",
    ):
        (problem,) = resolve({"ENV_FILE": path}, root).problems
        assert path in problem


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_file_of_somebody_else_is_named(root):
    (root / ".env").touch(0o600)
    os.chmod(root, 0o755)
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setuid(65534)
        os.write(write_end, json.dumps(resolve({}, root).problems).encode())
        os._exit(0)
    problems = json.loads(os.read(read_end, 4096))
    assert all("denied" in problem for problem in problems) and problems


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("target", "is_refused"), [("logs", True), ("plots", True), ("status", False), ("", False)]
)
def test_a_run_that_this_user_may_not_read_is_named(root, target, is_refused):
    """`make status` says so in its line."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(dir="/tmp") as runs:
        os.chmod(runs, 0o755)
        (Path(runs) / "theirs").mkdir(mode=0o700)
        if os.fork() == 0:
            os.setuid(65534)
            environ = {"RUN_NAME": "theirs", "RUNS_DIR": runs, "MAKE_TARGET": target}
            os.write(write_end, json.dumps(resolve(environ, root).problems).encode())
            os._exit(0)
        problems = json.loads(os.read(read_end, 4096))
    named = [problem for problem in problems if "RUN_NAME=theirs" in problem]
    assert len(named) == is_refused
    assert all("chmod" in problem for problem in named)


@pytest.mark.parametrize("name", ["logs", "checkpoints", "export"])
def test_a_run_has_no_link_in_place_of_its_folders(root, tmp_path, name):
    run = root / "runs" / "theirs"
    run.mkdir(parents=True)
    (run / "wandb").mkdir()
    (run / "file").symlink_to("/etc/passwd")
    named = {"RUN_NAME": "theirs", "RUNS_DIR": str(root / "runs"), "MAKE_TARGET": "train"}
    assert not resolve(named, root).problems
    (run / name).symlink_to(tmp_path)
    (problem,) = resolve(named, root).problems
    assert f"theirs/{name} is a link to a folder" in problem
    assert not resolve(named | {"MAKE_TARGET": "stop"}, root).problems  # which writes nothing there
    assert resolve(named | {"MAKE_TARGET": "plots"}, root).problems == [problem]


# ---- Secrets


def test_a_secret_is_in_no_message_and_in_no_public_place(root):
    resolved = read(root, HF_TOKEN=SECRET, SEED="x")
    assert resolved.config.hf_token == SECRET
    assert "HF_TOKEN" not in resolved.config.stored()
    assert SECRET not in repr(resolved.config) + "".join(resolved.problems + resolved.warnings)
    (root / "presets" / "tiny.env").write_text(f"HF_TOKEN={SECRET}\nPRESET=big\nNAME=SEED\n")
    problems = read(root, f"ENV_FILE={SECRET}\n", **typed(WANDB_API_KEY=SECRET)).problems
    assert [problem.split(":")[0] for problem in problems] == [
        "ENV_FILE (.env line 1)",
        "HF_TOKEN (presets/tiny.env line 1)",
        "PRESET (presets/tiny.env line 2)",
        "NAME (presets/tiny.env line 3)",
        "WANDB_API_KEY (command line)",
    ]
    assert SECRET not in str(problems)


# ---- Presets


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "presets").glob("*.env")))
def test_each_preset_loads(tmp_path, preset):
    shutil.copytree(ROOT / "presets", tmp_path / "presets")
    resolved = resolve({"PRESET": preset}, tmp_path, {"MASTER_ADDR": "a"})
    assert resolved.problems == [] and resolved.config.run_name == preset


def test_each_line_of_env_example_uncommented_changes_nothing(root):
    text = (ROOT / ".env.example").read_text()
    env_file = re.sub(r"^#(?=[A-Z0-9_]+=)", "", text, flags=re.MULTILINE)
    resolved = read(root, env_file)
    assert resolved.problems == []
    assert resolved.config == Config().derived()


# ---- Where the values in an error come from


def test_an_error_that_is_found_later_names_the_source_of_each_value(root, monkeypatch):
    """Each NAME=value that the process has, unless the sentence says already where it is from."""
    (root / "presets/tiny.env").write_text("OPTIMIZER=muon\n")
    resolved = read(root, "WEIGHT_DECAY=0.25\n", SEED="7", **typed(LEARNING_RATE="0.5"))
    monkeypatch.setattr("settings.resolve.resolve", lambda: resolved)
    origins = {
        "SEED=7": "environment",
        "LEARNING_RATE=0.5": "command line",
        "WEIGHT_DECAY=0.25": ".env line 1",
        "OPTIMIZER=muon": "presets/tiny.env line 1",
        "EPOCHS=1": "default",
    }
    for given, origin in origins.items():
        name = given.partition("=")[0]
        text = explain_error(SettingsError([f"{given}: Wrong."]))
        assert text == f"Invalid setting:\n    {given}: Wrong. [{name}: {origin}]"
    both = SettingsError(["SEED=7: Must not be EPOCHS=1, for example SEED=8.", "MODEL: Wrong."])
    assert explain_error(both).splitlines() == [
        "Invalid settings:",
        "    SEED=7: Must not be EPOCHS=1, for example SEED=8. [SEED: environment, EPOCHS: default]",
        "    MODEL: Wrong.",
    ]
    assert explain_error(SettingsError(["SEED=7 (environment): Wrong."])).endswith("Wrong.")
    assert explain_error(ValueError("SEED=7: Wrong.")) == "SEED=7: Wrong."


def test_an_error_of_another_rank_names_sources_too(monkeypatch):
    """train/distributed/world.py makes it without the constructor."""
    monkeypatch.setattr("settings.resolve.resolve", lambda: resolve({"SEED": "7", "ENV_FILE": ""}))
    error = SettingsError.__new__(SettingsError)
    error.args = ("rank 1: Invalid setting:\n    SEED=7: Wrong.",)
    error.problems = ["SEED=7: Wrong."]
    assert explain_error(error) == f"{error.args[0]} [SEED: environment]"


def test_where_the_run_cannot_be_read_an_error_is_printed_as_it_is(monkeypatch):
    def refuse():
        raise RunConfigError(["runs/r/config.json: is empty."])

    monkeypatch.setattr("settings.resolve.resolve", refuse)
    assert explain_error(SettingsError(["SEED=7: Wrong."])).endswith("SEED=7: Wrong.")
    assert explain_error(RunConfigError(["r: is empty."])) == "r: is empty."
