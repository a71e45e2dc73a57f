"""What is read from a GPU, how the library is asked for it, and how it is written.

nvidia-ml-py asks for what is wanted once a second. What is wanted a hundred times a second is called past it, into
buffers that stay, which takes half of its time or less. A reading is a function that returns an integer or raises an
NVMLError. None lists processes: that alone can take milliseconds.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml
from pynvml import NVMLError

from hardware.nvml import PERMANENT, Device

Read = Callable[[], int]
Reading = tuple[
    str, Callable[[Device], Read], Callable[[int], str]
]  # a column's end, what is read, how it is written

# The member of nvmlValue_t that holds a field's value, by nvmlValueType_t.
MEMBERS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}

# Why clocks are lower than they could be: nvmlClocksEventReasons, bit by bit.
REASONS = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}


def power_mw(d: Device) -> Read:
    """What nvidia-smi shows: the mean of a second on most cards since Ampere, instantaneous on A100 and older ones."""
    return first_of(d, lambda: direct("nvmlDeviceGetPowerUsage", d.handle, ctypes.c_uint()))


def power_inst_mw(d: Device) -> Read:
    """Instantaneous power, where the driver has it apart."""
    return first_of(d, lambda: field(d.handle, pynvml.NVML_FI_DEV_POWER_INSTANT))


def energy_mj(d: Device) -> Read:
    """Since the driver was loaded."""
    return first_of(
        d, lambda: direct("nvmlDeviceGetTotalEnergyConsumption", d.handle, ctypes.c_ulonglong())
    )


def temperature_c(d: Device) -> Read:
    """Of the GPU itself. The second call is the older one, which CUDA 14 drops."""

    def newer() -> Read:
        buffer = pynvml.c_nvmlTemperature_v1_t(
            version=pynvml.nvmlTemperature_v1, sensorType=pynvml.NVML_TEMPERATURE_GPU
        )
        return direct("nvmlDeviceGetTemperatureV", d.handle, buffer, member="temperature")

    return first_of(
        d,
        newer,
        lambda: direct(
            "nvmlDeviceGetTemperature", d.handle, ctypes.c_uint(), pynvml.NVML_TEMPERATURE_GPU
        ),
    )


def memory_bytes(d: Device) -> Read:
    """In use, without what the driver keeps for itself where that is told apart, as in nvidia-smi."""
    return first_of(
        d,
        lambda: asked(lambda: pynvml.nvmlDeviceGetMemoryInfo(d.handle, pynvml.nvmlMemory_v2).used),
        lambda: asked(lambda: pynvml.nvmlDeviceGetMemoryInfo(d.handle).used),
    )


def utilisation_percent(d: Device) -> Read:
    """Of the time in which a kernel ran at all; a kernel that waits for others counts."""
    return first_of(d, lambda: asked(lambda: pynvml.nvmlDeviceGetUtilizationRates(d.handle).gpu))


def memory_utilisation_percent(d: Device) -> Read:
    """Of the time in which memory was read or written."""
    return first_of(d, lambda: asked(lambda: pynvml.nvmlDeviceGetUtilizationRates(d.handle).memory))


def clock_mhz(d: Device, which: int) -> Read:
    return first_of(d, lambda: asked(lambda: pynvml.nvmlDeviceGetClockInfo(d.handle, which)))


def throttle_bits(d: Device) -> Read:
    """The bits of REASONS. The second call is the older one, which CUDA 14 drops."""
    return first_of(
        d,
        lambda: asked(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(d.handle)),
        lambda: asked(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(d.handle)),
    )


def reasons(bits: int) -> str:
    """'power_cap+sw_thermal'; 'none' for no reason, a number for bits that are not known."""
    known = [word for bit, word in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return "+".join(known + [hex(rest)] * bool(rest)) or "none"


def first_of(d: Device, *ways: Callable[[], Read]) -> Read:
    """The first way that this driver and this GPU know; a reading that always fails where they know none."""
    error = d.error
    if error is None:
        for way in ways:
            read: Read | None = None
            try:
                read = way()
                read()
                return read
            except NVMLError as failure:
                error = failure
                if read and failure.value not in PERMANENT:  # known, and may answer the next time
                    return read
    assert error

    def fails() -> int:
        raise NVMLError(error.value)

    return fails


def asked(call: Callable[[], Any]) -> Read:
    """A reading by nvidia-ml-py."""
    return lambda: int(call())


def entry(function: str) -> Any:
    """A function of the library, as an object of our own: nvidia-ml-py's is left as it is."""
    try:
        return pynvml.nvmlLib[function]
    except AttributeError:
        raise NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND) from None


def direct(function: str, handle: Any, buffer: Any, *between: int, member: str = "value") -> Read:
    """A reading by function(handle, *between, &buffer), past nvidia-ml-py."""
    call, reference = entry(function), ctypes.byref(buffer)

    def read() -> int:
        if code := call(handle, *between, reference):
            raise NVMLError(code)
        return getattr(buffer, member)

    return read


def field(handle: Any, number: int) -> Read:
    """A reading of one NVML_FI_* field, of the whole GPU (scope 0)."""
    call, buffer = (
        entry("nvmlDeviceGetFieldValues"),
        pynvml.c_nvmlFieldValue_t(fieldId=number, scopeId=0),
    )
    reference = ctypes.byref(buffer)

    def read() -> int:
        if code := call(handle, 1, reference) or buffer.nvmlReturn:
            raise NVMLError(code)
        if (member := MEMBERS.get(buffer.valueType)) is None:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return getattr(buffer.value, member)

    return read


# ---------------------------------------------------------------------------------------------------
# Columns
# ---------------------------------------------------------------------------------------------------


def thousandth(raw: int) -> str:
    """mW as W, mJ as J, exactly."""
    return f"{raw // 1000}.{raw % 1000:03d}"


def gib(raw: int) -> str:
    return f"{raw / 2**30:.3f}"


BASIC: list[Reading] = [("power_w", power_mw, thousandth), ("temp_c", temperature_c, str)]
MORE: list[Reading] = [
    ("power_inst_w", power_inst_mw, thousandth),
    ("energy_j", energy_mj, thousandth),
]
SLOW: list[Reading] = [
    ("mem_used_gib", memory_bytes, gib),
    ("util_percent", utilisation_percent, str),
    ("mem_util_percent", memory_utilisation_percent, str),
    ("sm_mhz", lambda d: clock_mhz(d, pynvml.NVML_CLOCK_SM), str),
    ("mem_mhz", lambda d: clock_mhz(d, pynvml.NVML_CLOCK_MEM), str),
    ("throttle", throttle_bits, reasons),
]

MEANING = {
    "timestamp": "UTC, by the clock of this machine",
    "elapsed_sec": "seconds on its monotonic clock since elapsed_0",
    "power_w": "W, as nvidia-smi shows it: on most cards since Ampere the mean of a second, on A100 instantaneous",
    "temp_c": "degrees Celsius, of the GPU",
    "power_inst_w": "W, instantaneous",
    "energy_j": "J since the driver was loaded; differences of it are what counts",
    "mem_used_gib": "GiB, of all processes",
    "util_percent": "of the time a kernel ran, waiting ones included",
    "mem_util_percent": "of the time memory was read or written",
    "sm_mhz": "MHz",
    "mem_mhz": "MHz",
    "throttle": "why clocks are lower than they could be, + between reasons",
    "bytes_per_s": "mean of the last second",
}
