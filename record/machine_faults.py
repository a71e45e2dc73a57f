"""Faults of the machine that a pod runs on, which another machine may not have.

In a pod they end with MACHINE_FAULT: the cluster makes another pod, and the healthy ones wait for it.
BAD_SETTING and BAD_DATA are left for what is the same on every node. On a machine that a person has
started a run on, nobody chooses another, so the exit codes stay those that name what to change.
"""

import dataclasses
import errno

from record.exit_codes import BAD_DATA, BAD_SETTING, NO_PROGRESS

# What a disk answers that is not mounted, was mounted read-only after an error, or has lost its server.
VOLUME_ERRORS = (
    "EIO",
    "EROFS",
    "ENODEV",
    "ESTALE",
    "ENOTCONN",
    "ESHUTDOWN",
    "ETIMEDOUT",
    "EHOSTDOWN",
    "EHOSTUNREACH",
    "EREMOTEIO",
)


@dataclasses.dataclass(frozen=True)
class MachineFault:
    """A row of the table.

    Attributes:
        meaning: what is wrong with the machine.
        by_hand: exit code where a person has started the run. In a pod it is MACHINE_FAULT.
        is_listed: later pods refuse the node (record/bad_nodes.py). Not so where the fault may be
            the volume's or the Hub's own, or where nothing could be written.
    """

    name: str
    meaning: str
    by_hand: int
    is_listed: bool = False


ROWS = (
    MachineFault(
        "gpus",
        "There is no NVIDIA driver, it does not match its library (NVML), or GPUs are missing.",
        BAD_SETTING,
        is_listed=True,
    ),
    MachineFault("driver", "The NVIDIA driver is too old for torch.", BAD_DATA, is_listed=True),
    MachineFault(
        "gpu-health",
        "A GPU is lost, does not answer, needs a reset, or has uncorrected memory errors.",
        NO_PROGRESS,
        is_listed=True,
    ),
    MachineFault("volume", "The volume is not mounted, or gives input/output errors.", BAD_DATA),
    MachineFault("hub", "There is no route to the Hub.", BAD_DATA),
    MachineFault("scratch", "No temporary files can be written.", BAD_DATA),
    MachineFault("port", "The port of node 0 cannot be served.", BAD_DATA),
)
MACHINE_FAULTS = {row.name: row for row in ROWS}


def classify(error: BaseException) -> str:
    """Return the name of the machine's fault that an error is about; "" if it may be the run's own."""
    name: str = getattr(error, "machine_fault", "")
    if name:
        return name
    reason = error.__cause__ or error
    if not isinstance(reason, OSError):
        return ""
    # An error of a socket, which another node may be at fault for, names no file.
    is_about_file = reason is not error or reason.filename is not None
    if is_about_file and errno.errorcode.get(reason.errno or 0, "") in VOLUME_ERRORS:
        return "volume"
    return ""
