"""The energy of GPUs in intervals of time, from the files of their samplers.

    gpu_metrics_*.csv + .json -> find_files() -> read_columns() -> find_readings() -> GpuEnergy.add(), file by file

An energy counter is read more often than it changes, some ten times per second. Its value is known at each change, and
on the straight line between two of them, which is closer to the truth than what is read in between.
A GPU without a counter has its power integrated by trapezoids, for a whole file. Where nothing new was read for HOLE_S,
and where a counter fell or rose faster than any GPU can, there is a hole. Nobody knows how its energy is distributed:
an interval has it only with the whole hole inside, and only if the counter went on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from settings.json_file import read_object

HOLE_S = 3.0  # three intervals of the slowest sampler (INTERVAL_MS=1000)
MOST_W = 10_000  # more than any GPU draws
FAST = r"elapsed_sec|gpu\d+_(?:energy_j|power_inst_w|power_w)"
SLOW = r"elapsed_sec|net_.+_(?:in|out)_bytes_per_s"
NUMBER = r"(?:-?[0-9]+(?:\.[0-9]*)?)?"  # or an empty cell


@dataclass(frozen=True)
class SampleFile:
    """One gpu_metrics_*.csv.

    Attributes:
        boot: one start of the machine, with one monotonic clock; the name of the file if that is unknown.
        begin_s: the first row, on that clock.
        zero_s: where elapsed_sec is 0, on that clock.
        offset_s: Unix seconds minus those of that clock, as the wall clock was set last.
    """

    path: Path
    node: int
    host: str
    boot: str
    begin_s: float
    zero_s: float
    offset_s: float


def find_files(folder: Path) -> tuple[list[SampleFile], list[str]]:
    """Return the files of samplers in a run's folder, by node and time, and a sentence on each that is left out."""
    files = []
    remarks = []
    for path in sorted(folder.glob("gpu_metrics_*.csv")):
        try:
            files.append(read_header(path))
        except (OSError, LookupError, TypeError, ValueError) as error:
            remarks.append(
                f"{path.name} is left out: it, or {path.stem}.json next to it, is not as the sampler "
                f"writes them ({error})"
            )
    return sorted(files, key=lambda file: (file.node, file.begin_s)), remarks


def read_header(path: Path) -> SampleFile:
    """Read the first row of a file, and the .json next to it. Raises OSError, LookupError, TypeError, ValueError."""
    if not path.is_file():
        raise ValueError("it is no file")
    with open(path, "rb") as file:
        names = file.readline().split(b",")
        row = file.readline().split(b",")
    elapsed_s = float(row[names.index(b"elapsed_sec")])
    about = read_object(path.with_suffix(".json"))
    zero = about["elapsed_0"]
    last = about["anchors"][-1]
    return SampleFile(
        path,
        int(about["node"] or 0),
        str(about.get("host")),
        str(about["boot_id"] or path.name),
        zero["mono_s"] + elapsed_s,
        zero["mono_s"],
        last["time"] - last["mono_s"],
    )


def read_columns(path: Path, pattern: str, remarks: list[str]) -> dict[str, np.ndarray]:
    """Return the columns whose names match, (rows,) float64 with NaN for empty cells.

    Damaged rows, which a crash of the machine leaves, are left out, with a sentence added to `remarks`; so are all of a
    file whose header is not the sampler's. A last line without its end is not a row yet. Raises OSError.
    """
    import pyarrow  # takes 0.1 s, which commands without samples need not wait for

    data = path.read_bytes()
    data = data[: data.rfind(b"\n") + 1]
    names = data[: data.find(b"\n")].decode("latin-1").split(",")
    wanted = [name for name in names if re.fullmatch(pattern, name)]
    if "elapsed_sec" not in wanted or len({*wanted}) < len(wanted):
        remarks.append(f"{path.name} is left out: a column is missing, or is there twice")
        return {}
    try:
        table = parse_columns(data, wanted)
    except pyarrow.ArrowInvalid:
        cells = [NUMBER if name in wanted else "[^,]*" for name in names]
        intact = re.compile(",".join(cells).encode() + rb"\r?\n")
        header, *rows = data.splitlines(keepends=True)
        intact_rows = [row for row in rows if intact.fullmatch(row)]
        damaged = len(rows) - len(intact_rows)
        remarks.append(f"{path.name}: damaged rows that are left out: {damaged:,}")
        table = parse_columns(header + b"".join(intact_rows), wanted)
    return {name: table.column(name).to_numpy() for name in wanted}


def parse_columns(data: bytes, wanted: list[str]) -> Any:
    """Return a table. Raises pyarrow.ArrowInvalid for too many or too few cells in a row, and for what is not a number
    in these columns."""
    import pyarrow
    from pyarrow import csv

    types = dict.fromkeys(wanted, pyarrow.float64())
    return csv.read_csv(
        pyarrow.BufferReader(data),
        # With threads, the process may abort when it exits.
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=csv.ParseOptions(quote_char=False),
        convert_options=csv.ConvertOptions(include_columns=wanted, column_types=types),
    )


def find_readings(columns: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each GPU with its counter in joules and its power in watts, instantaneous if known, (rows,) each."""
    nothing = np.full(len(columns["elapsed_sec"]), np.nan)
    for gpu in dict.fromkeys(re.findall(r"gpu\d+", " ".join(columns))):
        power_w = columns.get(f"{gpu}_power_inst_w", nothing)
        power_w = np.where(np.isfinite(power_w), power_w, columns.get(f"{gpu}_power_w", nothing))
        power_w = np.where(power_w <= MOST_W, power_w, np.nan)
        yield gpu, columns.get(f"{gpu}_energy_j", nothing), power_w


class GpuEnergy:
    """The energy of a GPU in n intervals, added up file by file.

    Attributes:
        joules: (n,) in each interval, as far as it is covered.
        covered_s: (n,) seconds of each interval that readings cover.
        last: (boot, is_counter) -> time and value, (1,) each, of the last reading.
    """

    def __init__(self, size: int):
        self.joules = np.zeros(size)
        self.covered_s = np.zeros(size)
        self.last: dict = {}

    def add(
        self,
        boot: str,
        times: np.ndarray,
        counter: np.ndarray,
        power_w: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
    ) -> None:
        """Add the next file of a boot.

        Args:
            times: (rows,) seconds on the clock of this boot.
            counter, power_w: (rows,) joules and watts that were read then, NaN where nothing was.
            begins, ends: (n,) of the intervals, in seconds on this clock.
        """
        is_counter = np.diff(counter[np.isfinite(counter)]).any()
        values = counter if is_counter else power_w
        last = self.last.get((boot, is_counter), (np.array([]), np.array([])))
        is_new = times > last[0].max(initial=-np.inf)  # a second sampler adds nothing
        is_reading = np.isfinite(times + values) & is_new
        times = np.append(last[0], times[is_reading])
        values = np.append(last[1], values[is_reading])
        if is_counter:
            is_change = np.diff(values, prepend=values[:1]) != 0
            is_change[: len(last[0])] = True
            times = times[is_change]
            values = values[is_change]
        if not times.size:
            return
        times = np.maximum.accumulate(times)
        self.last[boot, is_counter] = (times[-1:], values[-1:])

        took = np.diff(times)
        rise = np.diff(values)
        if not is_counter:
            rise = (values[1:] + values[:-1]) / 2 * took
        # A change may be seen a second late.
        is_known = (took > 0) & (took <= HOLE_S) & (rise >= 0) & (rise <= MOST_W * (took + 1))
        for sums, increments in ((self.joules, rise), (self.covered_s, took)):
            curve = np.append(0.0, np.cumsum(np.where(is_known, increments, 0.0)))
            sums += np.interp(ends, times, curve) - np.interp(begins, times, curve)
