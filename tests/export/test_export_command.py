"""make train, make export and a run that goes on from the export, as a user's shell calls them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from settings.declare import format_value
from tests.running import ROOT, environment, train, wait_for


def export(env, code=0):
    return train(env, command=[sys.executable, "-m", "export"], code=code)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    env = environment(tmp_path_factory.mktemp("run"), data, MAX_STEPS=6)
    train(env)
    return env


def test_a_run_that_starts_from_an_export_begins_where_it_ended(trained, tmp_path):
    said = export(
        trained | {"VOCAB_SIZE": "", "N_EMBD": "", "N_LAYER": ""}
    )  # the run's own settings rule
    folder = Path(trained["RUNS_DIR"]) / "run" / "export"
    assert (
        "step 6: " in said
        and f"from_pretrained('{folder}')" in said
        and "every weight is the checkpoint's" in said
    )
    assert all(f"  {path.name} " in said for path in folder.iterdir())
    settings = {
        "RUNS_DIR": str(tmp_path),
        "INIT_FROM": str(folder),
        "TOKENIZER": str(folder / "tokenizer.json"),
        "MAX_STEPS": "1",
        "LEARNING_RATE": "1e-9",
        "EVAL_EVERY": "1",
    }
    train(trained | settings)  # on the shards that are there: nothing is prepared again

    def loss(parent):
        lines = (Path(parent) / "run" / "metrics.jsonl").read_text().splitlines()
        return next(r["val_loss"] for r in map(json.loads, reversed(lines)) if r["event"] == "eval")

    assert loss(str(tmp_path)) == pytest.approx(loss(trained["RUNS_DIR"]), abs=1e-4)
    attempt = json.loads((tmp_path / "run" / "config.json").read_text())["attempts"][0]
    sums = dict(
        reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines()
    )
    assert attempt["init_from"] == {
        name: sums[name] for name in ("config.json", "model.safetensors")
    }
    card = (
        export(trained | {"RUNS_DIR": str(tmp_path)})
        and (tmp_path / "run" / "export" / "README.md").read_text()
    )
    assert f"weights of others: config.json of sha256 {sums['config.json'][:16]}" in card
    assert str(tmp_path) not in card and str(folder) not in card


@pytest.mark.slow
def test_a_run_keeps_the_epsilon_that_init_from_brought(trained, tmp_path):
    export(trained)
    folder = shutil.copytree(Path(trained["RUNS_DIR"]) / "run" / "export", tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": 1e-3}))
    env = trained | {
        "RUNS_DIR": str(tmp_path),
        "INIT_FROM": str(folder),
        "TOKENIZER": str(folder / "tokenizer.json"),
    }
    train(env | {"MAX_STEPS": "1"})
    (folder / "config.json").unlink()  # a run that is resumed needs it no more
    assert "resumed from step_0000001" in train(env | {"MAX_STEPS": "2"})
    export(env | {"MAX_STEPS": "2"})
    made = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert facts["rms_norm_eps"] == 1e-5 and made["rms_norm_eps"] == 1e-3


def test_settings_that_are_not_the_export_s_are_all_said_with_the_value_to_set(trained, tmp_path):
    export(trained)
    folder = Path(trained["RUNS_DIR"]) / "run" / "export"
    other = {"RUNS_DIR": str(tmp_path), "INIT_FROM": str(folder), "N_LAYER": "3", "N_HEAD": "4"}
    said = train(trained | other, code=64)
    config = json.loads((folder / "config.json").read_text())
    assert (
        f"set N_LAYER={format_value(config['num_hidden_layers'])}" in said
        and "set N_HEAD=2" in said
    )


def test_ctrl_c_leaves_no_half_folder(trained):
    export(trained)
    run = Path(trained["RUNS_DIR"]) / "run"
    before = {path.name: path.read_bytes() for path in (run / "export").iterdir()}
    code = (
        "import sys, time\nfrom export import __main__ as command\n"
        "def slow(*_):\n    (command.ROOT / sys.argv[1]).write_text('here'); time.sleep(60)\n"
        "command.write_beside = slow\nsys.exit(command.main())"
    )
    mark = run / "mark"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(mark)],
        env=trained,
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ) as process:
        wait_for(mark, "here")
        os.kill(process.pid, signal.SIGINT)
        said = process.communicate(timeout=120)[1]
    assert (
        process.returncode == 130
        and said == "stopped; nothing was exported, and what was there is as it was\n"
    )
    assert {path.name: path.read_bytes() for path in (run / "export").iterdir()} == before
    assert not list(run.glob(".export-*"))
