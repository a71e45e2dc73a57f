"""A user at the keyboard: settings in the environment, commands as make calls them, and a scheduler that we direct."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k8s import launch
from k8s.cluster import nodes, volume
from settings.config import SETTINGS
from tests.cluster_sim.cluster import Cluster
from tests.cluster_sim.store import Refusal

A100 = "NVIDIA-A100-SXM4-80GB"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


@dataclasses.dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


class User:
    """Calls the commands in this process, so that what they wait for can be made short."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ):
        self.cluster, self.monkeypatch, self.capsys, self.runs = (
            cluster,
            monkeypatch,
            capsys,
            folder / "runs",
        )
        (folder / "empty.env").touch()
        self.settings = {
            "ENV_FILE": str(folder / "empty.env"),
            "RUNS_DIR": str(self.runs),
            "IMAGE": f"registry.example.org/lab/pure-transformer@{DIGEST}",
        }
        for name in SETTINGS:
            monkeypatch.delenv(name, raising=False)
        for name, value in {**cluster.env, "NETRC": str(folder / "none")}.items():
            monkeypatch.setenv(name, value)

    def environment(self, **settings: str) -> dict[str, str]:
        """For a process of its own."""
        return {**os.environ, **self.settings, **settings}

    def launch(self, command: str = "train", **settings: str) -> Said:
        """make train-8xa100, restart or data."""
        return self.call(lambda: launch.main([command]), settings)

    def sites(self, **settings: str) -> Said:
        return self.call(nodes.main, settings)

    def call(self, command: Callable[[], int], settings: dict[str, str]) -> Said:
        self.capsys.readouterr()
        with self.monkeypatch.context() as patch:
            for name, value in {**self.settings, **settings}.items():
                patch.setenv(name, value)
            code = command()
        return Said(code, *self.capsys.readouterr())

    @contextlib.contextmanager
    def scheduler(
        self, place: Callable[[int], str | None], then: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        """Pods of Jobs come, and are put on the node that `place` says for their index, or on none. then: what
        befalls each that has a node; else it runs."""
        self.cluster.start_kubelet(processes=False)
        over, problem = threading.Event(), list[BaseException]()

        def work() -> None:
            seen: set[str] = set()
            while not over.wait(0.05):
                for pod in self.cluster.objects("Pod"):
                    name, index = (
                        pod["metadata"]["name"],
                        pod["metadata"]["labels"].get(
                            "batch.kubernetes.io/job-completion-index", "0"
                        ),
                    )
                    if pod["metadata"]["uid"] in seen:
                        continue
                    seen.add(pod["metadata"]["uid"])
                    with contextlib.suppress(KeyError, Refusal):  # it has just been deleted
                        if (node := place(int(index))) is None:
                            self.cluster.set_pod(name, message=FULL)
                            continue
                        self.cluster.set_pod(
                            name, node=node, **({} if then else {"phase": "Running"})
                        )
                        if then:
                            then(name)

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                problem.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        yield
        over.set()
        thread.join()
        assert not problem, problem


@pytest.fixture
def a_user(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> User:
    """A user of a cluster that has room for the wished shape, and of a launch that waits for no pods."""
    cluster.nodes(
        {"name": "gpu-0", "zone": "ucsd", "region": "us-west", "product": A100, "gpus": 8},
        {"name": "gpu-1", "zone": "ucsd", "region": "us-west", "product": A100, "gpus": 8},
    )
    monkeypatch.setattr(launch, "PLACE_S", 0.0)
    monkeypatch.setattr(launch, "BAD_NODES_S", 0.2)
    monkeypatch.setattr(volume, "POLL_S", 0.05)
    monkeypatch.setattr(launch.placement, "LOOK_S", 0.1)
    monkeypatch.setattr(launch.placement, "SETTLE_S", 0.2)
    return User(cluster, tmp_path, monkeypatch, capsys)
