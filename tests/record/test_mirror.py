"""settings/wandb_env.py, record/trackers/mirror.py and the parts of record/trackers/wandb_mirror.py that need no W&B."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from record import status
from record.run_paths import RunPaths
from record.trackers import mirror
from record.trackers.mirror import Mirror, mode_of
from record.trackers.wandb_mirror import Gpus, Rows, Tail
from settings import wandb_env
from settings.config import Config
from settings.declare import SettingsError

KEY = ("0123456789abcdef" * 3)[:40]  # composed here, so that no search for secrets stops at it


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any W&B."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name in ("NETRC", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


# ---- Settings


@pytest.mark.parametrize(
    ("mode", "key", "netrc", "expected"),
    [
        ("", "", False, "disabled"),
        ("", KEY, False, "online"),
        ("", "", True, "online"),
        ("auto", "", False, "disabled"),
        ("auto", KEY, False, "online"),
        ("auto", "", True, "online"),
        ("online", KEY, False, "online"),
        ("online", "", True, "online"),
        ("online", "", False, None),
        ("offline", "", False, "offline"),
        ("offline", KEY, True, "offline"),
        ("disabled", "", False, "disabled"),
        ("disabled", KEY, True, "disabled"),
    ],
)
def test_the_mode_follows_from_setting_and_key(
    home: Path, mode: str, key: str, netrc: bool, expected: str | None
) -> None:
    if netrc:
        (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    environ = {"WANDB_MODE": mode, "WANDB_API_KEY": key}
    if expected is None:
        with pytest.raises(SettingsError) as raised:
            Config.load(environ)
        (problem,) = raised.value.problems
        assert problem.startswith("WANDB_MODE=online: there is no key; set WANDB_API_KEY")
    else:
        assert mode_of(Config.load(environ)) == expected


def test_a_key_in_netrc_counts_for_its_own_server_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "mine").write_text(f"machine wandb.lab:8080 login user password {KEY}\n")
    monkeypatch.setenv("NETRC", str(home / "mine"))
    assert not wandb_env.has_key("")
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.lab:8080")
    assert wandb_env.has_key("")
    (home / "mine").write_text("machine\n")  # damaged
    assert not wandb_env.has_key("")


def test_of_the_variables_of_wandb_only_those_that_cannot_break_a_run_are_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "WANDB_RUN_ID",
        "WANDB_RESUME",
        "WANDB_DIR",
        "WANDB_NAME",
        "WANDB_MODE",
        "WANDB_BASE_URL",
        "MY_WANDB",
    ):
        monkeypatch.setenv(name, "x")
    given = wandb_env.environment({"WANDB_MODE": "offline", "WANDB_ENTITY": ""})
    assert {name: value for name, value in given.items() if "WANDB" in name} == {
        "WANDB_BASE_URL": "x",
        "MY_WANDB": "x",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }
    assert given["HOME"] == os.environ["HOME"]


# ---- The record as rows


def entry(event: str, step: int, **values: Any) -> dict[str, Any]:
    return {"schema": 1, "event": event, "time": 100.0 + step, "step": step, **values}


def steps(first: int, last: int, **values: Any) -> list[dict[str, Any]]:
    return [
        entry(
            "step",
            step,
            loss=float(step),
            lr=0.1,
            grad_norm=1.0,
            step_ms=2.0,
            tokens_per_s=3.0,
            mfu=None,
            **values,
        )
        for step in range(first, last + 1)
    ]


def rows_of(
    records: list[dict[str, Any]], after: int = 0, **settings: Any
) -> dict[int, dict[str, float]]:
    """Step -> values of all rows, of which no step may come twice or after a later one."""
    c = dataclasses.replace(
        Config(), **{"log_every": 5, "eval_every": 10, "max_steps": 22} | settings
    )
    rows = Rows(c, after)
    found = [row for record in records for row in rows.feed(record)] + list(rows.rest())
    assert [step for step, _, _ in found] == sorted({step for step, _, _ in found})
    assert all(moment == 100.0 + step for step, moment, _ in found)
    return {step: values for step, _, values in found}


def test_rows_are_every_nth_step_the_first_and_last_of_an_attempt_and_all_evaluations() -> None:
    records = [
        entry("start", 0),
        *steps(1, 12),
        entry("eval", 12, val_loss=2.0, val_bpb=1.0),
        *steps(13, 22),
        entry("eval", 22, val_loss=1.5, val_bpb=None, val_ppl=4.5),
        entry("end", 22, reason="done"),
    ]
    rows = rows_of(records)
    assert list(rows) == [1, 5, 10, 12, 15, 20, 22]
    assert rows[5] == {
        "train/loss": 5.0,
        "train/perplexity": pytest.approx(math.e**5),
        "train/lr": 0.1,
        "train/grad_norm": 1.0,
        "perf/step_ms": 2.0,
        "perf/tokens_per_s": 3.0,
    }
    assert rows[12] == {"val/loss": 2.0, "val/bpb": 1.0}
    assert (
        rows[22]["val/loss"] == 1.5 and rows[22]["train/loss"] == 22.0 and "val/bpb" not in rows[22]
    )
    assert rows[22]["val/perplexity"] == 4.5
    assert list(rows_of([entry("resume", 7), *steps(8, 11)])) == [8, 10]


def test_an_evaluation_that_failed_and_what_was_skipped_add_nothing_to_the_rows() -> None:
    nothing = entry("eval", 10, val_loss=None, val_bpb=None, error="HTTP 403", eval_s=1.0)
    skipped = entry("skip", 12, reason="nonfinite", loss=None, grad_norm=None, step_ms=2.0)
    rows = rows_of(
        [entry("start", 0), *steps(1, 10), nothing, *steps(11, 11), skipped, *steps(12, 22)]
    )
    assert rows == rows_of([entry("start", 0), *steps(1, 22)])


def test_a_loss_that_is_not_known_or_too_large_has_no_perplexity() -> None:
    huge, unknown = entry("step", 5, loss=1e4), entry("step", 10, loss=None, lr=0.5)
    assert rows_of([huge, unknown], eval_every=0) == {5: {"train/loss": 1e4}, 10: {"train/lr": 0.5}}


@pytest.mark.parametrize("killed", range(1, 22))
@pytest.mark.parametrize("back_to", [0, 4, 10])
def test_a_step_is_given_once_and_with_its_evaluation_whenever_the_trainer_was_killed(
    killed: int, back_to: int
) -> None:
    def attempt(first: int, last: int) -> list[dict[str, Any]]:
        records = []
        for record in steps(first, last):
            records.append(record)
            if record["step"] in (10, 20, 22):
                records.append(entry("eval", record["step"], val_loss=0.5))
        return records

    whole = rows_of([entry("start", 0), *attempt(1, 22), entry("end", 22, reason="done")])
    before = [entry("start", 0), *attempt(1, killed)]
    if killed in (10, 20):
        before.pop()  # in the evaluation
    given = rows_of(before)
    again = [
        entry("resume", min(back_to, killed)),
        *attempt(min(back_to, killed) + 1, 22),
        entry("end", 22, reason="done"),
    ]
    if killed == back_to == 10:
        again.insert(1, entry("eval", 10, val_loss=0.5))  # a resumed run makes up for it
    later = rows_of([*before, *again], after=max(given, default=0))
    assert not given.keys() & later.keys()
    both = given | later
    assert {step: both[step] for step in whole} == whole
    assert both.keys() - whole.keys() <= {
        min(back_to, killed) + 1
    }  # the first step of the second attempt


def test_the_tail_of_a_file_is_read_once_and_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail.records()) == []
    lines = [json.dumps(entry("step", step)) + "\n" for step in range(4)]
    path.write_text(lines[0] + lines[1][:9])
    assert [r["step"] for r in tail.records()] == [0]
    path.write_text(lines[0])  # as a trainer that starts again cuts it
    assert list(tail.records()) == []
    with open(path, "a") as file:
        file.write(lines[1] + "no json\n" + '{"schema": 2}\n' + lines[2])
    assert [r["step"] for r in tail.records()] == [1, 2]
    assert list(tail.records()) == []


# ---- GPUs


def fake_nvml(monkeypatch: pytest.MonkeyPatch, util: list[int], milliwatts: list[int]) -> None:
    """An NVML with a GPU for each reading."""

    class NVMLError(Exception):
        pass

    module: Any = types.ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetCount = lambda: len(util)
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid[-1])
    module.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(
        gpu=util[handle], memory=0
    )
    module.nvmlDeviceGetPowerUsage = lambda handle: milliwatts[handle]
    monkeypatch.setitem(sys.modules, "pynvml", module)


@pytest.mark.parametrize(
    ("visible", "count", "util", "watts"),
    [
        (None, None, 50.0, 250.0),
        (None, 2, 25.0, 150.0),
        ("1", None, 50.0, 200.0),
        ("GPU-2,GPU-1", None, 75.0, 300.0),
    ],
)
def test_utilisation_and_power_are_means_over_the_gpus_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    count: int | None,
    util: float,
    watts: float,
) -> None:
    fake_nvml(monkeypatch, [0, 50, 100], [100_000, 200_000, 400_000])
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if visible is None and count is None:
        watts = 700 / 3
    gpus = Gpus(count)
    gpus.sample()
    gpus.sample()
    assert gpus.until(time.time() - 60) == {}  # a row from before the mirror looked
    assert gpus.until(time.time()) == {
        "gpu/util": pytest.approx(util),
        "gpu/power_w": pytest.approx(watts),
    }
    assert gpus.until(time.time()) == {}


def test_where_there_is_no_driver_there_are_no_gpu_values(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [], [])
    module: Any = sys.modules["pynvml"]

    def fail() -> None:
        raise module.NVMLError

    module.nvmlInit = fail
    gpus = Gpus(None)
    gpus.sample()
    assert gpus.until(time.time()) == {}


# ---- The trainer's side


def process(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )


def test_a_mirror_that_ends_by_itself_is_waited_for_and_heard_to_the_end() -> None:
    said: list[str] = []
    one = Mirror(process("import sys; print('a'); sys.stdin.read(); print('b')"), said.append)
    one.close(hurried=lambda: False)
    assert said == ["a", "b"] and one.process.returncode == 0


def test_a_mirror_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "DONE_S", 60)
    monkeypatch.setattr(mirror, "STOPPED_S", 0.2)
    said: list[str] = []
    one = Mirror(process("import time; time.sleep(60)"), said.append)
    began = time.monotonic()
    one.close(hurried=lambda: True)
    assert time.monotonic() - began < 30 and one.process.poll() is None
    assert len(said) == 1 and "not finished" in said[0]
    one.process.kill()
    one.process.wait()


def test_a_mirror_that_is_killed_does_not_hold_up_the_end() -> None:
    one = Mirror(process("import time; time.sleep(60)"), lambda line: None)
    one.process.kill()
    one.close(hurried=lambda: False)
    assert one.process.returncode == -9


# ---- make status


@pytest.mark.parametrize(
    ("state", "files", "words"),
    [
        ({"mode": "online", "url": "https://x/runs/1"}, False, "W&B: https://x/runs/1"),
        ({"mode": "offline", "url": None}, True, "bin/wandb sync {folder}/wandb/offline-run-*"),
        ({"mode": "offline", "url": None}, False, ""),  # the package is missing
        ({"mode": "online", "url": None}, False, ""),
        (None, False, ""),
    ],
)
def test_status_says_where_the_run_is_at_wandb(
    tmp_path: Path, state: dict | None, files: bool, words: str
) -> None:
    paths = RunPaths(tmp_path)
    if files:
        (paths.wandb / "offline-run-20261122_101112-abcd").mkdir(parents=True)
    if state:
        paths.wandb_state.write_text(json.dumps(state))
    line = status.mirrored(paths)
    assert words.format(folder=tmp_path) in line and bool(line) == bool(words)
