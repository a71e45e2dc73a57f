"""The panels of curves.py in plotly's own words: traces and layout, as JSON.

    {"columns": {"0.loss": [...], ...}, "panels": [{"traces": [{"y": "0.loss", ...}], "layout": {...}}]}

A column is written once, and traces name it; a colour is the name of a CSS variable. The page puts both in
their places, so that a change of theme is a new drawing of the same numbers. Measured values are written in
full; the hover text has 9 digits of them, which tell any two float32 apart. Means and minutes have 7.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.curves import (
    DASHES,
    FAILED,
    FEW,
    PANELS,
    RUN_COLOURS,
    X_TITLES,
    Panel,
    event_words,
    marks,
    smoothed,
    smoothing_window,
)
from analysis.load import Run

# event -> plotly symbol, colour; the rest are the troubles
MARKS = {"checkpoint": ("triangle-up", "--muted"), "resume": ("triangle-right", "--ink"),
         "rollback": ("triangle-left", "--trouble"), FAILED: ("circle-open", "--trouble"), "end": ("square", "--ink")}
TROUBLE = ("x", "--trouble")
IN_LEGEND = {"resume": "resume", "rollback": "rollback", "skip": "skipped step", FAILED: FAILED}
LINES = {"resume": ("--muted", "dot"), "rollback": ("--trouble", "dot")}  # upright, where the run was taken up again
EVAL_MARKS = ((False, "validation", "circle", 9), (True, "validation, full set", "star", 14))


def figure(panel: Panel, runs: Sequence[Run], names: Sequence[str],
           points: Sequence[np.ndarray]) -> dict[str, Any]:
    """Traces and layout of one panel."""
    made = layout(panel, len(runs))
    if len(runs) == 1:  # the events of several runs would cover each other
        made["shapes"] = upright_lines(runs[0], panel)
        lines = traces(0, runs[0], panel, "", len(points[0])) + event_traces(runs[0], panel)
    else:
        lines = [trace for i, (run, name, chosen) in enumerate(zip(runs, names, points, strict=True))
                 for trace in traces(i, run, panel, name, len(chosen))]
    return {"loss": panel.evals, "traces": lines, "layout": made}


# ---------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------

def page_columns(i: int, run: Run, chosen: np.ndarray) -> dict[str, list[float | None]]:
    """`I.KEY` -> the chosen points of every column the panels name, and of its mean as `I.KEY_mean`."""
    window = smoothing_window(len(run.columns["step"]))
    columns: dict[str, list[float | None]] = {
        f"{i}.step": [int(step) for step in run.columns["step"][chosen]],
        f"{i}.minutes": plain(run.columns["minutes"][chosen], digits=7)}
    for panel in PANELS:
        columns[f"{i}.{panel.y}"] = plain(run.columns[panel.y][chosen])
        if panel.smooth:
            columns[f"{i}.{panel.y}_mean"] = plain(smoothed(run.columns[panel.y], window)[chosen], digits=7)
    return columns


def plain(values: np.ndarray, digits: int | None = None) -> list[float | None]:
    """JSON's numbers: null for NaN; in full, or with so many significant digits."""
    return [None if not math.isfinite(v) else v if digits is None else float(f"{v:.{digits}g}")
            for v in values.tolist()]


# ---------------------------------------------------------------------------------------------------
# Traces and layout
# ---------------------------------------------------------------------------------------------------

def traces(i: int, run: Run, panel: Panel, name: str, drawn: int) -> list[dict[str, Any]]:
    """The lines of one run in one panel, and its evaluations; no name where no other run is shown."""
    colour, dash = line_of(i)
    prefix = f"{plotly_text(name)}: " if name else ""
    shown = f"{prefix}training"
    window = smoothing_window(len(run.columns["step"]))
    base = {"type": "scatter", "x": f"{i}.{panel.x}", "legendgroup": f"run{i}",
            "mode": "lines+markers" if drawn <= FEW else "lines", "marker": {"size": 4, "color": colour}}
    key, other = {"step": ("minutes", "%{customdata:.2f} min"),
                  "minutes": ("step", "step %{customdata:,}")}[panel.x]
    raw = base | {"y": f"{i}.{panel.y}", "name": shown, "opacity": 0.4 if panel.smooth else 1,
                  "line": {"color": colour, "width": 1 if panel.smooth else 2, "dash": dash},
                  "showlegend": not panel.smooth, "customdata": f"{i}.{key}",
                  "hovertemplate": f"%{{y:.9~g}} at {other}<extra>{prefix}the step</extra>"}
    if not panel.smooth:
        return [raw]
    mean = base | {"y": f"{i}.{panel.y}_mean", "name": shown, "mode": "lines",
                   "line": {"color": colour, "width": 2, "dash": dash},
                   "hovertemplate": f"%{{y:.5~g}}<extra>{prefix}mean of {window} steps</extra>"}
    marks = eval_traces(run, panel, colour, prefix) if panel.evals else []
    return [raw, mean, *(mark | {"legendgroup": base["legendgroup"]} for mark in marks)]


def plotly_text(text: str) -> str:
    """The text as plotly shows it literally: it knows some tags, and in templates %{...}."""
    return html.escape(text, quote=False).replace("%", "&#37;")


def line_of(i: int) -> tuple[str, str]:
    """Colour, as a CSS variable, and dash of the run with this number."""
    count = len(RUN_COLOURS["light"])
    return f"--run{i % count}", DASHES[i // count % len(DASHES)]


def eval_traces(run: Run, panel: Panel, colour: str, prefix: str) -> list[dict[str, Any]]:
    """Validation losses: circles, and a star for the final, larger set."""
    found = []
    for full, words, symbol, size in EVAL_MARKS:
        evals = [e for e in run.evals if bool(e.get("full")) is full and e.get("val_loss") is not None]
        if evals:
            found.append({
                "type": "scatter", "mode": "markers", "name": prefix + words,
                "x": [along(run, panel, e["step"]) for e in evals], "y": [e["val_loss"] for e in evals],
                "marker": {"symbol": symbol, "size": size, "color": colour,
                           "line": {"color": "--ink", "width": 1}},
                "hovertemplate": [f"%{{y:.9~g}}{eval_words(e)}<extra>{prefix}{words}</extra>"
                                  for e in evals]})
    return found


def eval_words(record: Mapping[str, Any]) -> str:
    """What else an evaluation says, for its hover text; the rest is in the CSV."""
    return f" ({record['val_bpb']:.9g} bpb)" if record.get("val_bpb") is not None else ""


def along(run: Run, panel: Panel, step: int) -> float:
    """Where a step lies on the panel's x axis."""
    return step if panel.x == "step" else float(f"{run.minutes_at(step):.7g}")


def event_traces(run: Run, panel: Panel) -> list[dict[str, Any]]:
    """Marks on the lower edge for what happened to the run; one trace a kind."""
    return [{
        "type": "scatter", "mode": "markers", "yaxis": "y2", "name": plotly_text(IN_LEGEND.get(kind, kind)),
        "showlegend": kind in IN_LEGEND and panel.x == "step",  # once is enough
        "x": [along(run, panel, e["step"]) for e in events], "y": [0.02] * len(events),
        "marker": {"symbol": MARKS.get(kind, TROUBLE)[0], "color": MARKS.get(kind, TROUBLE)[1],
                   "size": 6 if kind == "skip" else 8},
        "hovertemplate": [f"{plotly_text(event_words(e))}<extra>step {e['step']:,}</extra>"
                          for e in events],
    } for kind, events in marks(run).items()]


def upright_lines(run: Run, panel: Panel) -> list[dict[str, Any]]:
    """A thin one where the run was taken up again, from a checkpoint or by a rollback."""
    return [{"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1,
             "line": {"color": colour, "width": 1, "dash": dash}}
            for kind, (colour, dash) in LINES.items()
            for x in sorted({along(run, panel, e["step"]) for e in run.events if e["event"] == kind})]


def layout(panel: Panel, runs: int) -> dict[str, Any]:
    axis = {"gridcolor": "--grid", "linecolor": "--grid", "zeroline": False, "tickcolor": "--grid"}
    unified = "step %{x:,}" if panel.x == "step" else "%{x:.2f} min"
    return {
        "title": {"text": panel.title, "x": 0, "xref": "paper", "font": {"size": 15}},
        "font": {"color": "--ink", "size": 12, "family": "system-ui, sans-serif"},
        "paper_bgcolor": "--paper", "plot_bgcolor": "--paper",
        "uirevision": "kept",  # a zoom outlives a change of theme
        "hovermode": "x unified", "hoverdistance": 12,
        "hoverlabel": {"bgcolor": "--paper", "bordercolor": "--muted", "font": {"color": "--ink"}},
        "margin": {"l": 64, "r": 16, "t": 44, "b": 48}, "height": 360,
        "showlegend": panel.evals and runs == 1,  # of several runs the table is the legend
        "legend": {"x": 1, "xanchor": "right", "y": 1, "yanchor": "top", "bgcolor": "--veil",
                   "tracegroupgap": 0},
        "xaxis": axis | {"title": {"text": X_TITLES[panel.x]}, "unifiedhovertitle": {"text": unified},
                         "rangemode": "tozero"},
        "yaxis": axis | {"type": "log" if panel.log else "linear",
                         "rangemode": "tozero" if panel.from_zero else "normal",
                         "exponentformat": "SI" if panel.y == "tokens_per_s" else "e"},
        "yaxis2": {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False},
    }
