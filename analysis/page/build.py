"""Runs to one HTML file: what they are, charts that the browser draws, tables, and where the time went.

    runs -> facts, tables and words as HTML, for every reader
         -> JSON and packed columns, which the scripts draw: view.js, series.js, chart.js, controls.js

The page needs no network, and its content policy forbids any. Without JavaScript it shows a picture.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from analysis.groups import Comparison, find_differences, group_runs
from analysis.panels import COLORS, PANELS, choose_line
from analysis.runs import Run
from analysis.summary import (
    WORDS,
    describe_not_finite,
    describe_run,
    find_style,
    find_window,
    list_marks,
    summarize,
)
from record.goodput import CATEGORIES
from record.metrics import duration, replace_nonfinite

SCRIPTS = ("view.js", "series.js", "chart.js", "controls.js")
RATES = ("tokens_per_s", "mfu")
COLUMNS = ("step", "tokens", "time", "step_ms", "minutes", "loss", "lr", "grad_norm", *RATES)
EVALS = ("step", "full", "val_loss", "val_bpb", "core", "core_partial")
SMOOTH = ("step", "tokens", "lr")  # their second differences are mostly 0
CLOCK_TICKS = 1024  # per second: the clock is only an axis, and finer digits are noise


def write_page(path: Path, runs: Sequence[Run], comparison: Comparison | None = None) -> None:
    """Write the page of runs, each with a name of its own. Raises OSError.

    A picture with the same name that ends in .png becomes part of the page, so write that first.
    """
    groups = group_runs(runs)
    differences = find_differences(groups)
    buffer = bytearray()
    data: dict[str, Any] = {"panels": [asdict(panel) for panel in PANELS], "groups": [], "runs": []}
    rows = []
    for number, (group, members) in enumerate(groups.items()):
        color, dash = choose_line(number)
        data["groups"].append({"name": group, "color": f"--line{color}", "dash": dash})
        settings = {name: values.get(group, "") for name, values in differences.items()}
        for run in members:
            data["runs"].append(describe_data(run, buffer) | {"group": number})
            rows.append({"run": run.name} | summarize(run) | settings)
    kinds = {mark["kind"] for run in data["runs"] for mark in run["marks"]}
    data["marks"] = {kind: asdict(find_style(kind)) for kind in sorted(kinds)}
    title = f"{len(runs)} runs"
    facts = {
        name: ", ".join(dict.fromkeys(values.values())) for name, values in differences.items()
    }
    if len(runs) == 1:
        title = rows[0].pop("run")
        facts = rows[0] | describe_run(runs[0])
    page = Template(read_file("page.html")).substitute(
        title=escape(title),
        style=read_file("page.css") + style_lines(),
        facts=to_list(facts),
        comparison=show_comparison(comparison) if comparison else "",
        picture=show_picture(path.with_suffix(".png")),
        runs=to_table(rows),
        goodput="".join(map(show_goodput, runs)),
        notes="".join(map(show_notes, runs)),
        words=to_list(WORDS),
        # "<" could end the script element; JSON may also write it as an escape
        data=json.dumps(replace_nonfinite(data)).replace("<", "\\u003c"),
        numbers=base64.b64encode(zlib.compress(buffer)).decode(),
        scripts="".join(map(read_file, SCRIPTS)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def read_file(name: str) -> str:
    """Return a file next to this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def style_lines() -> str:
    """Return the colors of the lines as variables of a style sheet."""
    rules = ""
    for theme, colors in COLORS.items():
        variables = "".join(f" --line{number}: {color};" for number, color in enumerate(colors))
        rules += f":root[data-theme={theme}] {{{variables} }}\n"
    return rules


# ---------------------------------------------------------------------------------------------------
# For the scripts
# ---------------------------------------------------------------------------------------------------


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
        "samples": pack_columns(vars(run.samples), buffer) if run.samples else {},
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
    columns["not_finite"] = np.where(run.loss_not_finite, 1.0, np.nan)
    return columns


def pack_columns(columns: Mapping[str, Any], buffer: bytearray) -> dict[str, Any]:
    """Append (n,) columns to the buffer, and return where the page finds each. One without numbers is left out.

        float64 -> bits as integers -> differences -> bytes transposed, and in the end zlib and base64

    The high bytes of neighbors are mostly equal, so zlib removes most of what is transposed. In series.js `unpack` is
    the other half.
    """
    heads = {}
    for name, values in columns.items():
        if not isinstance(values, np.ndarray) or not np.isfinite(values).any():
            continue
        order = 2 if name in SMOOTH else 0  # how many times differences are taken
        heads[name] = {"at": len(buffer), "n": len(values), "order": order}
        bits = np.ascontiguousarray(values, np.float64).view(np.int64)
        for _ in range(order):
            bits = np.diff(bits, prepend=0)  # wraps around, and so does the sum in the page
        buffer += bits.view(np.uint8).reshape(-1, 8).T.tobytes()
    return heads


# ---------------------------------------------------------------------------------------------------
# For the reader
# ---------------------------------------------------------------------------------------------------


def to_list(terms: Mapping[str, str]) -> str:
    """Return terms and what there is to say of them."""
    items = ""
    for term, words in terms.items():
        items += f"<div><dt>{escape(term)}</dt><dd>{escape(words)}</dd></div>\n"
    return items


def to_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the head and the body of a table. rows: heading -> cell."""
    headings = dict.fromkeys(heading for row in rows for heading in row)
    lines = ""
    for row in rows:
        cells = (f"<td>{escape(row.get(heading, ''))}</td>" for heading in headings)
        lines += f"<tr>{''.join(cells)}</tr>\n"
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody>"


def show_comparison(comparison: Comparison) -> str:
    """Return the verdicts and the table of `make compare`."""
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in comparison.sentences)
    return f"{sentences}<div class=scroll><table>{to_table(comparison.rows)}</table></div>"


def show_picture(path: Path) -> str:
    """Return a picture as part of the page."""
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="All curves of this page" src="data:image/png;base64,{data}">'


def show_goodput(run: Run) -> str:
    """Return where the time went, as a bar and in words."""
    goodput = run.goodput
    if goodput is None or not goodput.wall_s:
        return ""
    parts = ""
    for category, seconds in goodput.seconds.items():
        words = f"{CATEGORIES[category]} {duration(seconds)}"
        width = f"width:{seconds / goodput.wall_s:.4%}"
        parts += f'<span class="{category}" title="{words}" style="{width}">{words}</span>'
    words = escape(f"{run.name}: {goodput.summary()}")
    return f'<p>{words}</p><div class="bar">{parts}</div>\n'


def show_notes(run: Run) -> str:
    """Return what a reader must know to read the curves of a run."""
    notes = [*run.remarks, describe_not_finite(run)]
    if run.loss_is:
        notes.append(f"the loss is {run.loss_is}, as its log has it.")
    return "".join(f"<p>{escape(f'{run.name}: {note}')}</p>\n" for note in notes if note)
