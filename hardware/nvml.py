"""NVML, the driver's own library: whether it is there, which GPUs it knows, and how it says that something failed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pynvml

LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
# What asking again does not change.
PERMANENT = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
)


class Unavailable(Exception):
    """There is nothing to sample here; the message says why and what would help."""


class Fault(Exception):
    """A reading that could not be had, with NVML's return code."""

    def __init__(self, code: int):
        self.code = code
        super().__init__(str(pynvml.NVMLError(code)))

    @property
    def is_permanent(self) -> bool:
        return self.code in PERMANENT


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU. index: NVML's, as nvidia-smi shows it; handle: None where even that could not be had, for `fault`."""

    index: int
    handle: Any
    fault: Fault | None
    name: str | None
    uuid: str | None
    power_limit_w: float | None
    memory_total_gib: float | None = None
    clock_max_mhz: float | None = None  # of its multiprocessors


def start() -> str:
    """Load the library and start it; returns the driver's version. Raises Unavailable."""
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            raise Unavailable(
                "no NVIDIA driver here (libnvidia-ml.so.1 cannot be loaded), so there is nothing to "
                "sample; in a container, start it with its GPUs, as in docker run --gpus all"
            ) from None
        raise Unavailable(
            f"the NVIDIA driver does not answer ({error}); nvidia-smi shows whether it works"
        ) from None


def devices(visible: list[str] | None) -> tuple[list[Device], list[str]]:
    """(those of the GPUs here that are in CUDA_VISIBLE_DEVICES, what is to be said of that). Raises Unavailable.

    visible: indices, or UUIDs and beginnings of them; None: all. CUDA stops at the first that is none.
    """
    try:
        here = [device(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise Unavailable(
            f"the NVIDIA driver does not say how many GPUs there are ({error})"
        ) from None
    if not here:
        raise Unavailable("the NVIDIA driver knows of no GPU here")
    if visible is None:
        return here, []
    if any(name.startswith("MIG") for name in visible):
        return here, [
            "CUDA_VISIBLE_DEVICES names a slice (MIG): power and temperature are those of whole GPUs"
        ]
    taken: list[Device] = []
    for name in visible:
        found = [
            d
            for d in here
            if (name.isdecimal() and d.index == int(name))
            or (name.startswith("GPU-") and (d.uuid or "").startswith(name))
        ]
        if len(found) != 1:
            break
        taken += found
    if not taken:
        raise Unavailable(
            f"CUDA_VISIBLE_DEVICES={','.join(visible)} shows none of the {len(here)} GPUs here"
        )
    return sorted(taken, key=lambda d: d.index), []


def device(index: int) -> Device:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return Device(index, None, Fault(error.value), None, None, None)
    limit = value_or_none(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return Device(
        index,
        handle,
        None,
        value_or_none(pynvml.nvmlDeviceGetName, handle),
        value_or_none(pynvml.nvmlDeviceGetUUID, handle),
        None if limit is None else limit / 1000,
        value_or_none(lambda of: pynvml.nvmlDeviceGetMemoryInfo(of).total / 2**30, handle),
        value_or_none(
            lambda of: float(pynvml.nvmlDeviceGetMaxClockInfo(of, pynvml.NVML_CLOCK_SM)), handle
        ),
    )


def value_or_none(function: Callable[[Any], Any], handle: Any) -> Any:
    try:
        return function(handle)
    except pynvml.NVMLError:
        return None
