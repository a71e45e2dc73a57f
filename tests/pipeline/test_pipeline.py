"""make pipeline whole: what is wrong is found before the first stage; a tiny one ends, killed at any stage."""

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages import own_settings
from settings import SettingsError
from tests.conftest import SHARED
from tests.finetune.making import row, write_rows
from tests.running import ROOT, environment


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """As MedQA has them, so short that they fit: of MedQA's own rows where they lie beside the repository."""
    found, draw = sorted((SHARED / "medical").glob("medqa*.jsonl")), random.Random(seed)
    if not found:
        words = [f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
        made = [draw.sample(words, 5) for _ in range(count)]
        return [
            {
                "question": f"Which is {asked}?",
                "options": dict(zip("ABCD", options, strict=True)),
                "answer": options[i % 4],
                "answer_idx": "ABCD"[i % 4],
            }
            for i, (asked, *options) in enumerate(made)
        ]
    rows = [json.loads(line) for line in found[0].read_text(encoding="utf-8").splitlines()]
    short = [entry for entry in rows if sum(map(len, entry["options"].values())) <= 80]
    return [
        entry | {"question": " ".join(entry["question"].split()[-6:])}
        for entry in draw.sample(short, count)
    ]


@pytest.fixture
def user(tmp_path: Path, data: dict[str, str]) -> dict[str, str]:
    """A user's environment: a tiny base, conversations and questions for every stage."""
    talks = [row(f"Hello {i}.", "Hi.", "Why?", "I know.") for i in range(120)]
    held_out = [
        *questions(12, 1),
        *({"question": f"Is {i} one?", "answer": "Yes"} for i in range(4)),
    ]
    files = {
        name: str(write_rows(tmp_path / f"{name}.jsonl", rows))
        for name, rows in (
            ("talks", talks),
            ("questions", questions(60, 2)),
            ("held_out", held_out),
        )
    }
    shutil.copytree(data["DATA_DIR"], tmp_path / "data")
    return environment(tmp_path, data | {"DATA_DIR": str(tmp_path / "data")}) | {
        "RUNS_DIR": str(tmp_path / "runs"),
        "RUN_NAME": "x",
        "SEQ_LEN": "256",
        "BATCH_TOKENS": "2048",
        "MICRO_BATCH_SIZE": "8",
        "MAX_STEPS": "4",
        "EVAL_EVERY": "0",
        "EVAL_DATA": files["held_out"],
        "MID_DATA": f"{files['talks']},{files['questions']}*2",
        "SFT_DATA": files["questions"],
    }


def pipeline(env: dict[str, str], code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline"],
        env=env,
        cwd=ROOT,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=270,
    )
    assert done.returncode == code, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def test_what_only_a_pipeline_asks_for_is_said_together(
    user: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os,
        "environ",
        user
        | {
            "MODEL": "tiny",
            "MID_DATA": "",
            "PRESET": "gpt2-124m",
            "N_KV_HEAD": "2",
            "SAVE_EVERY": "0",
            "EVAL_TOKENS": "0",
            "RUN_NAME": 60 * "x",
        },
    )
    with pytest.raises(SettingsError) as found:
        own_settings()
    assert [re.split("[= :]", text)[0] for text in found.value.problems] == [
        "MODEL",
        "MID_DATA",
        "RUN_NAME",
        "SAVE_EVERY",
        "EVAL_TOKENS",
    ]
    assert "MID_DATA=exercises" in found.value.problems[1]


def test_all_that_is_wrong_is_said_at_once_by_the_names_that_were_given(
    user: dict[str, str], tmp_path: Path
) -> None:
    said = pipeline(
        user
        | {
            "SFT_DATA": "gone.jsonl",
            "PROFILE": "1",
            "CORE_BUNDLE": "no-such-bundle",
        },
        78,
    )
    assert "2 problems, and no stage was begun" in said
    assert "SFT_DATA=gone.jsonl: there is no such file or folder" in said
    assert "CORE_BUNDLE=no-such-bundle: there is no such folder or .zip" in said
    assert not list((tmp_path / "runs").glob("x-[bms]*"))


def test_damaged_data_of_a_late_stage_is_found_before_the_first(
    user: dict[str, str], tmp_path: Path
) -> None:
    whole = gzip.compress(Path(user["SFT_DATA"]).read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    write_rows(tmp_path / "long.jsonl", [{"question": "why " * 2000, "answer": "no"}] * 3)
    said = pipeline(
        user
        | {
            "SFT_DATA": str(tmp_path / "cut.jsonl.gz"),
            "EVAL_DATA": str(tmp_path / "long.jsonl"),
        },
        78,
    )
    assert re.search(r"cut\.jsonl\.gz:[0-9]+ of SFT_DATA: damaged or truncated", said)
    assert "EVAL_DATA: none of its 1 questions fits into SEQ_LEN=256 tokens" in said
    assert not (tmp_path / "runs" / "x-base").exists()


def kill_in(env: dict[str, str], words: str, number: int) -> None:
    """Start a pipeline, and send it a signal once it says these words."""
    with subprocess.Popen(
        [sys.executable, "-m", "pipeline"],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as started:
        assert started.stdout
        said = ""
        for line in started.stdout:
            said += line
            if words in line:
                started.send_signal(number)
                break
        else:
            raise AssertionError(said)
        started.stdout.read()
        assert started.wait() == (-number if number == signal.SIGKILL else 75)


@pytest.mark.slow
@pytest.mark.timeout(540)  # eight stages, each a process that imports torch
def test_a_tiny_pipeline_that_fails_and_is_killed_goes_on_to_its_end(
    user: dict[str, str], tmp_path: Path
) -> None:
    kill_in(user | {"LOG_EVERY": "1"}, "step=2/4", signal.SIGKILL)
    damaged = tmp_path / "runs" / "x-mid" / "config.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    said = pipeline(user, 78)
    assert f"{damaged}: is damaged: it is not JSON. Restore it from a copy" in said
    assert "stage 3 of 8" not in said  # found before any stage
    damaged.unlink()
    in_the_way = damaged.with_name("metrics.jsonl")
    in_the_way.mkdir()
    said = pipeline(user, 78)
    assert re.search(
        r"the stage mid-training failed with exit code 78, and no later one was begun; what it said is in "
        r".*/x-pipeline/logs/mid\.log, and this goes on there: make pipeline .*RUN_NAME=x",
        said,
    )
    assert "stage 3 of 8" in said and "stage 5 of 8" not in said
    in_the_way.rmdir()
    for words, number in (("step=2/4", signal.SIGTERM), ("stage 8 of 8", signal.SIGINT)):
        kill_in(user | {"LOG_EVERY": "1"}, words, number)
    said = pipeline(user)
    assert "stage 8 of 8: sample" in said and "stage 7 of 8" not in said
    facts = json.loads((tmp_path / "runs" / "x-pipeline" / "pipeline.json").read_text())
    assert [stage["state"] for stage in facts["stages"].values()] == ["done"] * 8
    assert (
        "multiple choice, right of the questions held out" in said
        and "of 12, guessing 25.0%" in said
    )
    assert "bits per byte, CORE left out" in said and "written answers" in said
    assert (tmp_path / "runs" / "x-sft" / "sample.txt").read_text().startswith("> ")
    again = pipeline(user)
    assert "pipeline x: done" in again and "==== stage" not in again


@pytest.mark.slow
@pytest.mark.timeout(540)  # eight stages, each a process that imports torch
def test_a_pipeline_that_is_done_does_nothing_again_and_refuses_other_settings_and_data(
    user: dict[str, str],
) -> None:
    pipeline(user)
    again = pipeline(user)
    assert "pipeline x: done" in again and "==== stage" not in again

    changed = pipeline(user | {"LEARNING_RATE": "1e-3"}, 64)
    assert re.search(
        "LEARNING_RATE=0.001: the stage base is done with LEARNING_RATE=0.003", changed
    )
    questions_of = Path(user["SFT_DATA"])
    questions_of.write_text(
        questions_of.read_text() + json.dumps({"question": "More?", "answer": "Yes"}) + "\n"
    )
    changed = pipeline(user, 78)
    assert "SFT_DATA: is not what the stage SFT was done with" in changed
    assert "MID_DATA: is not what the stage mid-training was done with" in changed
