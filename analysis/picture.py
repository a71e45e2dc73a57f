"""Runs to one PNG with the panels of curves.py, for a README or a chat; drawn without a display."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis import bar
from analysis.curves import (
    FAILED,
    FEW,
    PANELS,
    POINTS_DRAWN,
    RUN_COLOURS,
    X_TITLES,
    Panel,
    drawn_points,
    has,
    mark_of,
    marks,
    mean_line,
    not_finite_words,
    smoothing_window,
    state,
    summary,
)
from analysis.load import Run
from analysis.page.page_data import line_of as line_in_page

if TYPE_CHECKING:  # imported where it is drawn: half a second that a failing call need not spend
    from matplotlib.axes import Axes

WIDE, HIGH, DPI = 5.0, 4.0, 100  # inches of a panel
PAPER_DPI = 300  # of what goes to print
BAR_INCHES = 0.9  # more for each run's bar
MOST_BESIDE = 12  # names of runs in the last panel's place; more have a row of their own
NAME_INCHES = 0.25  # high
NOTE_WIDTH = 50  # letters
NO_BREAK = "\xa0"
EVAL_MARKS = ((False, "o", 30, "validation"), (True, "*", 150, "validation, full set"))
SHAPES = {
    "up": "^",
    "right": ">",
    "left": "<",
    "cross": "x",
    "diamond": "D",
    "ring": "o",
    "square": "s",
}
WORDS = {
    "up": "triangle up",
    "right": "triangle right",
    "left": "triangle left",
    "cross": "cross",
    "diamond": "diamond",
    "ring": "circle",
    "square": "square",
}
PRINTED = {"--muted": "0.45", "--ink": "0.2", "--trouble": "#b00020", "--spike": "#a06a00"}
CROWDED = (
    "3.000",
    "4.000",
    "6.000",
    "7.000",
    "8.000",
    "9.000",
)  # ticks without a label past one decade
COLOURS = RUN_COLOURS["light"]


def write_picture(path: Path, runs: Sequence[Run], names: Sequence[str], dpi: int = DPI) -> Path:
    """Write the picture of these runs, shown under `names`; returns its path. Panels without numbers are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = [panel for panel in PANELS if has(panel, runs)]
    columns = 3 if len(panels) < 6 else 4
    crowd = len(runs) > MOST_BESIDE
    # with a place for words, which have the rest of the last row
    rows = -(-len(panels) // columns) if crowd else len(panels) // columns + 1
    bars = sum(bool(bar.shares(run)) for run in runs) * BAR_INCHES
    heights = [
        *[HIGH] * rows,
        *filter(None, [bars, (2 - -len(runs) // columns) * NAME_INCHES if crowd else 0]),
    ]
    figure = Figure(
        figsize=(columns * WIDE, sum(heights)),
        dpi=dpi,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    cells = [figure.add_subplot(grid[i // columns, i % columns]) for i in range(len(panels))]
    words = figure.add_subplot(grid[-1, :] if crowd else grid[rows - 1, len(panels) % columns :])
    if bars:
        bar.draw_bars(figure.add_subplot(grid[rows, :]), runs, names)
    points = [drawn_points(run, POINTS_DRAWN // len(runs)) for run in runs]
    for panel, axes in zip(panels, cells, strict=True):
        for i, (run, chosen) in enumerate(zip(runs, points, strict=True)):
            draw_run(axes, panel, run, chosen, i)
        if len(runs) == 1:  # the events of several runs would cover each other
            draw_events(axes, panel, runs[0])
        finish(axes, panel, runs)
    title = f"{names[0]}\n{state(runs[0])}" if len(runs) == 1 else f"{len(runs)} training runs"
    figure.suptitle(title, fontsize=12, parse_math=False)
    describe(words, runs, names, columns if crowd else 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def line_of(i: int) -> dict[str, Any]:
    """Colour and dash of the run with this number, as in the page."""
    _, dash = line_in_page(i)
    style = {"dash": "dashed", "dot": "dotted"}.get(dash, dash)
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": style}


def draw_run(axes: "Axes", panel: Panel, run: Run, chosen: np.ndarray, i: int) -> None:
    """The raw line, the mean over it, and the evaluations of one run."""
    if panel.y not in run.columns:  # where other runs were sampled
        return
    x, y = run.columns[panel.x], run.columns[panel.y]
    look = (
        {"alpha": 0.4, "linewidth": 0.7, "linestyle": "solid"}
        if panel.smooth
        else {"linewidth": 1.6}
    )
    axes.plot(
        x[chosen], y[chosen], marker="." if len(chosen) <= FEW else "", **{**line_of(i), **look}
    )
    if panel.smooth:
        axes.plot(x[chosen], mean_line(run, panel.y)[chosen], **line_of(i), linewidth=1.6)
    if not panel.evals:
        return
    for full, marker, size, words in EVAL_MARKS:
        evals = [
            e for e in run.evals if bool(e.get("full")) is full and e.get("val_loss") is not None
        ]
        if evals:
            axes.scatter(
                [e["step"] if panel.x == "step" else run.minutes_at(e["step"]) for e in evals],
                [e["val_loss"] for e in evals],
                s=size,
                marker=marker,
                zorder=3,
                label=words,
                color=COLOURS[i % len(COLOURS)],
                edgecolors="black",
                linewidths=0.7,
            )


def draw_events(axes: "Axes", panel: Panel, run: Run) -> None:
    """Marks on the lower edge; a thin upright line where the run was taken up again. The end is the line's own."""
    for kind, events in marks(run).items():
        if kind == "end":
            continue
        mark = mark_of(kind)
        colour = PRINTED[mark.colour]
        places = sorted(
            {e["step"] if panel.x == "step" else run.minutes_at(e["step"]) for e in events}
        )
        for place in places if mark.upright else ():
            axes.axvline(place, color=colour, linewidth=0.8, linestyle="dotted")
        axes.plot(
            places,
            [0] * len(places),
            marker=SHAPES[mark.symbol],
            color=colour,
            markersize=5,
            linestyle="",
            clip_on=False,
            fillstyle="none" if kind == FAILED else "full",
            transform=axes.get_xaxis_transform(),
        )


def finish(axes: "Axes", panel: Panel, runs: Sequence[Run]) -> None:
    """Titles, scales and grid."""
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.set_xlabel(X_TITLES[panel.x], fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.log and any(
        (run.columns[panel.y] > 0).any() for run in runs if panel.y in run.columns
    ):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        low, high = axes.get_ylim()
        bare = CROWDED if high > 10 * low else ()
        axes.yaxis.set_minor_formatter(
            lambda value, _: "" if f"{value:.3e}"[:5] in bare else f"{value:g}"
        )
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    if panel.evals and len(runs) == 1 and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9, frameon=False, loc="upper right")


def describe(axes: "Axes", runs: Sequence[Run], names: Sequence[str], columns: int) -> None:
    """The sixth place, or a row of its own: the summary of one run, or the names of several in so many columns."""
    axes.axis("off")
    if len(runs) == 1:
        said = dict.fromkeys(
            [f"thick line: mean over {smoothing_window(len(runs[0].columns['step']))} steps"]
        )
        said |= dict.fromkeys(
            f"{WORDS[mark_of(kind).symbol]}: {mark_of(kind).name}"
            for kind in marks(runs[0])
            if kind != "end"
        )
        said |= dict.fromkeys(
            filter(None, [not_finite_words(runs[0].not_finite, runs[0].columns["step"])])
        )
        whole = "; ".join(
            note.replace(" ", NO_BREAK) if len(note) < NOTE_WIDTH else note for note in said
        )
        notes = ["", *(line.replace(NO_BREAK, " ") for line in textwrap.wrap(whole, NOTE_WIDTH))]
        lines = [f"{key:<17}{value}" for key, value in summary(runs[0]).items()]
        axes.text(
            0,
            1,
            "\n".join(lines + notes),
            va="top",
            family="monospace",
            fontsize=9,
            linespacing=1.7,
            parse_math=False,
            in_layout=False,
        )  # the panels' size is theirs
        return
    for i, name in enumerate(names):
        axes.plot([], [], **line_of(i), label=name)
    legend = axes.legend(
        loc="upper left",
        frameon=False,
        fontsize=10,
        ncols=columns,
        **({"mode": "expand"} if columns > 1 else {}),
    )
    legend.set_in_layout(False)  # the panels' size is theirs
    for text in legend.get_texts():
        text.set_parse_math(False)
