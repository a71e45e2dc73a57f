"""settings/declare.py and settings/config.py: where a value comes from, what is refused, and what the refusal says."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from settings.config import Config, compare_for_resume
from settings.declare import (
    ROOT,
    Declared,
    SettingsError,
    declared_fields,
    read_env_file,
    resolve,
    value_type,
)
from settings.env_example import env_example

FIELDS = declared_fields(Config)
NUMERIC = [name for name, field in FIELDS.items() if value_type(field) in (int, float)]
INTEGER = [name for name in NUMERIC if value_type(FIELDS[name]) is int]

# Stated here a second time, by hand: what a resumed run may not change, and what it records when it does.
FROZEN = {
    "SEED",
    "VOCAB_SIZE",
    "N_LAYER",
    "N_HEAD",
    "N_KV_HEAD",
    "N_EMBD",
    "MLP_DIM",
    "QK_NORM",
    "TIE_EMBEDDINGS",
    "ROPE_THETA",
    "SEQ_LEN",
    "BATCH_TOKENS",
    "OPTIMIZER",
    "DATA_MIX",
    "TOKENIZER",
    "DOC_MASK",
    "INIT_FROM",
    "MODEL",
    "DATA",
    "LORA_RANK",
    "LORA_ALPHA",
    "LORA_TARGETS",
}
TRACKED = {
    "DEVICE",
    "NPROC",
    "DTYPE",
    "COMPILE",
    "ATTENTION",
    "ACTIVATION_CHECKPOINTING",
    "MICRO_BATCH_SIZE",
    "TRAIN_TOKENS",
    "LEARNING_RATE",
    "MIN_LEARNING_RATE",
    "WARMUP_TOKENS",
    "LR_SCHEDULE",
    "DECAY_TOKENS",
    "ADAM_BETA1",
    "ADAM_BETA2",
    "WEIGHT_DECAY",
    "GRAD_CLIP",
    "EVAL_TOKENS",
    "PARALLEL",
    "SHARD_RANKS",
    "SYNC",
    "SITES",
    "SYNC_EVERY",
    "SYNC_FRAGMENTS",
    "SYNC_DELAY",
    "OUTER_LEARNING_RATE",
    "OUTER_MOMENTUM",
    "SYNC_DTYPE",
    "GRAD_SYNC",
    "NODES",
    "SPIKE_SIGMAS",
    "EVAL_DATA",
    "EPOCHS",
    "LORA_DROPOUT",
}

# The numbers for which zero has a meaning; each other one must be above it.
ZERO_IS_GOOD = {
    "SEED",
    "MIN_LEARNING_RATE",
    "WARMUP_TOKENS",
    "ADAM_BETA1",
    "ADAM_BETA2",
    "WEIGHT_DECAY",
    "GRAD_CLIP",
    "EVAL_EVERY",
    "SAMPLE_TEMPERATURE",
    "SAMPLE_TOKENS",
    "SAMPLE_TOP_K",
    "KEEP_EVERY",
    "SAVE_EVERY",
    "NODE_RANK",
    "MAX_RESTARTS",
    "SPIKE_SIGMAS",
    "WAN_RTT_MS",
    "OUTER_MOMENTUM",
    "SYNC_DELAY",
    "CORE_EVERY",
    "EVAL_EXAMPLES",
    "LORA_RANK",
    "LORA_DROPOUT",
}

# What a setting needs beside itself to mean anything.
LORA = {"LORA_RANK": "8"}
WITH = {
    "DECAY_TOKENS": {"LR_SCHEDULE": "wsd"},
    "CHECKPOINT_MODE": LORA,
    "ATTENTION": {"DTYPE": "bfloat16"},
    "SHARD_RANKS": {"PARALLEL": "hsdp"},
    "GRAD_SYNC": {"PARALLEL": "fsdp"},
    "NODES": {"MASTER_ADDR": "a"},
    "NODE_RANK": {"MASTER_ADDR": "a", "NODES": "2"},
    "LORA_ALPHA": LORA,
    "LORA_DROPOUT": LORA,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one empty preset and no .env."""
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "tiny.env").write_text("")
    return tmp_path


def problems(root: Path, env_file: str | bytes = "", **environ: str) -> list[str]:
    """The problems found with this .env and environment; none is an empty list."""
    (root / ".env").write_bytes(env_file.encode() if isinstance(env_file, str) else env_file)
    try:
        Config.load(environ, root)
    except SettingsError as error:
        return error.problems
    return []


# ---- Where a value comes from


def test_each_of_the_five_sources_wins_over_those_below_it(root: Path) -> None:
    (root / "presets" / "tiny.env").write_text("SEED=2\n")
    (root / ".env").write_text("SEED=3\n")
    environment, make = (
        {"SEED": "4"},
        {"SEED": "5", "MAKE_SETTINGS": "SEED PRESET"},
    )  # make exports its value over it

    def seed(environ: dict[str, str]) -> tuple[int, str]:
        return Config.load(environ, root).seed, resolve(Config, environ, root).origin["SEED"]

    assert seed(environment | make) == (5, "make's command line")
    assert seed(environment) == (4, "environment")
    value, origin = seed({})
    assert value == 3 and origin.endswith(".env line 1") and "presets" not in origin
    (root / ".env").unlink()
    value, origin = seed({})
    assert value == 2 and origin.endswith("presets/tiny.env line 1")
    (root / "presets" / "tiny.env").write_text("")
    assert seed({}) == (1337, "default")


def test_env_file_and_preset_are_chosen_by_the_sources_above_them(root: Path) -> None:
    (root / "presets" / "big.env").write_text("N_LAYER=7\n")
    (root / "mine").write_text("PRESET=big\nSEED=9\n")
    (root / ".env").write_text("SEED=1\n")
    config = Config.load({"ENV_FILE": "mine"}, root)
    assert (config.seed, config.preset, config.n_layer, config.run_name) == (9, "big", 7, "big")
    assert Config.load({"ENV_FILE": "mine", "PRESET": "tiny"}, root).n_layer == 4


def test_a_target_s_own_defaults_rank_below_presets_and_above_the_declared(root: Path) -> None:
    (root / "presets" / "big.env").write_text("N_LAYER=7\n")
    defaults = {"PRESET": "big", "N_LAYER": "5", "SEED": "6"}
    config, _ = Config.load_with_remarks({}, root, defaults)
    assert (config.preset, config.n_layer, config.seed, config.run_name) == ("big", 7, 6, "big")
    config, _ = Config.load_with_remarks({"PRESET": "tiny", "SEED": "8"}, root, defaults)
    assert (config.preset, config.n_layer, config.seed) == ("tiny", 5, 8)


def test_an_empty_value_is_an_unset_one_at_every_level(root: Path) -> None:
    (root / "presets" / "tiny.env").write_text("SEED=2\nN_LAYER=\n")
    (root / ".env").write_text("SEED=\nN_HEAD=\n")
    config = Config.load(dict.fromkeys(FIELDS, "") | {"MAKE_SETTINGS": "SEED"}, root)
    assert config.seed == 2
    assert config == dataclasses.replace(Config(), seed=2).derived()


def test_values_from_the_environment_are_listed_and_others_are_not(root: Path) -> None:
    (root / ".env").write_text("N_HEAD=2\n")
    environ = {
        "SEED": "4",
        "DEVICE": "cpu",
        "N_LAYER": "3",
        "MAKE_SETTINGS": "N_LAYER",
        "PATH": "/bin",
    }
    remarks = Config.load_with_remarks(environ, root)[1]
    assert remarks == ["taken from the environment: SEED=4 DEVICE=cpu"]


# ---- What is no setting


@pytest.mark.fault(23)
def test_an_unknown_name_in_an_env_file_is_refused_with_the_nearest(root: Path) -> None:
    (found,) = problems(root, "SEED=1\nLEARNIN_RATE=1\n")
    assert (
        found == f"LEARNIN_RATE ({root}/.env line 2): no such setting; did you mean LEARNING_RATE?"
    )
    (root / "presets" / "tiny.env").write_text("N_LAYERS=2\n")
    (found,) = problems(root)
    assert "presets/tiny.env line 1" in found and "did you mean N_LAYER?" in found


@pytest.mark.fault(23)
def test_an_unknown_name_on_makes_command_line_is_refused_with_the_nearest(root: Path) -> None:
    (found,) = problems(root, LEARNIN_RATE="1", MAKE_SETTINGS="LEARNIN_RATE")
    assert (
        found == "LEARNIN_RATE (make's command line): no such setting; did you mean LEARNING_RATE?"
    )
    (found,) = problems(root, seed="1", MAKE_SETTINGS="seed")
    assert "did you mean SEED?" in found
    (found,) = problems(root, QQQQQQ="1", MAKE_SETTINGS="QQQQQQ")
    assert "make settings" in found and "did you mean" not in found


def test_names_that_make_and_the_scripts_use_are_no_settings_and_no_mistake(root: Path) -> None:
    assert (
        problems(root, VENV="/opt/v", PYTHON="python3", MAKE_SETTINGS="VENV PYTHON MAKEFLAGS SHELL")
        == []
    )


@pytest.mark.fault(23)
def test_a_near_miss_in_the_environment_is_only_remarked_on(root: Path) -> None:
    environ = {"LEARNIN_RATE": "1", "HOME": "/root", "LS_COLORS": "x", "QQQQQQ": "1"}
    config, remarks = Config.load_with_remarks(environ, root)
    assert config.learning_rate == Config().learning_rate
    assert remarks == [
        "the environment has LEARNIN_RATE, which is no setting; was LEARNING_RATE meant?"
    ]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PRESET": "tin"}, ["PRESET=tin (environment)", "did you mean tiny?", "there are: tiny"]),
        ({"PRESET": "zzz"}, ["PRESET=zzz (environment)", "there are: tiny"]),
        (
            {"ENV_FILE": "absent.env"},
            ["ENV_FILE=absent.env (environment): no such file", ".env.example"],
        ),
    ],
    ids=["near", "far", "env file"],
)
def test_a_file_that_is_not_there_is_named_with_what_to_do(
    root: Path, environ: dict, words: list[str]
) -> None:
    (found,) = problems(root, **environ)
    assert all(word in found for word in words), found


def test_a_preset_cannot_choose_a_preset_or_an_env_file(root: Path) -> None:
    (root / "presets" / "tiny.env").write_text("PRESET=big\nENV_FILE=x\n")
    found = problems(root)
    assert [complaint.split(" (")[0] for complaint in found] == ["ENV_FILE", "PRESET"]
    assert all(
        "presets/tiny.env line" in complaint and "cannot be set here" in complaint
        for complaint in found
    )


def test_an_env_file_cannot_choose_another(root: Path) -> None:
    (found,) = problems(root, "ENV_FILE=other.env\n")
    assert "ENV_FILE" in found and ".env line 1" in found and "cannot be set here" in found


# ---- The syntax of an env file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'A="quoted"\n', ["line 1", "A has '\"'", "write A=value"]),
        (b"A='quoted'\n", ["line 1", "A has"]),
        (b"A=two words\n", ["line 1", "A has ' '"]),
        (b"A=value \n", ["line 1", "A has ' '"]),
        (b"A=tab\tbed\n", ["line 1", "A has"]),
        (b"A=$HOME\n", ["line 1", "A has '$'"]),
        (b"A=1 # why\n", ["line 1", "A has ' '", "comments on their own line"]),
        (b"A=a#b\n", ["line 1", "A has '#'"]),
        (b"A=a\\b\n", ["line 1", "A has"]),
        (b"A=`id`\n", ["line 1", "A has '`'"]),
        (b"B=1\nexport A=1\n", ["line 2", "export A", "is not NAME=value"]),
        (b"A = 1\n", ["line 1", "no blanks round '='"]),
        (b" A=1\n", ["line 1", "is not NAME=value"]),
        (b"A\n", ["line 1", "is not NAME=value"]),
        (b"=1\n", ["line 1", "is not NAME=value"]),
        (b"1A=1\n", ["line 1", "is not NAME=value"]),
        (b"A-B=1\n", ["line 1", "is not NAME=value"]),
        (b"A=1\nB=2\nA=3\n", ["line 3", "A was set before", "line 1"]),
        (b"A=1\r\n", ["line 1", "carriage return", "Unix line ends"]),
        (b"\xef\xbb\xbfA=1\n", ["line 1", "is not NAME=value"]),
        (b"A=\xff\n", ["cannot be read (not UTF-8)"]),
    ],
    ids=repr,
)
def test_what_other_readers_of_env_files_would_read_otherwise_is_refused(
    tmp_path: Path, text: bytes, words: list[str]
) -> None:
    path = tmp_path / "x.env"
    path.write_bytes(text)
    found = read_env_file(path)[1]
    assert len(found) == 1
    assert str(path) in found[0]
    assert all(word in found[0] for word in words), found[0]


def test_comments_blank_lines_and_plain_values_are_read_to_the_letter(tmp_path: Path) -> None:
    path = tmp_path / "x.env"
    path.write_text('# a comment with A="1" $x\n\nA=1\n_b2=/x/y:z,1e-3=%&*\nC=\nD=äö')
    values, found = read_env_file(path)
    assert found == []
    assert {name: value for name, (value, _) in values.items()} == {
        "A": "1",
        "_b2": "/x/y:z,1e-3=%&*",
        "C": "",
        "D": "äö",
    }
    assert values["_b2"][1].endswith("x.env line 4")


def test_every_bad_line_of_a_file_is_reported(root: Path) -> None:
    assert len(problems(root, "A B\nSEED='1'\nNO_SUCH=1\nSEED=x\nexport N_HEAD=1\n")) == 5


# ---- One value


def bad_values(name: str) -> list[str]:
    """Texts that break the rule of a setting, from what is declared of it."""
    field = FIELDS[name]
    declared: Declared = field.metadata["declared"]
    kind = value_type(field)
    if kind is bool:
        return ["yes", "true", "2", "-1", "01", "on"]
    if kind is str:
        return (["no-such-choice", declared.choices[0].upper()] if declared.choices else []) + (
            ["a b!", "/", "-x:"] if declared.pattern else []
        )
    bad = ["ten", "nan", "NaN", "inf", "-inf", "-1", "0x10", "1,5", "1 000", "--1", "."]
    if kind is int:
        bad += ["1e3", "1.0", "1_000", "\u0663"]
    if declared.minimum is not None:
        bad.append(repr(declared.minimum - 1))
    if declared.above is not None:
        bad.append(repr(declared.above))
    if declared.maximum is not None:
        bad += [repr(declared.maximum * 2 + 1)] + (
            [str(declared.maximum + 1)] if kind is int else []
        )
    return bad


@pytest.mark.fault(24)
@pytest.mark.parametrize("name", [name for name in FIELDS if bad_values(name)])
def test_a_refused_value_is_named_with_an_example_that_is_good(root: Path, name: str) -> None:
    for text in bad_values(name):
        found = [
            p
            for p in problems(root, **WITH.get(name, {}), **{name: text})
            if p.startswith(f"{name}={text} (environment): must be ")
        ]
        assert len(found) == 1, f"{name}={text}"
        example = re.search(r"; for example ([A-Z0-9_]+)=([^;\s]+)", found[0])
        assert example is not None and example[1] == name, found[0]
        assert problems(root, **WITH.get(name, {}), **{name: example[2]}) == [], found[0]


@pytest.mark.fault(24)
def test_every_number_refuses_what_is_below_zero_and_says_what_zero_means(root: Path) -> None:
    assert {
        name for name in NUMERIC if not problems(root, **WITH.get(name, {}), **{name: "-1"})
    } == set()
    assert {
        name for name in NUMERIC if not problems(root, **WITH.get(name, {}), **{name: "0"})
    } == ZERO_IS_GOOD


@pytest.mark.fault(24)
def test_a_whole_number_takes_no_exponent_and_a_rate_takes_one(root: Path) -> None:
    assert {name for name in INTEGER if not problems(root, **{name: "1e5"})} == set()
    assert Config.load({"LEARNING_RATE": "6e-4", "MAX_STEPS": "+7"}, root).learning_rate == 0.0006


@pytest.mark.parametrize("text", ["1_0", " 1", "1 ", "\u0661"])
def test_a_rate_takes_no_spelling_that_only_python_knows(root: Path, text: str) -> None:
    assert len(problems(root, LEARNING_RATE=text)) == 1


# ---- Secrets

SECRET = "hf_AbCdEfGh123"


def test_a_secret_is_in_no_record_no_message_and_no_remark(root: Path) -> None:
    config, remarks = Config.load_with_remarks({"HF_TOKEN": SECRET}, root)
    assert config.hf_token == SECRET
    assert "HF_TOKEN" not in config.stored() and SECRET not in json.dumps(config.stored())
    assert "HF_TOKEN=(secret)" in " ".join(remarks) and SECRET not in " ".join(remarks)
    with pytest.raises(SettingsError) as raised:
        Config.load({"HF_TOKEN": SECRET, "SEED": "x"}, root)
    assert "HF_TOKEN=(secret)" in str(raised.value) and SECRET not in str(raised.value)
    other = dataclasses.replace(config, hf_token="another")
    assert compare_for_resume(config.stored(), other) == ([], {})


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN={}",
        "HF_TOKEN = {}",
        'HF_TOKEN="{}"',
        "HF_TOKEN={} # mine",
        "HF_TOKEN: {}",
        "HF_TOKN={}",
        "HF_TOKEN={}\r",
    ],
)
def test_a_secret_on_a_line_that_is_refused_is_not_shown(root: Path, line: str) -> None:
    found = problems(root, line.format(SECRET) + "\n")
    assert len(found) == 1 and "line 1" in found[0]
    assert SECRET not in found[0]


def test_a_secret_in_a_preset_or_on_a_command_line_is_refused(root: Path) -> None:
    """Presets are committed, and command lines are seen by every user of the machine."""
    assert len(problems(root, HF_TOKEN=SECRET, MAKE_SETTINGS="HF_TOKEN")) == 1
    (root / "presets" / "tiny.env").write_text(f"HF_TOKEN={SECRET}\n")
    (found,) = problems(root)
    assert "HF_TOKEN" in found and SECRET not in found


# ---- Resuming


def other_value(name: str) -> object:
    value, kind = getattr(Config().derived(), name.lower()), value_type(FIELDS[name])
    return not value if kind is bool else f"{value}x" if kind is str else (value or 0) + kind(1)


@pytest.mark.fault(31)
@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_setting_is_frozen_tracked_or_free_as_listed(name: str) -> None:
    stored = json.loads(json.dumps(Config().derived().stored()))
    now = dataclasses.replace(Config().derived(), **{name.lower(): other_value(name)})
    complaints, tracked = compare_for_resume(stored, now)
    if name in FROZEN:
        assert (
            len(complaints) == 1
            and complaints[0].startswith(f"{name}=")
            and "RUN_NAME" in complaints[0]
        )
    else:
        assert complaints == []
    assert tracked == ({name: [stored[name], other_value(name)]} if name in TRACKED else {})


def test_nothing_is_said_when_nothing_has_changed(root: Path) -> None:
    config = Config.load({}, root)
    assert compare_for_resume(json.loads(json.dumps(config.stored())), config) == ([], {})


def test_all_frozen_settings_that_changed_are_named_with_both_values() -> None:
    now = dataclasses.replace(Config(), n_layer=8, seed=2, qk_norm=True).derived()
    complaints, _ = compare_for_resume(Config().derived().stored(), now)
    assert [c.split(":")[0] for c in complaints] == ["SEED=2", "N_LAYER=8", "QK_NORM=1"]
    assert [c.split("go on with ")[1].split(",")[0] for c in complaints] == [
        "SEED=1337",
        "N_LAYER=4",
        "QK_NORM=0",
    ]


def test_the_value_to_go_on_with_is_that_of_the_run_to_the_last_digit(root: Path) -> None:
    before = Config.load({"ROPE_THETA": "1234567"}, root)
    (complaint,), _ = compare_for_resume(
        before.stored(), Config.load({"ROPE_THETA": "1234568"}, root)
    )
    value = complaint.split("go on with ROPE_THETA=")[1].split(",")[0]
    assert compare_for_resume(before.stored(), Config.load({"ROPE_THETA": value}, root)) == ([], {})


def test_a_setting_that_the_stored_run_did_not_know_counts_as_its_default() -> None:
    stored = Config().derived().stored()
    del stored["QK_NORM"], stored["LEARNING_RATE"]
    assert compare_for_resume(stored, Config().derived()) == ([], {})
    complaints, tracked = compare_for_resume(
        stored, dataclasses.replace(Config(), qk_norm=True, learning_rate=0.5).derived()
    )
    assert len(complaints) == 1 and "QK_NORM=0" in complaints[0]
    assert tracked["LEARNING_RATE"] == [0.001, 0.5]


# ---- The files that are written from, or read by, the declaration


def test_env_example_is_what_the_declaration_gives() -> None:
    path = ROOT / ".env.example"
    if not path.exists():
        pytest.skip(".env.example is not written yet: make env-example")
    assert path.read_text() == env_example()


def test_each_line_of_env_example_uncommented_is_good_and_changes_nothing(root: Path) -> None:
    lines = [line[1:] for line in env_example().splitlines() if re.match(r"#[A-Z0-9_]+=", line)]
    assert sorted(line.split("=")[0] for line in lines) == sorted(FIELDS.keys() - {"ENV_FILE"})
    for line in lines:
        assert problems(root, line + "\n") == []
    (root / ".env").write_text("\n".join(lines) + "\n")
    assert Config.load({}, root) == Config().derived()


def test_env_example_has_each_setting_with_help_rule_and_a_group() -> None:
    text = env_example()
    for name, field in FIELDS.items():
        if name == "ENV_FILE":  # cannot be set in itself
            continue
        declared: Declared = field.metadata["declared"]
        assert re.search(rf"^# {re.escape(declared.help)}\.\n# .+\n#{name}=", text, re.MULTILINE), (
            name
        )
    assert re.findall("^# ==== (.+)$", text, re.MULTILINE) == [
        "Run",
        "Machine",
        "Parallel",
        "Sites",
        "Model",
        "Batch and schedule",
        "Optimizer",
        "Data",
        "Fine-tuning",
        "Pipeline",
        "Evaluation",
        "Checkpoints",
        "Failures",
        "Image",
        "Cluster",
        "Plan and doctor",
        "Monitor",
        "Plots",
        "Text",
        "WAN lab",
        "Benchmark",
        "Log",
        "W&B",
        "Secrets",
    ]


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "presets").glob("*.env")))
def test_each_preset_loads(tmp_path: Path, preset: str) -> None:
    shutil.copytree(ROOT / "presets", tmp_path / "presets")
    config = Config.load({"PRESET": preset}, tmp_path)
    assert config.preset == preset and config.run_name == preset
    assert config.last_step >= 10
