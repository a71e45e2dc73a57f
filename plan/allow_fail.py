"""The names that ALLOW_FAIL accepts: those of the checks of make plan, make doctor and a launch."""

from settings import SettingsError
from settings.names import find_nearest

# The checks are made in plan/, doctor/ and k8s/; a test holds this list equal to them.
CHECK_NAMES = (
    "attention",
    "batch",
    "bf16",
    "clock",
    "cluster",
    "commit",
    "compiler",
    "context",
    "disk",
    "disk-speed",
    "driver",
    "epochs",
    "free-gpus",
    "gpu-card",
    "gpu-memory",
    "gpu-mix",
    "gpu-products",
    "gpus",
    "gpus-torch",
    "host-memory",
    "hub",
    "image",
    "job",
    "kubectl",
    "lighthouse",
    "limits",
    "loopback",
    "memory",
    "namespace",
    "nvml",
    "open-files",
    "ports",
    "priority",
    "probe-alone",
    "probe-disk",
    "probe-kept",
    "probe-link",
    "probe-matmul",
    "probe-memory",
    "probe-slow-gpu",
    "probe-step",
    "pull-secret",
    "python",
    "quota",
    "rights",
    "secret",
    "shm",
    "sites",
    "storage",
    "target-hours",
    "target-tokens-per-s",
    "torch",
    "wan",
    "wandb",
)


def find_unknown_check(allow_fail: str) -> str | None:
    """Return what is wrong with ALLOW_FAIL, with the nearest name, or None."""
    for name in allow_fail.split(","):
        if name and name not in CHECK_NAMES:
            meant = find_nearest(name, CHECK_NAMES)
            suggestion = f"did you mean {meant}? " if meant else ""
            return (
                f"ALLOW_FAIL={allow_fail}: there is no check {name}; {suggestion}"
                f"there are: {', '.join(CHECK_NAMES)}"
            )
    return None


def refuse_unknown_checks(allow_fail: str) -> None:
    """Raise SettingsError if ALLOW_FAIL names a check that does not exist."""
    problem = find_unknown_check(allow_fail)
    if problem is not None:
        raise SettingsError([problem])
