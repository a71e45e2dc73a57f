"""The launcher's bash on one of several nodes: what it makes of the roll call's outcome and of the others' ends."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, wait_for
from tests.scripts.test_launch import env, launch, play, starts

__all__ = ["env", "play"]  # fixtures

NODES = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.5", "NPROC": "1"}


def test_torchrun_starts_behind_the_roll_call(env: dict[str, str]) -> None:
    code, out = launch(env, **NODES, POD_SITE="a-zone", K8S_NODE="a-machine")
    assert code == 0
    assert re.findall(r"run: (.+)", out) == [
        "-m train.distributed.rendezvous meet 1 a-zone a-machine",
        "-m torch.distributed.run --nnodes=2 --node-rank=1 --master-addr=10.0.0.5 --master-port=29500 "
        "--rdzv-conf=timeout=40 --max-restarts=0 --nproc-per-node=1 -m train.main",
    ]


def roll_call_ends_with(tmp_path: Path, code: int) -> None:
    stub = tmp_path / "venv" / "bin" / "python"
    stub.write_text(
        stub.read_text().replace(
            'exit "${CODE', f'[[ "$3" != meet ]] || exit {code}\nexit "${{CODE'
        )
    )


@pytest.mark.parametrize("code", [64, 69, 75, 78, 143])
def test_what_the_roll_call_says_is_final(env: dict[str, str], tmp_path: Path, code: int) -> None:
    roll_call_ends_with(tmp_path, code)
    got, out = launch(env, **NODES, MAX_RESTARTS="3")
    assert got == code and out.count("run:") == 1


def test_a_node_that_ends_for_good_tells_the_others(play: dict[str, str]) -> None:
    code, out = launch(play | NODES, PLAY="r78:1")
    assert code == 78 and out.endswith("run: -m train.distributed.rendezvous over 78\n")


def test_a_node_that_is_stopped_as_all_are_about_to_start_tells_the_others(
    env: dict[str, str], tmp_path: Path
) -> None:
    stub = tmp_path / "venv" / "bin" / "python"
    stub.write_text(
        stub.read_text().replace(
            'exit "${CODE',
            '[[ "$3" != meet ]] || { trap "" TERM; kill -TERM $PPID; '
            'sleep 0.5; exit 0; }\nexit "${CODE',
        )
    )
    code, out = launch(env, **NODES)
    assert code == 143
    assert re.findall(r"run: -m (.+\b)", out) == [
        "train.distributed.rendezvous meet 1",
        "train.distributed.rendezvous over 143",
    ]


WAITING = NODES | {"PEER_STOP": "wait"}


def test_a_node_whose_peer_was_told_to_stop_waits_for_it_and_that_is_no_failure(
    play: dict[str, str], tmp_path: Path
) -> None:
    code, out = launch(play | WAITING, PLAY="r75:1 s5:r75:1 r75:1 r75:1 0", MAX_RESTARTS="2")
    assert (
        code == 0
        and out.count("-m train.distributed.rendezvous meet 1") == 5
        and " over " not in out
    )
    assert (
        out.count("Another node was told to stop; waiting for it to come back (PEER_STOP=wait)")
        == 4
    )
    assert (tmp_path / "pauses").read_text().split()[1::2] == ["1"] * 4
    (tmp_path / "count").unlink()
    assert launch(play | WAITING, PLAY="r75:1 0", MAX_RESTARTS="0")[0] == 0


def test_failures_between_such_stops_still_count(play: dict[str, str], tmp_path: Path) -> None:
    code, out = launch(play | WAITING, PLAY="r75:1 1 r75:1 1 1", MAX_RESTARTS="2")
    assert (
        code == 70
        and starts(tmp_path) == 5
        and out.count("-m train.distributed.rendezvous over 70") == 1
    )


@pytest.mark.parametrize("how", [NODES, {"PEER_STOP": "wait"}])
def test_a_peer_that_stops_ends_a_node_unless_it_is_to_wait(
    play: dict[str, str], tmp_path: Path, how: dict[str, str]
) -> None:
    assert launch(play | how, PLAY="r75:1 0")[0] == 75
    assert starts(tmp_path) == 1


def test_a_node_that_was_told_itself_leaves_and_keeps_nobody(
    play: dict[str, str], tmp_path: Path
) -> None:
    """With PEER_STOP=wait it takes no time of its grace to tell the others."""
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(
            [ROOT / "scripts" / "launch.sh"], env=play | WAITING | {"PLAY": "wait"}, stdout=out
        )
    wait_for(tmp_path / "pauses", "pause 60", seconds=20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75
    assert starts(tmp_path) == 1 and " over " not in (tmp_path / "out").read_text()


def test_make_stop_on_a_node_is_about_that_node(play: dict[str, str], tmp_path: Path) -> None:
    """It tells the trainer alone, by SIGINT."""
    code, out = launch(play | WAITING, PLAY="r75!:1 0")
    assert code == 75 and starts(tmp_path) == 1 and "Another node" not in out


@pytest.mark.parametrize("code", [64, 69, 70, 78, 143])
def test_other_ends_are_final_for_a_node_that_waits_too(
    env: dict[str, str], tmp_path: Path, code: int
) -> None:
    roll_call_ends_with(tmp_path, code)
    got, out = launch(env, **WAITING, MAX_RESTARTS="3")
    assert got == code and out.count("run:") == 1


def test_a_node_of_a_run_that_is_done_ends_with_0_and_the_first_draws(
    env: dict[str, str], tmp_path: Path
) -> None:
    roll_call_ends_with(tmp_path, 10)
    for rank, last in (("1", "-m train.distributed.rendezvous meet 1"), ("0", "-m analysis.plots")):
        code, out = launch(env | NODES, "train.sh", NODE_RANK=rank)
        assert code == 0 and "train.main" not in out
        assert [line.rstrip() for line in re.findall("run: (.+)", out)][-1] == last


@pytest.mark.parametrize(
    ("nodes", "play_it", "code"), [({}, "64", 64), ({}, "78", 78), (NODES, "78", 78), ({}, "1", 70)]
)
def test_the_last_line_says_why(
    play: dict[str, str], tmp_path: Path, nodes: dict[str, str], play_it: str, code: int
) -> None:
    """Behind whatever torchrun says: of a pod that failed, Kubernetes shows the end of what it said."""
    stub = tmp_path / "venv" / "bin" / "python"
    trainer = 'if [[ "$*" == *train.main ]]; then'
    stub.write_text(
        stub.read_text().replace(
            trainer,
            trainer
            + """
        printf '%s\\nDATA_DIR=x: no shard\\n' $PLAY >"$EXIT_CODE_FILE"
        echo 'a traceback of torchrun' >&2""",
        )
    )
    got, out = launch(play | nodes, PLAY=play_it, MAX_RESTARTS="1")
    assert got == code
    said = {70: "the trainer said last: "}.get(code, "")
    assert out.splitlines()[-1] == f"launch: exit code {code}: {said}DATA_DIR=x: no shard"


def test_a_node_goes_back_to_the_roll_call(play: dict[str, str], tmp_path: Path) -> None:
    code, out = launch(play | NODES, PLAY="s5:1 r1:1 0")
    assert (
        code == 0
        and out.count("-m train.distributed.rendezvous meet 1") == 3
        and " over " not in out
    )


def test_each_node_has_its_own_job_and_only_the_first_draws(
    env: dict[str, str], tmp_path: Path
) -> None:
    """They may share RUNS_DIR."""
    first = subprocess.Popen(
        [ROOT / "scripts" / "train.sh", "node"],
        stdout=subprocess.PIPE,
        text=True,
        env=env | NODES | {"NODE_RANK": "0", "GATE": str(tmp_path / "gate")},
    )
    wait_for(tmp_path / "runs" / "x" / ".job", "preparing data", seconds=20)
    done = subprocess.run(
        [ROOT / "scripts" / "train.sh", "node"],
        env=env | NODES,
        text=True,
        check=True,
        capture_output=True,
    )
    assert "train.main" in done.stdout and "analysis.plots" not in done.stdout
    assert re.search(
        r"pid \d+ on \S+: training as node 1 of 2",
        (tmp_path / "runs" / "x" / ".job_node_1").read_text(),
    )
    (tmp_path / "gate").touch()
    assert "analysis.plots" in first.communicate(timeout=120)[0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (NODES, True),
        (NODES | {"NODE_RANK": "0"}, True),
        (NODES | {"PEER_STOP": "wait"}, False),
        ({}, False),
    ],
)
def test_a_node_that_cannot_prepare_its_data_tells_the_others_why(
    env: dict[str, str], tmp_path: Path, settings: dict[str, str], told: bool
) -> None:
    """They would wait for it as long as they may. Pods end with their Job."""
    stub = tmp_path / "venv" / "bin" / "python"
    stub.write_text(
        stub.read_text().replace(
            'exit "${CODE',
            """if [[ $2 == train.data.prepare ]]; then
        [[ -z $EXIT_CODE_FILE ]] || printf '78\\nDATA=x: there is\\nno such file\\n' >"$EXIT_CODE_FILE"
        exit 78
      fi
      exit "${CODE""",
        )
    )
    code, out = launch(env, "train.sh", **settings)
    assert code == 78 and "train.main" not in out
    assert (
        "run: -m train.distributed.rendezvous over 78 DATA=x: there is\nno such file\n" in out
    ) == told
    assert ("rendezvous" in out) == told and not list(tmp_path.glob("prepared.*"))


def test_a_detached_node_has_its_own_console(env: dict[str, str], tmp_path: Path) -> None:
    assert launch(env | NODES, "train.sh", DETACH="1")[0] == 0
    wait_for(tmp_path / "runs" / "x" / "console_node_1.log", "--node-rank=1", seconds=20)


def test_a_node_of_a_run_on_one_machine_is_refused() -> None:
    done = subprocess.run(
        ["make", "train-node", "ENV_FILE=", "PRESET=tiny"],
        cwd=ROOT,
        text=True,
        check=False,
        capture_output=True,
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "VENV": str(Path(sys.executable).parent.parent),
        },
    )
    assert (
        "NODES=1: train-node is for one of several machines; set NODES" in done.stderr
        and "Error 64" in done.stderr
    )


def test_a_pod_waits_for_a_run_that_a_machine_which_is_gone_still_holds(
    env: dict[str, str], tmp_path: Path
) -> None:
    """As a shared disk has it for some minutes. By hand it is refused at once."""
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    with open(folder / ".job", "w") as lock:
        lock.write("pid 1 on a-pod: training\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out = launch(env, "train.sh")
        assert (
            code == 78
            and "run x is at work already (pid 1 on a-pod: training)" in out
            and "run:" not in out
        )
        with open(tmp_path / "out", "w") as said:
            pod = subprocess.Popen(
                [ROOT / "scripts" / "train.sh"], env=env | {"PEER_STOP": "wait"}, stdout=said
            )
        wait_for(tmp_path / "out", "at work already", seconds=20)
        assert pod.poll() is None
    assert pod.wait(120) == 0
    said_once = (tmp_path / "out").read_text()
    assert said_once.count("waiting for up to 40 s") == 1 and "run: -m analysis.plots" in said_once


@pytest.mark.parametrize(("peer_stop", "code"), [("end", 78), ("wait", 0)])
def test_no_pod_is_made_anew_for_plots_alone(
    env: dict[str, str], tmp_path: Path, peer_stop: str, code: int
) -> None:
    stub = tmp_path / "venv" / "bin" / "python"
    stub.write_text(
        stub.read_text().replace(
            'exit "${CODE', '[[ $2 != analysis.plots ]] || exit 78\nexit "${CODE'
        )
    )
    got, out = launch(env, "train.sh", PEER_STOP=peer_stop)
    assert got == code and "run: -m analysis.plots" in out
    assert ("its plots were not drawn (code 78)" in out) == (code == 0)


@pytest.mark.slow
def test_a_pod_waits_no_longer_than_it_may(env: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    with open(folder / ".job", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out = launch(env, "train.sh", PEER_STOP="wait", START_TIMEOUT_S="10")
    assert code == 69 and "run x is at work already" in out.splitlines()[-1]
