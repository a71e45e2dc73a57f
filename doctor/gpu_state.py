"""What a GPU is held back by, from nvidia-smi: asked before its products are measured, and while they are."""

import dataclasses
import subprocess

# Bits of clocks_throttle_reasons.active, as nvml.h has them (nvmlClocksThrottleReason...).
REASONS = {
    0x4: "its power limit",
    0x8: "a hardware slow-down (power or heat)",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "the power supply (power brake)",
    0x2: "application clocks that were set (nvidia-smi -rac resets them)",
}
FIELDS = {
    "memory.used": "memory_mib",
    "utilization.gpu": "busy_percent",
    "power.draw": "watts",
    "power.limit": "limit_watts",
    "power.default_limit": "default_watts",
    "clocks.sm": "mhz",
    "clocks.max.sm": "most_mhz",
    "temperature.gpu": "celsius",
}
ALONE_MIB = 1024  # what a GPU that nobody uses may show, drivers and displays included


@dataclasses.dataclass(frozen=True)
class State:
    """Of one GPU; None is what nvidia-smi does not say."""

    reasons: int | None
    memory_mib: float | None
    busy_percent: float | None
    watts: float | None
    limit_watts: float | None
    default_watts: float | None
    mhz: float | None
    most_mhz: float | None
    celsius: float | None


def states() -> dict[str, State]:
    """uuid -> state of each GPU; empty where nvidia-smi is not there or does not answer."""
    try:
        done = subprocess.run(
            [
                "nvidia-smi",
                "--format=csv,noheader,nounits",
                "--query-gpu=uuid,clocks_throttle_reasons.active," + ",".join(FIELDS),
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        uuid, reasons, *values = (part.strip() for part in line.split(","))
        if len(values) == len(FIELDS):
            found[uuid.removeprefix("GPU-")] = State(
                int(reasons, 16) if reasons.startswith("0x") else None,
                **dict(zip(FIELDS.values(), map(number, values), strict=True)),
            )
    return found


def number(text: str) -> float | None:
    """None for '[N/A]' and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def causes(before: State | None, busy: State | None) -> list[str]:
    """What may make a GPU slow, likeliest first."""
    found = []
    if before and ((before.memory_mib or 0) > ALONE_MIB or (before.busy_percent or 0) > 10):
        found.append(
            f"another process was on it before ({before.memory_mib or 0:.0f} MiB in use, "
            f"{before.busy_percent or 0:.0f}% busy)"
        )
    if busy is None:
        return found
    if busy.limit_watts and busy.default_watts and busy.limit_watts < 0.98 * busy.default_watts:
        found.append(
            f"its power is capped at {busy.limit_watts:.0f} W, of {busy.default_watts:.0f} W"
        )
    if named := [name for bit, name in REASONS.items() if busy.reasons and busy.reasons & bit]:
        clock = (
            f" at {busy.mhz:.0f} of {busy.most_mhz:.0f} MHz" if busy.mhz and busy.most_mhz else ""
        )
        warm = f", {busy.celsius:.0f} degrees" if busy.celsius else ""
        drawn = f", {busy.watts:.0f} W" if busy.watts else ""
        found.append(f"held back{clock} by {' and '.join(named)}{drawn}{warm}")
    return found
