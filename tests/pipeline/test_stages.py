"""Stages with stand-in commands: one after the other, failed, stopped, killed, gone on with; what may not change."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.questions import Asked, Sheet
from pipeline import __main__ as entry
from pipeline import inputs
from pipeline.inputs import Problems, Ready
from pipeline.stages import CHAT, CHAT_EVAL, EVAL, OF_MID, TUNE, Stage, own_settings, stages_of
from pipeline.state import State
from record import locks
from record.locks import RunFolderError
from record.run_paths import RunPaths
from record.status import Status
from settings import ROOT, SettingsError, load_preset, resolve
from settings.config import Config
from settings.finding import FAIL, WARN, Finding
from tests.running import wait_for
from train.generate.chat_format import Message

KEYS = ("first", "second", "third")
# In a process of its own, so that it can be killed: arguments are the folder and the stages' commands.
ALONE = """
import logging, sys
from pathlib import Path
from tests.pipeline.test_stages import made_run
from pipeline import __main__ as entry
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
run, ready = made_run(Path(sys.argv[1]), *sys.argv[2:])
run.asked.at_work = True
sys.exit(entry.run_all(run, ready))
"""


def made_run(folder: Path, *commands: str) -> tuple[entry.Run, Ready]:
    """A pipeline whose stages are lines of bash, run in `folder`."""
    c = load_preset(RUN_NAME="x", RUNS_DIR=str(folder / "runs"))
    stages = [
        Stage(
            key,
            f"the {key}",
            f"x-{key}",
            {"HERE": str(folder)},
            (("bash", "-c", f"cd $HERE; {line}"),),
            watched=frozenset({"LEARNING_RATE", "SEED"}),
        )
        for key, line in zip(KEYS, commands, strict=True)
    ]
    paths = RunPaths.of(c.runs_dir, "x-pipeline", ROOT)
    job = locks.hold(paths.job, "runs this pipeline", folders=[paths.folder / "logs"])
    run = entry.Run(
        c,
        stages,
        State(paths.folder),
        paths,
        Status(paths.status, True, run=paths.name, last_step=3),
        entry.Asked(),
        job,
        "make pipeline RUN_NAME=x",
    )
    return run, Ready(dict.fromkeys(KEYS, c), {key: {} for key in KEYS}, ())


def finished(folder: Path, *commands: str) -> int:
    """The exit code of the pipeline, in this process."""
    run, ready = made_run(folder, *commands)
    try:
        return entry.run_all(run, ready)
    finally:
        run.job.close()


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "SIGNALS", ())


def marks(folder: Path) -> str:
    return (folder / "marks").read_text()


def status_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs" / "x-pipeline" / "STATUS.json").read_text())


def test_stages_come_in_order_and_what_is_done_is_not_done_again(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    lines = [f"printf {mark} >> marks; echo said by {mark}" for mark in "abc"]
    assert finished(tmp_path, *lines) == 0
    assert marks(tmp_path) == "abc" and status_of(tmp_path)["phase"] == "done"
    assert "said by b" in (tmp_path / "runs/x-pipeline/logs/second.log").read_text()
    assert re.findall("said by .", capfd.readouterr().out) == [
        "said by a",
        "said by b",
        "said by c",
    ]
    assert finished(tmp_path, *lines) == 0
    assert marks(tmp_path) == "abc"


@pytest.mark.parametrize("code", [64, 70, 78, 3])
def test_a_failed_stage_stops_the_later_ones_in_a_sentence(tmp_path: Path, code: int) -> None:
    assert finished(tmp_path, "printf a >> marks", f"exit {code}", "printf c >> marks") == code
    log = tmp_path / "runs/x-pipeline/logs/second.log"
    assert marks(tmp_path) == "a" and status_of(tmp_path)["exit_code"] == code
    why = status_of(tmp_path)["why"]
    assert f"the stage the second failed with exit code {code}, and no later one was begun" in why
    assert log.exists() and why.endswith("and this goes on there: make pipeline RUN_NAME=x")
    assert finished(tmp_path, "printf a >> marks", "printf b >> marks", "printf c >> marks") == 0
    assert marks(tmp_path) == "abc"


def test_a_run_that_was_stopped_by_itself_is_told_so(tmp_path: Path) -> None:
    assert finished(tmp_path, "exit 75", "true", "true") == 75
    assert "the stage the first was stopped" in status_of(tmp_path)["why"]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_killed_or_told_to_stop_it_goes_on_where_it_was(tmp_path: Path, number: int) -> None:
    waits = "trap 'printf t >> marks; exit 75' TERM; printf b >> marks; for i in {1..600}; do sleep 0.05; done"
    command = [
        sys.executable,
        "-c",
        ALONE,
        str(tmp_path),
        "printf a >> marks",
        waits,
        "printf c >> marks",
    ]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as started:
        wait_for(tmp_path / "marks", "ab")
        started.send_signal(number)
        said, _ = started.communicate(timeout=120)
    wait_for(tmp_path / "marks", "abt")  # its command hears of it, whatever ended the pipeline
    if number != signal.SIGKILL:
        assert started.returncode == 75
        assert (
            f"stopped by {signal.Signals(number).name} in the stage the second; the same command goes on"
            in said
        )
    assert finished(tmp_path, "printf a >> marks", "printf B >> marks", "printf c >> marks") == 0
    assert marks(tmp_path) == "abtBc"


def test_two_pipelines_of_one_name_do_not_meet(tmp_path: Path) -> None:
    run, _ = made_run(tmp_path, "true", "true", "true")
    run.stage("the first")
    with pytest.raises(RunFolderError, match=f"runs this pipeline .pid {os.getpid()} .*the first"):
        made_run(tmp_path, "true", "true", "true")
    run.job.close()


def test_a_stage_waits_for_a_trainer_that_is_left_of_a_killed_one(tmp_path: Path) -> None:
    held = tmp_path / "runs" / "x-first"
    held.mkdir(parents=True)
    holder = subprocess.Popen(
        [
            "bash",
            "-c",
            f"exec 9>>{held}/.job; flock 9; touch {held}/held; sleep 1; "
            f"printf h >> {tmp_path}/marks",
        ]
    )
    deadline = time.monotonic() + 30
    while not (held / "held").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert finished(tmp_path, "printf a >> marks", "true", "true") == 0
    assert holder.wait() == 0 and marks(tmp_path) == "ha"


def test_what_a_stage_made_is_known_wherever_the_repository_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "ROOT", tmp_path)
    monkeypatch.setattr(entry, "fingerprint_of", lambda folder: f"of {folder.parent.name}")
    run, ready = made_run(tmp_path, "true", "true", "true")
    run.stages[0] = dataclasses.replace(run.stages[0], trains=True)
    assert entry.run_all(run, ready) == 0
    run.job.close()
    facts = json.loads((tmp_path / "runs" / "x-pipeline" / "pipeline.json").read_text())
    assert facts["stages"]["first"]["made"] == {"runs/x-first/export": "of x-first"}


# ---- The real stages


@pytest.fixture
def real_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Stage]:
    """The stages of the preset tiny, by key, for a user who has set COMPILE and LEARNING_RATE."""
    mine = {"PRESET": "tiny", "ENV_FILE": str(tmp_path / "env"), "DATA_DIR": str(tmp_path)}
    (tmp_path / "env").write_text("")
    mine |= {"COMPILE": "1", "LEARNING_RATE": "3e-3"}
    monkeypatch.setattr(os, "environ", mine)
    c, _ = own_settings()
    return {stage.key: stage for stage in stages_of(c, ("Hi?",), core=False)}


def test_fine_tuning_takes_fractions_of_the_rate_of_the_base(
    real_stages: dict[str, Stage],
) -> None:
    base, mid, sft = (real_stages[key].load() for key in ("base", "mid", "sft"))
    assert (base.learning_rate, mid.learning_rate, sft.learning_rate) == (
        3e-3,
        3e-4,
        1e-4,
    )
    assert base.batch_tokens == mid.batch_tokens == sft.batch_tokens
    assert (mid.epochs, mid.min_learning_rate, mid.compile, base.compile) == (1, 0, "auto", "1")


def test_all_stages_ask_the_same_questions_by_default_exercises(
    real_stages: dict[str, Stage], tmp_path: Path
) -> None:
    asked = {real_stages[key].load().eval_data for key in ("mid", "sft", "chat-base", "chat-sft")}
    assert asked == {f"{tmp_path}/exercises/1337/held_out.jsonl"}
    assert "EVAL_DATA" not in real_stages["base"].watched
    for key, command in (("evaluation", EVAL), ("chat-base", CHAT_EVAL), ("chat-sft", CHAT_EVAL)):
        assert real_stages[key].commands == (command,)
    assert real_stages["sample"].commands == (("env", "PROMPT=Hi?", *CHAT),)


# ---- What may not change


def states(folder: Path, done: bool) -> tuple[State, Stage, Config]:
    stage = Stage(
        "mid",
        "mid-training",
        "x-mid",
        {},
        (),
        OF_MID,
        frozenset({"LEARNING_RATE", "SEED", "DATA"}),
        trains=True,
    )
    c = dataclasses.replace(load_preset(), learning_rate=1e-3, data="a.jsonl")
    state = State(folder)
    state.begin(stage, c, {"MID_DATA": "one"})
    if done:
        state.end(stage, 1.0, 0, {"/there/export": "two"})
    return State(folder), stage, c  # as it is read again


def test_what_a_done_stage_was_made_with_is_refused_by_the_name_that_the_user_knows(
    tmp_path: Path,
) -> None:
    state, stage, c = states(tmp_path, done=True)
    assert (
        state.changed_settings(
            stage, dataclasses.replace(c, micro_batch_size=99, nproc=3), set(), True
        )
        == []
    )
    assert state.changed_settings(
        stage, dataclasses.replace(c, learning_rate=2e-3, seed=4), set(), False
    ) == [
        "LEARNING_RATE=0.002: the stage mid-training is done with LEARNING_RATE=0.001, and would not be what "
        "it is; go on with that, or choose another RUN_NAME",
        "SEED=4: the stage mid-training is done with SEED=1337, and would not be what it is; go on with that, or "
        "choose another RUN_NAME",
    ]
    assert state.changed_settings(stage, dataclasses.replace(c, seed=4), {"SEED"}, False) == []
    assert state.changed_inputs(stage, {"MID_DATA": "one"}) == []
    assert [
        text.partition(";")[0] for text in state.changed_inputs(stage, {"MID_DATA": "other"})
    ] == ["MID_DATA: is not what the stage mid-training was done with"]
    assert state.changed_outputs(stage, {"/there/export": "two"}) == []
    assert "is not what the stage" in state.changed_outputs(stage, {"/there/export": "x"})[0]
    assert (
        "is gone, which the stage mid-training made"
        in state.changed_outputs(stage, {"/there/export": ""})[0]
    )


def test_a_stage_that_has_begun_may_take_what_its_run_may(tmp_path: Path) -> None:
    state, stage, c = states(tmp_path, done=False)
    assert (
        state.changed_settings(stage, dataclasses.replace(c, learning_rate=2e-3), set(), True) == []
    )
    assert (
        "MID_DATA=b.jsonl: the stage mid-training has begun with MID_DATA=a.jsonl"
        in state.changed_settings(stage, dataclasses.replace(c, data="b.jsonl"), set(), True)[0]
    )
    assert state.changed_settings(stage, dataclasses.replace(c, data="b.jsonl"), set(), False) == []
    assert state.changed_inputs(stage, {"MID_DATA": "other"}) == []


def test_a_torn_file_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    states(tmp_path, done=True)
    path = tmp_path / "pipeline.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RunFolderError, match=r"pipeline\.json: damaged"):
        State(tmp_path)


def test_the_sample_asks_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        Asked([Message("user", text)], "yes", options, "x:1")
        for text, options in (
            ("w" * 90, ("A. a", "B. b")),
            ("short?", ("A. a", "B. b")),
            ("say", ()),
        )
    ]
    monkeypatch.setattr(inputs.chat_format, "render", lambda v, messages: list(messages[0].text))
    c, sheet, v = load_preset(PRESET="tiny"), Sheet(asked, 3, []), object()
    assert inputs.prompts_of(c, sheet, v, 64) == ["short?", "say"]  # type: ignore[arg-type]
    assert inputs.prompts_of(dataclasses.replace(c, prompt="mine"), sheet, v, 64) == ["mine"]  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="PROMPT: does not fit into SEQ_LEN=64"):
        inputs.prompts_of(dataclasses.replace(c, prompt="w" * 65), sheet, v, 64)  # type: ignore[arg-type]


def test_memory_of_every_stage_is_asked_for_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def look(c: Config, finetune: bool = False) -> tuple[list[Finding], str]:
        asked.append((c.model, finetune))
        return [
            Finding("memory", FAIL, "9 GiB do not fit", "set BATCH_TOKENS=64", 64),
            Finding("disk", WARN, "x"),
        ], ""

    monkeypatch.setattr(inputs, "look", look)
    stages = [Stage(key, key, f"x-{key}", {}, (TUNE,), OF_MID) for key in ("mid", "sft", "done")]
    state, problems, c = State(tmp_path), Problems(), load_preset(PRESET="finetune")
    state.begin(stages[2], c, {})
    state.end(stages[2], 1.0, 0, {})
    inputs.look_at_tuning(
        stages, dict.fromkeys(("mid", "sft", "done"), c), state, tmp_path, problems
    )
    assert asked == [(str(tmp_path), True)] * 2
    assert problems.settings == [
        f"{key}: memory: 9 GiB do not fit; set BATCH_TOKENS=64" for key in ("mid", "sft")
    ]
    assert not problems.others
    allowed = Problems()
    inputs.look_at_tuning(
        stages, {"mid": dataclasses.replace(c, allow_fail="memory")}, state, tmp_path, allowed
    )
    assert len(asked) == 3 and not allowed
