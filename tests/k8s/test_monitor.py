"""make monitor of a run in the cluster: the real kubectl against an API in memory."""

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k8s.cluster.kubectl import kubectl
from k8s.cluster.where import decide
from monitor import __main__ as monitor
from monitor import cluster as monitor_cluster
from monitor.facts import Cluster as Facts
from monitor.facts import Gpu, Node, Progress, to_line
from monitor.rules import pod_waits
from monitor.watch import View, watcher_of
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import JOB, RUN, put_job, put_pod, sender

Look = Callable[..., tuple[int, str, str]]


@pytest.fixture
def look(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Look:
    """make monitor ONCE=1, of somebody who sent the run `a-run` to the cluster: exit code, output, complaints."""
    sender(cluster, tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("ONCE", "1")

    def once(**settings: str) -> tuple[int, str, str]:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        return (monitor.main(), *capsys.readouterr())

    return once


def told(index: int, step: int) -> str:
    """A line of a pod's teller."""
    now = time.time()
    progress = Progress(
        step,
        last_step=2000,
        loss=3.25,
        tokens_per_s=134432.0,
        step_s=3.9,
        step_time=now - 6,
        attempt_started=now - 60,
    )
    status = {"phase": "training", "since": now - 60, "heartbeat": now - 5}
    return (
        to_line(
            Node(
                index,
                f"{JOB}-{index}",
                now - 5,
                status,
                at_work=True,
                gpus_time=now - 5,
                gpus=(Gpu(0, utilisation_percent=99.0, power_w=399.0),),
                progress=progress,
            )
        )
        + "\n"
    )


def running(cluster: Cluster) -> None:
    cluster.nodes({"name": "a", "zone": "ucsd"}, {"name": "b", "zone": "ksu"})
    put_job(cluster)
    for index in range(4):
        name = put_pod(cluster, index, phase="Running", node="a" if index < 3 else "b")
        cluster.logs[name] = told(index, 1200) + f"last words of {index}\n"


def test_a_job_at_work_with_what_its_pods_tell(look: Look, cluster: Cluster) -> None:
    running(cluster)
    code, out, err = look()
    assert code == 0 and err == "", out + err
    for line in (
        f"job: {JOB} in namespace lab: running: all 4 pods run",
        "step: 1,200 of 2,000, 60.0%, attempt 1",
        "gpu 3/0: utilisation 99%, memory n/a GiB, power 399 W, n/a, throttled by nothing",
        "eta: 52:00, at ",
    ):
        assert f"\n{line}" in out, (line, out)
    assert re.search(r"^phase: training for 1:\d\d$", out, re.M)
    assert re.search(r"^pod 3: Running, node b, site ksu, restarts 0, ", out, re.M)
    assert re.search(r"^last line 0: .*last words of 0$", out, re.M)
    assert re.search(r"^speed: 134,432 tokens/s, \d+% of the plan's ", out, re.M)
    assert re.search(
        r"^network: the plan sends \S+ GB a step, \S+ [GM]B/s, through 125 MB/s$", out, re.M
    )  # WAN_GBIT=1


def test_a_pod_that_finds_no_node_is_wrong(
    look: Look, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_waits, "PENDING_MINUTES", 1e-5)
    cluster.nodes({"name": "a", "zone": "ucsd"})
    put_job(cluster)
    for index in range(4):
        put_pod(cluster, index, message="0/12 nodes are available: 12 Insufficient nvidia.com/gpu.")
    code, out, _ = look()
    assert code == 1 and re.search(r"^fault no-free-gpu.*; next: make sites", out, re.M), out
    assert re.search(r"^pod 0: Pending, node n/a, site n/a", out, re.M)


def test_no_such_job_is_no_such_run(look: Look, cluster: Cluster) -> None:
    code, out, err = look()
    assert code == 78 and out == "" and f"there is no Job {JOB} in namespace lab" in err


def test_a_cluster_out_of_reach_is_said(look: Look, tmp_path: Path) -> None:
    text = Path(os.environ["KUBECONFIG"]).read_text()
    (tmp_path / "dead").write_text(re.sub(r"(https?://[^:\s]+):\d+", r"\1:9", text))
    code, out, _ = look(KUBECONFIG=str(tmp_path / "dead"))
    assert code == 1 and "\nfault cluster: " in out and out.startswith(f"run: {RUN}, ")


def test_the_screen_goes_on_while_kubectl_takes_its_time(
    look: Look, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(cluster)
    answer, real = threading.Event(), monitor_cluster.Watch.look
    looks = []

    def slow(self: monitor_cluster.Watch, now: float) -> tuple[Facts, tuple[Node, ...]]:
        looks.append(now)
        if len(looks) > 1:
            answer.wait(20)
        return real(self, now)

    monkeypatch.setattr(monitor_cluster.Watch, "look", slow)
    watcher = watcher_of(decide())
    watcher.every_s = 0.1
    watcher.start()
    try:
        while watcher.view is None:
            assert watcher.gone is None, watcher.gone
            watcher.wait(1)
        first: View = watcher.view
        while len(looks) < 2:
            time.sleep(0.02)
        assert watcher.view is first and first.seen.cluster and len(first.seen.nodes) == 4
        answer.set()
        deadline = time.monotonic() + 20
        while watcher.view is first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (
            watcher.view is not first and dataclasses.replace(watcher.view.seen, now=0.0).run == RUN
        )
    finally:
        answer.set()
        watcher.end()


def test_a_job_that_is_taken_away_while_it_is_watched_is_over(look: Look, cluster: Cluster) -> None:
    running(cluster)
    watcher = watcher_of(decide())
    assert not watcher.once().over
    kubectl("delete", "job", JOB, "-n", "lab", "--cascade=background")
    view = watcher.once()
    assert (
        view.over
        and view.code == 1
        and "is not there" in " ".join(fault.text for fault in view.faults)
    )
    watcher.end()
