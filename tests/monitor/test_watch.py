"""monitor/watch.py: looks that fail, as nobody expected; and who reads what is told leaves."""

import subprocess
import sys
import time

from monitor.facts import Seen
from monitor.watch import Watcher
from record.run_paths import RunPaths
from settings import ROOT
from tests.monitor import scenes
from tests.monitor.test_monitor import environment, made, paths  # noqa: F401 (a fixture)


class Calm:
    """Judges nothing."""

    def judge(self, seen: Seen) -> tuple[list[object], str, tuple[str, ...]]:
        return [], "", ()


def watching(looks: list[Seen | Exception]) -> Watcher:
    """Each look brings the next of these, and at the end always the last."""

    def look(since: float) -> Seen:
        found = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(found, Exception):
            raise found
        return found

    return Watcher(lambda: (look, Calm()), 0.01)  # type: ignore[arg-type, return-value]


def wait_for(watcher: Watcher, what: object) -> None:
    deadline = time.monotonic() + 5
    while not what() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)


def test_a_look_that_fails_as_nobody_expected_is_said_and_the_next_one_comes() -> None:
    seen = scenes.here()
    looks: list[Seen | Exception] = [seen, TypeError("'<' not\nsupported")]
    watcher = watching(looks)
    watcher.start()
    wait_for(watcher, lambda: watcher.view and watcher.view.trouble)
    assert watcher.view and watcher.view.code == 1 and watcher.view.seen is seen
    assert watcher.view.trouble == (
        "this look failed (TypeError: '<' not supported); ONCE=1 make monitor shows where"
    )
    looks[:] = [seen]
    wait_for(watcher, lambda: watcher.view and not watcher.view.trouble)
    assert watcher.view.trouble == "" and watcher.thread.is_alive()
    watcher.ended.set()
    watcher.thread.join(5)


def test_a_first_look_that_fails_ends_the_watch_with_its_reason() -> None:
    watcher = watching([ZeroDivisionError("division by zero")])
    watcher.start()
    wait_for(watcher, lambda: watcher.gone)
    assert str(watcher.gone).startswith("this look failed (ZeroDivisionError: division by zero)")


def test_who_reads_leaves_without_a_traceback(paths: RunPaths) -> None:  # noqa: F811
    made(paths, "done")
    telling = subprocess.Popen(
        [sys.executable, "-m", "monitor"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(paths, ONCE="1"),
    )
    assert telling.stdout and telling.stderr
    telling.stdout.close()
    assert telling.wait(120) == 141 and telling.stderr.read() == b""
