"""Whether the GPUs of this machine can train, as their driver knows it (NVML).

    python -m hardware.gpu_health COUNT     prints what is wrong, or "well" if COUNT GPUs are

It takes a fraction of a second. It is a process of its own, since a driver may hang, or end it.
"""

import sys
from collections.abc import Callable
from typing import Any

import pynvml
from pynvml import NVMLError

from hardware import nvml
from settings.visible_gpus import visible_gpus


def find_problem(count: int) -> str:
    """Return what is wrong with the GPUs that CUDA would use; "" if at least `count` are there and well."""
    try:
        nvml.start()
        devices = nvml.list_devices(visible_gpus())
    except nvml.Unavailable as error:
        return str(error)
    for device in devices:
        problem = describe_fault(device)
        if problem:
            return f"GPU {device.index} ({device.uuid or 'of unknown UUID'}) {problem}"
    if len(devices) < count:
        return f"{len(devices)} of {count} GPUs are there"
    return ""


def describe_fault(device: nvml.Device) -> str:
    """Return what is wrong with a GPU, or "". Skips what it does not report, such as ECC on desktop cards."""
    if device.handle is None:
        return f"does not answer ({device.error})"

    def read(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(device.handle, *arguments)
        except NVMLError as error:
            if error.value in nvml.LOST:
                raise
            return None

    try:
        errors = read(
            pynvml.nvmlDeviceGetTotalEccErrors,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )
        remapped = read(pynvml.nvmlDeviceGetRemappedRows)
    except NVMLError as error:
        return f"is lost or needs a reset ({error})"
    if errors:
        return f"has {errors} uncorrected memory errors (ECC) since its driver was loaded"
    if remapped:
        _, _, is_pending, has_failed = remapped
        if has_failed:
            return "has failed to replace rows of its memory"
        if is_pending:
            return "needs a reset, to replace rows of its memory"
    return ""


if __name__ == "__main__":
    sys.stdout.write(find_problem(int(sys.argv[1])) or "well")
