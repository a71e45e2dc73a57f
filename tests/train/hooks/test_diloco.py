"""train/hooks/diloco.py: how steps and exchanges are counted, with a site that is alone."""

import dataclasses
from typing import Any, cast

import pytest
import torch

pytest.importorskip("torchft")
from record.metrics import read_records
from tests.train.diloco.alone import Alone
from tests.train.making import make_job
from train.data.mixture import Gap
from train.diloco.roll_call import gives_way
from train.faults import recovery
from train.hooks.diloco import DiLoCo


@pytest.fixture
def job(tiny, tmp_path):
    """One that counts steps."""
    c = dataclasses.replace(tiny, sync="diloco", sites=2, nodes=2)
    return make_job(c, tmp_path, DiLoCo(), step=0)


def join(job, every, fragments, delay=0):
    """The job's hook, from here on at a site that exchanges so often."""
    config = dataclasses.replace(
        job.config, sync_every=every, sync_fragments=fragments, sync_delay=delay
    )
    hook = cast(DiLoCo, job.hooks[0])
    hook.site = site = Alone(config)
    return hook, site


def goes_on(job, last_step):
    """Steps until the run is through, as train() takes them; a step that is made again counts again."""
    job.config = job.config.replace(max_steps=last_step)
    assert job.config.last_step == last_step and job.config.batch_windows == 16
    (hook,) = job.hooks
    hook.at_start(job)
    while job.step < last_step:
        job.step += 1
        hook.between_steps(job, set())


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 2), (2, 0), (2, 3), (4, 1)])
@pytest.mark.parametrize("last", [16, 17, 23, 24, 32])
def test_sites_that_saved_at_other_times_make_as_many_exchanges(
    job, fragments, delay, last, settled
):
    """One whose checkpoint ended an exchange early is where one without it is; so is the run that is made longer."""
    hook, site = join(job, 16, fragments, delay)
    turn = 16 // fragments
    if settled:
        goes_on_to(job, turn - delay)
        hook.settle(job)
        assert site.exchanges == 1
    goes_on(job, last)
    assert (job.step, site.exchanges) == (last, -(-last // turn) + fragments - 1)
    assert site.finished == site.common_step == last and job.gaps == ()
    before = site.exchanges
    goes_on(job, last + turn + 1)
    assert site.exchanges == before + 2 + fragments - 1 and job.gaps == ()


def goes_on_to(job, step):
    while job.step < step:
        job.step += 1
        job.hooks[0].between_steps(job, {"stop"})  # so that it does not finish


def rollbacks(job):
    return [r["step"] for r in read_records(job.paths.metrics) if r["event"] == "rollback"]


def test_a_site_that_fails_at_its_end_makes_only_steps_again_that_it_has_lost(job):
    _, site = join(job, 8, 2)
    goes_on_to(job, 8)
    site.manager.failing = [True]
    goes_on(job, 10)
    assert rollbacks(job) == [8]
    assert job.gaps == (Gap(8, 2 * 16),) and (job.step, site.exchanges) == (10, 4)
    # by the second exchange all steps are in common, but for another fragment
    _, site = join(job, 8, 2)
    job.step, job.gaps = 0, ()
    goes_on_to(job, 8)
    site.manager.failing = [False, True]
    goes_on(job, 10)
    assert all(gap.windows >= 0 for gap in job.gaps) and (job.step, site.exchanges) == (10, 4)


def test_going_back_behind_an_exchange_that_ended_early_passes_nothing_over_twice(job):
    hook, site = join(job, 8, 1, delay=3)
    goes_on_to(job, 6)
    assert site.in_flight
    hook.settle(job)
    assert (site.exchanges, site.common_step, site.in_flight) == (1, 8, None)
    job.step += 1
    hook.between_steps(job, set())
    with torch.no_grad():
        site.model.embed_tokens.add_(1.0)
    job.guard.skips = 3
    recovery.go_back(job)
    assert (job.step, site.common_step, job.gaps) == (7, 8, (Gap(7, 0),))
    assert torch.equal(site.model.embed_tokens, site.fragments[0].common["embed_tokens"])
    assert not site.is_due(12) and site.is_due(13)


def test_a_checkpoint_stands_where_it_was_taken_or_in_another_rhythm(job, monkeypatch):
    taken: list[tuple[int, int, int]] = []
    hook, site = join(job, 8, 1)
    monkeypatch.setattr(
        site, "stand", lambda states, step, exchanges, base: taken.append((step, exchanges, base))
    )
    one = {"exchanges": 4, "turn": 8, "base": -9, "finished": 20}
    for kept in (one, one | {"turn": 5}, None):
        hook.kept = ({}, kept or {})
        hook.stand(21)
    assert taken == [(21, 4, -9), (21, 2, 0), (21, 2, 0)] and hook.kept == ({}, {})


def shift(site):
    """Change all weights, as a step does."""
    with torch.no_grad():
        for weight in site.model.parameters():
            weight.add_(0.5)


def test_the_end_has_the_common_weights_and_their_hash(job):
    hook, site = join(job, 8, 2, delay=1)
    before = site.common
    for step in range(1, 11):
        shift(site)
        goes_on_to(job, step)
    shift(site)
    job.config = job.config.replace(max_steps=10)
    hook.at_start(job)
    for fragment in site.fragments:
        for name, own in fragment.own().items():
            assert torch.equal(own, fragment.common[name])
    assert site.digests == [site.digest(fragment) for fragment in site.fragments]
    assert site.common != before


def test_a_run_that_had_no_sites_has_its_weights_in_common(job):
    hook, site = join(job, 8, 2)
    shift(site)
    hook.stand(5)
    for fragment in site.fragments:
        for name, own in fragment.own().items():
            assert torch.equal(own, fragment.common[name])
    assert site.digests == [site.digest(fragment) for fragment in site.fragments]
    assert site.common != Alone(site.config).common


@pytest.mark.parametrize(
    ("mine", "other", "does"),
    [
        ({}, {}, False),
        ({"common": "b"}, {}, True),
        ({"common": "b", "node_rank": 0}, {"node_rank": 1}, False),
        ({"common": "b", "step": 7}, {}, False),
        ({"common": "b", "step": 7}, {"training": True}, True),
        ({"common": "b"}, {"outer": 4}, False),
    ],
)
def test_of_two_sites_that_were_trained_apart_one_gives_way(mine, other, does):
    said = {"outer": 5, "common": "a", "step": 5, "training": False}
    one, two = said | {"node_rank": 1} | mine, said | {"node_rank": 0} | other
    assert gives_way(one, two) is does
    assert not (gives_way(two, one) and does)


def test_a_jump_after_an_exchange_is_no_spike(job):
    join(job, 8, 1)
    for step in range(40):
        job.guard.taken(step, 2.0, 1.0)
    assert job.guard.judge(9.0, 1.0) == "loss"
    goes_on_to(job, 8)
    assert job.guard.judge(9.0, 1.0) is None


def test_steps_that_a_site_has_missed_are_recorded_and_kept(job):
    hook, site = join(job, 8, 1)
    ahead = Alone(site.config)
    ahead.exchange(8)
    ahead.step = 16

    def heal():
        site.take_over(ahead.hand_over())
        site.manager.count = 1

    site.manager.start_quorum = heal  # type: ignore[method-assign]
    job.step = 3
    hook.is_late = True
    hook.at_start(job)
    assert (job.step, site.exchanges, hook.missed) == (16, 2, [[3, 16]])
    assert "save" in job.requests and job.guard.unsettled
    (gap,) = [event for event in read_records(job.paths.metrics) if event["event"] == "gap"]
    assert (gap["from"], gap["to"], gap["reason"]) == (3, 16, "away")
    manifest: dict[str, Any] = {}
    assert hook.before_save(job, manifest)
    assert manifest["sites"]["away"] == [[3, 16]]
    another = DiLoCo()
    another.after_load(job, {"data": {}, **manifest}, {})
    assert another.missed == [[3, 16]]


def test_of_two_checkpoints_trained_apart_one_is_given_up(job):
    """Its site counts as behind all others, and the next quorum brings their weights."""
    _, site = join(job, 8, 1)
    site.exchange(8)
    before = site.common_step
    site.fall_behind()
    assert site.manager.count < 0 and site.exchanges < 0
    assert site.common_step == before
