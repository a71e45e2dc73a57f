"""How much of the time is spent computing at the xlarge preset's ratio of compute to traffic: DDP beside DiLoCo.

Parameters and the seconds that a step computes are both divided by SMALLER; the link stays as it is, and so
does the share of time that bytes take. Round trips are not divided, so that they count as many times as much. The
seconds are those of make plan, for the preset's own cards. Inner steps are waits: GPUs would compute them, not these
cores. The sync is real: the engine of train/diloco, in a process a site, with all that it does beside the network:
changes, their mean and the outer step are passes over all weights, which on a site's GPUs take no time, and here those
of four sites are done by the cores of one machine, together with the network's work. What the sum over the WAN takes
of a sync is said apart, and SLOWER = 4 divides link, parameters and the pieces in which they travel by 4, so
that bytes take as long, and such passes a quarter.

Efficiency is the seconds of computing over all seconds of whole rounds, H steps and their sync; under DDP of steps.
DDP stands here without any overlap, over one gloo group.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from bench.run import spread
from bench.wan_lab.crew import crew, lighthouse
from bench.wan_lab.engine import turns
from bench.wan_lab.network import Link, Network
from doctor.gpu_probe.foreign_load import worst
from hardware.model_size import parameters
from plan.fleet import fleet_of
from plan.run import run_of
from plan.speed import speed_of
from settings import load_config

PRESET = "xlarge-8xa100"
SITES = 4
SMALLER = 20  # what the preset's parameters and the seconds of a step are divided by
SLOWER = 1  # what link, pieces and once more the parameters are divided by
DDP_STEPS = 2
WAYS = (
    ("DiLoCo, H=30", {"SYNC_EVERY": "30"}, 3),
    ("DiLoCo, H=100", {"SYNC_EVERY": "100"}, 2),
    (
        "DiLoCo, H=100, 5 fragments, overlapping 4 steps",
        {"SYNC_EVERY": "100", "SYNC_FRAGMENTS": "5", "SYNC_DELAY": "4"},
        2,
    ),
)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The preset, scaled down. step_s: seconds that an inner step computes, at full size; all sites together. smaller:
    what parameters and seconds are divided by; slower: what the link and once more the parameters are."""

    parameters: int
    step_s: float
    smaller: float
    slower: float

    @property
    def elements(self) -> int:
        return round(self.parameters / (self.smaller * self.slower))

    @property
    def wait_s(self) -> float:
        return self.step_s / self.smaller


def scaled(smaller: float = 1, slower: float = 1) -> Scaled:
    """The preset as make plan sees it on its cards."""
    c = load_config({"PRESET": PRESET})
    step_s = speed_of(run_of(c, fleet_of(c)), None).step_s
    assert step_s is not None
    return Scaled(parameters(c).total, step_s, smaller, slower)


def ddp(network: Network, scale: Scaled, dtype: str) -> dict[str, Any]:
    """DDP's steps: compute, then all-reduce the gradients over one gloo group."""
    taken = turns(network, "gloo", dtype, scale.elements, 1, DDP_STEPS, scale.wait_s)
    return described(
        scale,
        f"DDP, {dtype}",
        1,
        [
            {
                "seconds": turn["seconds"],
                "compute_s": scale.wait_s,
                "sent_bytes": turn["sent_bytes"],
                "foreign_percent": turn["foreign_percent"],
            }
            for turn in taken
        ],
    )


def diloco(
    network: Network, scale: Scaled, name: str, settings: dict[str, str], rounds: int
) -> dict[str, Any]:
    """DiLoCo's rounds of SYNC_EVERY steps, with the engine of train/diloco in each site."""
    common = {
        "PRESET": PRESET,
        "DEVICE": "cpu",
        "DTYPE": "float32",
        "SYNC": "diloco",
        "MIN_SITES": str(SITES),
        "SITES": str(SITES),
        "NODES": str(SITES),
        "NPROC": "1",
        **settings,
    }
    with lighthouse(network, str(SITES)) as where:
        sizes = [str(number) for number in (scale.elements, scale.wait_s, scale.slower)]
        arguments = [
            [
                *sizes,
                *(
                    f"{key}={value}"
                    for key, value in (
                        common
                        | {
                            "NODE_RANK": str(site),
                            "LIGHTHOUSE": where,
                        }
                    ).items()
                ),
            ]
            for site in range(SITES)
        ]
        with crew(network, "bench.wan_lab.waiting", arguments) as workers:
            taken = [workers.turn(settings["SYNC_EVERY"]) for _ in range(rounds)]
    for turn in taken:
        for answer in turn["answers"]:
            if not answer["committed"] or set(answer["sites"]) != {SITES}:
                raise RuntimeError(f"{name}: a sync failed, or not all sites took part: {answer}")
    alone = "SYNC_DELAY" not in settings  # else the sum hides behind steps
    return described(
        scale,
        name,
        int(settings["SYNC_EVERY"]),
        [
            ({"wan_efficiency": 100 * of_wan(turn["answers"])} if alone else {})
            | {
                "seconds": turn["seconds"],
                "compute_s": turn["answers"][0]["compute_s"],
                "sent_bytes": turn["sent_bytes"],
                "foreign_percent": turn["foreign_percent"],
                "stall_s": max(answer["stall_s"] for answer in turn["answers"]),
                "exchange_s": max(max(answer["exchange_s"]) for answer in turn["answers"]),
                "network_s": max(answer["network_s"] for answer in turn["answers"]),
            }
            for turn in taken
        ],
    )


def of_wan(answers: list[dict[str, Any]]) -> float:
    """The share of time, 0 to 1, that would be computing if the sum over the WAN were all that a sync takes."""
    compute_s = float(answers[0]["compute_s"])
    return compute_s / (compute_s + max(answer["network_s"] for answer in answers))


def described(scale: Scaled, name: str, steps: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """rounds: seconds, compute_s and sent_bytes of a round of so many steps."""
    return {
        "name": name,
        "steps": steps,
        **dataclasses.asdict(scale),
        "elements": scale.elements,
        "rounds": [
            taken | {"efficiency": 100 * taken["compute_s"] / taken["seconds"]} for taken in rounds
        ],
    }


def found(link: Link) -> Iterator[dict[str, Any]]:
    """Each way to stay together."""
    scale = scaled(SMALLER, SLOWER)
    with Network(SITES, dataclasses.replace(link, gbit=link.gbit / SLOWER)) as network:
        for dtype in ("float32", "bfloat16"):
            yield ddp(network, scale, dtype)
        for name, settings, rounds in WAYS:
            yield diloco(network, scale, name, settings, rounds)


HEADER = (
    "| sites stay together by | parameters, M | steps of a round | computing of a round, s | all of it, s | "
    "efficiency, % | with the sum over the WAN alone, % | a sync, s | of that the sum over the WAN, s | "
    "sent by a site in a step, MB | foreign load, % |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def row(taken: dict[str, Any]) -> str:
    rounds = taken["rounds"]
    return (
        "| "
        + " | ".join(
            [
                taken["name"],
                f"{taken['elements'] / 1e6:.1f}",
                str(taken["steps"]),
                spread([r["compute_s"] for r in rounds], 2),
                spread([r["seconds"] for r in rounds], 2),
                spread([r["efficiency"] for r in rounds]),
                spread([r["wan_efficiency"] for r in rounds])
                if "wan_efficiency" in rounds[0]
                else "",
                *(
                    spread([r[key] for r in rounds], 2) if key in rounds[0] else ""
                    for key in ("exchange_s", "network_s")
                ),
                spread([r["sent_bytes"] / taken["steps"] / 1e6 for r in rounds], 1),
                worst(rounds),
            ]
        )
        + " |"
    )
