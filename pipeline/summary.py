"""What came out of a pipeline, on one screen: read from what the stages have left in their runs' folders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.chat_eval import show_result
from pipeline.stages import CHAT_STAGES, Stage
from pipeline.state import State
from record import metrics
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from settings.resolve import show_path


def summary(c: Config, stages: Sequence[Stage], state: State) -> list[str]:
    """Lines."""
    total = sum(state.seconds(stage) for stage in stages)
    told = [
        ("stage", "took", "result"),
        *((stage.title, clock(state.seconds(stage)), result(c, stage)) for stage in stages),
    ]
    widths = [max(len(row[i]) for row in told) for i in (0, 1)]
    lines = ["", f"pipeline {c.run_name}: done, {clock(total)} in all"]
    lines += [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {result}".rstrip() for a, b, result in told]
    for kind, name in (("choice", "multiple choice"), ("written", "written answers")):
        rows = [
            (key, show_result(found[kind]))
            for key in CHAT_STAGES
            if (found := newest(c, f"{c.run_name}-{key}", "chat_step_*.json"))
            and found[kind]["asked"]
        ]
        if rows:
            lines += [
                "",
                f"{name}, right of the questions held out (95 % interval)",
                *(f"  {key:<4}  {told_so}" for key, told_so in rows),
            ]
    last = RunPaths.of(c.runs_dir, f"{c.run_name}-sft", ROOT)
    elsewhere = f" RUNS_DIR={c.runs_dir}" if c.runs_dir != "runs" else ""
    lines += [
        "",
        f"the chat: {show_path(last.folder / 'export')}",
        f"talk to it: make chat RUN_NAME={c.run_name}-sft{elsewhere} SAMPLE_TEMPERATURE=0",
    ]
    return lines


def result(c: Config, stage: Stage) -> str:
    """What a stage has to show, in a few words."""
    paths = RunPaths.of(c.runs_dir, stage.run, ROOT)
    if stage.key == "evaluation":
        found = newest(c, stage.run, "step_*.json") or {}
        core = (found.get("core") or {}).get("core")
        partial = (found.get("core") or {}).get("core_partial")
        bits = found.get("val_bpb")
        told = [f"{bits:.3f} bits per byte" if isinstance(bits, float) else "bits per byte n/a"]
        if isinstance(core, float):
            told.append(f"CORE {core:.4f}")
        elif isinstance(partial, float):
            told.append(f"CORE n/a, of the tasks that are there {partial:.4f}")
        else:
            told.append("CORE left out (CORE_BUNDLE)")
        return ", ".join(told)
    if stage.tunes:
        scores = [
            entry["val_ppl"]
            for entry in metrics.read_records(paths.metrics)
            if entry["event"] == "eval" and isinstance(entry.get("val_ppl"), float)
        ]
        return show_path(paths.folder) + (
            f", perplexity {scores[0]:.4g} -> {scores[-1]:.4g}" if scores else ""
        )
    if stage.key.startswith("chat-"):
        found = newest(c, stage.run, "chat_step_*.json") or {}
        return "; ".join(
            f"{name} {found[kind]['accuracy']:.1%}"
            for kind, name in (("choice", "multiple choice"), ("written", "written"))
            if found.get(kind, {}).get("asked")
        )
    if stage.key == "sample":
        return show_path(paths.sample)
    return show_path(paths.folder)


def newest(c: Config, run: str, pattern: str) -> dict[str, Any] | None:
    """The JSON of the last step of that name in a run's eval/; None where there is none."""
    names = sorted(
        path
        for path in RunPaths.of(c.runs_dir, run, ROOT).evaluation("x").parent.glob(pattern)
        if "_until_" not in path.name
    )
    return read(names[-1]) if names else None


def read(path: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
