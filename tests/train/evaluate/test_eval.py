"""`make eval` and CORE_EVERY: what a run's checkpoint is worth, in its folder, in its record and on the console."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from record import metrics as record_reader
from tests.core_bundle import TASKS, make_folder
from tests.running import ROOT, environment, train, wait_for

LABELS = set(TASKS)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]
) -> tuple[dict[str, str], Path]:
    """Settings of a run that is done, and its folder."""
    folder = tmp_path_factory.mktemp("evaluated")
    env = environment(
        folder,
        data,
        MAX_STEPS=10,
        RUN_NAME="run",
        CORE_EVERY=5,
        EVAL_EVERY=5,
        KEEP_BEST=1,
        CORE_BUNDLE=make_folder(folder / "bundle"),
        EVAL_EXAMPLES=6,
    )
    assert "core_partial" in train(env)
    return env, folder / "run"


def evaluate(env: dict[str, str], code: int = 0, **settings: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "train.launcher", "finetune.evaluate"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        env=env | {name: str(value) for name, value in settings.items()},
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def written(run: Path) -> dict:
    return json.loads((run / "eval" / "step_0000010.json").read_text())


def test_training_records_core_and_make_eval_finds_the_same(
    trained: tuple[dict[str, str], Path],
) -> None:
    env, run = trained
    records = [r for r in record_reader.read_records(run / "metrics.jsonl") if r["event"] == "eval"]
    core = [r for r in records if "core" in r]
    assert [r["step"] for r in core] == [5, 10] and {r["core"] for r in core} == {None}
    assert core[-1].keys() - set(record_reader.EVAL_KEYS) <= {
        "schema",
        "event",
        "time",
        "mono_s",
        "host",
        "attempt",
        "step",
        "tokens",
    }
    (last,) = [r for r in records if r.get("full")]
    said = evaluate(env)
    found = written(run)
    assert (found["val_loss"], found["val_bpb"]) == (
        pytest.approx(last["val_loss"]),
        pytest.approx(last["val_bpb"]),
    )
    assert found["sources"]["python-stdlib"]["val_bpb"] == pytest.approx(
        last["val_bpb_by_source"]["python-stdlib"]
    )
    assert (
        found["core"]["core_partial"] == core[-1]["core_partial"] and found["core"]["core"] is None
    )
    assert found["core"]["core_centred"] == core[-1]["core_centred"] and found["problems"] == []
    assert set(found["core"]["tasks"]) == LABELS and len(found["core"]["lacking"]) == 18
    assert [of["asked"] for of in found["core"]["tasks"].values()] == [6, 6, 6, 6]
    for label, of in found["core"]["tasks"].items():
        assert of["centred"] == pytest.approx(
            (of["right"] / 6 - of["baseline"]) / (1 - of["baseline"])
        )
        assert f"\n{label} " in said
    assert found["settings"]["VOCAB_SIZE"] == 512 and "CORE n/a, 18 of 22 tasks are missing" in said
    assert "Warning" not in said


@pytest.mark.slow
def test_two_processes_find_what_one_does(trained: tuple[dict[str, str], Path]) -> None:
    env, run = trained
    evaluate(env)
    one = written(run)
    evaluate(env, NPROC=2, PARALLEL="fsdp")
    two = written(run)
    assert two["provenance"]["world_size"] == 2 and two["core"]["tasks"] == one["core"]["tasks"]
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)


def test_without_a_bundle_the_rest_is_measured_and_the_code_says_so(
    trained: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    env, run = trained
    page = tmp_path / "bundle.zip"
    page.write_bytes(b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'.ljust(278))
    evaluate(env)
    whole, before = written(run), set((run / "eval").glob("*_until_*.json"))
    said = evaluate(env, code=78, CORE_BUNDLE=page)
    assert "278 bytes that are no whole .zip of a bundle (a web or error page" in said
    found = written(run)
    assert "core" not in found and found["val_loss"] > 0 and "278 bytes" in found["problems"][0]
    (kept,) = set((run / "eval").glob("*_until_*.json")) - before
    assert json.loads(kept.read_text()) == whole  # the one before is kept beside
    assert "there is no such run" in evaluate(env, code=78, RUN_NAME="none")


@pytest.mark.fault(43)
def test_a_damaged_bundle_stops_a_run_before_it_trains(
    trained: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    env, _ = trained
    page = tmp_path / "bundle.zip"
    page.write_bytes(b"<html>sign in</html>")
    said = train(env | {"RUN_NAME": "other", "CORE_BUNDLE": str(page)}, code=78)
    assert "20 bytes that are no whole .zip of a bundle" in said and "step=1/" not in said


def test_interrupted_it_says_so_and_writes_nothing(
    trained: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    env, run = trained
    said, before = tmp_path / "said.txt", sorted((run / "eval").glob("*"))
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        open(said, "wb") as out,
    ):  # which never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/bundle.zip@sha256:{64 * '0'}"
        process = subprocess.Popen(
            [sys.executable, "-m", "train.launcher", "finetune.evaluate"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env | {"CORE_BUNDLE": url},
            start_new_session=True,
        )
        wait_for(said, "weights of")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(120) == 143
    assert (
        "interrupted: nothing was written" in said.read_text()
        and "Traceback" not in said.read_text()
    )
    assert sorted((run / "eval").glob("*")) == before
