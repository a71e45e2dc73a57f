"""MODEL: a run of ours, a folder, a name on a hub that answers well or badly."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from finetune import model_folder
from record.run_paths import RunPaths
from settings import SettingsError, load_preset
from settings.config import Config
from tests.export.exported import LLAMA, make_run
from tests.faults.hub import REVISION, Hub, Repository, hub
from tests.finetune.making import row, write_rows
from tests.finetune.models import models
from tests.finetune.test_training import chats, env_of, finetune, losses
from tests.running import ROOT, train
from tests.train.checkpoint.test_checkpoint import ALONE
from train.checkpoint.manifest import CheckpointError
from train.model.hf_import import ForeignError

__all__ = ["chats", "models"]  # fixtures

NAME = "lab/tiny-llama"


def served(folder: Path, **manner: object) -> dict[str, Repository]:
    """The folder's files on a hub, with code and a pickle beside them."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    beside = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"\x80", "x/y.json": b"{}"}
    return {NAME: Repository(files | beside, **manner)}  # type: ignore[arg-type]


def bring(
    env: dict[str, str], running: Hub, folder: Path, code: int = 0, model: str = NAME, *argv: str
) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "finetune.prepare_data", *argv],
        cwd=ROOT,
        text=True,
        check=False,
        timeout=270,
        env=env | running.environment(folder) | {"MODEL": model, "HF_TOKEN": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def test_a_name_on_the_hub_is_brought_once_without_code_and_pickles(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    env = env_of(tmp_path, models["llama"], chats)
    with hub(repositories=served(models["llama"])) as running:
        assert f"commit {REVISION}" in bring(env, running, tmp_path)
        kept = tmp_path / "data" / "models" / "lab--tiny-llama"
        expected = {path.name for path in models["llama"].iterdir()}
        assert {path.name for path in kept.iterdir() if path.name[0] != "."} == expected
        assert all(
            (kept / name).read_bytes() == (models["llama"] / name).read_bytes() for name in expected
        )
        before = len(running.requests)
        assert "training: 180 examples" in bring(env, running, tmp_path)
        assert len(running.requests) == before
    assert json.loads((kept / model_folder.WHOLE).read_text())["commit"] == REVISION
    assert model_folder.find(load_preset(MODEL=NAME, DATA_DIR=str(tmp_path / "data"))) == kept


@pytest.mark.parametrize(
    ("manner", "times"),
    [("503 file", 2), ("503 about", 1), ("short file", 2), ("wrong file", 1), ("page about", 1)],
)
def test_a_bad_answer_is_asked_for_again(
    models: dict[str, Path], chats: Path, tmp_path: Path, manner: str, times: int
) -> None:
    env = env_of(tmp_path, models["llama"], chats)
    with hub(repositories=served(models["llama"], manner=manner, bad_times=times)) as running:
        said = bring(env, running, tmp_path)
    assert "asking again" in said or manner == "short file"  # which the hub's client resumes
    kept = tmp_path / "data" / "models" / "lab--tiny-llama"
    assert all(
        (kept / path.name).read_bytes() == path.read_bytes() for path in models["llama"].iterdir()
    )


@pytest.mark.parametrize(
    ("manner", "model", "words"),
    [
        ("gated about", NAME, "set HF_TOKEN to a token that may read it"),
        ("good", "lab/none", "does not exist"),
        ("404 about", NAME, "does not exist, or not for everybody"),
    ],
)
def test_what_will_not_change_ends_it(
    models: dict[str, Path], chats: Path, tmp_path: Path, manner: str, model: str, words: str
) -> None:
    with hub(repositories=served(models["llama"], manner=manner)) as running:
        said = bring(env_of(tmp_path, models["llama"], chats), running, tmp_path, 78, model)
    assert said.startswith(
        f"MODEL={model}: There is no run and no folder of that name here, and on the Hub: "
    )
    assert words in said


@pytest.mark.parametrize(
    ("settings", "code"),
    [({}, 0), ({"MICRO_BATCH_SIZE": "16384", "SEQ_LEN": "512", "BATCH_TOKENS": "8388608"}, 64)],
    ids=["fits", "too large"],
)
def test_what_was_not_here_to_be_planned_is_planned_once_it_is(
    models: dict[str, Path], chats: Path, tmp_path: Path, settings: dict[str, str], code: int
) -> None:
    env = env_of(tmp_path, models["llama"], chats, **settings)
    with hub(repositories=served(models["llama"])) as running:
        said = bring(env, running, tmp_path, code, NAME, "before-training")
        assert said.index("GiB of memory") > said.index("commit ") and (
            "Nothing was started" in said
        ) == bool(code)
        again = bring(env, running, tmp_path, 0, NAME, "before-training")
    assert "plan" not in again  # scripts/train.py has said it


def test_pickles_alone_are_no_model(models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    held = served(models["llama"])
    held[NAME].files = {
        name: data for name, data in held[NAME].files.items() if not name.endswith(".safetensors")
    }
    env = env_of(tmp_path, models["llama"], chats)
    with hub(repositories=held) as running:
        assert "it has no safetensors, and pickles are not read" in bring(
            env, running, tmp_path, 78
        )


@pytest.mark.slow
def test_a_run_of_ours_is_fine_tuned_and_exported_again(
    tiny: Config, data: dict[str, str], tmp_path: Path
) -> None:
    made = make_run(
        tmp_path, dataclasses.replace(tiny, tokenizer=data["TOKENIZER"], seq_len=64, **LLAMA)
    )
    rows = write_rows(tmp_path / "chats.jsonl", [row(f"Is {i} one?", "Yes.") for i in range(100)])
    (tmp_path / "own.env").write_text(
        "SEQ_LEN=48\n"
    )  # which is not that of the run that is exported
    env = env_of(
        tmp_path, Path("a-run"), rows, MAX_STEPS="8", EPOCHS="4", ENV_FILE=str(tmp_path / "own.env")
    )
    for what in (
        "Exporting step 3 of a-run",
        "training: 90 examples",
    ):  # the second time there is one
        said = train(env, command=[sys.executable, "-m", "finetune.prepare_data"])
        assert what in said and ("Exporting" in said) == what.startswith("Exporting")
    finetune(env)
    found = losses(tmp_path)
    assert found[-1] < found[0] - 0.3
    said = train(env | {"GGUF": "1"}, command=[sys.executable, "-m", "export"])
    assert "with step 8 of run" in said
    base = {"RUN_NAME": "a-run", "MODEL": "", "DTYPE": "bfloat16"}
    said = train(env | base, command=[sys.executable, "-m", "export"])
    assert "these runs were fine-tuned from it: run." in said
    assert "resumed from step_0000008" in finetune(env | {"MAX_STEPS": "9", "EPOCHS": "8"})
    train(env | {"GGUF": "1", "STEP": "8"}, command=[sys.executable, "-m", "export"])
    export = tmp_path / "run" / "export"
    found = {weight.name: weight.data for weight in GGUFReader(export / "model.gguf").tensors}
    expected = load_file(export / "model.safetensors")["model.embed_tokens.weight"]
    assert (found["token_embd.weight"] == expected.numpy()).all()
    from train.generate.load_run import open_trained, settings_of_command

    c, _ = settings_of_command(
        {
            "ENV_FILE": "",
            "INIT_FROM": str(tmp_path / "run" / "export"),
            "RUN_NAME": "none",
            "DEVICE": "cpu",
            "RUNS_DIR": str(tmp_path),
            "DATA_DIR": str(tmp_path / "data"),
        }
    )
    again = open_trained(c, ALONE, given={"INIT_FROM"})  # as make eval and make sample open it
    first = made.models[3].embed_tokens.weight
    assert not torch.equal(again.model.embed_tokens.weight[:512], first[:512])
    assert torch.allclose(again.model.embed_tokens.weight[:512], first[:512], atol=0.1)


def test_a_run_of_ours_is_read_by_its_export(tmp_path: Path) -> None:
    c = load_preset(MODEL="mine", RUNS_DIR=str(tmp_path))
    with pytest.raises(SettingsError, match="There is no such run"):
        model_folder.find(c)
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ForeignError, match="The run has no export yet"):
        model_folder.find(c)
    with pytest.raises(CheckpointError, match="run mine has no checkpoint yet"):
        model_folder.bring(c)
    for number in (1, 2):  # of no run: without config.json
        (tmp_path / "mine" / "checkpoints" / f"step_{number:07d}").mkdir()
    with pytest.raises(ForeignError, match=r"mine: The run cannot be exported: .*config\.json"):
        model_folder.bring(c)
    (tmp_path / "mine" / "export").mkdir()
    (tmp_path / "mine" / "export" / "config.json").touch()
    assert model_folder.find(c) == tmp_path / "mine" / "export"
    assert (
        model_folder.find(load_preset(MODEL=str(tmp_path / "mine"))) == tmp_path / "mine" / "export"
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("export.json", '{"step": 1009}', " (step 1009)"),
        ("export.json", '{"step": 1012}', " (step 1012)"),
        ("export.json", "{", ""),
        ("README.md", "by hand\n", ""),
    ],
)
def test_an_export_that_the_run_has_left_behind_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: str, said: str
) -> None:
    (tmp_path / "mine" / "export").mkdir(parents=True)
    (tmp_path / "mine" / "export" / "config.json").touch()
    (tmp_path / "mine" / "export" / name).write_text(content)
    for step in (1009, 1012):
        (tmp_path / "mine" / "checkpoints" / f"step_{step:07d}").mkdir(parents=True)
    with caplog.at_level("INFO"):
        model_folder.bring(load_preset(MODEL="mine", RUNS_DIR=str(tmp_path)))
    first, *others = [one.getMessage() for one in caplog.records]
    assert first == f"Loading MODEL=mine from {tmp_path}/mine/export{said}."
    assert others == (
        []
        if "1012" in said
        else [
            "MODEL=mine: There is a newer checkpoint, of step 1012. To use it: make export RUN_NAME=mine"
        ]
    )


EXPORT = """#!/bin/sh
trap 'touch "$RUNS_DIR/cleaned"; exit 130' TERM
until [ -e "$RUNS_DIR/waits" ]; do sleep 0.02; done
kill -INT $PPID
while :; do sleep 0.1; done
"""


def test_an_interrupted_export_may_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(EXPORT)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    communicate = subprocess.Popen.communicate

    def wait(child: subprocess.Popen) -> tuple:
        (tmp_path / "waits").touch()
        return communicate(child)

    monkeypatch.setattr(subprocess.Popen, "communicate", wait)
    with pytest.raises(KeyboardInterrupt):
        model_folder.run_export(RunPaths(tmp_path / "mine"), load_preset(), 3)
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("model", ["mine", "mine/export"])
def test_a_run_finds_the_earlier_export_that_it_was_tuned_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    mine = tmp_path / "mine"
    (mine / "checkpoints" / "step_0001012").mkdir(parents=True)
    for name in ("export", "export-abc"):
        (mine / name).mkdir()
        (mine / name / "config.json").touch()
    (tmp_path / "tuned").mkdir()
    attempts = {"settings": {}, "attempts": [{"model_fingerprint": "abc"}, {}]}
    (tmp_path / "tuned" / "config.json").write_text(json.dumps(attempts))
    config = load_preset(MODEL=str(tmp_path / model), RUNS_DIR=str(tmp_path), RUN_NAME="tuned")
    with caplog.at_level("INFO"):
        assert model_folder.bring(config) == model_folder.find(config) == mine / "export-abc"
    assert "newer" not in caplog.text  # this run cannot use it
    assert model_folder.find(config.replace(run_name="another")) == mine / "export"


def test_what_scripts_ask_of_settings_is_asked_as_fine_tuning_does(tmp_path: Path) -> None:
    """A warm-up of more than TRAIN_TOKENS, which EPOCHS of DATA take the place of."""
    (tmp_path / "none.env").write_text("")
    env = {
        "PATH": "/usr/bin:/bin",
        "ENV_FILE": str(tmp_path / "none.env"),
        "WARMUP_TOKENS": "999999999",
    }
    for model, code in (("models/qwen3-1.7b", 0), ("", 64)):
        done = subprocess.run(
            [sys.executable, "-m", "settings", "check"],
            cwd=ROOT,
            text=True,
            check=False,
            env=env | {"MODEL": model},
            capture_output=True,
        )
        assert done.returncode == code, done.stderr
