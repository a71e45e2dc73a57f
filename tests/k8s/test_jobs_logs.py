"""make logs, attach and restart of a run in the cluster: what is shown, filtered and followed, and handed on."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from k8s import launch
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import ReaderRuns, put_job, put_pod, put_volume, sender, write_run

LOG = (
    "launch: processes=2 threads=8\nrendezvous: all nodes have joined\nNCCL INFO NET/Socket : Using eth0\n"
    "step=10/40 loss=6.1 lr=1e-3\ncheckpoint failed: No space left on device\n"
)


@pytest.fixture
def user(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Somebody who sent the run `a-run` to the cluster; called with a command, returns how it ended."""
    return sender(cluster, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("only", "lines"), [("", [0, 1, 2, 3, 4]), ("metrics", [3])])
def test_the_log_of_the_first_pod_is_shown_filtered(
    user, cluster: Cluster, only: str, lines: list[int]
) -> None:
    put_job(cluster, pods=2)
    names = [put_pod(cluster, index, phase="Running", node="a") for index in range(2)]
    cluster.logs |= {names[0]: LOG, names[1]: "of another\n"}
    code, out, _ = user("logs", ONLY=only)
    assert code == 0 and out == "".join(LOG.splitlines(keepends=True)[number] for number in lines)
    assert not [
        request for request in cluster.requests if request.query.get("follow")
    ]  # nobody watches a file
    assert user("logs", NODE_RANK="1")[1] == "of another\n"


def test_the_newest_pod_of_an_index_that_has_begun_is_taken(user, cluster: Cluster) -> None:
    put_job(cluster, pods=1)
    first, second = put_pod(cluster, 0, "a", exit_code=1), put_pod(cluster, 0, "b", phase="Pending")
    cluster.logs |= {first: "the first\n"}
    assert user("logs")[1] == "the first\n"
    cluster.set_pod(second, phase="Running", node="a")
    cluster.logs |= {second: "the second\n"}
    assert user("logs")[1] == "the second\n"


def test_a_log_is_followed_while_its_pod_lives(user, cluster: Cluster) -> None:
    put_job(cluster, pods=1)
    name = put_pod(cluster, 0, phase="Running", node="a")
    cluster.logs[name] = "step=1/9 loss=1 lr=1\n"

    def go_on() -> None:
        deadline = time.monotonic() + 20
        while (
            not [r for r in cluster.requests if r.query.get("follow") == "true"]
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        cluster.logs[name] = str(cluster.logs[name]) + "step=2/9 loss=1 lr=1\n"
        time.sleep(0.3)
        cluster.set_pod(name, exit_code=0)

    thread = threading.Thread(target=go_on)
    thread.start()
    code, out, _ = user("attach", ONLY="metrics")
    thread.join()
    assert code == 0 and out.splitlines() == ["step=1/9 loss=1 lr=1", "step=2/9 loss=1 lr=1"]


def test_ctrl_c_ends_the_watching_only(
    user, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_job(cluster, pods=1)
    name = put_pod(cluster, 0, phase="Running", node="a")
    cluster.logs[name] = LOG
    shown, ended = threading.Event(), threading.Event()
    write = sys.stdout.write

    def note(text: str) -> int:
        if "No space left" in text:
            shown.set()
        return write(text)

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "write", note)

    def press() -> None:
        # Python does not see a signal that comes between its last check and the read: who watches
        # presses again.
        assert shown.wait(200)
        wait_s = 0.5
        while not ended.wait(wait_s):
            os.kill(os.getpid(), signal.SIGINT)
            wait_s = 20

    pressing = threading.Thread(target=press)
    pressing.start()
    code, out, _ = user("logs")
    ended.set()
    pressing.join()
    assert code == 0 and out == LOG + "\n"
    assert len(cluster.objects("Pod")) == len(cluster.objects("Job")) == 1


def test_a_pod_that_has_not_begun_is_said_with_the_reason(user, cluster: Cluster) -> None:
    put_job(cluster, pods=2)
    put_pod(cluster, 0, message="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    code, out, err = user("logs")
    assert (
        code == 69
        and out == ""
        and "has said nothing yet: finds no node: 0/3 nodes are available" in err
    )
    code, _, err = user("logs", NODE_RANK="2")
    assert code == 64 and "NODE_RANK=2: the Job has 2 pods, of 0 to 1" in err


def test_when_pods_are_gone_the_volume_has_their_logs(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_volume(cluster)
    run = write_run(tmp_path / "volume")
    with ReaderRuns(cluster):
        assert user("logs")[1] == (run / "logs" / "node_0.log").read_text()
        assert user("logs", NODE_RANK="2")[1] == (run / "logs" / "node_2.log").read_text()
        code, _, err = user("logs", NODE_RANK="3")
        assert code == 78 and "NODE_RANK=3: run a-run has no log of that node" in err
        nothing = "No errors in the logs of run a-run on the volume.\n"
        code, out, err = user("logs", ONLY="errors")
        assert (code, out) == (0, "") and nothing in err
        (run / "logs" / "rank_5.log").write_text("2026-11-22 00:41:31,000 rank=5 ValueError: odd\n")
        assert user("logs", ONLY="errors")[1].splitlines() == [
            "==> logs/rank_5.log <==",
            "2026-11-22 00:41:31,000 rank=5 ValueError: odd",
        ]
        (run / "logs" / "node_0.log").unlink()
        assert user("logs")[1] == (run / "train.log").read_text()
    assert cluster.objects("Pod") == []


def test_another_context_than_kubectls_own_is_used_and_said(user, cluster: Cluster) -> None:
    config = Path(cluster.env["KUBECONFIG"])
    content = yaml.safe_load(config.read_text())
    content["contexts"].append(
        {"name": "other", "context": {"cluster": "test", "user": "lab-user"}}
    )
    content["current-context"] = "other"
    config.write_text(yaml.safe_dump(content))
    put_job(cluster, pods=1)
    cluster.logs[put_pod(cluster, 0, phase="Running", node="a")] = LOG
    code, out, err = user("logs")
    assert code == 0 and out == LOG
    assert (
        "was sent to context test, and kubectl uses other" in err
        and "kubectl config use-context test" in err
    )
    code, _, err = user("restart", PRESET="tiny", DEVICE="cpu", NODES="1", GPUS_PER_NODE="1")
    assert code == 64 and "kubectl config use-context test" in err


def test_restart_is_handed_to_the_launcher_for_the_run_that_is_meant(
    user, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(launch, "main", lambda argv: asked.append(argv) or 7)
    small = {"DEVICE": "cpu", "NODES": "1", "GPUS_PER_NODE": "1"}
    assert user("restart", PRESET="tiny", **small)[0] == 7 and asked == [["restart"]]
    (tmp_path / "runs-here" / "tiny").mkdir()
    (tmp_path / "runs-here" / "tiny" / "cluster.json").write_text('{"job_name": "a"}')
    monkeypatch.delenv("RUN_NAME")
    code, _, err = user("restart")  # of `tiny`, by make's own default: the launcher's is another
    assert code == 64 and asked == [["restart"]]
    assert "run tiny was sent to the cluster, and these settings would send xlarge-8xa100" in err
