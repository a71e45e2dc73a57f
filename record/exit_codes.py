"""Exit codes of the trainer and the launcher: what each means, what to do, and whether to retry.

Launcher, status and monitor read this table. Tests compare manifests and docs with it.
"""

import dataclasses

DONE = 0
BAD_SETTING = 64
NODES_MISSING = 69
NO_PROGRESS = 70
MACHINE_FAULT = 71
STOPPED = 75
BAD_DATA = 78
INTERRUPTED = 143


@dataclasses.dataclass(frozen=True)
class ExitCode:
    """A row of the table.

    Attributes:
        meaning: what happened.
        fix: what to do about it.
        ends_job: a retry cannot help, so the launcher and the cluster's Job end.
        counts: a trainer that ends so without having been asked to is started again, and that
            counts as one of the MAX_RESTARTS failed tries.
        is_ignored: the cluster's Job makes another pod, however often: the run is not at fault.
    """

    code: int
    meaning: str
    fix: str
    ends_job: bool = False
    counts: bool = False
    is_ignored: bool = False


ROWS = (
    ExitCode(DONE, "The run is done.", "", ends_job=True),
    ExitCode(
        BAD_SETTING,
        "A setting is invalid.",
        "Change the setting that the message names.",
        ends_job=True,
    ),
    ExitCode(
        NODES_MISSING,
        "Other nodes of the run did not join in START_TIMEOUT_S.",
        "Start the missing nodes, and look at their logs.",
        counts=True,
        is_ignored=True,
    ),
    ExitCode(
        NO_PROGRESS,
        "Restarts or rollbacks made no progress.",
        "Read the last lines of the log, fix what they say, and start the run again.",
        ends_job=True,
    ),
    ExitCode(
        MACHINE_FAULT,
        "This machine is at fault, not the run.",
        "Start the run on another machine, and run `make doctor` on this one.",
        counts=True,
        is_ignored=True,
    ),
    ExitCode(
        STOPPED,
        "The run stopped on request. What it had trained is in a checkpoint.",
        "Run the same command to resume.",
    ),
    ExitCode(
        BAD_DATA,
        "The data or the environment is bad, the same on every node.",
        "Fix what the message names, such as a file, a folder or a process.",
        ends_job=True,
    ),
    ExitCode(
        INTERRUPTED,
        "The run was told to stop before it trained, or could not save a checkpoint.",
        "Run the same command to resume from the last one.",
        counts=True,
    ),
)
EXIT_CODES = {row.code: row for row in ROWS}
OTHER = ExitCode(1, "The trainer failed.", "Read the last lines of the log.", counts=True)


def describe(code: int) -> ExitCode:
    """Return the row of an exit code; for one that is not in the table, that of a failed try."""
    return EXIT_CODES.get(code, dataclasses.replace(OTHER, code=code))
