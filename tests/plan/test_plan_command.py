"""python -m plan as make plan runs it: without torch, within seconds, and with the exit codes that it promises."""

import json
import os
import re
import subprocess
import sys

import pytest

from settings import ROOT


@pytest.fixture
def run(tmp_path):
    """Runs it with no settings but these, and a torch that ends whatever imports it."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text('raise SystemExit("torch was imported")\n')
    (tmp_path / "empty.env").touch()

    def started(**settings):
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(tmp_path / "path"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "ENV_FILE": str(tmp_path / "empty.env"),
            "RUNS_DIR": str(tmp_path / "runs"),
            "DATA_DIR": str(tmp_path / "data"),
            **settings,
        }
        return subprocess.run(
            [sys.executable, "-m", "plan"],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    return started


def loads(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "settings",
    [
        {"PRESET": "xlarge-8xa100", "NODES": "4", "SITES": "4", "TARGET_HOURS": "4000"},
        {"PRESET": "d16-2xh100"},
        {"PRESET": "d16-2xh100", "SWEEP": "1"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_a_plan_needs_no_torch(run, settings):
    """The test's own torch is found first: what imports it is ended."""
    done = run(**settings)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_needs_no_torch_even_where_it_measures(run):
    done = run(PRESET="tiny", CARDS="cpu", DTYPE="float32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny on 1 process on CPU (computed")
    assert "are free" not in done.stdout  # CARDS=cpu may be another machine
    done = run(PRESET="tiny", DEVICE="cpu", DTYPE="float32")
    assert "are free" in " ".join(done.stdout.split())


def test_json_is_the_same_plan(run):
    found = loads(run(PRESET="d16-2xh100", JSON="1").stdout)
    assert found["schema"] == 1
    assert found["run_name"] == "d16-2xh100"
    assert found["steps"] == 12_800
    assert found["speed"]["tokens_per_s"] == pytest.approx(428_987, rel=1e-5)
    assert found["cost"] is None
    swept = loads(run(PRESET="d16-2xh100", JSON="1", SWEEP="gpus").stdout)
    assert swept["kind"] == "gpus"
    assert len(swept["rows"]) > 3


def test_json_of_what_is_not_known_has_null(run):
    done = run(PRESET="d16-2xh100", CARDS="8xv100-32gb-sxm", JSON="1")
    found = loads(done.stdout)
    assert done.returncode == 64
    assert found["time"] is None
    assert found["speed"]["tokens_per_s"] is None
    assert [(one["name"], one["level"]) for one in found["findings"]] == [("bf16", "FAIL")]


def without_clock(text):
    """A minute may pass between two plans: Thu 26 Nov 07:58."""
    return re.sub(r"\w{3} \d+ \w{3} \d\d:\d\d", "", text)


def test_what_cannot_be_ends_with_64_and_what_would_do_unless_it_is_allowed(run):
    impossible = {"PRESET": "xlarge-8xa100", "TARGET_HOURS": "48"}
    done = run(**impossible)
    assert (done.returncode, done.stderr) == (64, "")
    said = " ".join(done.stdout.split())
    assert "FAIL Time TARGET_HOURS=48 needs 215% MFU" in said
    assert "Try: TRAIN_TOKENS=" in said
    allowed = run(**impossible, ALLOW_FAIL="target-hours")
    assert allowed.returncode == 0
    assert without_clock(allowed.stdout) == without_clock(done.stdout)
    assert run(**impossible, ALLOW_FAIL="disk").returncode == 64


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"CARDS": "8xa100"},
            "CARDS=8xa100: unknown GPU a100; did you mean a100-80gb-sxm or ",
        ),
        ({"CARDS": "3xfoo"}, "CARDS=3xfoo: unknown GPU foo"),
        ({"MAKE_SETTINGS": "TARGET_HOUR", "TARGET_HOUR": "48"}, "TARGET_HOUR"),
        ({"MFU": "120"}, "MFU=120"),
        ({"SWEEP": "width"}, "SWEEP=width"),
        ({"SWEEP": "1", "ALLOW_FAIL": "disc"}, "no check disc; did you mean disk?"),
        ({"SITES": "3", "NODES": "4"}, "SITES=3: NODES=4 cannot be spread evenly"),
    ],
)
def test_a_setting_that_cannot_be_is_named(run, settings, said):
    done = run(**{"PRESET": "xlarge-8xa100"} | settings)
    assert done.returncode == 64
    assert done.stdout == ""
    assert said in done.stderr


def test_a_run_that_has_begun_goes_on(run, tmp_path):
    folder = tmp_path / "runs" / "d16-2xh100" / "checkpoints" / "step_0006400"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    whole, half = (
        loads(run(PRESET="d16-2xh100", JSON="1", RUN_NAME=name).stdout)
        for name in ("other", "d16-2xh100")
    )
    assert (whole["from_step"], half["from_step"]) == (0, 6400)
    assert half["time"]["training_seconds"] == pytest.approx(whole["time"]["training_seconds"] / 2)


def test_bad_data_has_the_exit_code_that_make_train_gives_it(run, tmp_path):
    done = run(PRESET="xlarge-8xa100", DATA_MIX="nowhere:1")
    assert (done.returncode, done.stdout) == (78, "") and "names nowhere" in done.stderr
    (tmp_path / "empty").mkdir()
    done = run(PRESET="tiny", DATA=str(tmp_path / "empty"))
    assert (done.returncode, done.stdout) == (78, "")
