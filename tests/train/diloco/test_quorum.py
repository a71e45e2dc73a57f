"""train/diloco/quorum.py: what a process makes of a lighthouse's answers."""

import concurrent.futures
import types

import pytest
import torch

pytest.importorskip("torchft")
from train.diloco import quorum
from train.diloco.quorum import NumberedByMembers, Quorums
from train.diloco.result import Interrupted


def hear(**changes):
    """A quorum of this lighthouse, as the manager hears of it."""
    facts = {
        "quorum_id": 1,
        "replica_ids": ["a:1", "b:1"],
        "store_address": "a:5",
        "max_step": 3,
        "max_world_size": 2,
        "replica_world_size": 2,
    }
    client = types.SimpleNamespace(_quorum=lambda **_: types.SimpleNamespace(**facts | changes))
    return NumberedByMembers(client)._quorum(step=3)


def test_quorums_are_known_by_their_members_and_meet_at_a_place_of_their_own():
    """A lighthouse that was started again counts from 1, and may name a number that others had."""
    first, later = hear(), hear(max_step=4)
    assert first.quorum_id == later.quorum_id  # they stay connected
    assert first.store_address != later.store_address
    assert first.store_address.startswith("a:5/")
    others = [hear(replica_ids=["a:1", "b:2"]), hear(quorum_id=2)]
    others += [hear(max_step=step, max_world_size=1) for step in (3, 4)]  # one is behind
    assert len({each.quorum_id for each in [first, *others]}) == 5


class Waiting(Quorums):
    """A manager whose next quorum is this future."""

    def __init__(self, future, stop_requested=False):
        self.shut: list[bool] = []
        self.__dict__ |= {
            "stop_requested": lambda: stop_requested,
            "group": None,
            "lighthouse": "10.0.0.5:29510",
            "is_given_up": False,
            "agreed_on": None,
            "_group_world_size": 1,
            "_use_async_quorum": False,
            "_quorum_timeout": None,
            "_quorum_future": None,
            "_healing": False,
            "_executor": types.SimpleNamespace(submit=lambda *_, **__: future),
        }

    def shutdown(self, wait=True):
        self.shut.append(True)


def test_a_stop_is_heard_while_a_quorum_is_waited_for(monkeypatch):
    """The others must not begin with this site: it leaves the lighthouse before it saves."""
    monkeypatch.setattr(quorum, "LOOK_S", 0.01)
    waiting = Waiting(concurrent.futures.Future(), stop_requested=True)
    with pytest.raises(Interrupted):
        waiting.start_quorum()
    assert waiting.is_given_up and waiting.shut == [True]


def test_a_quorum_that_another_process_of_the_site_did_not_get_fails_here_too(monkeypatch):
    monkeypatch.setattr(quorum, "sum_over_ranks", lambda votes, _: torch.tensor([1.0, 1.0, 0.0]))
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_result(None)
    with pytest.raises(ConnectionError, match="another process of this site got none"):
        Waiting(future).start_quorum()
