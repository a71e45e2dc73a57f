"""How many steps fine-tuning takes, which only DATA in tokens of MODEL tells.

`python -m finetune.prepare_data count` tells it, in a process of its own: it loads torch, and keeps the tokens for
`make finetune`.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Collection

from settings import ROOT
from settings.config import DEFAULTS, Config
from settings.declare import format_value
from settings.resolve import build_environment


class NotCounted(Exception):
    """Why DATA was not counted, in a sentence."""


def with_steps(config: Config, fitted: Collection[str], processes: int) -> Config:
    """Return the settings with MAX_STEPS, and with what fine-tuning chooses for MODEL and DATA.

    Args:
        fitted: names that are not given.

    Raises NotCounted.
    """
    if importlib.util.find_spec("transformers") is None:
        raise NotCounted("transformers, which counts them, comes with `make setup-finetune`.")
    given = {"NPROC": processes, "NODES": 1, "PRESET": config.preset}
    for name, value in config.values().items():
        if name not in fitted and value != DEFAULTS[name]:
            given.setdefault(name, value)
    done = subprocess.run(
        [sys.executable, "-m", "finetune.prepare_data", "count"],
        cwd=ROOT,
        env=build_environment({name: format_value(value) for name, value in given.items()}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotCounted(done.stderr.strip().rpartition("\n")[2].strip())
    return config.replace(**json.loads(done.stdout))
