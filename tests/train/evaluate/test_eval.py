"""`make eval` and CORE_EVERY: what a checkpoint is worth, in its folder, its record and on the console."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch

from record import metrics
from record.metrics import read_records
from settings import SettingsError, load_preset
from tests.core_bundle import TASKS, make_folder
from tests.running import ROOT, environment, train, wait_for
from train.data.manifest import hash_content
from train.distributed.world import World
from train.generate import eval_run

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")
LAUNCHER = [sys.executable, "-m", "train.launcher", "finetune.evaluate"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """Settings of a run that is done, and its folder."""
    folder = tmp_path_factory.mktemp("evaluated")
    env = environment(
        folder,
        data,
        MAX_STEPS=10,
        CORE_EVERY=5,
        EVAL_EVERY=5,
        KEEP_BEST=1,
        CORE_BUNDLE=make_folder(folder / "bundle"),
        EVAL_EXAMPLES=6,
    )
    assert "core_partial" in train(env)
    return env, folder / "run"


def evaluate(env, code=0):
    return train(env, command=[sys.executable, "-m", "finetune.evaluate"], code=code)


def read_result(run):
    return json.loads((run / "eval" / "step_0000010.json").read_text())


def test_training_records_core_and_make_eval_finds_the_same(trained):
    env, run = trained
    records = [r for r in read_records(run / "metrics.jsonl") if r["event"] == "eval"]
    core = [r for r in records if "core" in r]
    assert [(r["step"], r["core"]) for r in core] == [(5, None), (10, None)]
    of_every_event = {"schema", "event", "time", "mono_s", "host", "attempt", "step", "tokens"}
    documented = set(re.findall(r"\w+", metrics.__doc__))
    assert core[-1].keys() - of_every_event <= documented
    (last,) = [r for r in records if r.get("full")]
    output = evaluate(env)
    result = read_result(run)
    assert result["val_loss"] == pytest.approx(last["val_loss"])
    assert result["val_bpb"] == pytest.approx(last["val_bpb"])
    assert result["sources"]["python-stdlib"]["val_bpb"] == pytest.approx(
        last["val_bpb_by_source"]["python-stdlib"]
    )
    assert result["problems"] == []
    assert result["core"]["core"] is None
    assert len(result["core"]["lacking"]) == 18
    for key in ("core_partial", "core_centred"):
        assert result["core"][key] == core[-1][key]
    assert result["core"]["tasks"].keys() == set(TASKS)
    for label, task in result["core"]["tasks"].items():
        chance = task["baseline"]
        assert task["asked"] == 6
        assert task["centred"] == pytest.approx((task["right"] / 6 - chance) / (1 - chance))
        assert f"\n{label} " in output
    assert result["settings"]["VOCAB_SIZE"] == 512
    assert "CORE n/a, 18 of 22 tasks are missing" in output
    assert re.search(r"evaluating \d+ batches of held-out text\n", output)
    assert "Warning" not in output


@pytest.mark.slow
def test_two_processes_find_what_one_does(trained):
    env, run = trained
    evaluate(env)
    one = read_result(run)
    train(env | {"NPROC": "2", "PARALLEL": "fsdp"}, command=LAUNCHER)
    two = read_result(run)
    assert two["provenance"]["world_size"] == 2
    assert two["core"]["tasks"] == one["core"]["tasks"]
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)


def test_without_a_bundle_the_rest_is_measured_and_the_code_says_so(trained, tmp_path):
    env, run = trained
    page = tmp_path / "bundle.zip"
    page.write_bytes(b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'.ljust(278))
    evaluate(env)
    whole = read_result(run)
    output = evaluate(env | {"CORE_BUNDLE": str(page)}, code=78)
    assert "278 bytes that are no whole .zip of a bundle (a web or error page" in output
    result = read_result(run)
    assert "core" not in result
    assert result["val_loss"] > 0
    assert "278 bytes" in result["problems"][0]
    assert whole in [json.loads(path.read_text()) for path in (run / "eval").glob("*_until_*.json")]
    assert "There is no run " in evaluate(env | {"RUN_NAME": "none"}, code=78)


def test_eval_tokens_that_measure_nothing_are_refused():
    config = load_preset(EVAL_TOKENS="0")
    with pytest.raises(SettingsError, match="EVAL_TOKENS=0: Must be at least 256 for make eval"):
        eval_run.evaluate(config, ALONE)


def test_the_advice_names_the_text_that_was_given():
    c = load_preset(DATA="my novel.txt")
    said = eval_run.explain_absence(c, {})
    assert said.endswith(" VOCAB_SIZE=4096 DATA='my novel.txt' DATA_DIR=data")
    c = load_preset(DATA_MIX="python:1")
    assert eval_run.explain_absence(c, {}).endswith(
        " VOCAB_SIZE=4096 DATA_MIX=python:1 DATA_DIR=data"
    )


def test_a_run_is_scored_on_the_text_that_it_held_out_or_not_at_all(trained, tmp_path):
    env, run = trained
    evaluate(env)
    before = read_result(run)
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "eval")
    data = tmp_path / "data"
    shutil.copytree(env["DATA_DIR"], data)
    elsewhere = env | {"RUNS_DIR": str(tmp_path), "DATA_DIR": str(data)}
    elsewhere |= {"CORE_BUNDLE": "none"}
    del elsewhere["TOKENIZER"]

    evaluate(elsewhere)
    after = read_result(tmp_path / "run")
    assert (after["val_loss"], after["scored_bytes"]) == (
        before["val_loss"],
        before["scored_bytes"],
    )

    # Another text is pinned since then, as by a run of another Python.
    (pin,) = (data / "python-stdlib").glob("pin-*.json")
    (shards,) = (data / "python-stdlib").glob("*/*/manifest.json")
    folder = shards.parent.parent
    pin.write_text(pin.read_text().replace(folder.name.split("-")[0], "changed"))
    evaluate(elsewhere)
    assert read_result(tmp_path / "run")["val_loss"] == before["val_loss"]

    # The text has changed since then and was prepared again.
    changed = folder.rename(folder.with_name(f"changed-{folder.name.split('-')[1]}"))
    (manifest,) = changed.glob("*/manifest.json")
    content = json.loads(manifest.read_text().replace(folder.name, changed.name))
    manifest.write_text(json.dumps(content | {"hash": hash_content(content)}))
    output = evaluate(elsewhere, code=78)
    assert (
        f"the text that run held out is not in DATA_DIR={data}. What there is of DATA_MIX="
        in output
    )
    assert f"trained with, which was DATA_DIR={env['DATA_DIR']}. Or bring" in output
    assert "val_loss" not in read_result(tmp_path / "run")


@pytest.mark.fault(43)
def test_a_damaged_bundle_stops_a_run_before_it_trains(trained, tmp_path):
    env, _ = trained
    page = tmp_path / "bundle.zip"
    page.write_bytes(b"<html>sign in</html>")
    output = train(env | {"RUN_NAME": "other", "CORE_BUNDLE": str(page)}, code=78)
    assert "20 bytes that are no whole .zip of a bundle" in output
    assert "step=1/" not in output


def test_interrupted_it_says_so_and_writes_nothing(trained, tmp_path):
    env, run = trained
    output, before = tmp_path / "output.txt", sorted((run / "eval").glob("*"))
    # A server that never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent, open(output, "wb") as out:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/bundle.zip@sha256:{64 * '0'}"
        process = subprocess.Popen(
            LAUNCHER,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env | {"CORE_BUNDLE": url},
            start_new_session=True,
        )
        wait_for(output, "weights of")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(120) == 143
    assert "Interrupted. The same command starts again." in output.read_text()
    assert "Traceback" not in output.read_text()
    assert sorted((run / "eval").glob("*")) == before
