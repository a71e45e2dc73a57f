"""plan/fleet.py: which cards a run is planned for, and what is said where that cannot be told."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hardware.gpu_specs import load_gpu_specs
from plan import fleet
from plan.fleet import Fleet, fleet_of, gpus_here, visible_names
from plan.speed import slowest_card
from settings import SettingsError
from settings.config import Config

A100, H100, RTX4090 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
Smi = Callable[[str], None]


def config(**changes: object) -> Config:
    return dataclasses.replace(Config(), **changes)  # type: ignore[arg-type]


def shape(found: Fleet) -> tuple[str, int, int, int, int]:
    return found.text, found.processes, found.nodes, found.processes_of_a_node, found.sites


def refused(c: Config, here: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        fleet_of(c, here)
    return raised.value.problems


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """A stand-in for nvidia-smi, which runs this line of shell for --list-gpus and knows nothing else."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def stand_in(line: str) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f'#!/bin/sh\n[ "$*" = --list-gpus ] || exit 2\n{line}\n')
        script.chmod(0o755)

    return stand_in


def listing(*names: str) -> str:
    return "".join(f"GPU {i}: {name} (UUID: GPU-{i}{i}{i}{i}-ab)\n" for i, name in enumerate(names))


# ---- CARDS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cards": "8xa100-80gb-sxm"}, ("8 x a100-80gb-sxm", 8, 1, 8, 1)),
        ({"cards": "8xa100-80gb-sxm", "nodes": 4, "sites": 4}, ("8 x a100-80gb-sxm", 8, 4, 2, 4)),
        (
            {"cards": "8xa100-80gb-sxm", "nodes": 4, "sites": 2, "nproc": 2},
            ("8 x a100-80gb-sxm", 8, 4, 2, 2),
        ),
        ({"cards": "1xrtx4090", "device": "cuda"}, ("1 x rtx4090", 1, 1, 1, 1)),
        ({"cards": "4xa6000,4xa100-80gb-sxm"}, ("4 x a100-80gb-sxm and 4 x a6000", 8, 1, 8, 1)),
        (
            {"cards": "2xa6000,1xt4,2xa6000,3xh100-sxm"},
            ("3 x h100-sxm, 4 x a6000 and 1 x t4", 8, 1, 8, 1),
        ),
        ({"cards": "cpu", "device": "cpu"}, ("1 process on CPU", 1, 1, 1, 1)),
        ({"cards": "cpu", "nproc": 2, "nodes": 2, "sites": 2}, ("4 processes on CPU", 4, 2, 2, 2)),
        ({"device": "cpu"}, ("1 process on CPU", 1, 1, 1, 1)),
        ({"cards": "here", "device": "cpu", "nproc": 3}, ("3 processes on CPU", 3, 1, 3, 1)),
    ],
)
def test_the_fleet_is_what_the_settings_say(changes: dict[str, object], expected: tuple) -> None:
    found = fleet_of(config(**changes), here=(H100,) * 3)
    assert shape(found) == expected
    assert found.on_cpu == ("CPU" in found.text)


@pytest.mark.parametrize(
    ("cards", "meant"),
    [
        (
            "8xa100",
            "unknown GPU a100; did you mean a100-80gb-sxm or a100-80gb-pcie or "
            "a100-40gb-sxm or a100-40gb-pcie? known are gb200, ",
        ),
        (
            "1xrtx-4090",
            "unknown GPU rtx-4090; did you mean rtx4090? known are ",
        ),
        ("1xl40z", "did you mean l40? "),
        ("2xmi300x", "unknown GPU mi300x; known are "),
        (
            "4xt4,4xrtx4O90,4xmi300x",
            "unknown GPU rtx4O90 and mi300x; did you mean rtx4090? ",
        ),
    ],
)
def test_an_unknown_card_is_asked_for(cards: str, meant: str) -> None:
    (problem,) = refused(config(cards=cards))
    assert problem.startswith(f"CARDS={cards}: ") and meant in problem
    words = re.findall(r"[\w-]+", problem.partition(": unknown GPU ")[2])
    for key in load_gpu_specs():
        assert words.count(key) == 1
    assert problem.endswith("add another to hardware/gpus.toml")


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"cards": "8xt4", "nodes": 3},
            [
                "CARDS=8xt4: 8 cards cannot be spread evenly over NODES=3; set NODES=2, or CARDS "
                "with a multiple of 3"
            ],
        ),
        (
            {"cards": "1xt4", "nodes": 2},
            [
                "CARDS=1xt4: 1 card cannot be spread evenly over NODES=2; set NODES=1, or CARDS "
                "with a multiple of 2"
            ],
        ),
        (
            {"cards": "8xt4", "nproc": 4},
            [
                "NPROC=4: CARDS=8xt4 is 8 cards, with a process each; leave NPROC out, or set "
                "NPROC=8 or other CARDS"
            ],
        ),
        (
            {"cards": "8xt4", "nproc": 8, "nodes": 4},
            [
                "NPROC=8: CARDS=8xt4 is 2 cards on each of NODES=4, with a process "
                "each; leave NPROC out, or set NPROC=2 or other CARDS"
            ],
        ),
        (
            {"cards": "8xt4", "nodes": 4, "sites": 3},
            ["SITES=3: NODES=4 cannot be spread evenly over them; set SITES=2, or NODES=6"],
        ),
        (
            {"cards": "cpu", "sites": 4},
            ["SITES=4: NODES=1 cannot be spread evenly over them; set SITES=1, or NODES=4"],
        ),
        (
            {"cards": "9xt4", "nodes": 2, "sites": 3},
            [
                "CARDS=9xt4: 9 cards cannot be spread evenly over NODES=2; set NODES=1"
                ", or CARDS with a multiple of 2",
                "SITES=3: NODES=2 cannot be spread evenly over them; set SITES=2, or NODES=3",
            ],
        ),
        (
            {"cards": "cpu", "device": "cuda"},
            [
                "CARDS=cpu and DEVICE=cuda are two plans; set DEVICE=cpu for one on "
                "processors, or another CARDS, for example CARDS=8xa100-80gb-sxm"
            ],
        ),
        (
            {"cards": "8xt4", "device": "cpu"},
            [
                "CARDS=8xt4 and DEVICE=cpu are two plans; set CARDS=cpu for one on "
                "processors, or DEVICE=cuda for one on those cards"
            ],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    changes: dict[str, object], problems: list[str]
) -> None:
    assert refused(config(**changes)) == problems


def test_what_a_refusal_proposes_is_accepted() -> None:
    for changes in (
        {"nodes": 2},
        {"nproc": 8},
        {"nodes": 4, "nproc": 2},
        {"nodes": 4, "sites": 2},
        {"nodes": 8, "sites": 8},
        {"device": "cuda"},
    ):
        assert fleet_of(config(cards="8xt4", **changes)).processes == 8


# ---- Mixed


def slowest(fleet: Fleet, dtype: str, **changes: object) -> str:
    return slowest_card(config(dtype=dtype, **changes), fleet).key


def without(fleet: Fleet, dtype: str) -> list[str]:
    """The cards that have no units for products of that type."""
    return [card.key for _, card in fleet.cards if card.peak(dtype) is None]


def test_the_slowest_and_the_smallest_card_of_a_mixed_fleet() -> None:
    """Between an A30 (165 TFLOP/s in bfloat16, 10.3 in float32) and an A6000 (154.8, 38.7) it depends on the type."""
    found = fleet_of(config(cards="4xa30,4xa6000,1xrtx3070"))
    assert slowest(found, "bfloat16") == found.smallest.key == "rtx3070"
    found = fleet_of(config(cards="4xa30,4xa6000"))
    assert (slowest(found, "bfloat16"), slowest(found, "float32")) == ("a6000", "a30")
    assert found.smallest.key == "a30"
    assert without(found, "bfloat16") == without(found, "float32") == []
    # 362 TFLOP/s at 40% are less than 312 at the 50% that others reach; with one MFU for both they are more.
    found = fleet_of(config(cards="4xl40s,4xa100-80gb-sxm"))
    assert slowest(found, "bfloat16") == "l40s"
    assert slowest(found, "bfloat16", mfu=45.0) == "a100-80gb-sxm"


def test_a_card_without_bfloat16_is_named_and_has_no_peak() -> None:
    found = fleet_of(config(cards="4xa100-80gb-sxm,2xv100-32gb-sxm,2xt4"))
    assert without(found, "bfloat16") == ["v100-32gb-sxm", "t4"]
    assert slowest(found, "bfloat16") in without(found, "bfloat16")
    assert without(found, "float32") == [] and slowest(found, "float32") == "t4"


# ---- This machine


@pytest.mark.parametrize(
    ("changes", "here", "expected"),
    [
        ({}, (A100,) * 8, ("8 x a100-80gb-sxm", 8, 1, 8, 1)),
        ({"cards": "here", "device": "cuda"}, (A100,) * 8, ("8 x a100-80gb-sxm", 8, 1, 8, 1)),
        ({"nproc": 2}, (A100,) * 8, ("2 x a100-80gb-sxm", 2, 1, 2, 1)),
        ({"nproc": 2, "nodes": 4, "sites": 2}, (A100,) * 8, ("8 x a100-80gb-sxm", 8, 4, 2, 2)),
        ({}, (RTX4090, A100), ("1 x a100-80gb-sxm and 1 x rtx4090", 2, 1, 2, 1)),
        (
            {"nproc": 1},
            (RTX4090, "NVIDIA GeForce RTX 3080"),
            ("1 x rtx4090", 1, 1, 1, 1),
        ),  # the other takes no part
        ({}, (), ("1 process on CPU", 1, 1, 1, 1)),
        ({"cards": "here", "nproc": 2}, (), ("2 processes on CPU", 2, 1, 2, 1)),
    ],
)
def test_without_cards_it_is_about_this_machine(
    changes: dict[str, object], here: tuple[str, ...], expected: tuple
) -> None:
    assert shape(fleet_of(config(**changes), here)) == expected


@pytest.mark.parametrize(
    ("here", "example"),
    [
        (("NVIDIA GeForce RTX 3090 Ti",), "1xrtx3090"),
        ((RTX4090, "NVIDIA GeForce RTX 4090 D"), "2xrtx4090"),
        (("Tesla V100-SXM3-32GB",) * 2, "2xv100-32gb-sxm"),
        (("AMD Instinct MI300X",), "1xrtx4090"),
        (("NVIDIA A100-SXM4-80GB MIG 3g.40gb",), "1xrtx4090"),
    ],
)  # a part of a card is like none
def test_an_unknown_card_here_is_asked_for(here: tuple[str, ...], example: str) -> None:
    (problem,) = refused(config(), here)
    assert problem.startswith(
        f"CARDS: this machine has an unknown GPU, {here[-1]}: name the nearest one, for example "
        f"CARDS={example}; known are gb200, b200, "
    )
    number, key = example.split("x", 1)
    assert int(number) == len(here) and load_gpu_specs().get(key)


def test_too_few_or_no_gpus_here_are_said() -> None:
    assert refused(config(nproc=4), (A100, A100)) == [
        "NPROC=4: 2 GPUs here; set NPROC=2, or CARDS for another machine, for example CARDS=8xa100-80gb-sxm"
    ]
    (problem,) = refused(config(device="cuda"))
    assert problem.startswith(
        "CARDS: there is no GPU here (nvidia-smi lists none), and DEVICE=cuda: say which to plan "
        "for, for example CARDS=8xa100-80gb-sxm; there are gb200, "
    )


def test_the_driver_is_asked_for_the_gpus(smi: Smi, tmp_path: Path) -> None:
    (tmp_path / "list").write_text(listing(A100, A100, RTX4090))
    smi(f"cat {tmp_path}/list")
    assert gpus_here() == (A100, A100, RTX4090)
    assert fleet_of(config(nodes=2)).text == "4 x a100-80gb-sxm and 2 x rtx4090"


@pytest.mark.parametrize(
    "line", ["echo NVIDIA-SMI has failed; exit 9", f"echo '{listing(A100)}'; exit 6", "exit 0"]
)
def test_a_driver_that_fails_lists_nothing(smi: Smi, line: str) -> None:
    smi(line)
    assert gpus_here() == ()


def test_without_a_driver_there_are_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_here() == () and fleet_of(config()).on_cpu


def test_gpus_that_are_hidden_do_not_count(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list").write_text(listing(A100, RTX4090, H100))
    smi(f"cat {tmp_path}/list")
    for visible, names in (
        ("2,0", (H100, A100)),
        ("1", (RTX4090,)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", (A100,)),
        ("NoDevFiles", ()),
        ("GPU-2222-ab,GPU-1111", (H100, RTX4090)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus_here() == names, visible


def test_slices_of_a_gpu_stand_in_its_place() -> None:
    listed = (
        f"GPU 0: {A100} (UUID: GPU-0aaa)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-1bbb)\n  MIG 2g.20gb     Device  1: (UUID: MIG-2ccc)\n"
        f"GPU 1: {H100} (UUID: GPU-3ddd)\n"
    )
    assert visible_names(listed, None) == (f"{A100} MIG 3g.40gb", f"{A100} MIG 2g.20gb", H100)
    assert visible_names(listed, ["MIG-2ccc"]) == (f"{A100} MIG 2g.20gb",)
    assert visible_names(listed, ["1", "0"]) == (H100, f"{A100} MIG 3g.40gb")
    (problem,) = refused(config(), visible_names(listed, None))
    assert f"this machine has an unknown GPU, {A100} MIG 3g.40gb and {A100} MIG 2g.20gb" in problem


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: list[str], **options: object) -> None:
        raise fleet.subprocess.TimeoutExpired(command, float(str(options["timeout"])))

    monkeypatch.setattr(fleet.subprocess, "run", hangs)
    assert gpus_here() == ()
