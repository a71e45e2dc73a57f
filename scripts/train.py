"""Train on this machine: check settings, machine and plan, then start this node of the run.

python -m scripts.train [WORD...] [NAME=value...]

finetune    fine-tune MODEL on DATA instead of pretraining
node        one of several machines: NODES=1 is refused
2xh100      2 GPUs of this machine, with the GPU sampler running
"""

import os
import sys

from doctor import before_run
from record.exit_codes import BAD_SETTING, DONE, INTERRUPTED
from settings import SettingsError, explain_error, targets
from settings.checks import PRETRAINING
from settings.config import Config
from settings.declare import format_value
from settings.resolve import resolve, set_target, take_words
from train.children import Children, complain, say
from train.launcher import NOTHING_TRAINED
from train.start_node import FINETUNE, PRETRAIN, Node, Workload

WORDS = ("finetune", "node", "2xh100")
DEFAULTS = {
    "finetune": targets.TARGET_DEFAULTS["finetune"],
    "2xh100": targets.TARGET_DEFAULTS["train-2xh100"],
}


def name_target(words: list[str]) -> str:
    """Return the make target that starts this module with these words."""
    target = "finetune" if "finetune" in words else "train"
    for word in ("node", "2xh100"):
        if word in words:
            target += f"-{word}"
    return target


def load(words: list[str], workload: Workload) -> Config:
    """Load the settings with the target's own defaults, which this process's children get too.

    Raises SettingsError, also for a word that is none.
    """
    take_words(words, WORDS)
    defaults: dict[str, str] = {}
    for word in words:
        defaults |= DEFAULTS.get(word, {})
    without = PRETRAINING if workload is FINETUNE else ()
    resolved = resolve(defaults=defaults, without=without).check()
    config = resolved.config
    for warning in resolved.warnings:
        say(warning)
    for name in defaults:
        os.environ[name] = format_value(getattr(config, name.lower()))
    return config


def check_nodes(config: Config, workload: Workload) -> int:
    """Refuse `make train-node` for a run on one machine."""
    if config.nodes > 1:
        return DONE
    target = f"make {workload.name}"
    complain(
        f"NODES=1: {workload.name}-node starts one node of several. Set NODES to how many there are, "
        "NODE_RANK to this one's number, counted from 0, and MASTER_ADDR to the address of node 0. "
        f"On one machine, run {target}."
    )
    return BAD_SETTING


def start(words: list[str], node: Node) -> int:
    """Check, then train. Returns the exit code."""
    code = node.refuse_second_job()
    if code == DONE:
        code = node.check_machine()
    if code == DONE and "node" in words:
        code = check_nodes(node.config, node.workload)
    if code == DONE:
        code = before_run.main([node.workload.name])
    if code == DONE and node.children.stop_requested:
        node.say_stopped()
        code = INTERRUPTED
    if code != DONE:
        return code
    if "2xh100" in words:
        node.start_sampler()
    return node.run()


def main(words: list[str]) -> int:
    children = Children(lambda: NOTHING_TRAINED)
    workload = FINETUNE if "finetune" in words else PRETRAIN
    try:
        node = Node(load(words, workload), children, workload)
    except SettingsError as error:
        complain(explain_error(error))
        return error.exit_code
    code = start(words, node)
    node.leave(code)
    return code


if __name__ == "__main__":
    set_target(name_target(sys.argv[1:]))
    sys.exit(main(sys.argv[1:]))
