"""Checkpoints that cannot be written for a while: said, tried again, and training goes on."""

from pathlib import Path

import pytest

from record import metrics as record_reader
from tests.faults.conftest import STEPS
from tests.faults.inject import Fault, faulty
from tests.running import environment, losses, train
from train.checkpoint import checkpoint


@pytest.mark.slow
@pytest.mark.fault(7, 35)
@pytest.mark.parametrize(
    ("do", "words"),
    [("fail", "injected"), ("no room", "[Errno 28] No space left on device")],
    ids=["fails", "no room"],
)
def test_a_save_that_fails_beside_training_is_said_and_tried_once_more(
    tmp_path: Path, data: dict[str, str], alone: Path, do: str, words: str
) -> None:
    out = train(
        faulty(
            environment(tmp_path, data, **STEPS),
            tmp_path,
            Fault("commit", do),
            Fault("step", "wait for the save", step=9),
        )
    )
    run = tmp_path / "run"
    said = f"checkpoint failed: {run}/checkpoints/step_0000008: could not be written on rank 0: {words}"
    assert said in out and "it is tried again now" in out
    saved = [
        r["step"]
        for r in record_reader.read_records(run / "metrics.jsonl")
        if r["event"] == "checkpoint"
    ]
    assert saved == [
        10,
        16,
        24,
    ]  # heard of behind step 9, and tried behind the one that begins then
    assert "GiB free" in out and "KEEP_LAST" in out
    assert not list((run / "checkpoints").glob("*tmp*"))
    for step in saved:
        checkpoint.read_manifest(checkpoint.folder_of(run / "checkpoints", step))
    assert losses(run) == losses(alone)
