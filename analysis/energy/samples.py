"""The files of GPU samplers: the energy of each GPU up to any moments, in one pass and little memory.

    gpu_metrics_*.csv + .json -> samplers(folder) -> Sampler.measure(moments) -> Curve.between(from, to)

A counter of energy has a new value some ten times a second, however often it is read. What it stood at in between is
on the line between two changes, not between two readings: tests/analysis/test_samples.py compares the errors of both.
Power is integrated by trapezoids. Where nothing new was read for HOLE_S, and where a counter fell, or rose as no GPU
can, there is a hole: nothing is known of its inside, but for what a counter that went on has counted as a whole.
Files are read in blocks; a last line without its end is left out.
"""

import dataclasses
import datetime
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 2**24
HOLE_S = 2.0  # between two readings, or three intervals of the sampler where those are longer
MOST_W = 10_000  # no GPU takes that; of a counter over a second more than has passed, since a change is seen late
SAME_S = 0.01  # two clocks on the wall that differ by less are one
BOOT_S = 1.0  # two boots of a machine are further apart
NUMBER = rb"(?:-?[0-9]+(?:\.[0-9]*)?)?"  # or an empty cell
CELL = re.compile(NUMBER)
ROW = re.compile(rb"[ -+\--~]*(?:," + NUMBER + rb")*")  # a time stamp, then numbers or empty cells
COLUMN = re.compile(r"gpu(\d+)_(energy_j|power_inst_w|power_w)")


class Curve:
    """Joules and covered seconds up to each of some moments, in order, from readings that come block by block.

    Both stand still in holes: (from, to, joules inside or NaN where they are not known).
    """

    def __init__(self, moments: np.ndarray, hole_s: float):
        self.moments, self.hole_s = moments, hole_s
        self.joules, self.seconds = np.zeros(len(moments)), np.zeros(len(moments))
        self.holes: list[tuple[float, float, float]] = []
        self.done, self.sum_j, self.sum_s = 0, 0.0, 0.0
        self.first = self.last = math.nan

    def extend(self, t: np.ndarray, rise: np.ndarray) -> None:
        """Times, the last one of the block before among them, and joules from each to the next."""
        took = np.diff(t)
        known = (rise >= 0) & (rise <= MOST_W * (took + 1))
        whole = known & (took <= self.hole_s)
        self.holes += [
            (float(t[i]), float(t[i + 1]), float(rise[i]) if known[i] else math.nan)
            for i in np.flatnonzero(~whole)
        ]
        joules = np.concatenate(([self.sum_j], self.sum_j + np.cumsum(np.where(whole, rise, 0.0))))
        seconds = np.concatenate(([self.sum_s], self.sum_s + np.cumsum(np.where(whole, took, 0.0))))
        end = int(np.searchsorted(self.moments, t[-1], side="right"))
        here = self.moments[self.done : end]
        self.joules[self.done : end] = np.interp(here, t, joules)
        self.seconds[self.done : end] = np.interp(here, t, seconds)
        self.done, self.sum_j, self.sum_s = end, float(joules[-1]), float(seconds[-1])
        self.first, self.last = float(t[0]) if math.isnan(self.first) else self.first, float(t[-1])

    def close(self) -> None:
        """What comes behind the last reading adds nothing."""
        self.joules[self.done :], self.seconds[self.done :] = self.sum_j, self.sum_s

    def between(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Joules and covered seconds of intervals that do not overlap, in order, whose ends are among the moments."""
        i, j = np.searchsorted(self.moments, begins), np.searchsorted(self.moments, ends)
        joules, seconds = self.joules[j] - self.joules[i], self.seconds[j] - self.seconds[i]
        for begin, end, inside in self.holes:
            k = int(np.searchsorted(begins, begin, side="right")) - 1
            if k >= 0 and end <= ends[k] and not math.isnan(inside):
                joules[k] += inside
                seconds[k] += end - begin
        return joules, seconds

    def blind_s(self, begin: float, end: float) -> float:
        """Seconds of this time that are not covered."""
        if math.isnan(self.first):
            return end - begin
        gaps = [(-math.inf, self.first), *((a, b) for a, b, _ in self.holes), (self.last, math.inf)]
        return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in gaps)


class Meter:
    """A GPU: its counter's curve, and that of its power, instant where it is known."""

    def __init__(self, index: int, moments: np.ndarray, hole_s: float):
        self.index = index
        self.counter, self.power = Curve(moments, hole_s), Curve(moments, hole_s)
        self.change: tuple[float, float] | None = None  # when the counter changed last, and to what
        self.reading: tuple[float, float] | None = None  # the last of power
        self.value = math.nan  # the counter's

    def add(self, t: np.ndarray, energy: np.ndarray | None, power: np.ndarray) -> None:
        """Readings at these times; NaN where there is none."""
        if energy is not None and (known := np.isfinite(energy)).any():
            e, te = energy[known], t[known]
            changed = np.diff(e, prepend=e[0] if math.isnan(self.value) else self.value) != 0
            self.value = float(e[-1])
            self.change = extend(self.counter, self.change, te[changed], e[changed], np.diff)
        known = np.isfinite(power) & (power <= MOST_W)
        self.reading = extend(self.power, self.reading, t[known], power[known], None)


def extend(
    curve: Curve, before: tuple[float, float] | None, t: np.ndarray, values: np.ndarray, rises: Any
) -> tuple[float, float] | None:
    """Add values to a curve, behind the last one before; returns the new last. rises: joules between neighbours;
    None where the values are watts, of which nothing is known across a hole."""
    if not len(t):
        return before
    if before:
        t, values = np.concatenate(([before[0]], t)), np.concatenate(([before[1]], values))
    if rises is None:
        took = np.diff(t)
        curve.extend(
            t, np.where(took <= curve.hole_s, (values[1:] + values[:-1]) / 2 * took, math.nan)
        )
    else:
        curve.extend(t, rises(values))
    return float(t[-1]), float(values[-1])


# ---------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Table:
    """One gpu_metrics_*.csv. about: its .json, empty where that is missing; began: Unix seconds at elapsed_sec 0, as
    the first row's clock on the wall told them, and at_end as the last row's did."""

    path: Path
    about: Mapping[str, Any]
    columns: list[str]
    first_s: float
    last_s: float
    began: float
    at_end: float
    damaged: int = 0

    @property
    def gpus(self) -> list[int]:
        """Indices of the GPUs that it has columns of."""
        return sorted({int(found[1]) for name in self.columns if (found := COLUMN.fullmatch(name))})

    def blocks(self, wanted: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """The columns, float64, NaN for empty cells, some ten thousand rows at a time. Counts rows that are damaged.

        Raises OSError.
        """
        with open(self.path, "rb") as file:
            file.readline()
            rest = b""
            while data := file.read(BLOCK_BYTES):
                data = rest + data
                cut = data.rfind(b"\n") + 1
                data, rest = data[:cut], data[cut:]
                if data:
                    yield self.parsed(data, wanted)

    def parsed(self, data: bytes, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        import pyarrow  # takes a tenth of a second
        from pyarrow import csv

        def skip(_: Any) -> str:
            self.damaged += 1
            return "skip"

        def read(text: bytes) -> Any:
            return csv.read_csv(
                pyarrow.BufferReader(text),
                csv.ReadOptions(column_names=self.columns),
                csv.ParseOptions(quote_char=False, invalid_row_handler=skip),
                csv.ConvertOptions(
                    include_columns=list(wanted),
                    null_values=[""],
                    column_types=dict.fromkeys(wanted, pyarrow.float64()),
                ),
            )

        def checked() -> bytes:
            """The rows whose cells are numbers, one by one."""
            rows, places = (
                data.splitlines(keepends=True),
                [self.columns.index(name) for name in wanted],
            )
            good = [
                row
                for row in rows
                if row.isascii()
                and len(cells := row.rstrip(b"\r\n").split(b",")) == len(self.columns)
                and all(CELL.fullmatch(cells[place]) for place in places)
            ]
            self.damaged = before + len(rows) - len(good)
            return b"".join(good)

        before = self.damaged
        try:
            table = read(
                data if data.isascii() else checked()
            )  # pyarrow cannot tell of a row that is no text
        except pyarrow.ArrowInvalid:  # a cell is no number
            table = read(checked())
        return {
            name: table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
            for name in wanted
        }


@dataclasses.dataclass
class Sampler:
    """The files of one machine between two of its starts, in order, on one clock.

    monotonic: the clock is the machine's monotonic one, else that on its wall. offsets: Unix seconds less the clock's,
    one for each look at the clock on the wall; the last counts, as a clock is set because it was wrong.
    """

    host: str | None
    boot_id: str | None
    node: int | None
    monotonic: bool
    offsets: list[float]
    tables: list[Table]

    def zero(self, table: Table) -> float:
        """The clock at elapsed_sec 0 of a file."""
        return table.about["elapsed_0"]["mono_s"] if self.monotonic else table.at_end

    @property
    def span(self) -> tuple[float, float]:
        """Its first and last reading, on its clock."""
        return (
            self.zero(self.tables[0]) + self.tables[0].first_s,
            self.zero(self.tables[-1]) + self.tables[-1].last_s,
        )

    def measure(self, moments: np.ndarray) -> list[Meter]:
        """A meter for each GPU. moments: on its clock, in order. Raises OSError."""
        meters: dict[int, Meter] = {}
        last = -math.inf
        for table in self.tables:
            wanted = ["elapsed_sec", *(name for name in table.columns if COLUMN.fullmatch(name))]
            hole_s = max(HOLE_S, 3e-3 * table.about.get("interval_ms", 0))
            for index in table.gpus:
                meter = meters.setdefault(index, Meter(index, moments, hole_s))
                meter.counter.hole_s = meter.power.hole_s = hole_s
            for block in table.blocks(wanted):
                t = block["elapsed_sec"] + self.zero(table)
                ahead = np.fmax.accumulate(np.concatenate(([last], t)))
                new = t > ahead[:-1]  # neither a second time nor without a time
                last = float(ahead[-1])
                for index in table.gpus:
                    known = {
                        name: block[f"gpu{index}_{name}"][new]
                        for name in ("energy_j", "power_inst_w", "power_w")
                        if f"gpu{index}_{name}" in block
                    }
                    power = known.get("power_w", np.full(int(new.sum()), math.nan))
                    if "power_inst_w" in known:
                        power = np.where(
                            np.isfinite(known["power_inst_w"]), known["power_inst_w"], power
                        )
                    meters[index].add(t[new], known.get("energy_j"), power)
        for meter in meters.values():
            meter.counter.close()
            meter.power.close()
        return list(meters.values())

    @property
    def remarks(self) -> list[str]:
        """What there was to say of the files, once they are read."""
        return [
            f"{table.path.name}: {table.damaged:,} damaged {'row' if table.damaged == 1 else 'rows'} left out"
            for table in self.tables
            if table.damaged
        ]


def samplers(folder: Path) -> tuple[list[Sampler], list[str]]:
    """All that sampled into the folder, and what there is to say of files that cannot be used, or not fully."""
    tables: list[Table] = []
    said: list[str] = []
    for path in sorted(folder.glob("gpu_metrics_*.csv")):
        try:
            if table := open_table(path, said):
                tables.append(table)
        except (OSError, ValueError, KeyError, TypeError) as error:
            said.append(f"{path.name} is left out, as it is no table of a sampler ({error})")
    adopt(tables, said)
    found: list[Sampler] = []
    for table in sorted(tables, key=lambda t: t.at_end + t.first_s):
        about = table.about
        offsets = [a["time"] - a["mono_s"] for a in about["anchors"]] if about else [0.0]
        sampler = next((s for s in found if goes_on(s, table, offsets)), None)
        if sampler is None:
            sampler = Sampler(
                about.get("host"), about.get("boot_id"), about.get("node"), bool(about), [], []
            )
            found.append(sampler)
        sampler.tables.append(table)
        sampler.offsets += offsets
        if not about:
            said.append(
                f"{table.path.name} has no .json beside it: its machine is unknown, and it is joined by its "
                "clock on the wall"
            )
            if abs(table.at_end - table.began) > SAME_S:
                said.append(
                    f"{table.path.name}: that clock was set by {table.at_end - table.began:.2f} s meanwhile; "
                    "what it said last counts"
                )
    for sampler in found:
        sampler.tables.sort(key=lambda t, s=sampler: s.zero(t) + t.first_s)  # type: ignore[misc]
    return sorted(found, key=lambda s: (s.node is None, s.node or 0)), said


def goes_on(sampler: Sampler, table: Table, offsets: Sequence[float]) -> bool:
    """Whether a file is of the same machine and boot. Of one without .json: as long as no two were written at once."""
    about = table.about
    if not about:
        return not sampler.monotonic and sampler.span[1] <= table.at_end + table.first_s
    if not sampler.monotonic or (sampler.host, sampler.boot_id) != (
        about.get("host"),
        about.get("boot_id"),
    ):
        return False
    return sampler.boot_id is not None or same_boot(sampler.offsets, offsets)


def same_boot(offsets: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two monotonic clocks of a machine are one, by how far the clock on the wall was from them: that is when
    the machine was started, and another boot is at least its own duration away."""
    return any(abs(one - other) < BOOT_S for one in offsets for other in others)


def boots_of(config: Path) -> dict[int | None, str]:
    """Number of an attempt -> boot_id of the machine whose clock its record has, of those that it is known of."""
    try:
        attempts = json.loads(config.read_text(encoding="utf-8"))["attempts"]
        return {
            n: attempt["boot_id"]
            for n, attempt in enumerate(attempts)
            if isinstance(attempt.get("boot_id"), str)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def open_table(path: Path, said: list[str]) -> Table | None:
    """A file, its head and tail read; None where there is no row yet. Raises OSError, ValueError."""
    with open(path, "rb") as file:
        header, first = file.readline(), file.readline()
        size = file.seek(0, io.SEEK_END)
        file.seek(max(len(header), size - 2**16))
        tail = file.read()
    columns = header.decode("ascii", "replace").strip().split(",")
    if columns[:2] != ["timestamp", "elapsed_sec"] or not any(map(COLUMN.fullmatch, columns)):
        raise ValueError("its first line does not name timestamp, elapsed_sec and power of GPUs")
    if not first.endswith(b"\n"):
        return None
    rows = [
        row
        for row in tail[: tail.rfind(b"\n")].splitlines()
        if ROW.fullmatch(row) and row.count(b",") > 1
    ]
    (began, first_s), (at_end, last_s) = moment(first), moment(rows[-1] if rows else first)
    about: dict[str, Any] = {}
    try:
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if not isinstance(about, dict) or not about["anchors"] or not about["elapsed_0"]["mono_s"]:
            raise ValueError("it holds no clock")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        said.append(
            f"{path.with_suffix('.json').name} cannot be used ({type(error).__name__}: {error})"
        )
        about = {}
    return Table(path, about, columns, first_s, last_s, began, at_end)


def moment(row: bytes) -> tuple[float, float]:
    """(Unix seconds at elapsed_sec 0, elapsed_sec) of a row. Raises ValueError."""
    stamp, elapsed, *_ = row.decode("ascii", "replace").split(",")
    when = datetime.datetime.fromisoformat(stamp)
    if when.tzinfo is None:
        raise ValueError("its time stamps name no time zone, for example 2026-01-31T12:00:00.000Z")
    return when.timestamp() + 0.0005 - float(elapsed), float(
        elapsed
    )  # milliseconds are cut off, not rounded


def adopt(tables: list[Table], said: list[str]) -> None:
    """A file without its .json that goes on where a sampler's other file ends has that one's."""
    for table in tables:
        if table.about:
            continue
        for other in tables:
            if (
                other.about
                and table.columns == other.columns
                and table.first_s > other.last_s
                and any(
                    abs(table.began - (a["time"] - a["elapsed_sec"])) < SAME_S
                    for a in other.about["anchors"]
                )
            ):
                table.about = other.about
                said.append(
                    f"{table.path.name} has no .json beside it; by its clock it goes on from {other.path.name}"
                )
                break
