"""Runs to one HTML file: what they are, charts that the browser draws, tables, and where the time went.

    runs -> facts, tables and words, which page.html shows to every reader
         -> JSON and packed columns, which the scripts draw: view.js, series.js, chart.js, controls.js

The page needs no network, and its content policy forbids any. Without JavaScript it shows a picture.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from analysis.groups import Comparison, find_differences, group_runs
from analysis.panels import COLORS, PANELS, VALIDATION_COLOR, choose_line
from analysis.runs import Run
from analysis.summary import (
    WORDS,
    describe_run,
    find_style,
    find_window,
    list_marks,
    list_remarks,
    show_setting,
    summarize,
)
from record.durable import write_whole
from record.goodput import CATEGORIES
from record.metrics import duration, replace_nonfinite

FOLDER = Path(__file__).parent
STYLE = "page.css"
SCRIPTS = ("view.js", "series.js", "chart.js", "controls.js")
RATES = ("tokens_per_s", "mfu")
COLUMNS = ("step", "tokens", "time", "step_ms", "minutes", "loss", "lr", "grad_norm", *RATES)
EVALS = ("step", "full", "val_loss", "val_bpb", "core", "core_partial")
SMOOTH = ("step", "tokens", "lr")  # their second differences are mostly 0
CLOCK_TICKS = 1024  # per second: the clock is only an axis, and finer digits are noise


def write_page(
    path: Path, runs: Sequence[Run], picture: bytes = b"", comparison: Comparison | None = None
) -> None:
    """Write the page of runs, each with a name of its own. Raises OSError.

    Args:
        picture: a PNG of all curves, for browsers without JavaScript.
    """
    from jinja2 import Environment, FileSystemLoader  # a command that fails need not wait for it

    groups = group_runs(runs)
    differences = find_differences(groups)
    buffer = bytearray()
    data: dict[str, Any] = {"panels": [asdict(panel) for panel in PANELS], "groups": [], "runs": []}
    rows = []
    for number, (group, members) in enumerate(groups.items()):
        color, dash = choose_line(number)
        data["groups"].append({"name": group, "color": f"--line{color}", "dash": dash})
        for run in members:
            data["runs"].append(describe_data(run, buffer) | {"group": number})
            settings = {name: show_setting(run, name) for name in differences if run.settings}
            rows.append({"run": run.name} | summarize(run) | settings)
    data["validation"] = f"--line{VALIDATION_COLOR}" if len(runs) == 1 else ""
    kinds = {mark["kind"] for run in data["runs"] for mark in run["marks"]}
    data["marks"] = {kind: asdict(find_style(kind)) for kind in sorted(kinds)}
    title = f"{len(runs)} runs"
    facts = {
        name: ", ".join(dict.fromkeys(values.values())) for name, values in differences.items()
    }
    if len(runs) == 1:
        title = runs[0].name
        facts = summarize(runs[0]) | describe_run(runs[0])
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
    environment.filters |= {"duration": duration, "remarks": list_remarks}
    page = environment.get_template("page.html").render(
        title=title,
        style=(FOLDER / STYLE).read_text(encoding="utf-8"),
        themes=COLORS,
        facts=facts,
        comparison=comparison,
        picture=base64.b64encode(picture).decode(),
        rows=rows,
        runs=runs,
        categories=CATEGORIES,
        words=WORDS,
        # "<" could end the script element; JSON may also write it as an escape
        data=json.dumps(replace_nonfinite(data)).replace("<", "\\u003c"),
        numbers=base64.b64encode(zlib.compress(buffer)).decode(),
        scripts=[(FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS],
    )
    write_whole(path, page.encode(errors="replace"))


def describe_data(run: Run, buffer: bytearray) -> dict[str, Any]:
    """Return what the scripts draw of a run. The numbers go to the buffer."""
    return {
        "name": run.name,
        "loss_is": run.loss_is,
        "started": run.started,
        "window": find_window(run.steps),
        "evals": [{key: record.get(key) for key in EVALS} for record in run.evals],
        "marks": list_marks(run),
        "columns": pack_columns(choose_columns(run), buffer),
        "samples": pack_columns(run.samples, buffer),
    }


def choose_columns(run: Run) -> dict[str, np.ndarray]:
    """Return what the charts need of the steps, in a form that compresses. `openRuns` in series.js undoes it."""
    columns = {name: run.columns[name] for name in COLUMNS}
    step_ms = columns["step_ms"]
    columns["minutes"] = columns["minutes"] - np.nancumsum(step_ms) / 60_000  # mostly 0
    for name in RATES:
        products = columns[name] * np.where(step_ms > 0, step_ms, 1.0)  # mostly the batch size
        columns[name] = products.astype(np.float32)  # 7 digits do
    columns["time"] = np.round(columns["time"] * CLOCK_TICKS) / CLOCK_TICKS
    columns["not_finite"] = np.where(run.is_not_finite("loss"), 1.0, np.nan)
    return columns


def pack_columns(columns: Mapping[str, np.ndarray], buffer: bytearray) -> dict[str, Any]:
    """Append (n,) columns to the buffer, and return where the page finds each. One without numbers is left out.

        float64 -> bits as integers -> differences -> bytes transposed, and in the end zlib and base64

    The high bytes of neighbors are mostly equal, so zlib removes most of what is transposed. In series.js `unpack` is
    the other half.
    """
    heads = {}
    for name, values in columns.items():
        if not np.isfinite(values).any():
            continue
        order = 2 if name in SMOOTH else 0  # how many times differences are taken
        heads[name] = {"at": len(buffer), "n": len(values), "order": order}
        bits = np.ascontiguousarray(values, np.float64).view(np.int64)
        for _ in range(order):
            bits = np.diff(bits, prepend=0)  # wraps around, and so does the sum in the page
        buffer += bits.view(np.uint8).reshape(-1, 8).T.tobytes()
    return heads
