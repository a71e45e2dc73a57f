"""What is wrong with a run at this moment, in sentences with the next command: all rules, the gravest first.

    pod_rules     pods that wait for a node or an image, fail, run out of memory
    run_rules     waiting, phases that last too long, killed, crashed, NCCL, hanging
    gpu_rules     GPUs lost, held back, idle, slower than the others; a network that is full
    train_rules   disk, loss, memory, checkpoints, data, speed

Each is a pure function of what is seen and of the settings, so that a rule can be tried on made facts; sift.py leaves
out what another fault explains.
"""

from monitor.facts import Fault, Seen
from monitor.rules import gpu_rules, run_rules, train_rules
from monitor.rules.pod_rules import pod_faults
from monitor.rules.sift import Rule, found_by, sift
from settings.config import Config

RULES: tuple[Rule, ...] = (*run_rules.RULES, *gpu_rules.RULES, *train_rules.RULES)


def judge(seen: Seen, c: Config) -> list[Fault]:
    """All faults, without those that another explains."""
    return sift(found_by(RULES, seen, c), pod_faults(seen))
