"""Runs made of numbers, in memory and on disk."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.runs import COLUMNS, Run
from settings import load_preset

START = 1.7e9  # 2023-11-14 22:13:20 UTC
BATCH = 1000  # tokens per step


def make_run(
    name: str,
    loss: Sequence[float] = (3.0,),
    evals: Sequence[Mapping[str, Any]] = (),
    step_ms: float = 1000.0,
    columns: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Run:
    """Make a run with these losses, one per step."""
    steps = np.arange(1.0, len(loss) + 1)
    made = dict.fromkeys(COLUMNS, np.full(len(loss), np.nan)) | {
        "step": steps,
        "tokens": steps * BATCH,
        "minutes": steps * step_ms / 60_000,
        "time": steps,
        "loss": np.array(loss, float),
        "step_ms": np.full(len(loss), step_ms),
        "tokens_per_s": np.full(len(loss), BATCH * 1000 / step_ms),
        **(columns or {}),
    }
    return Run(name, made, evals, facts.pop("events", ()), START, **facts)


def make_eval(
    step: int, val_loss: float | None, full: bool = False, **facts: Any
) -> dict[str, Any]:
    return {"event": "eval", "step": step, "val_loss": val_loss, "full": full, **facts}


def write_run(
    folder: Path,
    final: float,
    step_ms: float = 125.0,
    **settings: str,
) -> Path:
    """Write the record of a run of 20 steps whose validation loss falls to `final`."""
    config = load_preset(PRESET="tiny", **settings)
    records: list[dict[str, Any]] = [{"event": "start", "step": 0}]
    for step in range(1, 21):
        facts = {"loss": 3 + final / step, "step_ms": step_ms, "tokens_per_s": 1e6 / step_ms}
        records.append({"event": "step", "step": step, "tokens": BATCH * step, **facts})
        if step % 5 == 0:
            loss = final + (20 - step) / 10
            records.append(make_eval(step, loss, val_bpb=loss / 2, tokens=BATCH * step))
    records.append(make_eval(20, final + 0.5, full=True, val_bpb=final / 2, tokens=BATCH * 20))
    folder.mkdir()
    attempt = {"world_size": 8, "device": "H100", "git": "abc123"}
    stored = {"settings": config.stored(), "attempts": [attempt]}
    (folder / "config.json").write_text(json.dumps({"schema": 1, **stored}))
    frame = {"schema": 1, "time": START, "mono_s": 0.0, "host": "h", "attempt": 0}
    lines = [json.dumps(frame | record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder
