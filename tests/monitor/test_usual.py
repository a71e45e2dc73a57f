"""monitor/usual.py: looks at a run by hand, and which readings of power count."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from monitor import local, watch
from monitor.facts import Cluster, Gpu, Node, Progress, Seen
from monitor.tail import Tail
from monitor.usual import ENOUGH, READINGS, Usual
from record import metrics
from record.run_paths import RunPaths
from settings.config import Config

START = 1.8e9


def node(
    at: float,
    watts: float,
    step: int,
    phase: str = "training",
    attempt: int = 0,
    step_s: float = 1.0,
    behind: float = 0.0,
    number: int = 0,
    **changes: Any,
) -> Node:
    """A look `at` seconds; the last step was made `behind` seconds before."""
    progress = Progress(step, attempt=attempt, step_time=START + at - behind, step_s=step_s)
    facts = {"status": {"phase": phase}, "progress": progress} if number == 0 else {}
    return Node(
        number,
        "h",
        START + at,
        gpus=(Gpu(0, power_w=watts), Gpu(1, power_w=watts + 5)),
        gpus_time=START + at - 0.5,
        **facts | changes,
    )


def training_w(usual: Usual, *nodes: Node) -> list[float | None]:
    return [gpu.training_w for each in usual.of(nodes) for gpu in each.gpus]


def test_it_is_the_median_of_the_readings_while_steps_came() -> None:
    usual = Usual()
    found = [training_w(usual, node(2.0 * n, 600 + 10 * n, 2 * n)) for n in range(ENOUGH + 2)]
    # the first one counts at the second look, which finds steps behind it, and each of the others at its own
    assert found[: ENOUGH - 1] == (ENOUGH - 1) * [[None, None]]
    assert found[ENOUGH - 1 :] == [[620, 625], [625, 630], [630, 635]]


@pytest.mark.parametrize("what", ["hang", "evaluating", "slow", "attempt", "rollback"])
def test_what_is_no_training_counts_for_nothing(what: str) -> None:
    usual = Usual()
    for n in range(10):
        training_w(usual, node(2.0 * n, 600, 2 * n))
    for n in range(10, 60):  # twice as many as before
        at, step = 2.0 * n, 18
        if what == "hang":
            found = training_w(usual, node(at, 100, step, behind=at - 18))
        elif what == "evaluating":
            found = training_w(usual, node(at, 100, 2 * n, phase="evaluating"))
        elif what == "slow":  # a step each 4 s, where it takes 1 s
            found = training_w(usual, node(at, 100, 18 + (n - 10) // 2, behind=at % 4))
        elif what == "attempt":  # that hangs; the next one goes on
            found = training_w(usual, node(at, 100, step, behind=at - 18, attempt=1))
        else:
            found = training_w(usual, node(at, 100, 28 - n))
    assert found == [600, 605]
    for n in range(60, 63):
        again = what == "attempt"
        found = training_w(usual, node(2.0 * n, 100, 2 * n - 76 * (not again), attempt=2 * again))
    assert found == [600, 605], "nor later"


def test_only_the_last_readings_are_kept_and_each_counts_once() -> None:
    usual = Usual()
    for n in range(200):
        for _ in range(3):
            found = training_w(usual, node(2.0 * n, 600, 2 * n))
    assert len(usual.counted[0, 0]) in (199, 200) and found == [600, 605]
    for n in range(200, 200 + READINGS):
        found = training_w(usual, node(2.0 * n, 500, 2 * n))
    assert found == [500, 505] and len(usual.counted[0, 0]) == READINGS and len(usual.waiting) <= 4


def test_nodes_behind_the_first_have_theirs_by_its_steps_and_what_is_told_stays() -> None:
    usual = Usual()
    for n in range(10):
        told = node(2.0 * n, 600, 2 * n)
        told = dataclasses.replace(
            told, gpus=(dataclasses.replace(told.gpus[0], training_w=1.0), told.gpus[1])
        )
        found = training_w(usual, told, node(2.0 * n, 300, 0, number=1))
    assert found == [1.0, 605, 300, 305]
    assert training_w(usual, node(0, 300, 0, number=1)) == [None, None], (
        "without the first nothing is known"
    )


def test_a_look_at_this_machine_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    between, tail = local.Between(paths), Tail(paths.metrics)
    paths.status.write_text('{"phase": "training"}')
    for step in range(10):
        at = START + 2 * step
        with open(paths.metrics, "a") as file:
            file.write(
                metrics.to_json(
                    {
                        "schema": 1,
                        "event": "step",
                        "time": at,
                        "attempt": 0,
                        "step": step + 1,
                        "step_ms": 2000.0,
                    }
                )
                + "\n"
            )
        monkeypatch.setattr(
            between.gpus, "look", lambda at=at: ((Gpu(0, power_w=600.0),), at - 0.5, "")
        )
        seen = local.look(Config(), paths, tail, between)
    assert seen.gpus == (Gpu(0, power_w=600.0, training_w=600.0),)


def test_a_look_at_a_cluster_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from monitor import cluster

    looks = iter([(Cluster("", "job", "running"), (node(2.0 * n, 600, 2 * n),)) for n in range(10)])

    class Planned:
        c = type("C", (), {"preset": "tiny"})()

        def there(self, *_: Any) -> Any:
            return Seen(0, "", "").expected

    class Place:
        paths = type("Paths", (), {"name": "big"})()

    monkeypatch.setattr(
        cluster,
        "Watch",
        lambda place: type("Watch", (), {"target": None, "look": lambda self, now: next(looks)})(),
    )
    monkeypatch.setattr(watch, "with_limit", lambda seen, c: seen)
    look = watch.looking_there(Place(), Planned())  # type: ignore[arg-type]
    for _ in range(10):
        seen = look(START)
    assert [gpu.training_w for gpu in seen.nodes[0].gpus] == [600, 605]
