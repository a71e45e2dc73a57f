"""Runs to one self-contained HTML page: a table, and the panels drawn by plotly in the browser.

    runs -> columns and figures (figures.py) -> JSON in the page -> drawn, and again when the theme changes

The page holds plotly's own bundle (4.8 MB). It needs no network, and its content policy forbids it any. Its
script only puts the columns and the theme's colours where their names stand.
"""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis import bar
from analysis.curves import PANELS, POINTS_DRAWN, RUN_COLOURS, drawn_points, state, summary
from analysis.figures import figure, line_of, page_columns
from analysis.load import Run


def write_page(path: Path, runs: Sequence[Run], names: Sequence[str]) -> Path:
    """Write the page of these runs, shown under `names`; returns its path."""
    from plotly.offline import get_plotlyjs  # not at the top: a call that fails need not wait for it

    points = [drawn_points(run, POINTS_DRAWN // len(runs)) for run in runs]
    columns: dict[str, list[float | None]] = {}
    for i, (run, chosen) in enumerate(zip(runs, points, strict=True)):
        columns |= page_columns(i, run, chosen)
    numbers = {"columns": columns, "panels": [figure(panel, runs, names, points) for panel in PANELS]}
    title, below = (names[0], state(runs[0])) if len(runs) == 1 else (f"{len(runs)} training runs", "")
    text = document(title, below, table(runs, names), bar.bars_html(runs, names), remarks(runs, points),
                    numbers, get_plotlyjs())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------------------------------------------
# The document
# ---------------------------------------------------------------------------------------------------

def table(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The summary, a row a run. With several runs it is their legend too, and each can be hidden."""
    rows = [{key: html.escape(value) for key, value in summary(run).items()} for run in runs]
    if len(runs) > 1:
        rows = [{"run": legend_entry(i, name), "state": html.escape(state(run))} | row
                for i, (name, run, row) in enumerate(zip(names, runs, rows, strict=True))]
    head = "".join(f"<th>{key}</th>" for key in rows[0])
    cells = ("".join(f'<td class="{key}">{value}</td>' for key, value in row.items()) for row in rows)
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def legend_entry(i: int, name: str) -> str:
    """A run's name behind a piece of its line and a box that hides it."""
    colour, dash = line_of(i)
    dashes = {"solid": "", "dash": "8 5", "dot": "2 3", "dashdot": "8 3 2 3"}[dash]
    return (f'<label><input type="checkbox" class="shown" value="run{i}" checked> '
            f'<svg width="34" height="10"><line x2="34" y1="5" y2="5" stroke="var({colour})" '
            f'stroke-width="3" stroke-dasharray="{dashes}"/></svg> {html.escape(name)}</label>')


def remarks(runs: Sequence[Run], points: Sequence[np.ndarray]) -> list[str]:
    """What a reader must know to read the curves."""
    said = ["Thin line: every step as recorded. Thick line: the mean over a window round each step. Circles: "
            "validation loss; star: on the full set at the end. Training time is the sum of the steps, "
            "without evaluations, saving and lost work."]
    if len(runs) == 1:
        said.append("On the lower edge: checkpoints (triangles), resumes and rollbacks (with a dotted line), the "
                    "end (a square); crosses are skipped steps, signals and troubles.")
    if bar.enough(runs):
        said.append("Goodput: the share of the time since the first start that trained the steps which the run "
                    "still has. Lost work are steps gone back behind, or skipped; down is the time between an "
                    "attempt's last record and the start of the next one.")
    for run, chosen in zip(runs, points, strict=True):
        if len(chosen) < (n := len(run.columns["step"])):
            said.append(f"Thinned: {len(chosen):,} of the {n:,} steps of {run.name} are drawn, the lowest "
                        "and highest of each stretch among them; the CSV beside the record has all.")
    return said


def document(title: str, below: str, summary_table: str, bars: str, said: Sequence[str], data: Mapping[str, Any],
             plotly: str) -> str:
    """The text of the page: heading, a line below it, table, panels, bars, remarks, numbers and scripts."""
    # in a script element "<" could end the script; JSON may write it as an escape
    numbers = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    places = "\n".join(f'<div class="panel" id="panel{i}"></div>' for i in range(len(data["panels"])))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="below">{html.escape(below)}</p>
<div class="wide">{summary_table}</div>
<p><label><input type="checkbox" id="log"> logarithmic loss axes</label></p>
<div class="panels">
{places}
</div>
{bars}
{"".join(f"<p>{html.escape(line)}</p>" for line in said)}
<script type="application/json" id="data">{numbers}</script>
<script>{plotly}</script>
<script>
{SCRIPT}
</script>
</body>
</html>
"""


def colours(theme: str) -> str:
    """CSS variables of the runs' colours."""
    return " ".join(f"--run{i}: {colour};" for i, colour in enumerate(RUN_COLOURS[theme]))


STYLE = """:root { --ink: #1d2126; --paper: #ffffff; --veil: rgba(255, 255, 255, 0.7); --muted: #6b7480;
  --grid: #dfe3e8; --trouble: #b00020; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e6ea; --paper: #15181c; --veil: rgba(21, 24, 28, 0.7); --muted: #9099a4;
    --grid: #333a42; --trouble: #ff6b6b; DARK }
}
body { margin: 1.2rem; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 0.3rem; overflow-wrap: anywhere; }
.below { color: var(--ink); margin-top: 0; }
p { color: var(--muted); margin: 0.6rem 0; max-width: 75rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--grid); padding: 0.3rem 1.4rem 0.3rem 0; text-align: left;
  white-space: nowrap; }
th { color: var(--muted); font-weight: 500; }
td.state { white-space: normal; min-width: 16rem; }
.panels { display: grid; gap: 0.5rem 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); }
.panel:first-child { grid-column: 1 / -1; }
.panel { min-width: 0; }""".replace("LIGHT", colours("light")).replace("DARK", colours("dark")) + bar.STYLE

SCRIPT = """const {columns, panels} = JSON.parse(document.getElementById("data").textContent);
// Named one by one: the default bar has a button that uploads the data.
const config = {responsive: true, displaylogo: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]]};
const dark = matchMedia("(prefers-color-scheme: dark)");

// A copy with columns and colours in the place of their names.
function filled(value, key, css) {
  if (typeof value === "string") {
    if (key === "x" || key === "y" || key === "customdata") return columns[value];
    return /color$/.test(key) && value.startsWith("--") ? css.getPropertyValue(value).trim() : value;
  }
  if (Array.isArray(value)) return value.map(item => filled(item, "", css));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, filled(item, name, css)]));
}

function draw() {
  const css = getComputedStyle(document.documentElement);
  panels.forEach((panel, i) =>
    Plotly.react("panel" + i, filled(panel.traces, "", css), filled(panel.layout, "", css), config));
}

const log = document.getElementById("log");
log.addEventListener("change", () => {
  for (const panel of panels) if (panel.loss) panel.layout.yaxis.type = log.checked ? "log" : "linear";
  draw();
});
for (const box of document.querySelectorAll(".shown")) box.addEventListener("change", () => {
  for (const panel of panels) for (const trace of panel.traces)
    if (trace.legendgroup === box.value) trace.visible = box.checked;
  draw();
});
dark.addEventListener("change", draw);
draw();"""
