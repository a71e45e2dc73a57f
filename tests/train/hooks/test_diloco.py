"""What a site gives torchft and makes of its answers, and how steps are counted, without another site."""

import concurrent.futures
import dataclasses
import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("torchft")
from plan.network import outer
from record.metrics import read_records
from settings.config import Config
from tests.train.making import make_job
from train.data.mixture import Gap
from train.diloco import torchft_engine
from train.diloco.outer_step import Site
from train.diloco.result import Outcome, ToldToStop
from train.diloco.torchft_engine import (
    Answers,
    Fragment,
    Nesterov,
    Quorums,
    fragments_of,
)
from train.faults import recovery
from train.hooks.diloco import DiLoCo, counts_before
from train.job import Job
from train.model.model import build


@pytest.mark.parametrize(
    ("layers", "count", "tied"), [(6, 1, True), (6, 4, True), (5, 2, False), (4, 4, False)]
)
def test_fragments_hold_each_weight_once_and_are_those_that_are_planned(
    tiny: Config, layers: int, count: int, tied: bool
) -> None:
    c = dataclasses.replace(tiny, n_layer=layers, tie_embeddings=tied)
    weights = dict(build(c, torch.device("cpu")).named_parameters())
    found = fragments_of({name: w.numel() for name, w in weights.items()}, count)
    assert sorted(name for names in found for name in names) == sorted(weights)
    total = sum(w.numel() for w in weights.values())
    shares = [sum(weights[name].numel() for name in names) / total for names in found]
    assert shares == pytest.approx(
        outer.fragments(c, count), abs=2e-3
    )  # the last norm is counted elsewhere


def test_an_outer_optimizer_goes_on_from_what_it_gave_away(tiny: Config) -> None:
    """Against Nesterov's step by hand; the second half by another, that took over."""
    c = dataclasses.replace(tiny, outer_learning_rate=0.7, outer_momentum=0.9)
    model, other = (build(c, torch.device("cpu")) for _ in range(2))
    names = ["layers.0.input_layernorm.weight", "embed_tokens.weight"]
    one, two = (Nesterov(Fragment(m, names), c) for m in (model, other))
    assert one.momentum() == one.state_dict() == {}
    expected = {name: model.get_parameter(name).detach().clone() for name in names}
    momentum = {name: torch.zeros_like(expected[name]) for name in names}
    for turn in range(4):
        if turn == 2:
            given = one.state_dict()
            one.zero_grad()
            two.load_state_dict(given)
            for name in names:
                other.get_parameter(name).data.copy_(model.get_parameter(name).data)
                given[name].zero_()  # it was a copy
        optimizer, at = (one, model) if turn < 2 else (two, other)
        for name in names:
            gradient = torch.randn(
                expected[name].shape, generator=torch.Generator().manual_seed(turn)
            )
            at.get_parameter(name).grad = gradient.clone()
            momentum[name] = 0.9 * momentum[name] + gradient
            expected[name] -= 0.7 * (gradient + 0.9 * momentum[name])
        optimizer.step()
    for name in names:
        torch.testing.assert_close(other.get_parameter(name).data, expected[name])
        torch.testing.assert_close(two.momentum()[name], momentum[name])
    two.load_state_dict({})
    assert two.momentum() == {}


class Lighthouse:
    """A client that hears of these quorums."""

    def __init__(self, **said: Any):
        self.said = {
            "quorum_id": 1,
            "replica_ids": ["a:1", "b:1"],
            "store_address": "a:5",
            "max_step": 3,
            "max_world_size": 2,
            "replica_world_size": 2,
        } | said

    def _quorum(self, **asked: Any) -> Any:
        return types.SimpleNamespace(**self.said)

    def should_commit(self) -> str:
        return "its own"


def test_quorums_are_known_by_their_members_and_meet_at_a_place_of_their_own() -> None:
    """A lighthouse that was started again counts from 1, and may name a number that others had."""
    heals: list[bool] = []

    def heard(**said: Any) -> Any:
        return Answers(Lighthouse(**said), heals.append)._quorum(step=3)

    first, others = heard(), heard(replica_ids=["a:1", "b:2"])
    assert first.quorum_id != others.quorum_id != heard(quorum_id=2).quorum_id
    assert first.quorum_id == heard(max_step=4).quorum_id  # they stay connected
    assert first.store_address != heard(
        max_step=4
    ).store_address and first.store_address.startswith("a:5/")
    assert first.replica_world_size == 2 and heals == [False] * 5
    assert (
        len(
            {
                first.quorum_id,
                *(heard(max_step=step, max_world_size=1).quorum_id for step in (3, 4)),
            }
        )
        == 3
    )
    assert heals[-1] and Answers(Lighthouse(), heals.append).should_commit() == "its own"


def test_a_quorum_that_is_given_up_on_leaves_the_count_of_exchanges_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread fetches weights still, and counts as the other site does, while this one saves and leaves."""
    monkeypatch.setattr(torchft_engine, "ASK_S", 0.01)
    quorums: Any = Quorums.__new__(Quorums)
    fetching: concurrent.futures.Future[None] = concurrent.futures.Future()
    shut = []
    quorums.__dict__ |= {
        "told": lambda done, failed: (done, failed, True),
        "patience_s": 10.0,
        "abandoned": False,
        "_step": 4,
        "settled": None,
        "_quorum_future": None,
        "_quorum_retries": 0,
        "_use_async_quorum": False,
        "_quorum_timeout": None,
        "_executor": types.SimpleNamespace(submit=lambda *_, **__: fetching),
        "_manager": types.SimpleNamespace(shutdown=lambda: shut.append(True)),
    }
    with pytest.raises(ToldToStop):
        quorums.start_quorum()
    quorums._step = 9
    fetching.set_result(None)
    assert quorums.current_step() == 4 and shut == [True]
    quorums.abandoned = False
    assert quorums.current_step() == 9


# ---------------------------------------------------------------------------------------------------
# How steps are counted
# ---------------------------------------------------------------------------------------------------


class Apart(Site):
    """A site whose exchanges succeed, or fail, without another, and whose weights are a number."""

    def __init__(self, every: int, fragments: int, delay: int = 0):
        self.world: Any = types.SimpleNamespace(size=1)
        self.c: Any = types.SimpleNamespace(sites=1)
        self.step = self.base = 0
        self.finished, self.digests, self.dropped = -1, [""] * fragments, 0
        self.manager: Any = types.SimpleNamespace(step=0, current_step=lambda: self.manager.step)
        self.engine: Any = Steps(every // fragments, fragments, delay)
        self.striped: Any = types.SimpleNamespace(failed=None, sites=[0])
        self.fails = 0

    def advance(self, step: int, now: bool = False) -> Outcome:
        self.step, e = step, self.engine
        e.position += 1
        if now:
            e.position = e.turn if e.in_flight else e.opens
        ends = e.position == e.turn
        e.in_flight = not ends and (e.in_flight or e.position == e.opens)
        if not ends:
            return Outcome(outer=self.exchanges)
        self.fails -= 1
        before = self.exchanges
        self.manager.step += (committed := self.fails < 0)
        return Outcome(None, before % len(e), committed, self.exchanges)

    def forget_own(self) -> None:
        self.dropped += 1


class Steps:
    """What is counted of an engine."""

    def __init__(self, turn: int, fragments: int, delay: int):
        self.turn, self.opens, self.fragments = turn, turn - delay, fragments
        self.position, self.in_flight = 0, False

    def __len__(self) -> int:
        return self.fragments


@pytest.fixture
def job(tiny: Config, tmp_path: Path) -> Job:
    """One that counts steps."""
    c = dataclasses.replace(tiny, sync="diloco", sites=2, nodes=2)
    return make_job(c, tmp_path, DiLoCo(), step=0)


def to_site(job: Job, site: Apart) -> DiLoCo:
    """Its hook, at this site from here on."""
    hook = cast(DiLoCo, job.hooks[0])
    hook.site = site
    return hook


def goes_on(job: Job, last_step: int) -> None:
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
    job: Job, fragments: int, delay: int, last: int, settled: bool
) -> None:
    """One whose checkpoint ended an exchange early is where one without it is; so is the run that is made longer."""
    site = Apart(16, fragments, delay)
    hook = to_site(job, site)
    turn = 16 // fragments
    if settled:
        goes_on_to(job, turn - delay)
        hook.settle(job)
        assert site.exchanges == 1
    goes_on(job, last)
    assert (job.step, site.exchanges, site.engine.position) == (
        last,
        -(-last // turn) + fragments - 1,
        0,
    )
    assert site.finished == last and job.gaps == ()
    before = site.exchanges
    goes_on(job, last + turn + 1)
    assert site.exchanges == before + 2 + fragments - 1 and job.gaps == ()


def goes_on_to(job: Job, step: int) -> None:
    while job.step < step:
        job.step += 1
        job.hooks[0].between_steps(job, {"stop"})  # so that it does not finish


def rollbacks(job: Job) -> list[int]:
    return [r["step"] for r in read_records(job.paths.metrics) if r["event"] == "rollback"]


def test_a_site_that_fails_at_its_end_makes_only_steps_again_that_it_has_lost(job: Job) -> None:
    site = Apart(8, 2)
    to_site(job, site)
    goes_on_to(job, 8)
    site.fails = 1
    goes_on(job, 10)
    assert rollbacks(job) == [8]
    assert job.gaps == (Gap(8, 2 * 16),) and (job.step, site.exchanges) == (10, 4)
    site = Apart(8, 2)
    to_site(job, site)
    job.step, job.gaps = 0, ()
    goes_on_to(job, 8)
    site.advance = failing_second(site)  # type: ignore[method-assign]
    goes_on(job, 10)
    assert all(gap.windows >= 0 for gap in job.gaps) and (job.step, site.exchanges) == (10, 4)


def failing_second(site: Apart) -> Any:
    """The second exchange from here on fails: by then all steps are in common, but for another fragment."""
    advance, calls = site.advance, [0]

    def failing(step: int, now: bool = False) -> Outcome:
        calls[0] += now
        site.fails = int(calls[0] == 2)
        return advance(step, now)

    return failing


def test_going_back_behind_an_exchange_that_ended_early_passes_nothing_over_twice(job: Job) -> None:
    site = Apart(8, 1, delay=3)
    hook = to_site(job, site)
    goes_on_to(job, 6)
    assert site.engine.in_flight
    hook.settle(job)
    assert (site.exchanges, site.engine.position) == (1, -2)
    job.step += 1
    site.advance(job.step)
    job.guard.skips = 3
    recovery.go_back(job)
    assert (job.step, site.dropped, job.gaps) == (7, 1, (Gap(7, 0),))
    assert site.engine.position == -1 and site.common_step == 8


def test_a_checkpoint_stands_where_it_was_taken_or_in_another_rhythm(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int, int]] = []
    site = Apart(8, 1)
    hook = to_site(job, site)
    monkeypatch.setattr(
        site, "adopt", lambda states, step, exchanges, base: taken.append((step, exchanges, base))
    )
    one = {"exchanges": 4, "turn": 8, "base": -9, "finished": 20}
    for kept in (one, one | {"turn": 5}, None):
        hook.kept = ({}, kept or {})
        hook.stand(21)
    assert taken == [(21, 4, -9), (21, 2, 0), (21, 2, 0)] and hook.kept == ({}, {})


@pytest.mark.parametrize(
    ("mine", "other", "gives_way"),
    [
        ({}, {}, False),
        ({"common": "b"}, {}, True),
        ({"common": "b", "node_rank": 0}, {"node_rank": 1}, False),
        ({"common": "b", "step": 7}, {}, False),
        ({"common": "b", "step": 7}, {"training": True}, True),
        ({"common": "b"}, {"outer": 4}, False),
    ],
)
def test_of_two_sites_that_were_trained_apart_one_gives_way(
    mine: dict[str, Any], other: dict[str, Any], gives_way: bool
) -> None:
    said = {"outer": 5, "common": "a", "step": 5, "training": False}
    one, two = said | {"node_rank": 1} | mine, said | {"node_rank": 0} | other
    assert counts_before(two, one) is gives_way
    assert not (counts_before(one, two) and gives_way)


def test_a_copy_is_on_the_host_and_its_own() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    copy = torchft_engine.aside(weight)
    weight.data.zero_()
    assert copy.tolist() == [1.0, 1.0] and not copy.requires_grad
