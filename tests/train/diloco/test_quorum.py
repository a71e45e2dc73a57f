"""train/diloco/quorum.py: what a process makes of a lighthouse's answers."""

import concurrent.futures
import types
from typing import Any

import pytest

pytest.importorskip("torchft")
from train.diloco import quorum
from train.diloco.quorum import NumberedByMembers, Quorums
from train.diloco.result import ToldToStop
from train.distributed.world import PeersMissing


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

    def should_commit(self):
        return "its own"


def test_quorums_are_known_by_their_members_and_meet_at_a_place_of_their_own():
    """A lighthouse that was started again counts from 1, and may name a number that others had."""
    heals: list[bool] = []

    def heard(**said: Any) -> Any:
        return NumberedByMembers(Lighthouse(**said), heals.append)._quorum(step=3)

    first, others = heard(), heard(replica_ids=["a:1", "b:2"])
    assert first.quorum_id != others.quorum_id != heard(quorum_id=2).quorum_id
    later = heard(max_step=4)
    assert first.quorum_id == later.quorum_id  # they stay connected
    assert first.store_address != later.store_address
    assert first.store_address.startswith("a:5/")
    assert first.replica_world_size == 2 and heals == [False] * 4
    healing = [heard(max_step=step, max_world_size=1).quorum_id for step in (3, 4)]
    assert len({first.quorum_id, *healing}) == 3
    assert heals[-1]
    assert NumberedByMembers(Lighthouse(), heals.append).should_commit() == "its own"


def made(future, agree, patience_s=10.0):
    """A manager whose next quorum is this future."""
    quorums: Any = Quorums.__new__(Quorums)
    quorums.__dict__ |= {
        "agree": agree,
        "patience_s": patience_s,
        "lighthouse": "10.0.0.5:29510",
        "is_given_up": False,
        "agreed_on": None,
        "_use_async_quorum": False,
        "_quorum_timeout": None,
        "_healing": False,
        "_executor": types.SimpleNamespace(
            submit=lambda *_, **__: future, shutdown=lambda wait: None
        ),
        "_checkpoint_transport": types.SimpleNamespace(shutdown=lambda wait: None),
        "_manager": types.SimpleNamespace(shutdown=lambda: shut.append(True)),
    }
    shut: list[bool] = []
    quorums.shut = shut
    return quorums


def test_a_stop_is_heard_while_a_quorum_is_waited_for(monkeypatch):
    """The others must not begin with this site: it leaves the lighthouse before it saves."""
    monkeypatch.setattr(quorum, "LOOK_S", 0.01)
    waiting: concurrent.futures.Future[None] = concurrent.futures.Future()
    quorums = made(waiting, lambda is_over, has_failed: (is_over, has_failed, True))
    with pytest.raises(ToldToStop):
        quorums.start_quorum()
    assert quorums.is_given_up and quorums.shut == [True]


def test_a_lighthouse_that_is_away_is_asked_until_patience_ends(monkeypatch, caplog):
    monkeypatch.setattr(quorum, "RETRY_S", 0.01)
    failed: concurrent.futures.Future[None] = concurrent.futures.Future()
    failed.set_exception(RuntimeError("no route\nto it"))
    quorums = made(failed, lambda is_over, has_failed: (is_over, has_failed, False), 0.1)
    with pytest.raises(PeersMissing, match=r"LIGHTHOUSE=10\.0\.0\.5:29510: no quorum .* no route;"):
        quorums.start_quorum()
    assert caplog.text.count("does not answer (no route)") == 1


def test_a_quorum_that_another_process_of_the_site_did_not_get_fails_here_too():
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_result(None)
    quorums = made(done, lambda is_over, has_failed: (True, True, False), -1.0)
    with pytest.raises(PeersMissing, match="another process of this site got none"):
        quorums.start_quorum()
