"""NVML, the library of the NVIDIA driver: start it, list the GPUs, and name what it returns on failure."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pynvml

from hardware.visible_gpus import visible_gpus

LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
# Asking again does not change these.
PERMANENT = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_DEPRECATED,
)


class Unavailable(Exception):
    """There is no GPU to sample here; the message says why and what would help."""


class Fault(Exception):
    """A reading that failed, with NVML's return code."""

    def __init__(self, code: int):
        self.code = code
        super().__init__(str(pynvml.NVMLError(code)))

    @property
    def is_permanent(self) -> bool:
        return self.code in PERMANENT


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU. A value is None where the driver does not tell it.

    Attributes:
        index: NVML's, as nvidia-smi shows it.
        handle: NVML's; None where even that failed, with `fault`.
        power_limit_w: the limit that is in force, in watts.
        memory_total_gib: in GiB.
        clock_max_mhz: highest clock of the multiprocessors, in MHz.
    """

    index: int
    handle: Any
    fault: Fault | None
    name: str | None = None
    uuid: str | None = None
    power_limit_w: float | None = None
    memory_total_gib: float | None = None
    clock_max_mhz: float | None = None


def start() -> str:
    """Load and start the library, and return the version of the driver. Raises Unavailable."""
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
    """Return the visible GPUs by index, and remarks on them. Raises Unavailable.

    Args:
        visible: indices, UUIDs or beginnings of UUIDs, as in CUDA_VISIBLE_DEVICES; None: all GPUs. CUDA stops at the
            first one that it does not know, and so does this.
    """
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise Unavailable(
            f"the NVIDIA driver does not say how many GPUs there are ({error})"
        ) from None
    here = [read_device(index) for index in range(count)]
    if not here:
        raise Unavailable("the NVIDIA driver knows of no GPU here")
    if visible is None:
        return here, []
    if any(name.startswith("MIG") for name in visible):
        return here, [
            "CUDA_VISIBLE_DEVICES names a slice (MIG): power and temperature are those of whole GPUs"
        ]
    chosen: list[Device] = []
    for name in visible:
        matches = [device for device in here if is_called(device, name)]
        if len(matches) != 1:
            break
        chosen += matches
    if not chosen:
        raise Unavailable(
            f"CUDA_VISIBLE_DEVICES={','.join(visible)} shows none of the {len(here)} GPUs here"
        )
    return sorted(chosen, key=lambda device: device.index), []


def is_called(device: Device, name: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES may call a GPU by this name."""
    if name.startswith("GPU-"):
        return (device.uuid or "").startswith(name)
    return name.isdecimal() and device.index == int(name)


def visible_indices(count: int | None) -> list[int]:
    """Return the indices of the first `count` GPUs that this process may use; [] where NVML knows none."""
    names = visible_gpus()
    if names is not None:
        names = names[:count]
    try:
        start()
        found, _ = devices(names)
    except Unavailable:
        return []
    return [device.index for device in found[:count]]


def read_device(index: int) -> Device:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        return Device(index, None, Fault(error.value))

    def read(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except pynvml.NVMLError:
            return None

    limit_mw = read(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    memory = read(pynvml.nvmlDeviceGetMemoryInfo)
    clock_mhz = read(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
    return Device(
        index,
        handle,
        None,
        read(pynvml.nvmlDeviceGetName),
        read(pynvml.nvmlDeviceGetUUID),
        limit_mw and limit_mw / 1000,
        memory and memory.total / 2**30,
        clock_mhz and float(clock_mhz),
    )
