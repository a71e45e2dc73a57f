"""The GPUs of this machine, by nvidia-smi, and whether the run can use them. No torch: see by_torch.py for its view.

see() -> Seen          what nvidia-smi lists, and what of it CUDA_VISIBLE_DEVICES leaves
gpus, driver, bf16, attention    judge it
"""

import csv
import dataclasses
import importlib.util
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from doctor.installed import Build
from hardware.gpu_specs import find_gpu
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding
from settings.precision import BFLOAT16_FROM, BFLOAT16_UNITS, SMI_S
from settings.visible_gpus import visible_devices, visible_gpus
from train.distributed.pod import exit_code_of_fault

FIELDS = ("index", "name", "uuid", "driver_version", "memory.total", "memory.used", "compute_cap")
DEVICES = ("nvidia[0-9]*", "dxg")  # in /dev: of the driver for Linux, and of Windows' for WSL

# The oldest driver for Linux that runs programs of a CUDA version: NVIDIA's CUDA Compatibility, "Minor Version
# Compatibility", table 1, and the CUDA Toolkit release notes, table 2, to the last digit. uv, by which make setup
# chooses a build, has the same. Packages of forward compatibility can make an older one do on data-centre cards.
DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}

# Which cards torch 2.13's builds for x86 have code for, by compute capability: PyTorch's RELEASE.md, "CUDA Support
# Matrix". CUDA 13 itself knows none before Turing.
CU126 = ((5, 0), (9, 0))
CU130 = ((7, 5), (12, 1))

FA3_ONLY = 9  # Hopper
MINE_MIB = 1024  # in use on a card that no program of note is on: a desktop, or a driver's own


@dataclasses.dataclass(frozen=True)
class Gpu:
    """driver: as NVIDIA writes it; capability: compute capability, None where the driver is too old to tell it;
    memory and what programs have of it in MiB, None where it is not told."""

    name: str
    uuid: str
    driver: str
    capability: tuple[int, int] | None = None
    memory_mib: int | None = None
    used_mib: int | None = None

    @property
    def has_bf16(self) -> bool | None:
        """None where it is not known."""
        if self.capability:
            return self.capability >= BFLOAT16_FROM
        card = find_gpu(self.name)
        return None if card is None else card.bf16_tflops is not None


@dataclasses.dataclass(frozen=True)
class Seen:
    """listed: by nvidia-smi; visible: of them, those that CUDA_VISIBLE_DEVICES leaves; hidden_by: its value, where it
    leaves less. problem: what nvidia-smi said instead of a list; "" also where there is no nvidia-smi. devices:
    whether /dev has any all the same."""

    listed: tuple[Gpu, ...] = ()
    visible: tuple[Gpu, ...] = ()
    hidden_by: str | None = None
    problem: str = ""
    devices: bool = False


# ---------------------------------------------------------------------------------------------------
# Gathered
# ---------------------------------------------------------------------------------------------------


def see() -> Seen:
    listed, problem = by_smi()
    wanted = visible_gpus()
    visible = chosen(listed, wanted)
    devices = any(any(Path("/dev").glob(pattern)) for pattern in DEVICES)
    return Seen(
        listed,
        visible,
        visible_devices() if len(visible) < len(listed) else None,
        problem,
        devices,
    )


def by_smi() -> tuple[tuple[Gpu, ...], str]:
    """(the GPUs that nvidia-smi lists, what else it said where it failed)."""
    listed: tuple[Gpu, ...] = ()
    said = ""
    for fields in (
        FIELDS,
        FIELDS[:-1],
    ):  # a driver before 510 does not know compute_cap, and says nothing at all
        try:
            done = subprocess.run(
                ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SMI_S,
                check=False,
            )
        except FileNotFoundError:
            return (), ""
        except (OSError, subprocess.TimeoutExpired) as error:
            return (), (
                f"nvidia-smi does not answer within {SMI_S:.0f} s"
                if not isinstance(error, OSError)
                else f"nvidia-smi cannot be started ({error.strerror})"
            )
        listed, others = parse(done.stdout)
        if done.returncode == 0 and not others:
            return listed, ""
        said = (
            " ".join([*others, done.stderr.strip()]).strip()
            or f"nvidia-smi ends with code {done.returncode}"
        )
        if "compute_cap" not in said:
            break
    return listed, " ".join(said.split())[:300]


def parse(text: str) -> tuple[tuple[Gpu, ...], list[str]]:
    """The GPUs of nvidia-smi's table, and lines that are none of it."""
    listed, others = [], []
    for line, row in zip(
        text.splitlines(), csv.reader(text.splitlines(), skipinitialspace=True), strict=True
    ):
        if len(row) not in (len(FIELDS), len(FIELDS) - 1) or not row[0].isdigit():
            others += [line.strip()] if line.strip() else []
            continue
        _, name, uuid, driver, total, used, *rest = (value.strip() for value in row)
        found = re.fullmatch(r"(\d+)\.(\d+)", rest[0]) if rest else None
        listed.append(
            Gpu(
                name,
                uuid,
                driver,
                (int(found[1]), int(found[2])) if found else None,
                int(total) if total.isdigit() else None,
                int(used) if used.isdigit() else None,
            )
        )
    return tuple(listed), others


def chosen(listed: Sequence[Gpu], wanted: Sequence[str] | None) -> tuple[Gpu, ...]:
    """Those that CUDA would use: indices, beginnings of UUIDs, or slices of cards (MIG), up to the first that names
    none (CUDA C++ Programming Guide, "CUDA Environment Variables"). None: all."""
    if wanted is None:
        return tuple(listed)
    found: list[Gpu] = []
    for name in wanted:
        if re.fullmatch("[0-9]+", name):
            these = list(listed[int(name) : int(name) + 1])
        elif name.startswith("MIG-") and listed:  # of which card only another question would tell
            these = [
                dataclasses.replace(
                    listed[0],
                    name=f"{listed[0].name} MIG",
                    uuid=name,
                    memory_mib=None,
                    used_mib=None,
                )
            ]
        else:
            these = [gpu for gpu in listed if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if len(these) != 1:
            break
        found += these
    return tuple(found)


def processes_of(c: Config, seen: Seen) -> int:
    """How many the launcher would start on this machine."""
    return c.nproc or (len(seen.visible) if c.device != "cpu" else 0) or 1


def uses_gpus(c: Config, seen: Seen) -> bool:
    """Whether the run is one for GPUs, be they there or not."""
    return c.device == "cuda" or (c.device == "auto" and bool(seen.visible))


# ---------------------------------------------------------------------------------------------------
# Judged
# ---------------------------------------------------------------------------------------------------


def gpus(c: Config, seen: Seen) -> list[Finding]:
    """Whether there are as many as the run wants, which, and whether others use them."""
    if c.device == "cpu":
        there = f"; the {count_of(seen.visible)} here stay unused" if seen.visible else ""
        return [Finding("gpus", PASS, f"DEVICE=cpu: none is needed{there}")]
    if not seen.visible:
        return [without(c, seen)]
    found = []
    if c.nproc and c.nproc > len(seen.visible):
        found.append(
            Finding(
                "gpus",
                FAIL,
                f"NPROC={c.nproc}: only {count_of(seen.visible)} can be used here" + hidden(seen),
                f"set NPROC={len(seen.visible)}",
                exit_code_of_fault("gpus"),
            )
        )
    elif seen.problem:
        found.append(
            Finding(
                "gpus",
                WARN,
                f"{names_of(seen.visible)}, but nvidia-smi also says: {seen.problem}",
                "look at dmesg; a card that fell off its bus comes back with a reboot",
            )
        )
    else:
        found.append(Finding("gpus", PASS, names_of(seen.visible) + hidden(seen)))
    taken = seen.visible[: processes_of(c, seen)]
    if len({gpu.name for gpu in taken}) > 1:
        found.append(
            Finding(
                "gpu-mix",
                WARN,
                f"{names_of(taken)}: every step waits for the slowest",
                "choose with CUDA_VISIBLE_DEVICES",
            )
        )
    if unknown := sorted({gpu.name for gpu in taken if find_gpu(gpu.name) is None}):
        found.append(
            Finding(
                "gpu-card",
                WARN,
                f"nothing is known of {' and '.join(unknown)}: the log has no MFU, and "
                "make plan no speed",
                "plan with the CARDS that come nearest, or add an entry to hardware/gpus.toml",
            )
        )
    if busy := [(i, gpu) for i, gpu in enumerate(taken) if (gpu.used_mib or 0) > MINE_MIB]:
        shown = ", ".join(f"{used_of(gpu)} of card {i}" for i, gpu in busy[:8])
        found.append(
            Finding(
                "gpu-memory",
                WARN,
                f"other programs hold {shown}",
                "nvidia-smi lists them; end those "
                "that are yours, or choose other cards with CUDA_VISIBLE_DEVICES",
            )
        )
    return found


def without(c: Config, seen: Seen) -> Finding:
    """No GPU can be used: an error only where one is asked for."""
    is_asked = c.device == "cuda"
    head = "DEVICE=cuda: there is no GPU here" if is_asked else "no GPU can be used here"
    if seen.listed:
        why = f"CUDA_VISIBLE_DEVICES={seen.hidden_by} hides the {count_of(seen.listed)} of this machine"
        if not is_asked:  # somebody wanted that
            return Finding("gpus", PASS, f"{why}; the run takes the CPU")
        text = f"{head} ({why})"
        fix = "unset CUDA_VISIBLE_DEVICES, or choose DEVICE=cpu"
    elif seen.problem:
        text = f"{head} (nvidia-smi says: {seen.problem})"
        fix = (
            "reload the driver or reboot; in a container, start it with the GPUs "
            "(docker run --gpus all), or choose DEVICE=cpu"
        )
    elif seen.devices:
        text = f"{head} (there is no nvidia-smi, though /dev has NVIDIA's devices)"
        fix = (
            "install the driver's tools; in a container set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    elif not is_asked:
        return Finding("gpus", PASS, "none here; the run takes the CPU")
    else:
        text = "No GPU found (nvidia-smi lists none). DEVICE=cuda, which presets for GPUs set, needs one"
        fix = "On a CPU, use PRESET=tiny, or DEVICE=cpu"
    return Finding("gpus", FAIL if is_asked else WARN, text, fix, exit_code_of_fault("gpus"))


def driver(c: Config, seen: Seen, build: Build) -> Finding | None:
    """Whether torch's build can use these cards with this driver; None where no card is wanted or there is no torch."""
    if not uses_gpus(c, seen) or not seen.visible or build.version is None:
        return None
    level = FAIL if c.device == "cuda" else WARN  # auto would train on the CPU
    has = seen.visible[0].driver
    fits = backend(seen.visible)
    fix = f"make setup TORCH_BACKEND={fits}" if fits else no_backend(seen.visible)
    if build.cuda is None:
        return Finding(
            "driver",
            level,
            f"torch {build.version} uses no GPU, and this machine has "
            f"{count_of(seen.visible)} (driver {has})",
            fix,
        )
    major = build.cuda[0]
    said = f"torch {build.version}, for CUDA {major}.{build.cuda[1]}"
    if major not in DRIVERS:
        return Finding("driver", PASS, f"driver {has}; which one {said} needs is not known here")
    if numbers(has) < DRIVERS[major]:
        return Finding(
            "driver",
            level,
            f"driver {has} is too old for {said}, which needs {dotted(DRIVERS[major])}",
            fix,
            exit_code_of_fault("driver"),
        )
    without_code = [
        gpu for gpu in seen.visible if gpu.capability and not covers(build.cuda, gpu.capability)
    ]
    if without_code:
        gpu = without_code[0]
        return Finding(
            "driver",
            FAIL,
            f"{said} has no code for {gpu.name} (compute capability "
            f"{dotted(gpu.capability or ())})",
            fix,
        )
    return Finding("driver", PASS, f"driver {has} fits {said} ({dotted(DRIVERS[major])} or later)")


def covers(cuda: tuple[int, int], capability: tuple[int, int]) -> bool:
    """Whether torch's build for that CUDA has code for a card; True where that is not known."""
    if cuda[0] >= 13:
        return capability >= CU130[0]
    return capability < (10, 0) or cuda >= (12, 8)


def backend(cards: Sequence[Gpu]) -> str | None:
    """The TORCH_BACKEND for these cards and their driver; None where there is none."""
    has = numbers(cards[0].driver)
    known = [gpu.capability for gpu in cards if gpu.capability]
    for name, major, (first, last) in (("cu130", 13, CU130), ("cu126", 12, CU126)):
        if has >= DRIVERS[major] and all(first <= capability <= last for capability in known):
            return name
    return None


def no_backend(cards: Sequence[Gpu]) -> str:
    """What to do where no build fits."""
    known = [gpu.capability for gpu in cards if gpu.capability]
    if known and min(known) < CU130[0] and max(known) > CU126[1]:
        return "no build has code for all of these cards: choose some with CUDA_VISIBLE_DEVICES"
    major = 13 if known and max(known) > CU126[1] else 12
    return (
        f"install driver {dotted(DRIVERS[major])} or later, then make setup "
        f"TORCH_BACKEND={'cu130' if major == 13 else 'cu126'}"
    )


def bf16(c: Config, seen: Seen, cpu_flags: frozenset[str] | None) -> Finding | None:
    """Whether what computes has units for DTYPE=bfloat16; None in float32, or where there is nothing to tell.

    cpu_flags: what /proc/cpuinfo says the processor can; None where there is none.
    """
    if c.dtype != "bfloat16":
        return None
    if uses_gpus(c, seen) and seen.visible:
        taken = seen.visible[: processes_of(c, seen)]
        if lacking := sorted({gpu.name for gpu in taken if gpu.has_bf16 is False}):
            return Finding(
                "bf16",
                FAIL,
                f"DTYPE=bfloat16: {' and '.join(lacking)} has no bfloat16 units",
                "set DTYPE=float32",
                64,
            )
        if unknown := sorted({gpu.name for gpu in taken if gpu.has_bf16 is None}):
            return Finding(
                "bf16",
                WARN,
                f"DTYPE=bfloat16: it is not known whether {' and '.join(unknown)} has "
                "bfloat16 units",
                "set DTYPE=float32 for a card before Ampere",
            )
        return Finding("bf16", PASS, f"{taken[0].name} has bfloat16 units")
    if c.device == "cuda" or cpu_flags is None:
        return None
    if units := sorted(cpu_flags & BFLOAT16_UNITS):
        return Finding("bf16", PASS, f"the processor has {' and '.join(units)}")
    # Products of 1024 x 1024 at 0.6 of float32's rate without them, 0.02 without AVX-512, 4.3 with them: on one
    # machine, with ONEDNN_MAX_CPU_ISA
    return Finding(
        "bf16",
        WARN,
        "DTYPE=bfloat16: the processor has no units for it (amx_bf16, avx512_bf16), and torch "
        "emulates it, which is slower than float32",
        "set DTYPE=float32",
    )


def attention(c: Config, seen: Seen) -> Finding | None:
    """Whether the kernel that ATTENTION asks for by name can be there; None where it asks for none of these."""
    if c.attention not in ("fa3", "flash-attn"):
        return None
    if problem := find_attention_problem(c, seen):
        fix = "set ATTENTION=auto or sdpa"
        return Finding("attention", FAIL, f"ATTENTION={c.attention}: {problem}", fix, 64)
    return Finding("attention", PASS, f"ATTENTION={c.attention} is installed")


def find_attention_problem(c: Config, seen: Seen) -> str:
    """Say why a FlashAttention kernel cannot run here, or return nothing."""
    if not seen.visible:
        return "it runs on NVIDIA GPUs only, and there is none here"
    wants, module = {
        "fa3": ("Hopper", "flash_attn_interface"),
        "flash-attn": ("Ampere or later", "flash_attn"),
    }[c.attention]
    for gpu in seen.visible[: processes_of(c, seen)]:
        if gpu.capability and (
            gpu.capability[0] != FA3_ONLY
            if c.attention == "fa3"
            else gpu.capability < BFLOAT16_FROM
        ):
            return f"{gpu.name} is no {wants} card"
    if importlib.util.find_spec(module) is None:
        return f"the package with the module {module} is not installed"
    return ""


def nvml(seen: Seen) -> Finding | None:
    """Whether the library loads by which GPUs are sampled; None where there is none to sample. Loads it."""
    if not seen.listed:
        return None
    lost = "power and use of the GPUs are not recorded"
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except ImportError:
        return Finding("nvml", WARN, f"nvidia-ml-py is not installed: {lost}", "make setup")
    except pynvml.NVMLError as error:
        return Finding(
            "nvml",
            WARN,
            f"NVML does not start ({error}): {lost}",
            "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    return Finding("nvml", PASS, f"NVML tells of {count} {'GPU' if count == 1 else 'GPUs'}")


# ---------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------


def numbers(version: str) -> tuple[int, ...]:
    """'550.90.07' -> (550, 90, 7)"""
    return tuple(int(part) for part in re.findall("[0-9]+", version))


def dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def count_of(cards: Sequence[Gpu]) -> str:
    return "1 GPU" if len(cards) == 1 else f"{len(cards)} GPUs"


def names_of(cards: Sequence[Gpu]) -> str:
    """'2 x NVIDIA A100-SXM4-80GB and 1 x NVIDIA L4'"""
    counts: dict[str, int] = {}
    for gpu in cards:
        counts[gpu.name] = counts.get(gpu.name, 0) + 1
    return " and ".join(f"{count} x {name}" for name, count in counts.items())


def hidden(seen: Seen) -> str:
    if seen.hidden_by is None:
        return ""
    return f" (CUDA_VISIBLE_DEVICES={seen.hidden_by}, of {len(seen.listed)})"


def used_of(gpu: Gpu) -> str:
    used = f"{(gpu.used_mib or 0) / 1024:.1f}"
    return f"{used} GiB" if gpu.memory_mib is None else f"{used} of {gpu.memory_mib / 1024:.0f} GiB"
