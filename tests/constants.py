"""Constants of the product that tests make smaller, in processes that they start.

    run_make("train", environment={**constants(SHARD_TOKENS=1000)})

In the test's own process, `monkeypatch.setattr` does the same.
"""

import json
import os
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent / "site"

# Constant -> the module that defines it.
MODULES: dict[str, str] = {
    "DONE_S": "train.hooks.trackers",
    "STOPPED_S": "train.hooks.trackers",
    "STUCK_S": "train.hooks.trackers",
    "REFRESH_S": "monitor.watch",
    "CHECKPOINT_TIMEOUT_S": "train.timeouts",
    "DATA_TIMEOUT_S": "train.timeouts",
    "GROUP_SHARDS": "train.data.data_paths",
    "MAX_EPOCHS": "train.data.data_paths",
    "MAX_ROLLBACKS": "train.faults.guard",
    "MAX_SKIPS": "train.faults.guard",
    "PROFILE_STEPS": "train.hooks.profiler",
    "SHARD_TOKENS": "train.data.data_paths",
    "SITE_WAIT_S": "train.timeouts",
    "SYNC_STREAMS": "train.diloco.site_registry",
    "SYNC_TIMEOUT_S": "train.timeouts",
    "LOOK_S": "train.diloco.lighthouse",
    "PYTHON": "train.launcher",
    "TRIES": "train.data.sources.hub",
    "FIRST_REFUSAL_S": "train.start_node",
}


def constants(**values: Any) -> dict[str, str]:
    """Return the environment of a process in which these constants have other values."""
    replacements: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        replacements.setdefault(MODULES[name], {})[name] = value
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TEST_CONSTANTS": json.dumps(replacements), "PYTHONPATH": os.pathsep.join(path)}
