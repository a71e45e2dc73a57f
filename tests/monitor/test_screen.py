"""monitor/screen.py and panels.py: made runs on terminals of several sizes, beside numbers worked out by hand."""

import dataclasses
import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from monitor import screen
from monitor.facts import Cluster, Expected, Fault, Gpu, Pod, Progress, Seen
from monitor.panels import Style
from monitor.screen import Screen
from tests.monitor import scenes

SIZES = [(80, 24), (80, 40), (100, 30), (120, 30), (160, 40), (200, 60)]
SCENES = {
    "here": scenes.here(),
    "cpu": scenes.on_cpu(),
    "cluster": scenes.in_cluster(),
    "two large nodes": scenes.in_cluster(3, 8),
    "nothing known": Seen(scenes.NOW, "r", "tiny"),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second after the look."""
    monkeypatch.setattr(screen.time, "time", lambda: scenes.NOW + 1)


def shown(
    seen: Seen,
    width: int = 80,
    height: int = 24,
    faults: Sequence[Fault] = (),
    verdict: str = "",
    trouble: str = "",
    **options: object,
) -> list[str]:
    """The lines as a terminal of that size shows them."""
    return raw(
        seen, width, height, faults, verdict, trouble, color_system=None, **options
    ).splitlines()


def raw(
    seen: Seen,
    width: int,
    height: int,
    faults: Sequence[Fault] = (),
    verdict: str = "",
    trouble: str = "",
    **options: object,
) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=True, **options)  # type: ignore[arg-type]
    console.print(Screen(seen, faults, verdict, trouble))
    return file.getvalue()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(
    "faults", [(), (scenes.HANG, scenes.DISK) * 4], ids=["well", "eight faults"]
)
def test_it_fits_every_terminal(name: str, size: tuple[int, int], faults: Sequence[Fault]) -> None:
    lines = shown(SCENES[name], *size, faults)
    assert 0 < len(lines) <= size[1] and max(map(len, lines)) <= size[0]


def line_of(lines: list[str], label: str) -> str:
    return next(" ".join(line.split()) for line in lines if line.startswith(label))


def test_the_run_in_figures() -> None:
    lines = shown(scenes.here())
    assert lines[0].split("  ")[:2] == ["d16", "training for 12:30"] and lines[0].endswith(
        "14:00:00"
    )
    assert lines[1] == "nothing is wrong"
    step = line_of(lines, "step")
    assert step.startswith("step 300/1,200 25.0% ") and step.endswith(
        " 36:00 to go, 14:36, planned 14:16"
    )
    bar = step.split()[3]
    assert bar.count("█") == round(len(bar) / 4) and set(bar) == {"█", "░"}
    assert line_of(lines, "loss") == "loss 3.5800 validation 3.9222 at 250"
    assert (
        line_of(lines, "speed")
        == "speed 32,768 tokens/s, 80% of plan MFU 43.8% of 50.0% 2,000 ms a step"
    )
    assert line_of(lines, "process") == "process 61.25 GiB, 60.00 by plan waits for data 0.5%"
    assert line_of(lines, "checkpoint") == "checkpoint step 200, 5:01 ago, 4 GB"
    assert line_of(lines, "network") == "network eth0 in 1.2 GB/s, out 1.1 GB/s of 3.12 GB/s"
    assert (
        line_of(lines, "machine")
        == "machine disk 212 GB left, for 53 checkpoints memory 48.0 of 96.0 GiB"
    )


def test_goodput_is_a_bar_of_causes_that_are_named() -> None:
    lines = shown(scenes.here())
    at = next(n for n, line in enumerate(lines) if line.startswith("goodput"))
    assert lines[at].split() == [
        "goodput",
        "50.0%",
        20 * "=" + 8 * "s" + 2 * "e" + 2 * "c" + 8 * "_",
    ]
    assert lines[at + 1].split("  ")[-4:] == [
        "s start-up 20.0%",
        "_ down 20.0%",
        "e evaluation 6.0%",
        "c checkpoint 4.0%",
    ]


def test_each_gpu_has_a_line_where_there_is_room() -> None:
    lines = shown(scenes.here())
    assert line_of(lines, "GPUs") == "GPUs 0/0 98% █████░ 64/80 GiB 670/700 W 60°C"
    hot = scenes.gpu(1, throttle=("sw_thermal", "power_cap"), temp_c=None, utilisation_percent=None)
    lines = shown(
        scenes.here(nodes=(dataclasses.replace(scenes.node(), gpus=(hot, Gpu(2, lost=True))),))
    )
    assert (
        line_of(lines, "GPUs")
        == "GPUs 0/1 n/a █████░ 64/80 GiB 671/700 W n/a sw thermal, power cap"
    )
    assert any(" ".join(line.split()) == "0/2 lost: it no longer answers" for line in lines)


def test_what_gpus_took_stands_below_them() -> None:
    counted = scenes.node(energy_j=1.8e7, energy_since=scenes.NOW - 3600)
    lines = shown(scenes.here(nodes=(counted,)), 80, 40)
    at = next(n for n, line in enumerate(lines) if line.startswith("energy"))
    assert " ".join(lines[at].split()) == "energy 5 kWh since 13:00; about 2.68 kJ a step"
    assert lines[at - 1].split()[0] == "0/1"
    assert (
        line_of(shown(scenes.here(nodes=(counted, scenes.node(1, 1))), 80, 60), "energy")
        == "energy 5 kWh on 1 of 2 nodes since 13:00; about 4.02 kJ a step"
    )  # and 670 W of the third
    assert not [line for line in shown(scenes.on_cpu(), 120, 40) if line.startswith("energy")]


def test_sixteen_gpus_on_two_nodes_are_told_in_what_room_there_is() -> None:
    seen = scenes.in_cluster(3, 8)
    tall = shown(seen, 80, 60)
    assert sum(" 98% ███" in line for line in tall) == 16
    middle = shown(seen, 120, 34)
    assert sum(line.count("% 6") for line in middle) == 16  # two and more on a line
    assert len([line for line in middle if "% 6" in line]) < 16
    low = shown(seen, 80, 24)
    assert any("node 0: 8 GPUs  98%  64-68/80 GiB  670-677/700 W  60-67°C" in line for line in low)
    assert any("2  pulling its image for 2:10  no node yet" in line for line in low)


def test_what_is_wrong_stands_first_in_whole_with_the_next_command() -> None:
    lines = shown(scenes.in_cluster(), 80, 40, [scenes.HANG, scenes.DISK], "failing: it hangs")
    text = " ".join(" ".join(lines[1:7]).split())
    assert text == (
        f"FAILS hang: {scenes.HANG.text} next {scenes.HANG.next} WRONG disk node 0: {scenes.DISK.text} "
        f"next {scenes.DISK.next}"
    )
    assert " ".join(lines[7].split()) == "verdict failing: it hangs"
    many = shown(
        scenes.here(),
        80,
        24,
        [dataclasses.replace(scenes.DISK, about=f"node {n}") for n in range(9)],
    )
    assert "and 6 more; ONCE=1 make monitor lists all" in " ".join(many)
    assert any(line.startswith("step") for line in many)


def test_pods_with_their_last_lines_where_there_is_room() -> None:
    lines = shown(scenes.in_cluster(), 132, 50)
    assert line_of(lines, "pods") == "pods 0 Running gpu-0.site0.example.org (site0)"
    assert any(line.split()[:2] == ["3", "pulling"] for line in lines)
    assert sum("3 s ago: step=300/1200 loss=3.5800" in line for line in lines) == 3
    assert any(line.endswith("gpu-1.site1.example.org (site1)  1 restart") for line in lines)
    assert any("the plan sends 8 GB a step, 5 GB/s, through 3.12 GB/s" in line for line in lines)


def test_words_of_others_are_never_markup_and_never_move_the_cursor() -> None:
    pod = Pod(
        0,
        "p",
        "Running",
        last_line="[bold]x[/] \x1b[2J\x1b[31mred\x07",
        last_line_time=scenes.NOW - 3,
    )
    seen = scenes.here(cluster=Cluster("ns", "job", "running", pods=(pod,)))
    fault = Fault("a", "said \x1b]0;title\x07 and \x1b[5A\r", "do \x9b2J")
    text = raw(seen, 100, 40, [fault], color_system=None)
    assert "3 s ago: [bold]x[/] red\n" in text
    assert not set(text) & {chr(n) for n in (*range(10), *range(11, 32), *range(127, 160))}


def test_colours_carry_nothing_alone_and_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    well = [scenes.here(), 80, 24, [scenes.HANG]]
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mFAILS" in raw(*well, color_system="standard")  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in raw(*well, color_system="standard")  # type: ignore[arg-type]


def test_a_terminal_without_other_characters_has_bars_too() -> None:
    bar = Style(80, ascii=True).bar(0.3, 10)
    assert bar.plain == "###......." and Style(80, ascii=True).degrees == "C"
    assert Style(80).bar(None, 4).plain == "░░░░" and Style(80).bar(7.0, 4).plain == "████"


def test_how_old_it_is_where_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "old" not in shown(scenes.here())[0]
    monkeypatch.setattr(screen.time, "time", lambda: scenes.NOW + 42)
    assert "42 s old" in shown(scenes.here())[0]
    assert "42 s old" in shown(scenes.in_cluster())[0]
    monkeypatch.setattr(screen.time, "time", lambda: scenes.NOW + 12)
    assert "old" not in shown(scenes.in_cluster())[0]  # which is looked at every 10 s
    assert "12 s old: the disk is gone" in shown(scenes.here(), trouble="the disk is gone")[0]


@pytest.mark.parametrize(
    ("status", "at_work", "stage", "words"),
    [
        (
            {"phase": "compiling", "since": scenes.NOW - 190},
            True,
            "",
            "compiling for 3:10 of about 5 min",
        ),
        (
            {"phase": "waiting for peers 2/4", "since": scenes.NOW - 20},
            True,
            "",
            "waiting for peers 2/4 for 20 s of at most 3 min",
        ),
        (
            {"phase": "evaluating", "since": scenes.NOW - 3},
            True,
            "",
            "evaluating for 3 s of about 8 s",
        ),
        ({"phase": "done", "since": scenes.NOW - 7200}, False, "", "done since 12:00"),
        (
            {"phase": "training", "since": scenes.NOW - 900, "heartbeat": scenes.NOW - 600},
            False,
            "",
            "killed while training since 13:50",
        ),
        ({}, True, "preparing data", "preparing data"),
        ({"phase": "done", "since": scenes.NOW - 60}, True, "drawing plots", "drawing plots"),
        ({}, False, "", "n/a: STATUS.json is not there or damaged"),  # of a run that has made steps
    ],
)
def test_what_the_run_is_at(
    status: dict[str, object], at_work: bool, stage: str, words: str
) -> None:
    plan = dataclasses.replace(scenes.EXPECTED, limits=(("waiting for peers", 180.0),))
    seen = scenes.here(
        expected=plan, nodes=(scenes.node(status=status, at_work=at_work, stage=stage),)
    )
    assert " ".join(shown(seen)[0].split()[1:-1]) == words


def test_what_is_not_known_is_said_or_left_out() -> None:
    lines = shown(
        scenes.here(
            nodes=(
                scenes.node(
                    0, 0, progress=Progress(), links=(), disk_free_bytes=None, memory_bytes=None
                ),
            ),
            expected=Expected(),
        )
    )
    assert (
        line_of(lines, "step") == "step 0" and line_of(lines, "loss") == "loss n/a validation n/a"
    )
    assert line_of(lines, "speed") == "speed n/a MFU n/a"
    assert not [
        line for line in lines if line.startswith(("goodput", "GPUs", "network", "machine"))
    ]
    assert "n/a: there is no NVIDIA driver" in line_of(
        shown(scenes.here(nodes=(scenes.node(0, 0, gpus_why="there is no NVIDIA driver"),))), "GPUs"
    )


def test_the_last_evaluation_is_longer_than_those_before() -> None:
    done = dataclasses.replace(scenes.PROGRESS, step=1200)
    status = {"phase": "evaluating", "since": scenes.NOW - 40}
    assert (
        "evaluating for 40 s  "
        in shown(scenes.here(nodes=(scenes.node(status=status, progress=done),)))[0]
    )
