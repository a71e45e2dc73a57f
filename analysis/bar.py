"""Where the time of each run went, as one bar: for the page in HTML, for the picture drawn by matplotlib.

    Goodput (record/goodput.py) -> shares: category, seconds, per cent -> segments, and in words below them

Every second since the first start is in one category. A run that is younger than ENOUGH_S has no bar: the
seconds of its start-up would say nothing of the rest.
"""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from analysis.load import Run
from record.goodput import CATEGORIES, Goodput
from record.metrics import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENOUGH_S = 5.0  # of wall time, for a bar
NARROWEST = 7.0  # per cent of the bar, below which a segment has no room for its own

# Of Okabe and Ito (2008), which the colour-blind can tell apart too, on light and dark ground; greys for the idle.
COLOURS = {
    "training": "#009e73",
    "start_up": "#56b4e9",
    "evaluation": "#0072b2",
    "checkpoint": "#cc79a7",
    "data_wait": "#e6b400",
    "exchange": "#f0e442",
    "lost_work": "#d55e00",
    "down": "#7d8590",
    "other": "#bcc2c9",
}
DARK = ("#0072b2", "#d55e00", "#7d8590", "#009e73")  # those that carry white letters


def enough(runs: Sequence[Run]) -> bool:
    """Whether there is something to show of any of them."""
    return any(run.goodput and run.goodput.wall_s >= ENOUGH_S for run in runs)


def shares(run: Run) -> list[tuple[str, float, float]]:
    """(category, seconds, per cent) of every category that does not round to 0.0%; none for a log or a short run."""
    if run.goodput is None or (wall_s := run.goodput.wall_s) < ENOUGH_S:
        return []
    return [
        (category, seconds, 100 * seconds / wall_s)
        for category in CATEGORIES
        if (seconds := run.goodput.seconds[category]) >= 0.0005 * wall_s
    ]


def heading(goodput: Goodput) -> str:
    return f"Goodput {100 * goodput.goodput:.1f}% of {duration(goodput.wall_s)}"


def in_words(category: str, seconds: float, per_cent: float) -> str:
    """training 57:46 (93.1%)"""
    return f"{CATEGORIES[category]} {duration(seconds)} ({per_cent:.1f}%)"


def letters(category: str) -> str:
    return "#ffffff" if COLOURS[category] in DARK else "#1d2126"


# ---------------------------------------------------------------------------------------------------
# Page
# ---------------------------------------------------------------------------------------------------


def bars_html(runs: Sequence[Run], names: Sequence[str]) -> str:
    """A bar and its legend for every run that is long enough; without any, nothing."""
    return "\n".join(
        bar_html(run, run.goodput, name if len(runs) > 1 else "")
        for run, name in zip(runs, names, strict=True)
        if run.goodput and shares(run)
    )


def bar_html(run: Run, goodput: Goodput, name: str) -> str:
    """One bar; no name where no other run is shown."""
    segments, legend = [], []
    for category, seconds, per_cent in shares(run):
        words = in_words(category, seconds, per_cent)
        label = f"{per_cent:.1f}%" if per_cent >= NARROWEST else ""
        segments.append(
            f'<span class="part" title="{words}" style="width:{per_cent:.4f}%;'
            f'background:{COLOURS[category]};color:{letters(category)}">{label}</span>'
        )
        detail = html.escape(goodput.detail(category).strip())
        legend.append(
            f'<li><i style="background:{COLOURS[category]}"></i>{words} <small>{detail}</small></li>'
        )
    whose = f"{html.escape(name)}: " if name else ""
    return (
        f'<div class="goodput"><h2>{whose}{heading(goodput)}</h2>\n'
        f'<div class="bar">{"".join(segments)}</div>\n<ul>{"".join(legend)}</ul></div>'
    )


# ---------------------------------------------------------------------------------------------------
# Picture
# ---------------------------------------------------------------------------------------------------


def draw_bars(axes: "Axes", runs: Sequence[Run], names: Sequence[str]) -> None:
    """A bar for every run that is long enough, the first on top, each with its words below it."""
    from matplotlib.artist import Artist
    from matplotlib.offsetbox import AnnotationBbox, DrawingArea, HPacker, TextArea
    from matplotlib.patches import Rectangle

    shown = [
        (run, run.goodput, name)
        for run, name in zip(runs, names, strict=True)
        if run.goodput and shares(run)
    ]
    for i, (run, goodput, name) in enumerate(shown):
        left, words = 0.0, list[Artist]()
        for category, seconds, per_cent in shares(run):
            axes.barh(-i, per_cent, left=left, height=0.36, color=COLOURS[category])
            if per_cent >= NARROWEST:
                axes.text(
                    left + per_cent / 2,
                    -i,
                    f"{CATEGORIES[category]} {per_cent:.1f}%",
                    ha="center",
                    va="center_baseline",
                    fontsize=8,
                    color=letters(category),
                    clip_on=True,
                )
            left += per_cent
            swatch = DrawingArea(8, 8)
            swatch.add_artist(Rectangle((0, 0), 8, 8, color=COLOURS[category]))
            text = TextArea(
                in_words(category, seconds, per_cent), textprops={"fontsize": 8, "color": "0.3"}
            )
            words.append(HPacker(children=[swatch, text], pad=0, sep=4, align="baseline"))
        whose = f"{name}: " if len(runs) > 1 else ""
        axes.text(
            0,
            0.25 - i,
            f"{whose}{heading(goodput)}",
            fontsize=10 if len(runs) == 1 else 9,
            parse_math=False,
        )
        axes.add_artist(
            AnnotationBbox(
                HPacker(children=words, pad=0, sep=14, align="baseline"),
                (0, -0.25 - i),
                box_alignment=(0, 1),
                pad=0,
                frameon=False,
            )
        )
    axes.set_xlim(0, 100)
    axes.set_ylim(0.5 - len(shown), 0.5)
    axes.axis("off")
