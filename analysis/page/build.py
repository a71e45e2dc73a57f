"""Runs to one self-contained HTML page: a table, panels that the browser draws, a comparison, where the time went.

    runs -> page_data.py: JSON, and every step's numbers packed -> unpacked and drawn by the scripts beside this file

The page needs no network, and its content policy forbids it any. Its scripts use no library: page.css, drawing.js,
unpack.js, chart.js, compare.js and page.js are put into it as they are.
"""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import bar
from analysis.curves import PANELS, RUN_COLOURS, has, not_finite_words, state, summary
from analysis.load import Run
from analysis.page.page_data import line_of, page_data

SCRIPTS = ("drawing.js", "unpack.js", "chart.js", "compare.js", "page.js")
THEMES = {
    "light": {
        "ink": "#1d2126",
        "paper": "#fbfcfd",
        "raised": "#ffffff",
        "veil": "rgb(251 252 253 / 88%)",
        "muted": "#646d78",
        "grid": "#e3e7eb",
        "edge": "#c5ccd4",
        "trouble": "#b00020",
        "spike": "#a06a00",
    },
    "dark": {
        "ink": "#e3e6ea",
        "paper": "#12151a",
        "raised": "#191d23",
        "veil": "rgb(18 21 26 / 88%)",
        "muted": "#98a2ad",
        "grid": "#2b323a",
        "edge": "#465059",
        "trouble": "#ff6b6b",
        "spike": "#e6b400",
    },
}


def write_page(path: Path, runs: Sequence[Run], names: Sequence[str]) -> Path:
    """Write the page of these runs, shown under `names`; returns its path."""
    data, numbers = page_data(runs, names)
    title, below = (
        (names[0], state(runs[0])) if len(runs) == 1 else (f"{len(runs)} training runs", "")
    )
    text = document(
        title, below, table(runs, names), bar.bars_html(runs, names), remarks(runs), data, numbers
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def beside(name: str) -> str:
    """A script or the style sheet."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------
# The document
# ---------------------------------------------------------------------------------------------------


def table(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The summary, a row a run. With several runs it is their legend too, and each can be hidden."""
    rows = [{key: in_lines(value) for key, value in summary(run).items()} for run in runs]
    if len(runs) > 1:
        rows = [
            {"run": legend_entry(i, name), "state": html.escape(state(run))} | row
            for i, (name, run, row) in enumerate(zip(names, runs, rows, strict=True))
        ]
    head = "".join(f"<th>{key}</th>" for key in rows[0])
    cells = (
        "".join(f'<td class="{key}">{value}</td>' for key, value in row.items()) for row in rows
    )
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def in_lines(value: str) -> str:
    """A value, and below it what stands in brackets."""
    first, bracket, rest = value.partition(" (")
    return html.escape(first) + (f" <small>({html.escape(rest)}</small>" if bracket else "")


def legend_entry(i: int, name: str) -> str:
    """A run's name behind a piece of its line and a box that hides it."""
    colour, dash = line_of(i)
    dashes = {"solid": "", "dash": "8 5", "dot": "2 3", "dashdot": "8 3 2 3"}[dash]
    return (
        f'<label><input type="checkbox" class="shown" value="{i}" checked> '
        f'<svg width="34" height="10"><line x2="34" y1="5" y2="5" stroke="var({colour})" '
        f'stroke-width="3" stroke-dasharray="{dashes}"/></svg> {html.escape(name)}</label>'
    )


def remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader must know to read the curves."""
    said = [
        "Drag over a stretch to zoom, double-click to see all again; with a panel chosen by Tab, the arrow keys go "
        "from step to step, + and - zoom. Every step is in this page, and its number as recorded.",
        "Thin line: every step as recorded. Thick line: the mean over a window round each step. Circles: "
        "validation loss; stars: on the full set. Training time is the sum of the steps, "
        "without evaluations, saving and lost work.",
    ]
    if missing := [
        panel.title
        for panel in PANELS
        if panel.y in ("tokens_per_s", "mfu", "lr", "grad_norm") and not has(panel, runs)
    ]:
        said.append(f"Not recorded, so not drawn: {'; '.join(missing)}.")
    if bar.enough(runs):
        said.append(
            "Goodput: the share of the time since the first start that trained the steps which the run "
            "still has. Lost work are steps gone back behind, or skipped; down is the time between an "
            "attempt's last record and the start of the next one."
        )
    for loss_is in dict.fromkeys(run.loss_is for run in runs if run.loss_is):
        names = ", ".join(run.name for run in runs if run.loss_is == loss_is)
        said.append(
            f"The loss of {names} is {loss_is}, as its log has it, and was not smoothed again; beside the raw "
            "loss of another run it lags."
        )
    for run in runs:
        if words := not_finite_words(run.not_finite, run.columns["step"]):
            said.append(
                f"{run.name}: {words}. These steps have no point, and no share in the mean."
            )
    if any(run.sampled for run in runs):
        said.append(
            "Power, energy and network come from the samplers of the GPUs, and are placed at steps by the "
            "clock on the wall."
        )
    return said


def document(
    title: str,
    below: str,
    summary_table: str,
    bars: str,
    said: Sequence[str],
    data: Mapping[str, Any],
    numbers: str,
) -> str:
    """The text of the page: heading, table, switches, panels, comparison, bars, remarks, numbers and scripts."""
    # in a script element "<" could end the script; JSON may write it as an escape
    known = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{style()}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="below">{html.escape(below)}</p>
<div class="wide">{summary_table}</div>
{SWITCHES}
<div id="events"></div>
<p id="trouble" hidden></p>
<div class="panels" id="panels"></div>
{COMPARISON}
{bars}
{"".join(f"<p>{html.escape(line)}</p>" for line in said)}
<script type="application/json" id="data">{known}</script>
<script type="text/plain" id="numbers">{numbers}</script>
<script>
{"".join(beside(name) for name in SCRIPTS)}</script>
</body>
</html>
"""


def style() -> str:
    """page.css with the colours of both themes."""
    text = beside("page.css")
    for theme, colours in THEMES.items():
        named = colours | {f"run{i}": colour for i, colour in enumerate(RUN_COLOURS[theme])}
        text = text.replace(
            theme.upper(), " ".join(f"--{name}: {colour};" for name, colour in named.items())
        )
    return text


AXES = """<option value="step">step</option><option value="tokens">tokens</option>
<option value="minutes">training time</option><option value="wall">time since the start</option>"""

SWITCHES = f"""<div class="switches">
<label>over <select id="axis">{AXES}</select></label>
<label><input type="checkbox" id="log"> logarithmic loss</label>
<label><input type="checkbox" id="cut"> fit after the steep start</label>
<label>smoothing <input type="range" id="smooth" min="0" step="1"> <output id="window"></output></label>
<label><input type="checkbox" id="raw" checked> raw line</label>
<button id="whole" disabled>all of it</button>
<button id="theme" class="end" aria-label="light or dark">light / dark</button>
</div>"""

COMPARISON = f"""<section id="compare" hidden>
<h2>Compared</h2>
<p><label>at equal <select id="equal">{AXES}</select></label>
<label>and there: <input type="text" id="place" size="12" inputmode="decimal"> <span id="unit"></span></label>
<span id="left"></span></p>
<div class="wide" id="by"></div>
<div class="wide" id="there"></div>
<p>Loss as smoothed above, on the line between two steps; the difference is from the first run shown. The table ends
where the first of them ended.</p>
</section>"""
