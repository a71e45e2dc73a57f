"""PROFILE=1 with several processes: all record, and the first of each site writes."""

import pytest

from tests.running import losses
from tests.train.diloco.sites import Sites
from tests.train.profile.test_profiling import FILES
from tests.train.test_ranks import launch
from train.profile.time_shares import read_table


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_are_profiled_and_train_as_ever(tmp_path, data, parallel):
    """A step between the preparation of torch's profiler and its start ended the second process (Kineto)."""
    settings = {"PARALLEL": parallel, "PROFILE_STEPS": 2}
    plain = launch(tmp_path, data, 2, 9, name="plain", **settings)
    run = launch(tmp_path, data, 2, 9, name="profiled", PROFILE=1, **settings)
    assert losses(run) == losses(plain)
    assert sorted(path.name for path in (run / "profile").iterdir()) == FILES
    text = (run / "profile" / FILES[1]).read_text()
    assert "rank 0 of 2" in text
    assert 0 < read_table(text)["communication, exposed"][0] < 100


@pytest.mark.slow
def test_each_site_writes_a_profile_of_its_own(tmp_path, data):
    sites = Sites(tmp_path, data, 2, PROFILE=1, PROFILE_STEPS=2, MAX_STEPS=10, SYNC_EVERY=5)
    try:
        sites.ends(0, 0)
    finally:
        sites.end()
    for rank in range(2):
        text = (sites.run(rank) / "profile" / "step_0000005.txt").read_text()
        assert text.startswith("profile of 2 steps from 5 on: rank 0 of 1, CPU")
        assert len(sites.events(rank, "sync")) == 2
