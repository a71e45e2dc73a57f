"""A run and its mirror at W&B, offline and against a server on the loopback interface that is good or is not."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from record import reader
from tests import wandb_file
from tests.running import ROOT, environment, losses, train, train_and_kill, wait_for
from tests.wandb_server import MANNERS, server

KEYS = [("0123456789abcdef" * 3)[:40], "wandb_v1_" + "aB3_" * 19 + "xyz"]
STEP = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "perf/step_ms": "step_ms",
    "perf/tokens_per_s": "tokens_per_s",
    "perf/mfu": "mfu",
}
EVAL = {"val/loss": "val_loss", "val/bpb": "val_bpb"}
BY_SOURCE = {"val/loss/": "val_loss_by_source", "val/bpb/": "val_bpb_by_source"}
MIRRORED = [1, 5, 10, 15, 20, 25, 30, 35, 40]

# Takes 15 steps and waits there until the file of argument 1 has the text of argument 2: a run is over in a second, and
# on a busy machine before its mirror has begun.
HELD = """
import pathlib, sys, time
from train import loop, main
step, file, calls = loop.train_step, pathlib.Path(sys.argv[1]), []
def held(*args, **kwargs):
    calls.append(1)
    while len(calls) > 15 and not (file.exists() and sys.argv[2] in file.read_text()):
        time.sleep(0.05)
    return step(*args, **kwargs)
loop.train_step = held
sys.exit(main.main())
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> dict:
    """The losses of a run without W&B."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert "W&B" not in train(environment(folder, data))
    assert not list((folder / "run").rglob("*wandb*"))
    return losses(folder / "run")


def held(file: Path, text: str) -> list[str]:
    """The command of a trainer that waits in its middle for a text in a file."""
    return [sys.executable, "-c", HELD, str(file), text]


def state(run: Path) -> dict:
    return json.loads((run / "wandb.json").read_text())


def holders(secret: str, folder: Path) -> list[Path]:
    """The files in which a text stands."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


def wait_until_gone(run: Path, seconds: float = 60) -> None:
    """Until no process mirrors the run."""
    deadline = time.monotonic() + seconds
    with open(run / ".wandb.lock") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert time.monotonic() < deadline
            time.sleep(0.1)


def record_as_rows(run: Path) -> dict[int, dict]:
    """Step -> what W&B is to have, by the record."""
    records = list(reader.read(run / "metrics.jsonl"))
    final = {r["step"]: r for r in reader.last_of_each_step(records)}
    rows = {
        step: {
            there: final[step][here]
            for there, here in STEP.items()
            if final[step][here] is not None
        }
        | {"train/perplexity": pytest.approx(2.718281828459045 ** final[step]["loss"])}
        for step in MIRRORED
    }
    for r in records:
        if r["event"] == "eval":
            row = rows.setdefault(r["step"], {})
            row.update({there: r[here] for there, here in EVAL.items()})
            row.update(
                {
                    there + name: value
                    for there, here in BY_SOURCE.items()
                    for name, value in r[here].items()
                }
            )
    return dict(sorted(rows.items()))


def test_an_offline_run_reads_back_as_its_record(
    tmp_path: Path, data: dict[str, str], undisturbed: dict
) -> None:
    run = tmp_path / "run"
    out = train(
        environment(
            tmp_path,
            data,
            WANDB_MODE="offline",
            WANDB_API_KEY=KEYS[0],
            EVAL_EVERY=12,
            WANDB_RUN_ID="mine",
            WANDB_RESUME="must",
            WANDB_NAME="another",
            WANDB_DIR="/nowhere",
        ),
        command=held(run / "train.log", "W&B: offline"),
    )
    wait_until_gone(run)
    assert losses(run) == undisturbed
    # on a busy machine it may also be said that there is no answer yet, or that the upload goes on
    (line,) = [line for line in out.splitlines() if line.startswith("W&B: offline")]
    assert f"wandb sync {run}/wandb/offline-run-*" in line
    rows = wandb_file.rows(run)
    own = {"_step", "_timestamp", "_runtime"}
    assert {
        row["_step"]: {k: v for k, v in row.items() if k not in own} for row in rows
    } == record_as_rows(run)
    assert [row["_step"] for row in rows] == sorted({*MIRRORED, 12, 24, 36})
    times = {
        r["step"]: r["time"]
        for r in reader.read(run / "metrics.jsonl")
        if r["event"] in ("step", "eval")
    }
    assert [row["_timestamp"] for row in rows] == [
        pytest.approx(times[row["_step"]], abs=1e-3) for row in rows
    ]
    (path,) = wandb_file.files(run)
    messages = {m.WhichOneof("record_type"): m for m in wandb_file.messages(path)}
    about = messages["run"].run
    assert (about.project, about.entity, about.display_name) == ("pure-transformer", "", "run")
    assert about.run_id == state(run)["id"] != "mine"
    config = {
        item.key: json.loads(item.value_json) for item in about.config.update if item.key[0] != "_"
    }
    assert config == json.loads((run / "config.json").read_text())["settings"]
    assert messages["exit"].exit.exit_code == 0
    assert holders(KEYS[0], run) == []
    status = subprocess.run(
        [sys.executable, "-m", "record.status", "status"],
        cwd=ROOT,
        text=True,
        check=True,
        env=environment(tmp_path, data),
        stdout=subprocess.PIPE,
    ).stdout
    assert "wandb sync" in status


@pytest.mark.slow
def test_killed_and_resumed_it_is_one_run_without_doubled_steps(
    tmp_path: Path, data: dict[str, str], undisturbed: dict
) -> None:
    run, env = (
        tmp_path / "run",
        environment(tmp_path, data, WANDB_MODE="offline", SAVE_EVERY=16, EVAL_EVERY=12),
    )
    train_and_kill(
        env, "in a step", 31, once=(run / "train.log", "W&B: offline")
    )  # step 16 is saved
    wait_until_gone(run)
    first = state(run)
    given = [row["_step"] for row in wandb_file.rows(run)]
    assert given == [1, 5, 10, 12, 15, 20, 24, 25, 30]
    assert [
        m.exit.exit_code
        for m in wandb_file.messages(wandb_file.files(run)[0])
        if m.HasField("exit")
    ] == [1]
    (run / "train.log").write_text("")
    assert "resumed from step_0000016" in train(
        env, command=held(run / "train.log", "W&B: offline")
    )
    wait_until_gone(run)
    assert losses(run) == undisturbed
    assert state(run)["id"] == first["id"]
    assert {
        m.run.run_id
        for path in wandb_file.files(run)
        for m in wandb_file.messages(path)
        if m.WhichOneof("record_type") == "run"
    } == {first["id"]}
    rows = wandb_file.rows(run)
    assert [row["_step"] for row in rows] == [*given, 35, 36, 40]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [
        undisturbed[step][0] for step in MIRRORED
    ]
    with server("good") as there:  # the command that is printed makes one run of the two files
        subprocess.run(
            [
                str(Path(sys.executable).with_name("wandb")),
                "sync",
                *map(str, wandb_file.folders(run)),
            ],
            env=env | {"WANDB_BASE_URL": there.url, "WANDB_API_KEY": KEYS[0]},
            check=True,
            timeout=120,
            cwd=tmp_path,
        )  # where it leaves its own logs
        assert [row["_step"] for row in there.history(first["id"])] == [
            row["_step"] for row in rows
        ]
        assert there.history(first["id"])[-1]["val/loss"] == rows[-1]["val/loss"]
        assert list(there.lines) == [first["id"]] and there.ended == [
            (first["id"], 1),
            (first["id"], 0),
        ]


@pytest.mark.slow
def test_a_restart_while_the_old_mirror_still_works_waits_for_it(
    tmp_path: Path, data: dict[str, str]
) -> None:
    run, env = tmp_path / "run", environment(tmp_path, data, WANDB_MODE="offline", SAVE_EVERY=16)
    train_and_kill(env, "in a step", 20, once=(run / "train.log", "W&B: offline"))
    (run / "train.log").write_text("")
    train(env, command=held(run / "train.log", "W&B: offline"))  # at once
    wait_until_gone(run)
    rows = [row["_step"] for row in wandb_file.rows(run)]
    assert rows == sorted(set(rows)) and set(rows) >= set(MIRRORED)


@pytest.mark.slow
def test_online_a_run_is_uploaded_and_a_restart_continues_it(
    tmp_path: Path, data: dict[str, str], undisturbed: dict
) -> None:
    run = tmp_path / "run"
    with server("good") as there:
        env = environment(
            tmp_path,
            data,
            WANDB_MODE="auto",
            WANDB_BASE_URL=there.url,
            WANDB_API_KEY=KEYS[1],
            SAVE_EVERY=16,
        )
        train_and_kill(env, "in a step", 31, once=(run / "train.log", "/runs/"))
        wait_until_gone(run)
        one = state(run)["id"]
        assert there.ended == [(one, 1)]
        assert [row["_step"] for row in there.history(one)] == [1, 5, 10, 15, 20, 25, 30]
        url = f"{there.url}/a-team/pure-transformer/runs/{one}"
        (run / "train.log").write_text("")
        out = train(env, command=held(run / "train.log", url))
        wait_until_gone(run)
        assert f"W&B: {there.url}/a-team/pure-transformer/runs/{one}" in out
        assert list(there.lines) == [one] and there.ended[-1] == (one, 0)
        rows = there.history(one)
        assert [row["_step"] for row in rows] == MIRRORED
        assert [row["train/loss"] for row in rows] == [undisturbed[step][0] for step in MIRRORED]
        status = subprocess.run(
            [sys.executable, "-m", "record.status", "status"],
            cwd=ROOT,
            text=True,
            check=True,
            env=env,
            stdout=subprocess.PIPE,
        ).stdout
        assert f"W&B: {there.url}/a-team/pure-transformer/runs/{one}" in status
    assert holders(KEYS[1], tmp_path) == []


@pytest.mark.slow
@pytest.mark.fault(21)
def test_servers_that_misbehave_change_nothing_of_a_run(
    tmp_path: Path, data: dict[str, str], undisturbed: dict
) -> None:
    def check(manner: str) -> None:
        folder = tmp_path / manner
        folder.mkdir()
        with server(manner) as there:
            out = train(
                environment(
                    folder,
                    data,
                    WANDB_BASE_URL=there.url,
                    WANDB_API_KEY=KEYS[0],
                    WANDB_MODE="online",
                )
            )
            lines = [line for line in out.splitlines() if line.startswith("W&B")]
            assert losses(folder / "run") == undisturbed, manner
            assert (
                "make mirror RUN_NAME=run" in lines[-1]
                and len(lines) <= 3
                and len({*lines}) == len(lines)
            ), out
            assert "Traceback" not in out, out
            wait_until_gone(folder / "run")
        assert state(folder / "run")["url"] is None, manner

    with ThreadPoolExecutor(4) as pool:  # at once, since most of it is waiting
        list(pool.map(check, MANNERS[1:]))
    assert holders(KEYS[0], tmp_path) == []


@pytest.mark.slow
@pytest.mark.fault(21)
@pytest.mark.parametrize("manner", ["hangs", "500"])
def test_a_server_that_is_lost_on_the_way_changes_nothing_of_a_run(
    tmp_path: Path, data: dict[str, str], undisturbed: dict, manner: str
) -> None:
    with server("good") as there:
        env = environment(
            tmp_path, data, WANDB_MODE="auto", WANDB_BASE_URL=there.url, WANDB_API_KEY=KEYS[0]
        )
        process = subprocess.Popen(
            held(tmp_path / "go", "go"),
            env=env,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        wait_for(tmp_path / "run" / "train.log", "/runs/")
        wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 15,')
        there.manner = manner
        (tmp_path / "go").write_text("go")
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and "Traceback" not in out, out
        # said once: by then it has given up, or is told to be still at it
        lines = [
            line for line in out.splitlines() if line.startswith("W&B: ") and "/runs/" not in line
        ]
        assert len(lines) == 1 and (
            "make mirror" in lines[0] or "this one does not wait" in lines[0]
        ), out
        with contextlib.suppress(ProcessLookupError):
            os.kill(
                int((tmp_path / "run" / ".wandb.lock").read_text().removeprefix("pid ")),
                signal.SIGKILL,
            )
    assert losses(tmp_path / "run") == undisturbed
    assert holders(KEYS[0], tmp_path) == []


def test_what_could_not_be_uploaded_is_uploaded_later(tmp_path: Path, data: dict[str, str]) -> None:
    train(environment(tmp_path, data))
    with server("good") as there:
        env = environment(
            tmp_path, data, WANDB_MODE="auto", WANDB_BASE_URL=there.url, WANDB_API_KEY=KEYS[0]
        )
        assert there.url in train(env, command=[sys.executable, "-m", "record.trackers.mirror"])
        (rows,) = [there.history(one) for one in there.lines]
        assert [row["_step"] for row in rows] == MIRRORED and [code for _, code in there.ended] == [
            0
        ]


@pytest.mark.fault(21)
def test_without_the_package_the_run_says_so_once_and_goes_on(
    tmp_path: Path, data: dict[str, str], undisturbed: dict
) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "wandb.py").write_text("raise ImportError('not here')\n")
    env = environment(tmp_path, data, WANDB_MODE="offline")
    out = train(env | {"PYTHONPATH": f"{tmp_path / 'stub'}:{ROOT}"})
    (line,) = [line for line in out.splitlines() if "W&B" in line]
    assert "not here" in line and "make setup" in line
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.slow
@pytest.mark.fault(21)
def test_a_mirror_that_is_killed_is_no_harm_and_the_next_attempt_has_one(
    tmp_path: Path, data: dict[str, str]
) -> None:
    run, env = tmp_path / "run", environment(tmp_path, data, WANDB_MODE="offline", MAX_STEPS=30_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "train.main"],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(run / "train.log", "W&B: offline")
    os.kill(int((run / ".wandb.lock").read_text().removeprefix("pid ")), signal.SIGKILL)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    stopped = json.loads((run / "STATUS.json").read_text())["step"]
    (run / "train.log").write_text("")
    again = env | {"MAX_STEPS": str(stopped + 20)}
    assert "resumed from" in train(again, command=held(run / "train.log", "W&B: offline"))
    wait_until_gone(run)
    rows = [row["_step"] for row in wandb_file.rows(run)]
    assert len(rows) == len(set(rows)) and rows[-1] == stopped + 20
    assert len({path.stem for path in wandb_file.files(run)}) == 1


def test_a_run_that_was_told_to_stop_counts_as_preempted(
    tmp_path: Path, data: dict[str, str]
) -> None:
    run, env = tmp_path / "run", environment(tmp_path, data, WANDB_MODE="offline", MAX_STEPS=30_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "train.main"],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(run / "train.log", "W&B: offline")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    wait_until_gone(run)
    kinds = [m.WhichOneof("record_type") for m in wandb_file.messages(wandb_file.files(run)[0])]
    assert "preempting" in kinds and kinds[-1] == "exit"


@pytest.mark.fault(21)
def test_online_without_a_key_is_a_bad_setting(tmp_path: Path, data: dict[str, str]) -> None:
    out = train(environment(tmp_path, data, WANDB_MODE="online", HOME=tmp_path), code=64)
    assert "WANDB_MODE=online: there is no key" in out
