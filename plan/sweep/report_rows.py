"""What a sweep found, as data and as a table that fits the terminal."""

import dataclasses
from typing import Any

from plan.report import table, wrapped
from record import number_formats
from record.number_formats import GIB, count


@dataclasses.dataclass(frozen=True)
class Row:
    """A run. typed: what gives it beside the settings that there are. loss: expected, nats/token, None where
    the law knows none; mfu_percent, hours
    and what follows from them: None where the speed is not known. waiting: the share of the time spent waiting for the
    network. fits_with: what to type so that memory holds it; "" where it does, None where nothing here helps.

    *_within: of the same model in the hours that there are, with as many tokens as it can read in them.
    """

    label: str
    typed: str
    parameters: int
    tokens: int
    loss: float | None
    mfu_percent: float | None
    tokens_per_s: float | None
    hours: float | None
    gpu_hours: float | None
    waiting: float | None
    memory_bytes: float
    capacity_bytes: float
    fits_with: str | None
    gpus: int = 0
    nodes: int = 1
    sites: int = 1
    parallel: str = "ddp"
    typed_within: str = ""
    tokens_within: int | None = None
    loss_within: float | None = None

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.capacity_bytes


@dataclasses.dataclass(frozen=True)
class Sweep:
    """kind: depth or gpus; within_hours: those of the columns *_within; recommended: a row's label, None
    where none can be; reasons: in words, the recommendation first."""

    kind: str
    title: str
    rows: list[Row]
    recommended: str | None
    reasons: list[str]
    within_hours: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            **dataclasses.asdict(self),
            "rows": [dataclasses.asdict(row) | {"fits": row.fits} for row in self.rows],
        }


def text(swept: Sweep) -> str:
    """The table, the recommended row marked, and the reasons."""
    columns = {"depth": of_a_depth, "gpus": of_gpus}[swept.kind]
    rows = [columns(row, swept) for row in swept.rows]
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    marks = ["  ", *("* " if row.label == swept.recommended else "  " for row in swept.rows)]
    width = max(len(row[0]) for row in cells)
    for mark, row in zip(marks, cells, strict=True):
        row[0] = mark + row[0].rjust(width)
    found = [*wrapped(swept.title, ""), *table(cells, left=(0, len(cells[0]) - 1))]
    for reason in swept.reasons:
        found += wrapped(reason, "")
    return "\n".join(found) + "\n"


def of_a_depth(row: Row, swept: Sweep) -> dict[str, str]:
    size = row.parameters
    within = (
        {}
        if swept.within_hours is None
        else {
            f"in {number_formats.hours(swept.within_hours)}: tokens": count(row.tokens_within or 0),
            "each": number((row.tokens_within or 0) / size),
            "loss ": loss(row.loss_within),
        }
    )
    return {
        "model": row.label,
        "size": count(size),
        "tokens": count(row.tokens),
        "MFU": percent(row.mfu_percent),
        "hours": number(row.hours),
        "GPU-h": number(row.gpu_hours),
        "loss": loss(row.loss),
        **within,
        "GiB": f"{row.memory_bytes / GIB:.1f}",
        "fits": fits(row),
    }


def of_gpus(row: Row, swept: Sweep) -> dict[str, str]:
    return {
        "GPUs": str(row.gpus),
        "nodes": str(row.nodes),
        "sites": str(row.sites),
        "PARALLEL": row.parallel,
        "tokens/s": "n/a" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        "waiting": "n/a" if row.waiting is None else f"{100 * row.waiting:.0f}%",
        "hours": number(row.hours),
        "GPU-hours": number(row.gpu_hours),
        "GiB": f"{row.memory_bytes / GIB:.1f}",
        "fits": fits(row),
    }


# ---------------------------------------------------------------------------------------------------
# Numbers in words
# ---------------------------------------------------------------------------------------------------


def fits(row: Row) -> str:
    if row.fits:
        return "yes"
    return "no" if row.fits_with is None else "with less"


def loss(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3g}%"


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    return "n/a" if value is None else number_formats.number(value)
