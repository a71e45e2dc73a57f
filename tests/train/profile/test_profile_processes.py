"""PROFILE=1 with several processes, which record together and of which the first writes, that of each site."""

import re
from pathlib import Path

import pytest

from tests.running import losses
from tests.train.diloco.sites import Sites
from tests.train.test_ranks import launch


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_are_profiled_and_train_as_ever(
    tmp_path: Path, data: dict[str, str], parallel: str
) -> None:
    """A step between the preparation of torch's profiler and its start ended the second process (Kineto)."""
    plain = launch(tmp_path, data, 2, 9, name="plain", PARALLEL=parallel)
    run = launch(
        tmp_path, data, 2, 9, name="profiled", PARALLEL=parallel, PROFILE=1, PROFILE_STEPS=2
    )
    assert losses(run) == losses(plain)
    assert sorted(path.name for path in (run / "profile").iterdir()) == [
        "step_0000005.json.gz",
        "step_0000005.txt",
    ]
    text = (run / "profile" / "step_0000005.txt").read_text()
    assert "rank 0 of 2" in text
    sent = re.search(r"^communication, exposed +([\d.]+)%", text, re.MULTILINE)
    assert sent and 0 < float(sent[1]) < 100


@pytest.mark.slow
def test_each_site_writes_a_profile_of_its_own(tmp_path: Path, data: dict[str, str]) -> None:
    """Its steps lie apart from the exchanges, which are behind the steps 7 and 14."""
    sites = Sites(tmp_path, data, 2, PROFILE=1, PROFILE_STEPS=2, MAX_STEPS=14, SYNC_EVERY=7)
    try:
        sites.ends(0, 0)
    finally:
        sites.end()
    for rank in range(2):
        folder = sites.run(rank) / "profile"
        assert sorted(path.name for path in folder.iterdir()) == [
            "step_0000005.json.gz",
            "step_0000005.txt",
        ]
        assert (
            (folder / "step_0000005.txt")
            .read_text()
            .startswith("profile of 2 steps from 5 on: rank 0 of 1, CPU")
        )
        assert len(sites.events(rank, "sync")) == 2
