"""The devices that a run is planned for: which cards, how many, on how many nodes and sites.

    CARDS=8xa100-80gb-sxm NODES=4 SITES=4      four nodes of two, each at a site of its own
    CARDS=4xa100-80gb-sxm,4xa6000              two groups, which gpu_groups.py compares
    ... NODES=4 SITES=4 SYNC=diloco            two sites of each
    CARDS=here NODES=2                         the GPUs of this machine, twice

A card that is not known is refused.
"""

import dataclasses
import math
import re
import subprocess

from hardware.gpu_specs import GpuSpec, find_gpu, load_gpu_specs
from settings import SettingsError
from settings.config import Config
from settings.names import find_nearest
from settings.visible_gpus import visible_gpus

CPU = "cpu"


@dataclasses.dataclass(frozen=True)
class Fleet:
    """cards: (how many, which) of each kind, none where a run is planned for CPUs; processes: of the run."""

    cards: tuple[tuple[int, GpuSpec], ...]
    processes: int
    nodes: int = 1
    sites: int = 1

    @property
    def on_cpu(self) -> bool:
        return not self.cards

    @property
    def processes_of_a_node(self) -> int:
        return self.processes // self.nodes

    @property
    def has_sites_of_one_kind(self) -> bool:
        """Whether each site has GPUs of one kind, as many as every other, as SYNC=diloco needs them."""
        each = self.processes // self.sites
        return all(count % each == 0 for count, _ in self.cards)

    def all_of(self, card: GpuSpec) -> "Fleet":
        """The same with every GPU of one kind."""
        return dataclasses.replace(self, cards=((self.processes, card),))

    @property
    def smallest(self) -> GpuSpec:
        """The card with the least memory. Not for CPUs."""
        return min((card for _, card in self.cards), key=lambda card: card.memory_gib)

    @property
    def text(self) -> str:
        """'8 x a100-80gb-sxm', '4 x a6000 and 4 x t4', '2 processes on CPU'"""
        if self.on_cpu:
            return (
                "1 process on CPU" if self.processes == 1 else f"{self.processes} processes on CPU"
            )
        *others, last = (f"{count} x {card.key}" for count, card in self.cards)
        return f"{', '.join(others)} and {last}" if others else last


def fleet_of(c: Config, here: tuple[str, ...] | None = None) -> Fleet:
    """What CARDS says, else the GPUs of this machine, else its processors. Raises SettingsError.

    here: the names of this machine's GPUs; None has nvidia-smi asked.
    """
    if c.cards == CPU and c.device == "cuda":
        raise SettingsError(
            [
                "CARDS=cpu and DEVICE=cuda are two plans; set DEVICE=cpu for one on processors, or "
                "another CARDS, for example CARDS=8xa100-80gb-sxm"
            ]
        )
    if c.cards == CPU or (c.cards in ("", "here") and c.device == CPU):
        return on_cpu(c)
    if c.cards in ("", "here"):
        return of_this_machine(c, gpus_here() if here is None else here)
    if c.device == CPU:
        raise SettingsError(
            [
                f"CARDS={c.cards} and DEVICE=cpu are two plans; set CARDS=cpu for one on processors, or "
                "DEVICE=cuda for one on those cards"
            ]
        )
    return of_cards(c)


def on_cpu(c: Config) -> Fleet:
    return spread(c, {}, c.nodes * (c.nproc or 1), [])


def of_cards(c: Config) -> Fleet:
    """Those that CARDS lists, spread evenly over the nodes, a process each."""
    counts: dict[str, int] = {}
    for part in c.cards.split(","):
        number, key = part.split("x", 1)
        counts[key] = counts.get(key, 0) + int(number)
    processes, problems = sum(counts.values()), []
    if unknown := [key for key in counts if key not in load_gpu_specs()]:
        nearest = [guess for key in unknown for guess in meant(key)]
        question = f"did you mean {' or '.join(dict.fromkeys(nearest))}? " if nearest else ""
        others = [key for key in keys() if key not in nearest]
        problems.append(
            f"CARDS={c.cards}: unknown GPU {' and '.join(unknown)}; {question}known are "
            f"{', '.join(others)}; add another to hardware/gpus.toml"
        )
    if processes % c.nodes:
        problems.append(
            f"CARDS={c.cards}: {plural(processes, 'card')} cannot be spread evenly over NODES={c.nodes}; "
            f"set NODES={divisor(processes, c.nodes)}, or CARDS with a multiple of {c.nodes}"
        )
    elif c.nproc not in (None, processes // c.nodes):
        of_each = f" on each of NODES={c.nodes}" if c.nodes > 1 else ""
        problems.append(
            f"NPROC={c.nproc}: CARDS={c.cards} is {plural(processes // c.nodes, 'card')}{of_each}, with a "
            f"process each; leave NPROC out, or set NPROC={processes // c.nodes} or other CARDS"
        )
    return spread(c, counts, processes, problems)


def of_this_machine(c: Config, names: tuple[str, ...]) -> Fleet:
    """The GPUs that a run on this machine takes, NODES times over; its processors where there are none."""
    if not names and c.device != "cuda":
        return on_cpu(c)
    used, problems = names[: c.nproc] if c.nproc else names, []
    if not names:
        problems.append(
            "CARDS: there is no GPU here (nvidia-smi lists none), and DEVICE=cuda: say which to plan for, "
            f"for example CARDS=8xa100-80gb-sxm; there are {', '.join(keys())}"
        )
    elif c.nproc and c.nproc > len(names):
        problems.append(
            f"NPROC={c.nproc}: {plural(len(names), 'GPU')} here; set NPROC={len(names)}, or CARDS for "
            "another machine, for example CARDS=8xa100-80gb-sxm"
        )
    counts: dict[str, int] = {}
    for name in used:
        key = card.key if (card := find_gpu(name)) else ""
        counts[key] = counts.get(key, 0) + c.nodes
    if unknown := dict.fromkeys(name for name in used if find_gpu(name) is None):
        problems.append(
            f"CARDS: this machine has an unknown GPU, {' and '.join(unknown)}: name the nearest one, for example "
            f"CARDS={len(used) * c.nodes}x{akin(next(iter(unknown)))}; known are {', '.join(keys())}; add "
            "another to hardware/gpus.toml"
        )
    return spread(c, counts, len(used) * c.nodes, problems)


def spread(c: Config, counts: dict[str, int], processes: int, problems: list[str]) -> Fleet:
    """The fleet of so many cards by key, over nodes and sites. Raises SettingsError where there are problems."""
    if c.nodes % c.sites:
        problems = [
            *problems,
            f"SITES={c.sites}: NODES={c.nodes} cannot be spread evenly over them; set SITES="
            f"{divisor(c.nodes, c.sites)}, or NODES={-(-c.nodes // c.sites) * c.sites}",
        ]
    if problems:
        raise SettingsError(problems)
    cards = tuple(
        (counts[card.key], card) for card in load_gpu_specs().values() if card.key in counts
    )
    fleet = Fleet(cards, processes, c.nodes, c.sites)
    if c.sync == "diloco" and not fleet.has_sites_of_one_kind:
        sites = processes // math.gcd(*counts.values())
        raise SettingsError(
            [
                f"SITES={c.sites}: each site of SYNC=diloco needs GPUs of one kind, as many as every other, and "
                f"there are {fleet.text}; set SITES={sites} NODES={sites}"
            ]
        )
    return fleet


# ---------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------


def keys() -> list[str]:
    return list(load_gpu_specs())


def meant(key: str) -> list[str]:
    """Which cards begin so, as with a100, or else which one is spelt alike."""
    alike = [known for known in keys() if known.startswith(key)]
    return alike or [guess for guess in [find_nearest(key, keys())] if guess]


def akin(name: str) -> str:
    """The key of the card whose name is the most alike, as an example."""
    names = [name for spec in load_gpu_specs().values() for name in spec.names]
    nearest = find_gpu(find_nearest(name.removeprefix("NVIDIA "), names, similarity=0.75) or "")
    return nearest.key if nearest else "rtx4090"


def divisor(number: int, most: int) -> int:
    """The largest number up to `most` that divides another."""
    return max(n for n in range(1, most + 1) if number % n == 0)


def plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---------------------------------------------------------------------------------------------------
# This machine
# ---------------------------------------------------------------------------------------------------


def gpus_here() -> tuple[str, ...]:
    """The names of the GPUs that a process started here sees, as torch has them; none where there is no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return visible_names(done.stdout, visible_gpus()) if done.returncode == 0 else ()


def visible_names(listing: str, visible: list[str] | None) -> tuple[str, ...]:
    """Names by what nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves of it: indices, or the beginnings of UUIDs.

        GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5a5b...)
          MIG 3g.40gb     Device  0: (UUID: MIG-9c0d...)       a slice of the GPU above, which is not there itself

    CUDA takes entries up to the first that is none of its devices.
    """
    gpus: list[tuple[str, str, str]] = []  # name, index, UUID
    for block in re.split(r"^(?=GPU )", listing, flags=re.MULTILINE):
        if whole := re.match(r"GPU (\d+): (.+) \(UUID: ([^)]+)\)", block):
            slices = re.findall(
                r"^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: ([^)]+)\)", block, re.MULTILINE
            )
            gpus += [(f"{whole[2]} MIG {kind}", whole[1], uuid) for kind, uuid in slices] or [
                (whole[2], whole[1], whole[3])
            ]
    if visible is None:
        return tuple(name for name, _, _ in gpus)
    names = []
    for entry in visible:
        chosen = [
            name
            for name, index, uuid in gpus
            if entry == index or (len(entry) > 4 and uuid.startswith(entry))
        ]
        if not chosen:
            break
        names.append(chosen[0])
    return tuple(names)
