"""analysis/energy/samples.py: readings and files made by hand, and the joules in them by formulas of their own."""

import json

import numpy as np
import pytest

from analysis.energy.samples import FAST, GpuEnergy, find_files, read_columns

T = np.arange(0, 20, 0.01)
COUNTER = 300 * T
POWER = np.full(len(T), 300.0)
NOTHING = np.full(len(T), np.nan)


def write(
    folder,
    stamp,
    times,
    columns,
    zero=(0, 0),
    **about,
):
    """Write a file and its sidecar; elapsed_sec is 0 at `zero` on its monotonic and wall clocks."""
    path = folder / f"gpu_metrics_{stamp}.csv"
    header = ",".join(["elapsed_sec", *columns])
    rows = np.column_stack([times, *columns.values()])
    np.savetxt(path, rows, fmt="%.4f", delimiter=",", header=header, comments="")
    anchor = {"mono_s": zero[0], "time": zero[1]}
    facts = {"node": 0, "boot_id": "b", "elapsed_0": anchor, "anchors": [anchor]} | about
    path.with_suffix(".json").write_text(json.dumps(facts))
    return path


def measure(begin, end, *files):
    """Return joules and covered seconds, from boot, times, counter and power of files."""
    meter = GpuEnergy(1)
    for file in files:
        meter.add(*file, np.array([begin]), np.array([end]))
    return [meter.joules[0], meter.covered_s[0]]


IS_READ = (T < 10) | (T > 13.5)


@pytest.mark.parametrize(
    ("counter", "power", "begin", "end", "seconds"),
    [
        (COUNTER, NOTHING, -5, 2, 1.99),  # the first value may be an old one
        (COUNTER // 30 * 30, 2 * POWER, 2.05, 18, 15.95),  # ten values per second, on a line
        (0 * T, POWER, 2, 18, 16),  # a counter that never changes is none
        (np.where(IS_READ, COUNTER, np.nan), NOTHING, 5, 18, 9.48),
        (np.where(IS_READ, COUNTER, 3000), NOTHING, 5, 18, 9.48),
        (np.where(T < 10, COUNTER + 1e6, COUNTER), NOTHING, 2, 18, 15.99),
        (np.where(T < 10, COUNTER, COUNTER + 1e9), NOTHING, 2, 18, 15.99),
    ],
)
def test_only_what_was_read_counts(counter, power, begin, end, seconds):
    expected = pytest.approx([300 * seconds, seconds], rel=2e-3)
    assert measure(begin, end, ("b", T, counter, power)) == expected


def test_files_of_one_boot_go_on():
    first = (T[:1000], COUNTER[:1000], NOTHING[:1000])
    second = (T[1000:], COUNTER[1000:], NOTHING[1000:])
    copied = [("b", *first), ("b", *first), ("b", *second)]
    assert measure(2, 18, *copied) == pytest.approx([4800, 16])
    assert measure(2, 18, ("b", *first), ("c", *second))[1] < 15.995


def test_damaged_rows_and_files_are_named(tmp_path):
    path = write(tmp_path, "1", T, {"gpu0_energy_j": COUNTER})
    rows = path.read_bytes().splitlines()
    rows[300] = b"\0" * 40
    rows[400] = rows[400].replace(b".", b"x")
    rows[500] += b",1.0"
    rows[600] = b"\377"
    path.write_bytes(b"\n".join(rows) + b"\n30.0000,9")
    remarks: list[str] = []
    columns = read_columns(path, FAST, remarks)
    assert remarks == ["gpu_metrics_1.csv: damaged rows that are left out: 4"]
    assert columns["elapsed_sec"] == pytest.approx(np.delete(T, [299, 399, 499, 599]))

    write(tmp_path, "2", T[:0], {"gpu0_energy_j": T[:0]})
    write(tmp_path, "3", T, {"gpu0_energy_j": T}).with_suffix(".json").unlink()
    files, remarks = find_files(tmp_path)
    assert [file.path for file in files] == [path]
    assert [remark[12] for remark in remarks] == ["2", "3"]
