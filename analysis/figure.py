"""Runs as a picture: all panels in a PNG (`make plots`), and one panel for a paper (`make compare FIGURE=`).

matplotlib draws without a display, and is imported late: a command that fails need not wait for it.
"""

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.groups import Lines
from analysis.panels import COLORS, PANELS, VALIDATION_COLOR, Panel, choose_line
from analysis.runs import Run
from analysis.summary import read_evals, smooth_column
from record import number_formats
from record.durable import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
PAPER_DPI = 300
PAPER_INCHES = (3.3, 2.5)  # a column of most conference papers
PAPER_POINTS = 500  # of a line
COLUMNS = 3
PANEL_INCHES = 5
LEGEND_INCHES = 0.25  # per line
FEW_POINTS = 5  # are drawn as such: the line of a single step would be invisible
VALIDATION = COLORS["light"][VALIDATION_COLOR]
# Whether an evaluation is of the full set -> marker, its size, and its name in the legend.
MARKERS = {False: ("o", 6, "validation, subset"), True: ("*", 11, "validation, full set")}
RC: dict[Any, Any] = {
    "axes.grid": True,
    "font.size": 8,
    "pdf.fonttype": 42,  # fonts as TrueType: publishers refuse Type 3
}


@contextlib.contextmanager
def open_figure(path: Path, width: float, height: float, dpi: int) -> Iterator["Figure"]:
    """Yield a figure of so many inches to draw into, and write it. Raises OSError."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(RC):
        figure = Figure((width, height), dpi, layout="constrained")
        yield figure
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:])
        write_whole(path, content.getvalue())


def write_figure(path: Path, runs: Sequence[Run], dpi: int = DPI) -> None:
    """Write all panels of the steps of these runs that have data. Raises OSError."""
    panels = [panel for panel in PANELS if panel.kind == "steps" and has_data(panel, runs)]
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    height = rows * PANEL_INCHES + (len(runs) + len(MARKERS)) // COLUMNS * LEGEND_INCHES
    with open_figure(path, COLUMNS * PANEL_INCHES, height, dpi) as figure:
        for place, panel in enumerate(panels):
            draw_panel(figure.add_subplot(rows, COLUMNS, place + 1), panel, runs)
        if len(runs) == 1:
            figure.suptitle(runs[0].name)
        if panels:
            handles = figure.axes[0].get_legend_handles_labels()
            figure.legend(*handles, loc="outside lower center", ncols=COLUMNS)


def has_data(panel: Panel, runs: Sequence[Run]) -> bool:
    """Return whether any run has a number in a panel of steps."""
    return any(np.isfinite(run.columns[panel.column]).any() for run in runs)


def draw_panel(axes: "Axes", panel: Panel, runs: Sequence[Run]) -> None:
    """Draw the lines of all runs, and their evaluations as points; of a single run also what was recorded."""
    is_alone = len(runs) == 1
    for number, run in enumerate(runs):
        x = run.columns[panel.x]
        recorded = run.columns[panel.column]
        values = smooth_column(run, panel.column) if panel.is_smoothed else recorded
        name = "training, smoothed" if is_alone else run.name
        color = draw_line(axes, number, name, x, values)
        if is_alone:  # those of several would cover each other
            axes.plot(x, recorded, color=color, alpha=0.4, label="training, each step")
        if panel.has_evals:
            draw_evals(axes, panel, run, VALIDATION if is_alone else color)
    for is_full, (marker, size, label) in MARKERS.items():  # for the legend
        if panel.has_evals and any(
            len(read_evals(run, "val_loss", is_full, "step")[0]) for run in runs
        ):
            fill = VALIDATION if is_alone else "white"
            axes.plot([], [], marker, color=fill, ms=size, mec="black", label=label)
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x)
    if panel.is_log:
        axes.set_yscale("log")
    if panel.starts_at_zero:
        axes.set_ylim(bottom=0)


def draw_evals(axes: "Axes", panel: Panel, run: Run, color: str) -> None:
    """Draw the validation loss of a run as points."""
    for is_full, (marker, size, _) in MARKERS.items():
        points = read_evals(run, "val_loss", is_full, panel.x)
        axes.plot(*points, marker, color=color, ms=size, mec="black")


def draw_line(axes: "Axes", number: int, name: str, x: np.ndarray, y: np.ndarray) -> str:
    """Draw a line with the color and dash of its number, as in the page, and return the color."""
    place, dash = choose_line(number)
    color = COLORS["light"][place]
    marker = "." if len(x) <= FEW_POINTS else ""
    axes.plot(x, y, color=color, linestyle=dash, marker=marker, label=name)
    return color


def write_paper_figure(path: Path, lines: Lines) -> None:
    """Write one panel with the mean of each group, and a band from its lowest to its highest run.

    The ending is pdf, svg or png.
    """
    x = np.linspace(lines.start, lines.end, PAPER_POINTS)
    with open_figure(path, *PAPER_INCHES, PAPER_DPI) as figure:
        axes = figure.subplots()
        for number, (name, y) in enumerate(lines.interpolate(x).items()):
            color = draw_line(axes, number, name, x, y.mean(0))
            axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.25)
        axes.xaxis.set_major_formatter(lambda value, _: number_formats.count(value))
        axes.set_xlabel(lines.axis)
        axes.set_ylabel(f"{lines.curve.name}\n({lines.curve.unit})")
        axes.legend()
