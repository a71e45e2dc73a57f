"""What `PROBE=1` measured, in words: beside the card's data sheet, what others reach, and what the run asks for."""

import statistics
from collections.abc import Iterator

from doctor import gpu_state
from doctor.probing import NO_ROOM, Measured
from hardware.flops import mfu
from hardware.gpu_specs import GpuSpec, find_gpu
from hardware.model_size import flops_of
from plan.measured import cpu_name
from plan.storage import checkpoint_bytes
from record import number_formats
from settings.config import Config
from settings.finding import PASS, WARN, Finding

# What products of bfloat16 were seen to reach on cards of the same peak, TFLOP/s: the best over many shapes, by
# ml-engineering (Bekman), compute/accelerator, 2024: A100 SXM 271 of 312, H100 and H200 SXM 794.5 of 989.
REACHED = {312.0: 271.0, 989.0: 794.5}
REACHED_BY_OTHERS = 0.8  # of the peak of other cards, the least of these two
LEAST = 0.7  # of what others reach
LEAST_OF_LINKS = 0.5  # of a link's data sheet
SLOW = 0.9  # of the median of the same machine's cards
FOREIGN = 10.0  # per cent of a CPU that others may take while it is measured


def findings(c: Config, found: Measured) -> list[Finding]:
    """A line for each part. c: the settings as they are; found: what was measured for them."""
    said = [*products(found), *memory(found), *disk(c, found), *links(c, found), *step(c, found)]
    if found.foreign_percent is not None and found.foreign_percent > FOREIGN:
        said.append(
            Finding(
                "probe-alone",
                WARN,
                f"other processes took {found.foreign_percent:.0f}% of the processors "
                "meanwhile, and these figures are too low",
                "measure again when the machine is quiet",
            )
        )
    return said


def figure(value: float) -> str:
    """Three digits: '0.144', '14.2', '702'."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def card_here(found: Measured) -> GpuSpec | None:
    return find_gpu(found.names[0]) if found.on_gpu else None


def unmeasured(found: Measured, part: str, name: str, fix: str = "") -> Finding:
    return Finding(name, WARN, f"not measured: {found.notes.get(part, 'nothing came of it')}", fix)


# ---------------------------------------------------------------------------------------------------
# Products and memory
# ---------------------------------------------------------------------------------------------------


def products(found: Measured) -> Iterator[Finding]:
    if not found.matmul:
        yield unmeasured(
            found, "ceilings", "probe-matmul", "measure again; make doctor looks at GPUs and torch"
        )
        return
    device = found.names[0] if found.on_gpu else cpu_name()
    if not found.on_gpu and found.processes > 1:
        device += f", {found.threads} in each of {found.processes} processes"
    card, told, slow = card_here(found), [], False
    for kind, rates in found.matmul.items():
        rate, beside = min(rates) if found.on_gpu else sum(rates), ""
        if card and (peak := card.peak(kind)):
            beside = f", {100 * rate / peak:.0f}% of {peak:g}"
            if kind == "bfloat16":
                reached = REACHED.get(peak, REACHED_BY_OTHERS * peak)
                slow = rate < LEAST * reached
                beside += f" (others reach {reached:g})" if peak in REACHED else ""
        told.append(f"{figure(rate)} TFLOP/s in {kind}{beside}")
    if found.on_gpu and "bfloat16" not in found.matmul:
        told.append("no bfloat16 units: DTYPE=float32")
    several = f", the slowest of {found.processes}" if found.on_gpu and found.processes > 1 else ""
    text = f"{device}{several}: {'; '.join(told)}"
    worst = min(range(found.processes), key=lambda i: list(found.matmul.values())[-1][i])
    if slow:
        yield Finding(
            "probe-matmul",
            WARN,
            f"{text}; {why(found, worst)}",
            "nvidia-smi -q -d PERFORMANCE,POWER says more",
        )
    else:
        yield Finding("probe-matmul", PASS, text)
    if found.on_gpu:
        yield from uneven(found)


def uneven(found: Measured) -> Iterator[Finding]:
    """The cards that are slower than others of their kind beside them: each step waits for them."""
    kind, rates = list(found.matmul.items())[-1]
    for i, rate in enumerate(rates):
        alike = [
            other for other, name in zip(rates, found.names, strict=True) if name == found.names[i]
        ]
        if rate < SLOW * statistics.median(alike):
            yield Finding(
                "probe-slow-gpu",
                WARN,
                f"GPU {i} ({found.uuids[i]}) does {figure(rate)} TFLOP/s in {kind}, "
                f"and the others {figure(statistics.median(alike))}; {why(found, i)}",
                "each step waits for it: leave it out (CUDA_VISIBLE_DEVICES), or have it looked at",
            )


def why(found: Measured, i: int) -> str:
    """The likely cause of a slow GPU."""
    uuid = found.uuids[i] if found.uuids else ""
    return (
        "; ".join(gpu_state.causes(found.before.get(uuid), found.busy.get(uuid)))
        or "nvidia-smi names no cause (power limit, clocks, heat, another process on it)"
    )


def memory(found: Measured) -> Iterator[Finding]:
    if not found.memory:
        if found.matmul:  # else it was said with the products
            yield unmeasured(found, "ceilings", "probe-memory")
        return
    rate, card = (min if found.on_gpu else sum)(found.memory), card_here(found)
    beside = f", {100 * rate / card.bandwidth_gb_s:.0f}% of {card.bandwidth_gb_s:g}" if card else ""
    text = f"{figure(rate)} GB/s, two arrays read and one written (STREAM's triad){beside}"
    if card and rate < LEAST * card.bandwidth_gb_s:
        yield Finding(
            "probe-memory",
            WARN,
            f"{text}; {why(found, found.memory.index(rate))}",
            "nvidia-smi -q -d CLOCK,ECC says more",
        )
    else:
        yield Finding("probe-memory", PASS, text)


# ---------------------------------------------------------------------------------------------------
# Disk and links
# ---------------------------------------------------------------------------------------------------


def disk(c: Config, found: Measured) -> Iterator[Finding]:
    if found.disk is None:
        yield unmeasured(found, "disk", "probe-disk", "another place: RUNS_DIR")
        return
    write, read, size = found.disk["write_mb_s"], found.disk["read_mb_s"], checkpoint_bytes(c)
    back = (
        f"read back at {figure(read)}"
        if read
        else "not measured reading, since the system keeps in memory what it was told to forget"
    )
    save_s, allowed_s = size / write / 1e6, 60 * c.save_minutes / 10
    text = (
        f"RUNS_DIR={c.runs_dir}: {number_formats.size(found.disk['bytes'])} written at {figure(write)} MB/s (with fsync), {back}; a "
        f"checkpoint of {number_formats.size(size)} would take {figure(save_s)} s (computed)"
    )
    if save_s > allowed_s:
        minutes = -(-10 * save_s // 60)
        yield Finding(
            "probe-disk",
            WARN,
            f"{text}, more than a tenth of SAVE_MINUTES={c.save_minutes:g}",
            f"a faster disk (RUNS_DIR), or SAVE_MINUTES={minutes:.0f}",
        )
    else:
        yield Finding("probe-disk", PASS, text)


def links(c: Config, found: Measured) -> Iterator[Finding]:
    if found.processes < 2:
        return
    if found.link is None:
        yield unmeasured(found, "ceilings", "probe-link")
        return
    bus, card = found.link["bus_gb_s"], card_here(found)
    beside = f", {100 * bus / card.link_gb_s:.0f}% of {card.link_gb_s:g}" if card else ""
    text = (
        f"{figure(bus)} GB/s between {found.processes} processes{beside} (an all-reduce of "
        f"{number_formats.size(found.link['bytes'])}, bus bandwidth), {figure(found.link['latency_us'])} microseconds for a number"
    )
    if card and bus < LEAST_OF_LINKS * card.link_gb_s:
        yield Finding(
            "probe-link",
            WARN,
            text,
            "nvidia-smi topo -m shows how cards are joined; without NVLink it is "
            "PCIe or host memory, and P2P may be off (docs/nccl.md)",
        )
    else:
        yield Finding("probe-link", PASS, text)


# ---------------------------------------------------------------------------------------------------
# A step
# ---------------------------------------------------------------------------------------------------


def step(c: Config, found: Measured) -> Iterator[Finding]:
    name, here = "probe-step", found.c
    if found.step is None:
        yield unmeasured(
            found,
            "step",
            name,
            "a smaller model, ACTIVATION_CHECKPOINTING or PARALLEL=fsdp"
            if found.notes.get("step", "").startswith(NO_ROOM)
            else "",
        )
        return
    s, card = found.step, card_here(found)
    used = (
        mfu(s["tokens_per_s"], flops_of(here), found.processes, card.peak(here.dtype))
        if card
        else None
    )
    if card is None and (rates := found.matmul.get(here.dtype)):
        share = f", {100 * s['tokens_per_s'] * flops_of(here) / (sum(rates) * 1e12):.0f}% of the products above"
    else:
        share = "" if used is None else f", MFU {used:.1f}%"
    how = f"{s['rounds']} steps" if s["rounds"] > 1 else "1 step"
    if s["composed"]:
        how = "composed of the first micro-batch with the update, and the others"
    text = (
        f"{figure(s['tokens_per_s']) if s['tokens_per_s'] < 100 else round(s['tokens_per_s'])} tokens/s"
        f"{' of this machine alone' if c.nodes > 1 else ''}{share}, {s['peak_gib']:.2f} GiB at the peak of a "
        f"process: {1000 * s['step_s']:.0f} ms for {s['micro_batches']} x {s['micro_batch']} sequences a process "
        f"({how}; {'compiled' if s['compiled'] else 'not compiled'}, attention={s['attention']})"
    )
    if "smaller" in found.notes:
        yield Finding(
            name,
            WARN,
            f"{text}; with more at a time: {found.notes['smaller']}",
            f"MICRO_BATCH_SIZE={s['micro_batch']}"
            if found.notes["smaller"].startswith(NO_ROOM)
            else "",
        )
    else:
        yield Finding(name, PASS, text)
