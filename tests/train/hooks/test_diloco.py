"""train/hooks/diloco.py: how steps and syncs are counted, with a site that is alone."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("torchft")
from record.metrics import read_records
from tests.train.diloco.alone import Alone, train
from tests.train.making import make_job
from train.data.mixture import Gap
from train.distributed.world import PeersDiffer, PeersMissing
from train.hooks.diloco import DiLoCo


@pytest.fixture
def start(tiny, tmp_path):
    """Returns the job, the hook and the site of a run that syncs every `every` steps; the job counts steps."""

    def start(every=8, fragments=1, delay=0):
        sync = {"sync_every": every, "sync_fragments": fragments, "sync_delay": delay}
        config = dataclasses.replace(tiny, sync="diloco", sites=2, nodes=2, **sync)
        hook = DiLoCo()
        hook.site = Alone(config)
        return make_job(config, tmp_path, hook, step=0), hook, hook.site

    return start


def step_to(job, step):
    """Take steps as train() does; one that is made again counts again."""
    while job.step < step:
        job.step += 1
        job.hooks[0].between_steps(job, frozenset())


def train_to_end(job, last_step):
    job.config = job.config.replace(max_steps=last_step)
    assert job.config.last_step == last_step and job.config.batch_windows == 16
    job.hooks[0].at_start(job)
    step_to(job, last_step)


def events(job, name):
    return [event for event in read_records(job.paths.metrics) if event["event"] == name]


@pytest.mark.parametrize("is_saved_early", [False, True])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 2), (2, 0), (2, 3), (4, 1)])
@pytest.mark.parametrize("last", [16, 17, 23, 24, 32])
def test_sites_that_saved_at_other_times_make_as_many_syncs(
    start, fragments, delay, last, is_saved_early
):
    """One whose checkpoint ended a sync early is where one without it is; so is the run that is made longer."""
    job, hook, site = start(16, fragments, delay)
    interval = 16 // fragments
    if is_saved_early:
        step_to(job, interval - delay)
        hook.finish_in_flight(job)
        assert site.syncs == 1
    train_to_end(job, last)
    assert (job.step, site.syncs) == (last, -(-last // interval) + fragments - 1)
    assert site.finished == site.last_sync_step == last and job.gaps == ()
    before = site.syncs
    train_to_end(job, last + interval + 1)
    assert site.syncs == before + 2 + fragments - 1 and job.gaps == ()


@pytest.mark.parametrize(
    ("failing", "back_to", "gap"),
    [
        ([True], 8, Gap(8, 2 * 16)),
        ([False, True], 10, Gap(10, 0)),  # by then all steps are global, but for another fragment
    ],
)
def test_a_sync_that_fails_at_the_end_costs_the_steps_since_the_last(start, failing, back_to, gap):
    job, _, site = start(8, 2)
    step_to(job, 8)
    site.manager.failing = failing
    train_to_end(job, 10)
    assert [event["step"] for event in events(job, "rollback")] == [back_to]
    assert job.gaps == (gap,) and (job.step, site.syncs) == (10, 4)


def test_going_back_after_a_sync_that_ended_early_passes_nothing_over_twice(start):
    job, hook, site = start(8, delay=3)
    step_to(job, 6)
    assert site.in_flight
    hook.finish_in_flight(job)
    assert (site.syncs, site.last_sync_step, site.in_flight) == (1, 8, False)
    step_to(job, 7)
    train(site.model, 0)
    job.guard.skips = 3
    job.recovery.roll_back(job)
    assert (job.step, site.last_sync_step, job.gaps) == (7, 8, (Gap(7, 0),))
    assert torch.equal(site.model.embed_tokens, site.outer.weights["embed_tokens"])
    assert not site.is_due(12) and site.is_due(13)


def test_the_run_ends_with_the_global_weights_and_their_hash(start):
    job, hook, site = start(8, 2, delay=1)
    before = site.progress()
    for step in range(1, 11):
        train(site.model, step)
        step_to(job, step)
    train(site.model, 11)
    job.config = job.config.replace(max_steps=10)
    hook.at_start(job)
    for name, own in site.model.named_parameters():
        assert torch.equal(own, site.outer.weights[name])
    assert site.digests == site.digest_all()
    assert site.progress()["weights"] != before["weights"]


def test_a_run_that_has_nothing_left_to_sync_looks_for_nobody(start):
    job, hook, _ = start()
    job.config = job.config.replace(max_steps=10)
    job.step = 10
    hook.stored = ({}, {"finished": 10})
    hook.join(job)
    assert job.hooks == [] and hook.client is None


def test_a_jump_after_a_sync_is_no_spike(start):
    job, _, _ = start(8)
    for step in range(40):
        job.guard.applied(step, 2.0, 1.0)
    assert job.guard.check_step(9.0, 1.0) == "loss"
    step_to(job, 8)
    assert job.guard.check_step(9.0, 1.0) is None


def test_steps_that_a_site_has_missed_are_recorded_and_kept(start):
    job, hook, site = start(8)
    ahead = Alone(site.config)
    ahead.sync(8)
    ahead.step = 16
    site.heal_from(ahead)
    job.step = 3
    hook.is_behind = True
    hook.at_start(job)
    assert (job.step, site.syncs, hook.missed) == (16, 2, [[3, 16]])
    assert "save" in job.requests and job.guard.cooldown
    (gap,) = events(job, "gap")
    assert (gap["from"], gap["to"], gap["reason"]) == (3, 16, "away")
    manifest: dict[str, Any] = {"data": {}}
    assert hook.before_save(job, manifest)
    another = DiLoCo()
    another.after_load(job, manifest, {})
    assert another.missed == [[3, 16]]


def test_without_a_quorum_the_lighthouse_is_named(start):
    job, hook, site = start(8)

    def start_quorum():
        raise RuntimeError("no route\nto it")

    site.manager.start_quorum = start_quorum
    with pytest.raises(PeersMissing, match=r"LIGHTHOUSE=.* no quorum of sites \(no route\);"):
        hook.sync(job)
    assert not site.in_flight


def test_a_site_that_made_more_steps_in_fewer_syncs_has_trained_apart(start):
    job, hook, site = start(8)
    ahead = Alone(site.config)
    ahead.sync(8)
    site.heal_from(ahead)
    job.step = 9
    with pytest.raises(PeersDiffer, match=rf"move away the run folder .*: {job.config.run_folder}"):
        hook.sync(job)
