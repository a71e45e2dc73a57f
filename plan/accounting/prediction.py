"""What is predicted of a run, kept in its folder before it trains: plan.json.

A resumed run keeps the prediction that it has, even if the plan knows more by now. If the devices, the number of steps,
or a setting that decides time or memory changed, the plan of the rest replaces it, and the run is held to that from
then on. How the run kept to the earlier one stays in the `end` records of metrics.jsonl.
"""

import json
import time
from typing import Any

from plan.past_runs import OF_A_STEP, devices_of, has_same
from plan.planner import Plan
from record.durable import write_whole
from record.number_formats import GIB
from record.provenance import commit
from record.run_paths import RunPaths
from settings.json_file import read_object

OF_A_RUN = (*OF_A_STEP, "eval_every", "eval_tokens", "sync", "sync_every")
ALSO_SAME = ("device", "processes", "nodes", "steps")


def keep_prediction(plan: Plan, paths: RunPaths) -> None:
    """Write what is planned into the run's folder, unless that is there already, or no step is left.

    Raises:
        OSError: the folder cannot be written.
        ValueError: plan.json is damaged, and stays as it is. The message follows its path.
    """
    new = predict(plan)
    try:
        old = read_object(paths.plan)
        has_same_settings = has_same(old["settings"], plan.run.config, OF_A_RUN)
        if has_same_settings and all(old[name] == new[name] for name in ALSO_SAME):
            return
    except FileNotFoundError:
        pass
    except (LookupError, TypeError):
        raise ValueError("is damaged: something is missing") from None
    if plan.from_step != plan.steps:
        write_whole(paths.plan, json.dumps({**new, **commit()}, indent=1).encode() + b"\n")


def predict(plan: Plan) -> dict[str, Any]:
    """Return a prediction as plan.json has it. None is what nobody knows.

    time: Unix seconds; settings: those that decide time and memory, without those that DATA decides later; seconds:
    from from_step to the end, without start-up; step_s, batch_tokens: in fine-tuning of the largest step that DATA can
    lead to.
    """
    config, speed = plan.run.config, plan.speed
    device, processes, nodes = devices_of(plan.run.fleet)
    settings = {}
    for name in OF_A_RUN:
        if name.upper() not in plan.fitted:
            settings[name] = getattr(config, name)
    return {
        "schema": 1,
        "time": time.time(),
        "device": device,
        "processes": processes,
        "nodes": nodes,
        "fine_tuning": plan.fine_tuning,
        "dtype": config.dtype,
        "settings": settings,
        "from_step": plan.from_step,
        "steps": plan.steps,
        "batch_tokens": plan.batch_tokens,
        "flops_per_token": plan.flops_per_token,
        "seconds": plan.time.total_seconds if plan.time else None,
        "step_s": speed.step_seconds,
        "tokens_per_s": speed.tokens_per_s,
        "mfu_percent": speed.mfu_percent,
        "speed": speed.why,
        "memory_gib": plan.layout.total_bytes / GIB,
        "energy_kwh": plan.kwh,
    }
