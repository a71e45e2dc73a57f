"""python -m finetune.main: trained, evaluated, stopped, gone on with, on one process and several."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from record import metrics as record_reader
from tests.faults.inject import Fault, faulty
from tests.finetune.making import row, write_rows
from tests.finetune.models import models
from tests.processes import run_trainer
from tests.running import ROOT, environment

__all__ = ["models"]  # a fixture

SMALL = {
    "SEQ_LEN": "64",
    "BATCH_TOKENS": "1024",
    "MICRO_BATCH_SIZE": "4",
    "EPOCHS": "1",
    "LEARNING_RATE": "3e-3",
    "WARMUP_TOKENS": "0",
    "EVAL_EVERY": "6",
    "LOG_EVERY": "5",
    "SPIKE_SIGMAS": "0",
}
LORA = {"LORA_RANK": "4", "LORA_TARGETS": "attention,mlp,experts"}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        row(f"What is {i}?", f"It is {i}, and {i} it is.", "Why?", "I know.") for i in range(200)
    ]
    return write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


def env_of(folder: Path, model: Path, chats: Path, **settings: str) -> dict[str, str]:
    """A user's environment, with a run in `folder`."""
    kept = environment(folder, {})
    for name in (
        "VOCAB_SIZE",
        "N_LAYER",
        "N_HEAD",
        "N_EMBD",
        "TRAIN_TOKENS",
        "EVAL_TOKENS",
        "SAMPLE_TOKENS",
        "DATA_MIX",
    ):
        kept.pop(name)
    return (
        kept
        | {"DATA_DIR": str(folder / "data"), "MODEL": str(model), "DATA": str(chats)}
        | SMALL
        | settings
    )


def finetune(env: dict[str, str], processes: int = 1, code: int = 0) -> str:
    """What its processes say, until the last of them ends; they must end with this code."""
    found, said = run_trainer(["-m", "finetune.main"], env, processes)
    assert found == code, f"exit code {found}, not {code}:\n{said}"
    return said


def records(folder: Path) -> list[dict[str, Any]]:
    return list(record_reader.read_records(folder / "run" / "metrics.jsonl"))


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in records(folder) if entry["event"] == "step"]


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Name -> tensor of a full checkpoint."""
    import torch.distributed.checkpoint as dcp

    place = folder / "run" / "checkpoints" / f"step_{step:07d}"
    facts = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in facts.items()}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    return state


def exchange(said: str, chats: Path, kind: str) -> int:
    """Return the number of the row of which the run asked the question at its end."""
    found = re.search(
        rf"The question of {re.escape(str(chats))}:(\d+) \({kind}\):\n    user\n    What is (\d+)\?\n"
        r"    assistant\nThe reply after step (\d+):\n.*\nThe reply in the data:\n    It is (\d+), and",
        said,
        re.DOTALL,
    )
    assert found, said
    line, *numbers = map(int, found.groups())
    assert numbers[0] == numbers[2] == line - 1
    return numbers[0]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("glm4_moe", LORA), pytest.param("qwen3", {}, marks=pytest.mark.slow)],
    ids=["lora", "full"],
)
def test_trained_and_gone_on_with_to_the_bit(
    models: dict[str, Path], chats: Path, tmp_path: Path, kind: str, settings: dict[str, str]
) -> None:
    if settings:
        pytest.importorskip("peft", reason="make setup-dev installs it")
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    env = env_of(tmp_path / "whole", models[kind], chats, **settings)
    said = finetune(env)
    number = exchange(said, chats, "held out")
    assert said.count(f"It is {number}, and {number} it is.") >= 1
    assert "It is 1" in said and "[[[" in said  # the preview, before the first step
    assert said.index("[[[") < said.index("step=1/")
    assert ("model.layers.2 (2 tensors), which the model does not take" in said) == (
        kind == "glm4_moe"
    )
    found = losses(tmp_path / "whole")
    steps = len(found)
    assert steps == 12 and found[-1] < found[0] - 0.3
    scores = {
        entry["step"]: entry for entry in records(tmp_path / "whole") if entry["event"] == "eval"
    }
    assert list(scores) == [0, 6, 12]
    assert scores[12]["val_ppl"] < 0.8 * scores[0]["val_ppl"]
    assert scores[0]["scored_tokens"] == scores[12]["scored_tokens"] > 100
    said = finetune(env)
    assert "is done: 12 of 12 steps" in said and len(losses(tmp_path / "whole")) == 12
    assert "To train it further, set EPOCHS=2" in said
    facts = json.loads((tmp_path / "whole" / "run" / "config.json").read_text())
    assert facts["attempts"][0]["skipped"] == (
        ["model.layers.2 (2 tensors)"] if kind == "glm4_moe" else []
    )
    assert facts["settings"]["N_LAYER"] == 2 and facts["settings"]["N_EMBD"] == 32
    assert facts["settings"]["TRAIN_TOKENS"] == 12 * 1024

    env = env_of(tmp_path / "parts", models[kind], chats, **settings)
    finetune(env | {"MAX_STEPS": "5"})
    assert "resumed from step_0000005" in finetune(env)
    assert losses(tmp_path / "parts") == found
    one, other = saved(tmp_path / "whole", 12), saved(tmp_path / "parts", 12)
    assert one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )
    assert all(".lora_" in name for name in one) == bool(settings)


def kill_at(step: int, env: dict[str, str], folder: Path, processes: int = 1) -> None:
    """Start, and kill -9 all of it in that step; no earlier run in `folder` was killed so."""
    found, said = run_trainer(
        ["-m", "finetune.main"], faulty(env, folder, Fault("numbers", "kill", n=step)), processes
    )
    assert found == -9, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "settings"), [(1, {}), (2, {"PARALLEL": "fsdp"})], ids=["one", "two"]
)
def test_killed_at_any_moment_it_goes_on_to_the_bit(
    models: dict[str, Path], chats: Path, tmp_path: Path, processes: int, settings: dict[str, str]
) -> None:
    env = env_of(
        tmp_path, models["llama"], chats, SAVE_EVERY="2", EPOCHS="3", LOG_EVERY="1", **settings
    )
    kill_at(7, env, tmp_path, processes)
    said = finetune(env, processes)
    assert "resumed from step_000000" in said and "step=34/34" in said
    (tmp_path / "whole").mkdir()
    finetune(env_of(tmp_path / "whole", models["llama"], chats, EPOCHS="3", **settings), processes)
    went = {entry["step"]: entry["loss"] for entry in records(tmp_path) if entry["event"] == "step"}
    assert list(went.values()) == losses(tmp_path / "whole")
    assert saved(tmp_path, 34).keys() == saved(tmp_path / "whole", 34).keys()
    assert all(
        torch.equal(v, saved(tmp_path / "whole", 34)[n]) for n, v in saved(tmp_path, 34).items()
    )


@pytest.mark.slow
def test_killed_with_adapters_alone_it_has_them_and_its_step_again(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="make setup-dev installs it")
    more = {**LORA, "EPOCHS": "3", "LOG_EVERY": "1", "EVAL_EVERY": "0"}
    env = env_of(
        tmp_path, models["glm4_moe"], chats, SAVE_EVERY="2", CHECKPOINT_MODE="lite", **more
    )
    kill_at(9, env, tmp_path)
    said = finetune(env)
    taken = re.search(r"resumed from step_0*(\d+) at step \1/34", said)
    assert taken and int(taken[1]) in (4, 6, 8)
    assert (
        f"step_{int(taken[1]):07d} holds adapters alone (CHECKPOINT_MODE=lite): the optimizer starts again"
        in said
    )
    (tmp_path / "whole").mkdir()
    finetune(env_of(tmp_path / "whole", models["glm4_moe"], chats, **more))
    went = {entry["step"]: entry["loss"] for entry in records(tmp_path) if entry["event"] == "step"}
    whole = losses(tmp_path / "whole")
    next_one = (
        int(taken[1]) + 1
    )  # has the same adapters and the same batch; its update has other moments
    assert list(went) == list(range(1, 35))
    assert [went[step] for step in range(1, next_one + 1)] == whole[:next_one]
    assert went[next_one + 1] != whole[next_one]


@pytest.mark.slow
def test_another_model_or_other_data_do_not_go_on(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="make setup-dev installs it")
    base = tmp_path / "base"
    shutil.copytree(models["llama"], base)
    env = env_of(tmp_path, base, chats, MAX_STEPS="2", LORA_RANK="2", CHECKPOINT_MODE="lite")
    finetune(env)
    more = env | {"MAX_STEPS": "4"}
    assert "The run was started with MODEL=" in finetune(
        more | {"MODEL": str(models["qwen3"])}, code=64
    )
    other = write_rows(tmp_path / "other.jsonl", [row("Is it?", f"It is {i}.") for i in range(200)])
    assert "The run was started with DATA=" in finetune(more | {"DATA": str(other)}, code=64)
    before = chats.read_text()
    try:
        chats.write_text(before.replace("I know.", "I do know."))
        assert "was trained on other data" in finetune(more, code=78)
    finally:
        chats.write_text(before)
    path = sorted(base.glob("*.safetensors"))[0]  # other weights of the same shapes
    save_file(
        {name: values + 0.01 for name, values in load_file(path).items()},
        path,
        metadata={"format": "pt"},
    )
    assert "DATA, EVAL_DATA or MODEL name have changed" in finetune(more, code=78)


REFUSED: list[tuple[dict[str, str], int, str]] = [
    ({"MODEL": ""}, 64, "MODEL is not set"),
    ({"MODEL": "no/such@abcdef"}, 64, "There is no such run"),
    ({"MODEL": "nobody/nothing"}, 78, "Is not in"),
    ({"DATA": ""}, 64, "DATA is not set"),
    ({"DATA": "gone.jsonl"}, 78, "gone.jsonl"),
    (
        {"SEQ_LEN": "1024", "BATCH_TOKENS": "4096"},
        64,
        "SEQ_LEN=1024: MODEL=.* was made for 512 tokens",
    ),
    ({"WARMUP_TOKENS": "20000"}, 64, "WARMUP_TOKENS=20000: Must be less than .*EPOCHS=1"),
    (
        {"LR_SCHEDULE": "wsd", "DECAY_TOKENS": "90000"},
        64,
        "DECAY_TOKENS=90000: Must be at most .*EPOCHS=1",
    ),
    (
        {"STEP": "3"},
        64,
        "STEP=3: not available in fine-tuning, because MODEL is read from its export",
    ),
    (
        {"OPTIMIZER": "muon", "CORE_EVERY": "5", "COMPILE": "1"},
        64,
        "(?s)OPTIMIZER=muon: not available in fine-tuning.*CORE_EVERY=5.*COMPILE=1",
    ),
    (
        {"CHECKPOINT_MODE": "lite", "MAKE_SETTINGS": "CHECKPOINT_MODE", "MAKE_TARGET": "finetune"},
        64,
        r"CHECKPOINT_MODE \(command line\): Has no effect with LORA_RANK=0",
    ),
]


@pytest.mark.parametrize(
    ("settings", "code", "words"), REFUSED, ids=[",".join(settings) for settings, *_ in REFUSED]
)
def test_what_cannot_be_is_refused_in_a_sentence(
    models: dict[str, Path],
    chats: Path,
    tmp_path: Path,
    settings: dict[str, str],
    code: int,
    words: str,
) -> None:
    said = finetune(env_of(tmp_path, models["llama"], chats) | settings, code=code)
    assert re.search(words, said) and "Traceback" not in said, said


@pytest.mark.slow
def test_prepared_before_it_is_trained(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    env = env_of(tmp_path, models["llama"], chats)
    done = subprocess.run(
        [sys.executable, "-m", "finetune.prepare_data"],
        env=env,
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    assert "training: 180 examples" in done.stdout and "[[[It is" in done.stdout
    assert "reading and tokenizing took" in done.stderr
    again = subprocess.run(
        [sys.executable, "-m", "finetune.prepare_data", "before-training"],
        env=env,
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    assert again.stdout == "" and "one example" not in again.stderr
    said = finetune(env | {"MAX_STEPS": "1"})
    assert said.count("one example, ") == said.count("training: 180 examples") == 1
    assert "reading and tokenizing took" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("glm4_moe", {**LORA, "PARALLEL": "fsdp"}),
        ("qwen3", {"PARALLEL": "fsdp", "GRAD_SYNC": "micro-batch"}),
        ("llama", {"PARALLEL": "ddp"}),
    ],
    ids=["lora-fsdp", "full-fsdp", "full-ddp"],
)
def test_one_two_and_four_processes_train_alike(
    models: dict[str, Path], chats: Path, tmp_path: Path, kind: str, settings: dict[str, str]
) -> None:
    found: list[list[float]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for processes in (1, 2, 4):
        place = tmp_path / str(processes)
        place.mkdir()
        more = (
            settings
            if processes > 1
            else {n: v for n, v in settings.items() if n not in ("PARALLEL", "GRAD_SYNC")}
        )
        said = finetune(env_of(place, models[kind], chats, MICRO_BATCH_SIZE="2", **more), processes)
        exchange(said, chats, "held out")
        found.append(
            [
                *losses(place),
                *(entry["val_loss"] for entry in records(place) if entry["event"] == "eval"),
            ]
        )
        weights.append(
            {name: value for name, value in saved(place, 12).items() if name.startswith("model.")}
        )
    assert found[0][11] < found[0][0] - 0.3
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=2e-5)
    for held in weights[1:]:
        assert held.keys() == weights[0].keys()
        assert (
            max(float((value - weights[0][name]).abs().max()) for name, value in held.items())
            < 2e-4
        )


@pytest.mark.slow
def test_a_run_of_other_processes_goes_on(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    env = env_of(tmp_path, models["glm4_moe"], chats, MICRO_BATCH_SIZE="2", PARALLEL="fsdp", **LORA)
    (tmp_path / "one").mkdir()
    alone = env_of(tmp_path / "one", models["glm4_moe"], chats, MICRO_BATCH_SIZE="2", **LORA)
    finetune(alone)
    finetune(env | {"MAX_STEPS": "4"}, 2)
    finetune(env | {"MAX_STEPS": "8"}, 4)
    finetune({**env, "PARALLEL": "ddp"})
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "one"), rel=2e-5)
