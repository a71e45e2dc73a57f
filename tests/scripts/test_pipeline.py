"""scripts/pipeline.sh: stages in order, resumed, failed, stopped and killed; with a make and a Python that write down
what they are asked."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.finetune.making import row, write_rows
from tests.running import ROOT, environment, wait_for

# Stands for make. WAIT_IN: a word of the stage that waits until it is told to stop; FAIL_IN: of the one that fails.
MAKE = """#!/usr/bin/env bash
echo "make $*" >> "$LOG"
for word; do case $word in RUN_NAME=*) mkdir -p "$(dirname "$LOG")/runs/${word#*=}/eval" ;; esac; done
[[ -z ${FAIL_IN-} || $* != *"$FAIL_IN"* ]] || exit 7
if [[ -n ${WAIT_IN-} && $* == *"$WAIT_IN"* ]]; then
  trap 'echo told >> "$LOG"; exit 2' TERM
  echo waiting >> "$LOG"
  for _ in {1..600}; do sleep 0.1; done
fi
"""
# Stands for Python, except for the settings of the stages. REFUSE: MODULE=CODE of checks that fail.
PYTHON = f"""#!/usr/bin/env bash
if [[ "$*" == "-m finetune.pipeline.stages" ]]; then exec {shlex.quote(sys.executable)} "$@"; fi
echo "${{MAKE_TARGET-}} ${{RUN_NAME-}} $*" >> "$LOG"
[[ "$*" != *"finetune.pipeline.stages inputs"* ]] || {{ mkdir -p "$DATA_DIR/untrained/x-base" &&
  touch "$DATA_DIR/untrained/x-base/tokenizer.json"; }}
for refused in ${{REFUSE-}}; do [[ "$*" != *"${{refused%=*}}"* ]] || exit "${{refused#*=}}"; done
"""
STAGES = [
    ("train", "x-base"),
    ("eval", "x-base"),
    ("finetune", "x-mid"),
    ("eval", "x-mid"),
    ("finetune", "x-sft"),
    ("eval", "x-sft"),
    ("chat", "x-sft"),
    ("chat", "x-sft"),
    ("chat", "x-sft"),
]


@pytest.fixture
def user(tmp_path: Path) -> dict[str, str]:
    for path, text in ((tmp_path / "bin/make", MAKE), (tmp_path / "venv/bin/python", PYTHON)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "empty.env").touch()
    names = {
        "RUN_NAME": "x",
        "RUNS_DIR": str(tmp_path / "runs"),
        "DATA_DIR": str(tmp_path / "data"),
    }
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "VENV": str(tmp_path / "venv"),
        "LOG": str(tmp_path / "log"),
        "ENV_FILE": str(tmp_path / "empty.env"),
        "MAKE_TARGET": "pipeline",
        "MAKE_SETTINGS": " ".join(names),
        **names,
    }


def type_also(user: dict[str, str], **settings: str) -> dict[str, str]:
    """Return the environment with more settings of make's command line."""
    names = user["MAKE_SETTINGS"].split()
    return user | settings | {"MAKE_SETTINGS": " ".join([*names, *settings])}


def pipeline(user: dict[str, str], code: int = 0) -> str:
    done = subprocess.run(
        ["bash", "scripts/pipeline.sh"],
        env=user,
        cwd=ROOT,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=200,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def read_log(user: dict[str, str]) -> list[str]:
    """Return what was started since the last call."""
    path = Path(user["LOG"])
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def list_stages(lines: list[str]) -> list[tuple[str, str]]:
    """Return target and run of each call of make."""
    stages = []
    for line in lines:
        command, *words = line.split()
        if command == "make":
            names = dict(word.split("=", 1) for word in words if "=" in word)
            stages.append((words[0], names["RUN_NAME"]))
    return stages


def test_stages_come_in_order_after_the_checks_and_measure_once(user: dict[str, str]) -> None:
    pipeline(user)
    lines = read_log(user)
    assert list_stages(lines) == STAGES
    first = next(i for i, line in enumerate(lines) if line.startswith("make"))
    checked = [line.rpartition("-m ")[2] for line in lines[:first]]
    assert checked == [
        "doctor.before_run",
        "finetune.pipeline.stages inputs",
        *["doctor.before_run finetune", "finetune.prepare_data before-training"] * 2,
    ]
    runs = " ".join(f"{user['RUNS_DIR']}/x-{stage}" for stage in ("base", "mid", "sft"))
    assert lines[-1].endswith(f"-m finetune.pipeline.summary {runs}")

    pipeline(user)
    assert list_stages(read_log(user)) == [stage for stage in STAGES if stage[0] != "eval"]
    checkpoints = Path(user["RUNS_DIR"]) / "x-mid" / "checkpoints"
    checkpoints.mkdir()
    os.utime(checkpoints, (2e9, 2e9))  # a newer checkpoint
    pipeline(user)
    assert ("eval", "x-mid") in list_stages(read_log(user))
    os.utime(checkpoints, (1, 1))
    questions = Path(user["LOG"]).with_name("q.jsonl")
    questions.touch()
    pipeline(type_also(user, EVAL_DATA=str(questions)))
    asked = [stage for stage in list_stages(read_log(user)) if stage[0] == "eval"]
    assert asked == [("eval", "x-mid"), ("eval", "x-sft")]


def test_settings_reach_the_stages_that_they_are_for(user: dict[str, str]) -> None:
    typed = {"BATCH_TOKENS": "8192", "LORA_RANK": "4", "EVAL_EXAMPLES": "20", "SEED": "5"}
    typed |= {"CORE_BUNDLE": "core", "BENCHMARKS": "mmlu", "LEARNING_RATE": "0.03"}
    pipeline(type_also(user, **typed))
    lines = [shlex.split(line) for line in read_log(user) if line.startswith("make")]
    commands = {}
    for _, target, *words in lines:
        names = dict(word.split("=", 1) for word in words if "=" in word)
        commands[target, names["RUN_NAME"], names.get("BENCHMARKS") == "mmlu"] = names
    base = commands["train", "x-base", False]
    assert (base["BATCH_TOKENS"], base["SEED"], base["PRESET"]) == ("8192", "5", "tiny")
    assert "LORA_RANK" not in base and base["LEARNING_RATE"] == "0.03"
    assert commands["eval", "x-base", False]["CORE_BUNDLE"] == "core"
    for run, model, rate in (("x-mid", "x-base", 0.006), ("x-sft", "x-mid", 0.002)):
        tuned = commands["finetune", run, False]
        assert tuned["MODEL"] == f"{user['RUNS_DIR']}/{model}"
        assert (tuned["BATCH_TOKENS"], tuned["LORA_RANK"], tuned["SEED"]) == ("1024", "4", "5")
        assert float(tuned["LEARNING_RATE"]) == rate
        asked = commands["eval", run, False]
        assert asked["EVAL_EXAMPLES"] == "20" and "LORA_RANK" not in asked
    assert ("eval", "x-sft", True) in commands
    for run in ("x-base", "x-mid", "x-sft"):
        assert commands["eval", run, False]["BENCHMARKS"] == "none"


def test_a_recipe_runs_without_further_settings(user: dict[str, str]) -> None:
    said = pipeline(type_also(user, PRESET="d16-2xh100", DRY_RUN="1"))
    assert read_log(user) == []
    commands = [shlex.split(line) for line in said.splitlines() if line.startswith("make")]
    by_run = {word: command for command in commands for word in command if "RUN_NAME" in word}
    assert by_run.keys() == {f"RUN_NAME=x-{stage}" for stage in ("base", "mid", "sft")}
    assert "BENCHMARKS=arc_easy,arc_challenge,mmlu,gsm8k" in [
        word for command in commands for word in command
    ]
    for command in commands:
        if command[1] == "finetune":
            assert "PRESET=finetune" in command
            assert any(word.startswith("DATA=HuggingFaceTB/smol") for word in command)
            assert not any(word.startswith(("SEQ_LEN", "BATCH_TOKENS")) for word in command)


def test_all_checks_run_and_nothing_is_trained_if_one_fails(user: dict[str, str]) -> None:
    typed = type_also(user, MID_DATA="gone.jsonl", EVAL_DATA="gone.json")
    said = pipeline(typed | {"REFUSE": "before_run=64 inputs=78"}, 78)
    assert "MID_DATA=gone.jsonl: there is no such file" in said
    assert "EVAL_DATA=gone.json: there is no such file" in said
    assert "Nothing was trained." in said and "make pipeline RUN_NAME=x" in said
    lines = read_log(user)
    assert list_stages(lines) == [] and len(lines) == 6
    pipeline(user | {"REFUSE": "before_run=64"}, 64)
    assert list_stages(read_log(user)) == []


@pytest.mark.parametrize("dry_run", ["0", "1"])
@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        ({"NPROC": "16"}, 64, ("make finetune RUN_NAME=x-mid", "make finetune RUN_NAME=x-sft")),
        ({"LORA_RANK": "6"}, 64, ("make finetune RUN_NAME=x-sft", "started with LORA_RANK=5")),
        ({"MID_DATA": "gone.jsonl"}, 78, ("there is no such file",)),
        ({"NPROC": "16", "MID_DATA": "gone.jsonl"}, 64, ("NPROC", "there is no such file")),
    ],
)
def test_a_stage_that_would_be_refused_is_named_before_the_first_also_in_a_dry_run(
    user: dict[str, str], dry_run: str, typed: dict[str, str], code: int, words: tuple[str, ...]
) -> None:
    if "LORA_RANK" in typed:
        run = Path(user["RUNS_DIR"]) / "x-sft"
        run.mkdir(parents=True)
        (run / "config.json").write_text('{"settings": {"PRESET": "finetune", "LORA_RANK": 5}}')
    user |= {"DRY_RUN": dry_run}  # in the environment
    said = pipeline(type_also(user, **typed), code)
    for word in words:
        assert word in said
    assert list_stages(read_log(user)) == []
    assert "==== base" not in said


def test_what_a_pipeline_cannot_do_is_refused_at_once(user: dict[str, str]) -> None:
    typed = {"SAVE_EVERY": "0", "EVAL_TOKENS": "0", "MODEL": "tiny", "DETACH": "1"}
    said = pipeline(type_also(user, **typed), 64)
    for problem in (
        "SAVE_EVERY=0: Each stage begins from a checkpoint.",
        "EVAL_TOKENS=0: The base is evaluated.",
        "MODEL (command line): Not used by make pipeline.",
        "DETACH (command line): Not used by make pipeline.",
    ):
        assert problem in said
    nodes = {"NODES": "2", "MASTER_ADDR": "10.0.0.5"}
    assert "NODES=2: A pipeline runs on one machine." in pipeline(type_also(user, **nodes), 64)
    assert read_log(user) == []


def test_a_failed_stage_ends_the_pipeline_in_a_sentence(user: dict[str, str]) -> None:
    said = pipeline(user | {"FAIL_IN": "RUN_NAME=x-mid"}, 7)
    assert "The stage mid-training failed, see above. To resume: make pipeline RUN_NAME=x" in said
    assert list_stages(read_log(user)) == STAGES[:3]
    pipeline(user)
    resumed = list_stages(read_log(user))
    assert resumed == [STAGES[0], *STAGES[2:]]  # the base was measured before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_it_resumes_with_the_same_command(
    user: dict[str, str], number: int
) -> None:
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux has setpriv, by which a stage ends with a pipeline that is killed")
    with subprocess.Popen(
        ["bash", "scripts/pipeline.sh"],
        cwd=ROOT,
        env=user | {"WAIT_IN": "RUN_NAME=x-mid"},
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as started:
        wait_for(Path(user["LOG"]), "waiting")
        started.send_signal(number)
        _, said = started.communicate(timeout=100)
    wait_for(Path(user["LOG"]), "told")  # the stage hears of it, whatever ended the pipeline
    if number != signal.SIGKILL:
        assert started.returncode == 75
        assert "Stopped. To resume: make pipeline RUN_NAME=x" in said
    assert list_stages(read_log(user)) == STAGES[:3]
    pipeline(user)
    assert list_stages(read_log(user)) == [STAGES[0], *STAGES[2:]]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # nine stages, each a process that imports torch
def test_a_real_one_that_is_killed_resumes_and_says_what_was_learned(
    tmp_path: Path, data: dict[str, str]
) -> None:
    held_out = [{"question": f"Is {i} one?", "answer": "Yes" if i == 1 else "No"} for i in range(8)]
    files = {
        "MID_DATA": [row(f"Hello {i}.", "Hi.", "Why?", "I know.") for i in range(400)],
        "SFT_DATA": [{"question": f"Is {i} two?", "answer": "No"} for i in range(400)],
        "EVAL_DATA": held_out,
    }
    shutil.copytree(data["DATA_DIR"], tmp_path / "data")
    user = environment(tmp_path, data | {"DATA_DIR": str(tmp_path / "data")})
    user |= {name: str(write_rows(tmp_path / f"{name}.jsonl", files[name])) for name in files}
    user |= {"RUNS_DIR": str(tmp_path / "runs"), "RUN_NAME": "x", "SEQ_LEN": "128"}
    user |= {"BATCH_TOKENS": "1024", "MICRO_BATCH_SIZE": "8", "MAX_STEPS": "4", "EVAL_EVERY": "0"}
    user |= {"LOG_EVERY": "1", "BENCHMARKS": "none"}
    with subprocess.Popen(
        ["make", "pipeline"], cwd=ROOT, env=user, stdout=subprocess.PIPE, start_new_session=True
    ) as started:
        assert started.stdout
        for line in started.stdout:
            if b"step=2/4" in line:
                os.killpg(started.pid, signal.SIGKILL)
                break
    assert not (tmp_path / "runs" / "x-mid").exists()
    for _ in range(2):
        done = subprocess.run(
            ["make", "pipeline"], cwd=ROOT, env=user, text=True, check=False, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "EVAL_DATA, written answers: " in done.stdout
        assert done.stdout.count("==== sample") == 3
    assert "==== questions" not in done.stdout  # they were asked before
    for stage in ("base", "mid", "sft"):
        status = json.loads((tmp_path / "runs" / f"x-{stage}" / "STATUS.json").read_text())
        assert (status["phase"], status["step"]) == ("done", 4)
