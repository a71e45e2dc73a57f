"""record/machine_faults.py: how a process ends by a fault of its machine, in a pod and by hand."""

import errno
import re

import pytest

from record.exit_codes import BAD_DATA, BAD_SETTING, MACHINE_FAULT, NO_PROGRESS
from record.locks import RunFolderError, hold
from record.machine_faults import MACHINE_FAULTS, ROWS, classify
from settings import ROOT, SettingsError
from train.data.sources.hub import NoNetwork
from train.data.sources.source import CorpusError
from train.distributed.pod import exit_code_of, exit_code_of_fault
from train.distributed.world import GpusMissing

BY_HAND = {
    "gpus": BAD_SETTING,
    "driver": BAD_DATA,
    "gpu-health": NO_PROGRESS,
    "volume": BAD_DATA,
    "hub": BAD_DATA,
    "scratch": BAD_DATA,
    "port": BAD_DATA,
}


@pytest.mark.parametrize("node", ["", "node-7"])
def test_each_fault_ends_a_pod_with_71_and_a_run_by_hand_as_before(monkeypatch, node):
    monkeypatch.setenv("K8S_NODE", node)
    codes = dict.fromkeys(BY_HAND, MACHINE_FAULT) if node else BY_HAND
    assert {name: exit_code_of_fault(name) for name in MACHINE_FAULTS} == codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoNetwork("no network"), 71),
        (GpusMissing(["DEVICE=cuda: torch sees no GPU here"]), 71),
        (OSError(errno.ESTALE, "Stale file handle", "/volume/runs"), 71),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), 78),  # of a socket: a peer's, perhaps
        (SettingsError(["SEED=x"]), 64),
        (CorpusError("the hub refuses it (403)"), 78),
        (OSError(errno.ENOSPC, "No space left on device"), 78),
        (OSError(errno.EACCES, "Permission denied"), 78),
    ],
)
def test_what_is_the_same_on_every_node_keeps_its_code(monkeypatch, error, code):
    monkeypatch.setenv("K8S_NODE", "node-7")
    assert exit_code_of(error, getattr(error, "exit_code", 78)) == code
    monkeypatch.setenv("K8S_NODE", "")
    assert exit_code_of(error, getattr(error, "exit_code", 78)) != 71


@pytest.mark.parametrize(("number", "fault"), [(errno.ENOTCONN, "volume"), (errno.EDQUOT, "")])
def test_a_run_folder_on_a_volume_that_is_gone_is_a_fault_of_the_machine(
    tmp_path, monkeypatch, number, fault
):
    def fail(*_, **__):
        raise OSError(number, "the disk's answer")

    monkeypatch.setattr("record.locks.only_regular", fail)
    with pytest.raises(RunFolderError, match="the disk's answer") as raised:
        hold(tmp_path / "run" / ".job", "works")
    assert classify(raised.value) == fault


def test_the_page_on_kubernetes_has_the_table():
    text = (ROOT / "docs/kubernetes.md").read_text().partition("## Machine faults")[2]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*?) \| (\d+) \|", text, re.MULTILINE)
    assert rows == [(row.name, row.meaning, str(row.by_hand)) for row in ROWS]
