"""GPUs as NVML, the library of the NVIDIA driver, knows them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pynvml
from pynvml import NVMLError

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
    """There is no GPU to read here. The message says why, and what would help."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU. A value is None where the driver does not give it.

    Attributes:
        index: NVML's, as nvidia-smi shows it.
        handle: NVML's; None where even that failed, with `error`.
        power_limit_w: the limit in force, in watts.
        clock_max_mhz: highest clock of the multiprocessors.
    """

    index: int
    handle: Any = None
    error: NVMLError | None = None
    name: str | None = None
    uuid: str | None = None
    power_limit_w: float | None = None
    memory_total_gib: float | None = None
    clock_max_mhz: float | None = None

    def is_called(self, name: str) -> bool:
        """Whether CUDA_VISIBLE_DEVICES may call it so: by its index, or the beginning of its UUID."""
        if name.startswith("GPU-"):
            return (self.uuid or "").startswith(name)
        return name.isdecimal() and self.index == int(name)


def start() -> str:
    """Load the library and return the version of the driver. Raises Unavailable."""
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except NVMLError as error:
        problem = f"the NVIDIA driver does not answer ({error}); nvidia-smi shows whether it works"
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            problem = (
                "no NVIDIA driver here (libnvidia-ml.so.1 cannot be loaded); start a container with "
                "its GPUs, for example docker run --gpus all"
            )
        raise Unavailable(problem) from None


def list_devices(visible: list[str] | None) -> list[Device]:
    """Return the visible GPUs by index. Raises Unavailable.

    Args:
        visible: entries of CUDA_VISIBLE_DEVICES; None for all GPUs. Like CUDA, this stops at the
            first entry that names no GPU. For a slice of a GPU (MIG) all GPUs are returned, since
            NVML does not say whose slice it is.
    """
    try:
        count = pynvml.nvmlDeviceGetCount()
    except NVMLError as error:
        raise Unavailable(f"the NVIDIA driver cannot count its GPUs ({error})") from None
    devices = [read_device(index) for index in range(count)]
    if not devices:
        raise Unavailable("the NVIDIA driver knows of no GPU here")
    if visible is None or any(name.startswith("MIG") for name in visible):
        return devices
    chosen: list[Device] = []
    for name in visible:
        matches = [device for device in devices if device.is_called(name)]
        if len(matches) != 1:
            break
        chosen += matches
    if not chosen:
        raise Unavailable(f"CUDA_VISIBLE_DEVICES shows none of the {count} GPUs here")
    return sorted(chosen, key=lambda device: device.index)


def read_device(index: int) -> Device:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except NVMLError as error:
        return Device(index, error=error)

    def read(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except NVMLError:
            return None

    limit_mw = read(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    memory = read(pynvml.nvmlDeviceGetMemoryInfo)
    clock_mhz = read(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
    return Device(
        index,
        handle,
        name=read(pynvml.nvmlDeviceGetName),
        uuid=read(pynvml.nvmlDeviceGetUUID),
        power_limit_w=limit_mw and limit_mw / 1000,
        memory_total_gib=memory and memory.total / 2**30,
        clock_max_mhz=clock_mhz and float(clock_mhz),
    )
