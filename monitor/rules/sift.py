"""Which of all faults are said: those that another explains are left out, and those that do not mend themselves come
first. A run that hangs is slow too, and has no new checkpoint; one sentence is enough, and the first one is the cause.
"""

from collections.abc import Callable, Collection, Iterable

from monitor.facts import Fault, Seen
from settings.config import Config

Rule = Callable[[Seen, Config], list[Fault]]

NO_STEP = {"hanging", "not-begun", "phase", "nccl"}
SLOW = {"below-plan", "imbalance", "straggler"}

# What explains what: a fault of the first name leaves those of the others out.
EXPLAINS: dict[str, set[str]] = {
    "gpu-lost": NO_STEP | SLOW | {"crashed", "killed", "idle-gpu", "network", "waits-for-data"},
    "silent": {"hanging", "phase", "not-begun"},
    "killed": {"memory", "nccl"},
    "nccl": {"crashed", "hanging", "phase", "not-begun"},
    "crashed": {"phase", "peers"},
    "not-begun": {"phase", "hanging"},
    "hanging": SLOW | {"no-checkpoint", "starved", "idle-gpu", "network"},
    "waits-for-data": {"starved", "below-plan", "phase"},
    "disk": {"no-checkpoint"},
    "nan": {"skips", "spike"},
    "skips": {"spike"},
    "throttled-heat": SLOW | {"throttled-power", "throttled-hardware"},
    "throttled-supply": SLOW | {"throttled-power", "throttled-hardware"},
    "throttled-hardware": SLOW | {"throttled-power"},
    "throttled-power": {"below-plan"},
    "starved": {"below-plan"},
    "network": {"below-plan"},
    "idle-gpu": {"below-plan", "imbalance"},
    "straggler": {"below-plan", "imbalance"},
}

# What is the matter with a Job or a pod (pod_rules.py) explains that the others wait for it, hear nothing of it, or
# end; that the cluster does not answer explains nothing of it.
BY_PODS = NO_STEP | {"peers", "silent", "crashed", "killed", "memory"}
NOT_ASKED = {"cluster", "logs-unread"}


def sift(faults: Iterable[Fault], of_pods: Collection[Fault] = ()) -> list[Fault]:
    """The faults without those that another explains, in their order; first those that do not mend themselves. Those
    of pods are among them, and none of these is left out."""
    found = [*of_pods, *faults]
    by_pods = BY_PODS if {fault.name for fault in of_pods} - NOT_ASKED else set()
    left_out = set().union(*map(explained_by, found), by_pods)
    kept = [fault for fault in found if fault in of_pods or fault.name not in left_out]
    return sorted(kept, key=lambda fault: not fault.failing)


def explained_by(fault: Fault) -> set[str]:
    """What it leaves out. A GPU that is lost explains nothing of a run that goes on without it."""
    return EXPLAINS.get(fault.name, set()) if fault.failing or fault.name != "gpu-lost" else set()


def found_by(rules: Iterable[Rule], seen: Seen, c: Config) -> list[Fault]:
    """What all of these rules find, explained or not."""
    return [fault for rule in rules for fault in rule(seen, c)]
