"""PROFILE=1 with several processes, which record together and of which the first writes."""

import re
from pathlib import Path

import pytest

from tests.running import losses
from tests.dist.test_ranks import launch


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_are_profiled_and_train_as_ever(tmp_path: Path, data: dict[str, str], parallel: str) -> None:
    """A step between the preparation of torch's profiler and its start ended the second process (Kineto)."""
    plain = launch(tmp_path, data, 2, 9, name="plain", PARALLEL=parallel)
    run = launch(tmp_path, data, 2, 9, name="profiled", PARALLEL=parallel, PROFILE=1, PROFILE_STEPS=2)
    assert losses(run) == losses(plain)
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["step_0000005.json.gz", "step_0000005.txt"]
    text = (run / "profile" / "step_0000005.txt").read_text()
    assert "rank 0 of 2" in text
    sent = re.search(r"^communication, exposed +([\d.]+)%", text, re.MULTILINE)
    assert sent and 0 < float(sent[1]) < 100
