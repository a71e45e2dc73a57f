"""monitor/alert.py: rings once for each new fault and at the end, never waits, and remembers over restarts."""

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from monitor import alert
from monitor.alert import Alerts, command_of
from monitor.facts import Fault, Seen
from monitor.verdict import Verdict
from record.run_paths import RunPaths
from settings import SettingsError
from settings.config import Config
from tests.monitor.moments import NOW, TRAINING, cluster, node, seen, status

HANGS = Fault("hanging", "hanging: no step for 4:10", "make logs", failing=True)
HOT = Fault("throttled-heat", "GPU 3 is throttled by heat", "look at fans", "node 1")
DONE = Verdict("done", "done: 10 of 10 steps", is_last=True)

# Writes the sentence and what it was told beside it, an alert a line.
BELL = """#!/bin/sh
printf '%s|%s|%s|%s|%s|%s|%s\\n' "$#" "$1" "$MONITOR_RUN" "$MONITOR_FAULT" "$MONITOR_ABOUT" "$MONITOR_FAILING" \
"$MONITOR_NEXT" >> "$(dirname "$0")/rung"
"""


class Bell:
    """A command that notes how it was called, and the run that it is about."""

    def __init__(self, folder: Path):
        self.folder, self.paths = folder, RunPaths(folder / "runs" / "big")
        self.command, self.rung = folder / "bell.sh", folder / "rung"
        self.paths.folder.mkdir(parents=True)
        self.does(BELL)

    def does(self, text: str) -> None:
        self.command.write_text(text)
        self.command.chmod(0o755)

    def alerts(self, limit_s: float = 20.0) -> Alerts:
        """A monitor that has just been started."""
        return Alerts(str(self.command), self.paths, limit_s)

    @property
    def names(self) -> list[str]:
        return (
            [line.split("|")[3] for line in self.rung.read_text().splitlines()]
            if self.rung.exists()
            else []
        )


@pytest.fixture
def bell(tmp_path: Path) -> Bell:
    return Bell(tmp_path)


def at(minutes: float, attempt: int = 0) -> Seen:
    found = seen(node(0, progress=dataclasses.replace(TRAINING, attempt=attempt)))
    return dataclasses.replace(found, now=NOW + 60 * minutes)


# ---- What rings


def test_a_new_fault_rings_once_with_a_sentence_and_its_facts(bell: Bell) -> None:
    alerts = bell.alerts()
    for minute in range(3):
        assert alerts.look(at(minute), [HANGS, HOT]) == []
    assert alerts.close() == []
    assert bell.rung.read_text().splitlines() == [
        "1|big: hanging: no step for 4:10; next: make logs|big|hanging||1|make logs",
        "1|big: GPU 3 is throttled by heat; next: look at fans|big|throttled-heat|node 1|0|look at fans",
    ]


def test_other_numbers_make_no_other_fault_and_another_node_does(bell: Bell) -> None:
    alerts = bell.alerts()
    alerts.look(at(0), [HOT])
    alerts.look(at(1), [dataclasses.replace(HOT, text="GPU 2, 3 are throttled by heat")])
    alerts.look(at(2), [HOT, dataclasses.replace(HOT, about="node 0")])
    alerts.close()
    assert bell.names == ["throttled-heat", "throttled-heat"]


@pytest.mark.parametrize(("away", "rings"), [(4.9, 1), (5.1, 2)])
def test_a_fault_that_is_back_is_new_after_alert_minutes_only(
    bell: Bell, away: float, rings: int
) -> None:
    alerts = bell.alerts()
    for minute, faults in (
        (0, [HOT]),
        (10, []),
        (10 + away / 2, []),
        (10 + away, [HOT]),
        (11 + away, [HOT]),
    ):
        alerts.look(at(minute), faults)
    alerts.close()
    assert len(bell.names) == rings


def test_one_that_flaps_at_every_look_rings_once(bell: Bell) -> None:
    alerts = bell.alerts()
    for minute in range(30):
        alerts.look(at(minute), [HOT] if minute % 2 else [])
    alerts.close()
    assert bell.names == ["throttled-heat"]


def test_the_end_rings_once_for_each_attempt(bell: Bell) -> None:
    alerts = bell.alerts()
    alerts.look(at(0), [], Verdict("on plan", "on plan: 5 tokens/s"))  # not the last word
    for minute in (1, 2):
        alerts.look(at(minute), [], DONE)
    alerts.look(at(3, attempt=1), [], None)
    alerts.look(at(4, attempt=1), [], Verdict("failing", "failing: killed", is_last=True))
    alerts.close()
    assert [line.split("|")[1:6] for line in bell.rung.read_text().splitlines()] == [
        ["big: done: 10 of 10 steps", "big", "end", "", "0"],
        ["big: failing: killed", "big", "end", "", "1"],
    ]


def test_a_monitor_that_is_started_again_remembers(bell: Bell) -> None:
    for minute in (0, 10, 20, 30):  # ONCE=1 every ten minutes
        alerts = bell.alerts()
        alerts.look(at(minute), [HANGS], DONE)
        alerts.close()
    assert bell.names == ["hanging", "end"]
    kept = json.loads((bell.paths.folder / ".alerts.json").read_text())
    assert kept == {
        "schema": 1,
        "faults": {"hanging ": None},
        "ended": "done in attempt 0",
        "since": NOW - 1000,
    }


CRASHED = Fault("crashed", "crashed: first", "make logs", failing=True)
FAILED = Verdict("failing", "failing: crashed: first", is_last=True)


def in_phase(phase: str, began: float, now: float, **changes: object) -> Seen:
    found = seen(node(0, status=status(phase, -began) if phase else {}, **changes))
    return dataclasses.replace(found, now=NOW + now)


@pytest.mark.parametrize(
    "looks_between", [True, False]
)  # from cron the second attempt may never be seen at work
@pytest.mark.parametrize("name", ["crashed", "killed"])
def test_a_second_crash_before_the_first_record_rings_again(
    bell: Bell, looks_between: bool, name: str
) -> None:
    end = dataclasses.replace(CRASHED, name=name)
    for now in (0, 1):
        bell_of(bell, in_phase("crashed", -10, now), [end], FAILED)
    for now in (20, 21) if looks_between else ():
        bell_of(bell, in_phase("data", 15, now), [], None)
    for now in (40, 41):
        bell_of(bell, in_phase("crashed", 30, now), [end], FAILED)
    assert bell.names == [name, "end"] * 2


def bell_of(bell: Bell, found: Seen, faults: list[Fault], verdict: Verdict | None) -> None:
    """ONCE=1, as from cron."""
    alerts = bell.alerts()
    assert alerts.look(found, faults, verdict) == [] == alerts.close()


def test_an_end_that_flaps_rings_once(bell: Bell) -> None:
    """A lock that somebody looks at seems held for an instant, and a status may be torn: the phase is the same."""
    killed = dataclasses.replace(CRASHED, name="killed")
    for now in range(12):
        over, torn = now % 2 == 0, now % 3 == 0
        found = in_phase("" if torn else "training", -900, now, at_work=not over)
        bell_of(bell, found, [killed] if over else [], FAILED if over else None)
    assert bell.names == ["killed", "end"]


def test_other_faults_are_not_forgotten_with_the_end(bell: Bell) -> None:
    bell_of(bell, in_phase("crashed", -10, 0), [CRASHED, HOT], FAILED)
    bell_of(bell, in_phase("data", 15, 20), [], None)
    bell_of(bell, in_phase("crashed", 30, 40), [CRASHED, HOT], FAILED)
    assert bell.names == ["crashed", "throttled-heat", "end", "crashed", "end"]


def test_a_job_that_is_there_anew_and_fails_without_a_word_rings_again(bell: Bell) -> None:
    def job(now: float, **facts: object) -> Seen:
        return dataclasses.replace(seen(cluster=cluster(**facts)), nodes=(), now=NOW + now)

    bell_of(bell, job(0, ended="Failed"), [CRASHED], FAILED)
    for now, facts in ((1, {"problem": "it does not answer"}), (2, {"wanted_pods": 0})):
        bell_of(bell, job(now, **facts), [], None)
    bell_of(bell, job(3, ended="Failed"), [CRASHED], FAILED)
    bell_of(bell, job(60), [], None)
    bell_of(bell, job(90, ended="Failed"), [CRASHED], FAILED)
    assert bell.names == ["crashed", "end"] * 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1, "faults": [1], "ended": ""}'])
def test_a_damaged_memory_is_none(bell: Bell, content: str) -> None:
    (bell.paths.folder / ".alerts.json").write_text(content)
    alerts = bell.alerts()
    alerts.look(at(0), [HANGS])
    assert alerts.close() == [] and bell.names == ["hanging"]


def test_a_memory_that_cannot_be_kept_is_said_once_and_nothing_rings_twice(bell: Bell) -> None:
    (bell.paths.folder / ".alerts.json").mkdir()  # as root any folder can be written
    alerts = bell.alerts()
    (said,) = alerts.look(at(0), [HANGS])
    assert ".alerts.json: cannot be written (Is a directory)" in said
    assert alerts.look(at(1), [HANGS]) == [] == alerts.look(at(2), [HANGS, HOT])
    alerts.close()
    assert bell.names == ["hanging", "throttled-heat"]


# ---- The command


def test_a_command_that_fails_is_said_once_with_its_last_words(bell: Bell) -> None:
    bell.does("#!/bin/sh\necho no network >&2\nexit 6\n")
    alerts = bell.alerts()
    alerts.look(at(0), [HANGS, HOT])
    assert alerts.close() == [f"ALERT_CMD={bell.command} ended with exit code 6: no network"]
    alerts.look(at(1), [dataclasses.replace(HOT, about="node 0")])
    assert alerts.close() == []


def test_one_that_never_ends_holds_nothing_up_and_is_ended_with_its_children(bell: Bell) -> None:
    bell.does(f"#!/bin/sh\nsleep 60 &\necho $! > {bell.folder}/child\nwait\n")
    alerts = bell.alerts(limit_s=10.0)
    began = time.monotonic()
    alerts.look(at(0), [HANGS])
    assert time.monotonic() - began < 9
    said = alerts.close()
    assert (
        said == [f"ALERT_CMD={bell.command} was ended after 10 s"] and time.monotonic() - began < 50
    )
    child = int((bell.folder / "child").read_text())
    deadline = time.monotonic() + 30
    while lives(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """One that is dead and not yet reaped counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_what_logs_hold_does_not_harm(bell: Bell) -> None:
    words = "crashed: $(touch gone) `x` 'y' \"z\"; {}rm * \u2026 \ufffd -n"
    odd = Fault("crashed", words.format("\0").replace("\ufffd", "\ud800"), "make logs")
    alerts = bell.alerts()
    alerts.look(at(0), [odd])
    assert alerts.close() == []
    assert bell.rung.read_text().startswith(f"1|big: {words.format('')}; next: make logs|")


def test_too_many_at_once_drop_the_oldest(bell: Bell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert, "MOST_WAITING", 2)
    alerts = bell.alerts()
    (said,) = alerts.look(
        at(0), [dataclasses.replace(HOT, about=f"node {number}") for number in range(4)]
    )
    assert "more than 2 alerts wait" in said
    alerts.close()
    assert [line.split("|")[4] for line in bell.rung.read_text().splitlines()] == [
        "node 2",
        "node 3",
    ]


def test_without_a_command_nothing_is_run_and_nothing_kept(bell: Bell) -> None:
    alerts = Alerts("", bell.paths)
    assert alerts.look(at(0), [HANGS], DONE) == alerts.close() == []
    assert os.listdir(bell.paths.folder) == []


def test_the_setting_is_looked_at_before_anything_is_wrong(bell: Bell) -> None:
    def refused(named: str) -> str:
        with pytest.raises(SettingsError) as error:
            command_of(dataclasses.replace(Config(), alert_cmd=named), bell.folder)
        return str(error.value)

    def found(named: str) -> str:
        return command_of(dataclasses.replace(Config(), alert_cmd=named), bell.folder)

    assert found("") == "" and found(str(bell.command)) == found("./bell.sh") == str(bell.command)
    assert Path(found("true")).name == "true" and found("true").startswith("/")
    assert (
        f"ALERT_CMD=absent.sh: there is no file {bell.folder}/absent.sh, nor a program"
        in refused("absent.sh")
    )
    assert "for example ALERT_CMD=scripts/my_alert.sh" in refused("./runs")
    bell.command.chmod(0o644)
    assert refused("./bell.sh").endswith(
        f"ALERT_CMD=./bell.sh: cannot be executed; chmod +x {bell.command}"
    )
    (bell.folder / "a=b").touch(0o755)
    assert "must have no = in it" in refused("./a=b")
