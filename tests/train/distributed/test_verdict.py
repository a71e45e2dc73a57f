"""Rendezvous of train/distributed/rendezvous.py, on a clock of the test: no sockets, no threads."""

import random

import pytest

from train.distributed.registry import Verdict
from train.distributed.rendezvous import GONE_S, Rendezvous

NODES = 3
TIMEOUT_S = 300.0
FACTS = {
    "torch": "2.13.0",
    "python": "3.11",
    "commit": "abc",
    "source": "1",
    "settings": {"RUN_NAME": "run", "LEARNING_RATE": 1e-3},
}


class Process:
    """A node's process that calls until it hears a verdict."""

    count = 0

    def __init__(self, rank, **changes):
        Process.count += 1
        self.rank = rank
        self.facts = FACTS | {"node_rank": rank, "host": f"h{rank}", "nodes": NODES} | changes
        self.facts |= {"token": f"{rank}-{Process.count}", "beat": 0, "launcher": [Process.count]}
        self.verdict = None
        self.started_with = None
        self.is_waiting_for_answer = False

    def speak(self):
        self.facts = self.facts | {"beat": self.facts["beat"] + 1}
        self.is_waiting_for_answer = True
        return self.rank, self.facts


@pytest.fixture
def rendezvous():
    return Rendezvous(NODES, TIMEOUT_S, "h0:29501")


def hear(rendezvous, process, now=0.0):
    rendezvous.hear(*process.speak(), f"10.0.0.{process.rank}", now)
    answer = rendezvous.reply(process.rank, now)
    return answer["verdict"] and Verdict(*answer["verdict"])


# ---- Nodes that restart in any order, over a network that loses and reorders


class World:
    """Three nodes, and what is on its way to the registry and back."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.rendezvous = Rendezvous(NODES, 1e9, "h0:29501")
        self.nodes = [Process(rank) for rank in range(NODES)]
        self.all = {process.facts["token"]: process for process in self.nodes}
        self.messages = []  # (process, rank, facts)
        self.answers = []  # (process, verdict, who starts)
        self.now = 0.0

    def restart(self, rank):
        """What the old process has said may still arrive."""
        self.nodes[rank] = Process(rank)
        self.all[self.nodes[rank].facts["token"]] = self.nodes[rank]

    def speak(self, process):
        if process.verdict is None and not process.is_waiting_for_answer:
            self.messages.append((process, *process.speak()))

    def deliver(self):
        process, rank, facts = self.messages.pop(self.chance.randrange(len(self.messages)))
        self.rendezvous.hear(rank, facts, f"10.0.0.{rank}", self.now)
        verdict = self.rendezvous.reply(rank, self.now)["verdict"]
        self.answers.append((process, verdict, frozenset(self.rendezvous.start)))

    def answer(self):
        process, verdict, start = self.answers.pop(self.chance.randrange(len(self.answers)))
        process.is_waiting_for_answer = False
        if verdict is None or process not in self.nodes:
            return
        assert verdict == Verdict(0)  # nothing is wrong with these nodes
        process.verdict = verdict
        process.started_with = start
        assert process.facts["token"] in start
        assert sorted(self.all[token].rank for token in start) == [0, 1, 2]
        for token in start:
            assert self.all[token].started_with in (None, start), "two starts share a process"

    def lose(self):
        """A message or its answer is lost: the process speaks again."""
        process, *_ = self.messages.pop() if self.messages else self.answers.pop()
        process.is_waiting_for_answer = False

    def act(self):
        self.now += self.chance.choice([0.0, 0.3, 1.0, GONE_S])
        choice = self.chance.random()
        process = self.chance.choice(self.nodes)
        if choice < 0.06 or (process.verdict and choice < 0.2):
            self.restart(process.rank)
        elif choice < 0.1 and self.messages + self.answers:
            self.lose()
        elif choice < 0.4 and self.messages:
            self.deliver()
        elif choice < 0.7 and self.answers:
            self.answer()
        else:
            self.speak(process)

    def calm(self):
        """From now on nothing fails. Attempts of which a process is missing end, and come back."""
        for _ in range(3 * NODES):
            for process in self.nodes:
                others = {other.started_with for other in self.nodes}
                if process.started_with and len(others) > 1:
                    self.restart(process.rank)
            for process in self.nodes:
                self.now += 0.3
                self.speak(process)
                while self.messages:
                    self.deliver()
                while self.answers:
                    self.answer()


@pytest.mark.parametrize("seed", range(100))
def test_nodes_that_restart_in_any_order_meet_and_are_never_told_of_two_starts(seed):
    world = World(seed)
    for _ in range(300):
        world.act()
    world.now += GONE_S
    world.calm()
    assert len({process.started_with for process in world.nodes}) == 1
    assert world.nodes[0].started_with


# ---- One case each


def test_a_missing_node_is_named_on_all_that_waited(rendezvous):
    first, third = Process(0), Process(2)
    assert hear(rendezvous, first) is None
    assert hear(rendezvous, third, TIMEOUT_S) is None
    assert hear(rendezvous, first, TIMEOUT_S) is None
    code, why = hear(rendezvous, first, TIMEOUT_S + 1)
    assert code == 69
    assert "2 of 3 nodes have joined: 0 (h0), 2 (h2); missing: 1; they are to reach h0:29501" in why
    assert hear(rendezvous, third, TIMEOUT_S + 2) == Verdict(code, why)


def test_a_node_that_is_silent_or_has_left_is_missing(rendezvous):
    for process in (Process(0), Process(1)):
        hear(rendezvous, process, 0.0)
    assert hear(rendezvous, Process(2, left=True), 0.0) is None
    assert rendezvous.reply(0, 1.0)["missing"] == [2]
    assert rendezvous.reply(0, GONE_S)["missing"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        # Those that do not fit are refused with both values.
        (
            {"torch": "2.11.0"},
            78,
            "torch=2.13.0 on node 0 (h0) and torch=2.11.0 on node 1 (h1): make",
        ),
        ({"python": "3.12"}, 78, "python=3.11 on"),
        ({"commit": "abc with changes"}, 78, "check out the same commit"),
        ({"source": "2", "commit": ""}, 78, "source=1 on"),
        (
            {"settings": {"RUN_NAME": "run", "LEARNING_RATE": 2e-3}},
            64,
            "LEARNING_RATE=0.001 on node 0 (h0) and LEARNING_RATE=0.002 on node 1 (h1): give all",
        ),
        ({"settings": {"RUN_NAME": "run"}}, 64, "LEARNING_RATE=None on node 1"),
        # An image without history fits a checkout of equal code.
        ({"commit": ""}, 0, ""),
        # One that ends for good takes the others along.
        ({"over": 75, "why": ""}, 75, "node 1 (h1) was told to stop"),
        ({"over": 78, "why": ""}, 78, "node 1 (h1) has ended with exit code 78: its log says why"),
        ({"over": 78, "why": "DATA=x: no such\n  file"}, 78, "code 78: DATA=x: no such file"),
    ],
)
def test_all_hear_the_same_whenever_they_come(rendezvous, changes, code, words):
    nodes = [Process(1, **changes), Process(0), Process(2)]
    for node in nodes:
        hear(rendezvous, node)
    verdict, *others = [hear(rendezvous, node, 1.0) for node in nodes]
    assert verdict.code == code and words in verdict.why
    assert others == [verdict] * 2
    assert rendezvous.heard == ({0, 1, 2} if code else set())


def test_two_nodes_of_one_rank_are_named_and_one_that_came_back_is_not(rendezvous):
    first, before, after = Process(0), Process(1, host="this"), Process(1, host="that")
    for node in (first, before, after, before, after, before):  # its last word was on its way
        assert hear(rendezvous, node) is None
    code, why = hear(rendezvous, after)
    assert code == 64
    assert why.startswith("NODE_RANK=1 was given to both that (10.0.0.1) and this (10.0.0.1)")


def test_a_node_does_not_start_with_one_that_has_come_back_since(rendezvous):
    nodes = [Process(rank) for rank in range(NODES)]
    assert [hear(rendezvous, node) for node in nodes] == [None, None, Verdict(0)]
    assert hear(rendezvous, nodes[1]) == Verdict(0)
    assert hear(rendezvous, Process(2)) is None
    assert hear(rendezvous, nodes[0]) is None


def test_a_node_that_ended_and_was_started_again_before_anyone_heard_is_as_new(rendezvous):
    hear(rendezvous, Process(1, over=78, why="no data"))
    nodes = [Process(rank) for rank in (1, 0, 2)]
    for node in nodes:
        assert hear(rendezvous, node) in (None, Verdict(0))
    assert [hear(rendezvous, node) for node in nodes] == [Verdict(0)] * NODES
