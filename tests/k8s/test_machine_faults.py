"""Runs on a cluster of bad machines: whatever is wrong with one, the run ends well and no healthy pod is replaced."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from record import bad_nodes
from record.bad_nodes import BadNode
from tests.cluster_sim.containers import members
from tests.constants import SITE, constants
from tests.faults.hub import hub
from tests.k8s.test_end_to_end import VOLUME, Lab
from tests.monitor.conftest import Environment, nvml
from tests.running import losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(540),  # a pod for each bad machine, one after the other
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="pods need /proc"),
]
__all__ = ["nvml"]  # a fixture

PODS = 2
A100 = "NVIDIA-A100-SXM4-80GB"
# By what is wrong with them, in the order in which pods try them: the first pod, which downloads, takes the first.
NO_HUB, NO_DRIVER, MISMATCH, NO_GPU, ECC, LOST, OLD_DRIVER, STALE, LISTED = BAD = [
    f"bad-{number}-{name}"
    for number, name in enumerate(
        [
            "no-hub",
            "no-driver",
            "mismatch",
            "no-gpu",
            "ecc",
            "lost",
            "old-driver",
            "stale",
            "listed",
        ]
    )
]
GOOD = ["good-0", "good-1", "good-2"]
CONSTANTS = {
    "MAX_EPOCHS": 10**6,
    "SHARD_TOKENS": 1000,
    "SITE_WAIT_S": 20,
    "SYNC_TIMEOUT_S": 100,
    "FIRST_REFUSAL_S": 1.0,
    "TRIES": 2,
}
SMI = """#!/bin/sh
echo '0, NVIDIA A100-SXM4-80GB, GPU-0000, 470.82.01, 81920, 4, 8.0'
"""


class BadLab(Lab):
    """Two pods of one GPU each, on nodes of one GPU each, of which most are bad."""

    def __init__(self, folder: Path, data: Path, fake: Environment, endpoint: dict[str, str]):
        super().__init__(folder, data)
        self.cluster.nodes(*({"name": name, "product": A100, "gpus": 1} for name in [*BAD, *GOOD]))
        self.env |= {
            "DEVICE": "auto",  # torch finds no GPU and takes the CPU; NVML is asked all the same
            "NODES": str(PODS),
            "BATCH_TOKENS": "512",
            "DATA_MIX": "usmle:1",
            "DATA_STREAM": "0",
            "POD_MEMORY_GB": "8",
            "MAX_STEPS": "40",
            "SAVE_EVERY": "5",
        }
        well = {"OMP_NUM_THREADS": "1"} | constants(**CONSTANTS) | fake(GPUS=1) | endpoint
        self.kubelet.extra = well
        (folder / "errors").write_text("2")
        (folder / "empty").mkdir()
        self.kubelet.of_nodes = {
            NO_HUB: {"HF_ENDPOINT": "http://127.0.0.1:9"},
            NO_DRIVER: {"LD_LIBRARY_PATH": str(folder / "empty")},
            MISMATCH: {"FAKE_NVML_INIT": "18"},
            NO_GPU: {"FAKE_NVML_GPUS": "0"},
            ECC: {"FAKE_NVML_ECC": str(folder / "errors")},
            LOST: {"FAKE_NVML_LOST": "0:0:1000000"},
            OLD_DRIVER: old_driver(folder, self.kubelet.image.environment["PATH"]),
            STALE: stale_volume(folder, self.kubelet.claim(VOLUME)),
        } | {name: {"FAKE_NVML_ECC": str(folder / name)} for name in [LISTED, *GOOD]}
        self.cluster.controller.scale = 0.001  # of its delays
        bad_nodes.write(self.folder_of_list, BadNode(LISTED, "found by a run before", 4e9))

    @property
    def folder_of_list(self) -> Path:
        return self.kubelet.claim(VOLUME) / "runs" / bad_nodes.FOLDER

    def bad_nodes(self) -> dict[str, str]:
        """The reason of each node that is listed."""
        found = [
            bad_nodes.find(self.folder_of_list, path.stem)
            for path in self.folder_of_list.glob("*.json")
        ]
        return {node.name: node.reason for node in found if node}

    def failed(self, run: str) -> list[tuple[str, int]]:
        """Node and exit code of each pod of a Job that has failed."""
        found = []
        for pod in self.cluster.objects("Pod"):
            is_of_job = pod["metadata"]["labels"].get("job-name") == f"job-{run}"
            if is_of_job and pod["status"]["phase"] == "Failed":
                state = pod["status"]["containerStatuses"][0]["state"]
                found.append((pod["spec"]["nodeName"], state["terminated"]["exitCode"]))
        return found

    def break_gpu(self, run: str, index: int) -> str:
        """Let the GPU of a pod fail, and its trainer with it. Returns the node."""
        pod = self.pods(run)[index]
        node = str(pod["spec"]["nodeName"])
        (self.folder / node).write_text("1")
        for process in members(pod["metadata"]["uid"]):
            command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if b"train.main" in command:
                os.kill(process, signal.SIGKILL)
        return node


def old_driver(folder: Path, path: str) -> dict[str, str]:
    """A node whose nvidia-smi tells of an old driver, as an image sees it that has torch for CUDA 13."""
    (folder / "smi").mkdir()
    (folder / "smi" / "nvidia-smi").write_text(SMI)
    (folder / "smi" / "nvidia-smi").chmod(0o755)
    (folder / "torch13" / "torch").mkdir(parents=True)
    (folder / "torch13" / "torch" / "__init__.py").touch()
    version = "__version__ = '2.13.0+cu130'\ncuda: str = '13.0'\n"
    (folder / "torch13" / "torch" / "version.py").write_text(version)
    return {
        "PATH": f"{folder / 'smi'}:{path}",
        "PYTHONPATH": f"{SITE}:{folder / 'torch13'}",
        "DEVICE": "cuda",
    }


def stale_volume(folder: Path, volume: Path) -> dict[str, str]:
    """A node whose mount of the volume has lost its server."""
    gcc = shutil.which("gcc")
    if not gcc:
        pytest.skip("no gcc here to compile the stale volume with")
    library = folder / "stale_volume.so"
    source = Path(__file__).parent.parent / "cluster_sim" / "stale_volume.c"
    subprocess.run([gcc, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "STALE_VOLUME": str(volume)}


@pytest.fixture
def lab(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, str], nvml: Environment
) -> Iterator[BadLab]:
    folder = tmp_path_factory.mktemp("bad")
    with hub() as server:
        made = BadLab(folder, Path(data["DATA_DIR"]), nvml, server.environment(folder))
        yield made
        made.cluster.close()


def check_failures(lab: BadLab, run: str, nodes: list[str]) -> None:
    """A pod has ended with 71 on each of these nodes and on no other, and none counts."""
    assert sorted(lab.failed(run)) == sorted((node, 71) for node in nodes)
    assert lab.job(run)["failed"] == 0


@pytest.mark.fault(46)
def test_a_run_goes_through_all_machine_faults_and_trains_as_without_them(lab: BadLab) -> None:
    lab.make("train-8xa100", "ddp")
    lab.until(lambda: lab.events("ddp", "checkpoint"), "a first checkpoint")
    pods = lab.uids("ddp")
    broken = lab.break_gpu("ddp", 1)
    lab.until(lambda: "Complete" in lab.conditions("ddp"), "the run is done")
    check_failures(lab, "ddp", [*BAD, broken])
    assert lab.uids("ddp")[0] == pods[0], "the healthy pod has waited"
    reasons = lab.bad_nodes()
    assert reasons.keys() == {*BAD, broken} - {NO_HUB, STALE}
    assert "uncorrected memory errors" in reasons[broken]
    assert "is too old for torch" in reasons[OLD_DRIVER]
    lab.make("train-8xa100", "plain")
    lab.until(lambda: "Complete" in lab.conditions("plain"), "the other run is done")
    assert not {node for node, _ in lab.failed("plain")} & reasons.keys(), (
        "the launch left them out"
    )
    assert losses(lab.paths("ddp").folder) == losses(lab.paths("plain").folder)
    lab.make("clear-bad-nodes", "plain")
    assert lab.bad_nodes() == {}


@pytest.mark.fault(46)
def test_sites_go_through_them_too(lab: BadLab) -> None:
    lab.make("train-8xa100", "sites", SYNC="diloco", SYNC_EVERY="5", MIN_SITES="2")
    lab.until(lambda: lab.events("sites", "sync"), "the sites sync")
    pods = lab.uids("sites")
    broken = lab.break_gpu("sites", 1)
    lab.until(lambda: "Complete" in lab.conditions("sites"), "the run is done")
    check_failures(lab, "sites", [*BAD, broken])
    assert lab.uids("sites")[0] == pods[0], "the healthy site has waited for the second (MIN_SITES)"
    assert lab.bad_nodes().keys() == {*BAD, broken} - {NO_HUB, STALE}
