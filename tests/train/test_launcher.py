"""train/launcher.py: which command it starts, what it makes of how that ends, and when it starts again."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from record import locks
from settings import ROOT
from settings.config import Config
from train import launcher
from train.children import Children
from train.distributed import rendezvous
from train.distributed.registry import Verdict

NODES: dict[str, Any] = {"nodes": 2, "node_rank": 1, "master_addr": "10.0.0.5"}


class Play(Children):
    """Children that end as a script says; what follows its last word is that word again.

    A word is an exit code, after what happens before: s10 commits step 10, r78 reports code 78, a
    signal arrives where there is "stop".
    """

    def __init__(self, script):
        self.words = script.split()
        self.stop_requested = False
        self.commands: list[str] = []
        self.pauses: list[float] = []
        self.stops_in_pause = False
        self.starts = 0

    def run(self, command, environment):
        assert environment["LAUNCHER_PID"] == str(os.getpid())  # the trainer ends with this process
        self.commands.append(" ".join(command[1:]).strip())
        word = self.words[min(self.starts, len(self.words) - 1)]
        self.starts += 1
        for part in word.split(":"):
            if part.startswith("s") and part != "stop":
                Path(environment["PROGRESS_FILE"]).write_text(f"{part[1:]}\n")
            elif part.startswith("r"):
                Path(environment["EXIT_CODE_FILE"]).write_text(f"{part[1:]}\nno shard\n")
            elif part == "stop":
                self.stop_requested = True
        return int(part)

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.stop_requested = self.stop_requested or self.stops_in_pause


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Two processes on the CPU, and other nodes that are told nothing."""
    monkeypatch.setattr(locks, "wait_until_free", lambda paths: None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("K8S_NODE", raising=False)
    return dataclasses.replace(
        Config(), runs_dir=str(tmp_path), run_name="x", device="cpu", nproc=2, max_restarts=3
    )


@pytest.fixture
def told(monkeypatch):
    """What the other nodes were told: code and reason."""
    words: list[tuple[int, str]] = []
    monkeypatch.setattr(rendezvous, "over", lambda config, *word: words.append(word))
    return words


@pytest.fixture
def roll_calls(monkeypatch):
    """Processes with which this node came to a roll call, in which all were there."""
    calls: list[int] = []

    def meet(config, processes, is_stopped):
        calls.append(processes)
        return Verdict(0)

    monkeypatch.setattr(rendezvous, "meet", meet)
    return calls


def replace(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, **changes)


def is_pod(monkeypatch):
    monkeypatch.setenv("K8S_NODE", "a-machine")


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({"nproc": 1}, "-m train.main"),
        (
            {},
            "-m torch.distributed.run --standalone --max-restarts=0 --nproc-per-node=2 "
            "-m train.main",
        ),
        (
            NODES | {"nproc": 1, "start_timeout_s": 40},
            "-m torch.distributed.run --nnodes=2 --node-rank=1 --master-addr=10.0.0.5 "
            "--master-port=29500 --rdzv-conf=timeout=40 --max-restarts=0 --nproc-per-node=1 "
            "-m train.main",
        ),
    ],
)
def test_one_process_runs_directly_and_several_under_torchrun(config, roll_calls, changes, command):
    play = Play("0")
    assert launcher.launch(replace(config, **changes), play) == 0
    assert play.commands[-1] == command


def test_all_visible_gpus_get_a_process_each(config, monkeypatch):
    monkeypatch.setattr(launcher, "count_gpus", lambda environment: 3)
    play = Play("0")
    launcher.launch(replace(config, nproc=None, device="auto"), play)
    launcher.launch(replace(config, nproc=None), play)
    assert "--nproc-per-node=3" in play.commands[0] and play.commands[1] == "-m train.main"


# ---- Exit codes


ONCE = {"max_restarts": 0}


@pytest.mark.parametrize(
    ("changes", "script", "code", "starts"),
    [
        # Another start cannot help.
        *[({"nproc": 1}, str(code), code, 1) for code in (0, 64, 70, 75, 78)],
        *[({}, f"r{code}:1", code, 1) for code in (64, 70, 75, 78)],
        # What the trainer reports beats the code of torchrun.
        ({}, "r75:0", 75, 1),
        (ONCE, "r75?:1", 1, 1),
        (ONCE, "1", 1, 1),
        (ONCE, "137", 137, 1),
        (ONCE, "r1:137", 137, 1),
        (ONCE, "r78:137", 78, 1),
        # It was asked to stop.
        ({}, "stop:r75:1", 75, 1),
        ({}, "stop:r75?:1", 75, 1),
        ({}, "stop:1", 143, 1),
        ({}, "r75!:1", 75, 1),
        ({}, "130", 143, 1),
        # An older checkpoint is no progress.
        ({}, "s10:1 s8:1 s9:1 s10:1", 70, 4),
    ],
)
def test_how_attempts_end_and_how_many_there_are(config, tmp_path, changes, script, code, starts):
    play = Play(script)
    assert launcher.launch(replace(config, **changes), play) == code
    assert play.starts == starts and not list(tmp_path.glob("launch.*"))


def test_a_stop_in_a_pause_is_heard(config):
    play = Play("1")
    play.stops_in_pause = True
    assert launcher.launch(config, play) == 143 and play.starts == 1


@pytest.mark.parametrize(
    ("nodes", "script", "code"),
    [({}, "r64:1", 64), ({}, "r78:1", 78), (NODES, "r78:1", 78), ({}, "r1:1", 70)],
)
def test_the_last_line_says_why(config, capfd, told, roll_calls, nodes, script, code):
    """After all that torchrun prints: Kubernetes shows the end of what a pod said."""
    assert launcher.launch(replace(config, **nodes), Play(script)) == code
    before = {70: "the trainer said last: "}.get(code, "")
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"launch: exit code {code}: {before}no shard"


# ---- Restarts


def test_a_trainer_that_fails_is_started_again_and_it_is_said(config, capfd):
    play = Play("s10:r1:1 137 0")
    assert launcher.launch(config, play) == 0 and play.starts == 3
    out = capfd.readouterr().out
    assert (
        "launch: attempt 1 ended with code 1; last checkpoint: step 10; starting again in 1 s "
        "(restart 1 of 3 without a new checkpoint)" in out
    )
    assert "attempt 2 ended with signal KILL; last checkpoint: step 10; starting again in 2" in out


def test_a_restart_waits_until_the_trainer_before_has_let_the_run_go(config, monkeypatch):
    """As workers do whose torchrun was killed: they end a moment later."""
    waits: list[str] = []
    monkeypatch.setattr(locks, "wait_until_free", lambda paths: waits.append(paths.name))
    assert launcher.launch(config, Play("137 1 0")) == 0 and waits == ["x", "x"]


def test_only_attempts_without_a_new_checkpoint_count(config, capfd, tmp_path):
    play = Play("s5:1 s10:1 1 1 s11:1 1 1 1")
    assert launcher.launch(config, play) == 70 and play.starts == 8
    assert play.pauses == [1, 1, 2, 4, 1, 2, 4]
    err = capfd.readouterr().err
    assert "attempt 8 ended with code 1; last checkpoint: step 11. That makes 4 attempts" in err
    assert f"{tmp_path}/x/logs/" in err


def test_pauses_grow_up_to_half_a_minute(config):
    play = Play("1")
    assert launcher.launch(replace(config, max_restarts=7), play) == 70
    assert play.pauses == [1, 2, 4, 8, 16, 30, 30]


def test_an_evaluation_is_not_started_again(config):
    play = Play("1")
    assert launcher.launch(config, play, "train.generate.eval_run") == 1 and play.starts == 1


# ---- Several nodes


def test_each_start_of_torchrun_has_its_roll_call(config, monkeypatch, roll_calls):
    is_pod(monkeypatch)
    play = Play("s5:1 r1:1 0")
    assert launcher.launch(replace(config, **NODES), play) == 0
    assert play.starts == 3 and roll_calls == [2] * 3


@pytest.mark.parametrize("pod", [False, True])
@pytest.mark.parametrize(
    ("answer", "code"), [(10, 0), (64, 64), (69, 69), (75, 75), (78, 78), (143, 143)]
)
def test_the_answer_of_the_roll_call_is_final(config, monkeypatch, told, pod, answer, code):
    if pod:
        is_pod(monkeypatch)
    monkeypatch.setattr(rendezvous, "meet", lambda *_: Verdict(answer, "why"))
    play = Play("0")
    assert launcher.launch(replace(config, **NODES), play) == code
    assert play.starts == 0 and told == []


FIRST_STOPPED = "r75:1 s5:r75:1 r75:1 r75:1 0"


@pytest.mark.parametrize(
    ("pod", "restarts", "script", "code", "starts", "words"),
    [
        (False, 3, "r78:1", 78, 1, [(78, "no shard")]),
        # A peer that was stopped ends a node that is no pod. A pod waits for it, which is no failure.
        (False, 3, "r75:1 0", 75, 1, [(75, "no shard")]),
        (True, 0, FIRST_STOPPED, 0, 5, []),
        (True, 2, "r75:1 1 r75:1 1 1", 70, 5, [(70, "")]),
        # A pod that is stopped itself takes no time to tell the others. `make stop` on a node, by
        # SIGINT to the trainer alone, is about that node.
        (True, 3, "stop:r75:1", 75, 1, []),
        (True, 3, "r75!:1", 75, 1, []),
    ],
)
def test_how_one_of_several_nodes_ends_and_what_the_others_are_told(
    config, monkeypatch, told, roll_calls, capfd, pod, restarts, script, code, starts, words
):
    if pod:
        is_pod(monkeypatch)
    play = Play(script)
    assert launcher.launch(replace(config, **NODES, max_restarts=restarts), play) == code
    assert (play.starts, told) == (starts, words)
    if script == FIRST_STOPPED:
        waits = "Another node was asked to stop; waiting for it to come back"
        assert play.pauses == [1] * 4 and capfd.readouterr().out.count(waits) == 4


def test_a_peer_that_stops_ends_a_pod_of_one_node(config, monkeypatch):
    is_pod(monkeypatch)
    play = Play("r75:1 0")
    assert launcher.launch(config, play) == 75 and play.starts == 1


def test_a_node_that_is_stopped_as_all_are_about_to_start_tells_the_others(
    config, told, roll_calls
):
    play = Play("0")
    play.stop_requested = True
    assert launcher.launch(replace(config, **NODES), play) == 143
    assert play.starts == 0 and told == [(143, "")]


# ---- As a program


def test_it_starts_fast_and_only_execs():
    code = "import sys, train.launcher, train.start_node; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n"
    script = (ROOT / "scripts" / "launch.sh").read_text()
    assert re.search(r'^exec .*python" -m train\.launcher "\$@"$', script, re.M)
