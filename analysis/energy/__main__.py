"""make energy: the energy of a run by cause, as a table, and by step, as a CSV file next to its record.

Exit codes: 0; 64 for an invalid setting; 78 if record or samples are missing or cannot be read.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from analysis.energy.join import join
from analysis.energy.prices import Prices
from analysis.energy.result import Energy
from analysis.runs import Run, RunError, read_run
from analysis.tables import write_csv
from record.exit_codes import BAD_DATA, BAD_SETTING, DONE
from record.goodput import CATEGORIES
from record.metrics import duration, figures
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from settings.resolve import show_path


def main() -> int:
    """Print the table and write the file. Returns the exit code."""
    try:
        config = Config.load()
        folder = RunPaths.of_node(config, ROOT).folder
        run = read_run(folder)
        energy = join(run, Prices(config.price_kwh, config.price_gpu_hour))
        if energy is None:
            raise RunError(
                f"{folder} has no gpu_metrics_*.csv: run `make gpu-sampler RUN_NAME={folder.name}` "
                "next to its training. `make train-2xh100` does so itself"
            )
        columns = find_columns(run, energy)
        path = folder / f"energy_{run.stamp}.csv"
        known = [np.where(np.isnan(column), np.array(None), column) for column in columns.values()]
        write_csv(path, columns, zip(*known, strict=True))
    except OSError as error:
        sys.stderr.write(f"{error}. Check its permissions and the free disk space\n")
        return BAD_DATA
    except (SettingsError, RunError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTING if isinstance(error, SettingsError) else BAD_DATA
    lines = [
        f"{run.name}, step {run.columns['step'][-1]:,.0f}: energy of the GPUs",
        *describe_causes(energy),
        describe_steps(columns),
        *energy.remarks,
        show_path(path),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return DONE


def find_columns(run: Run, energy: Energy) -> dict[str, np.ndarray]:
    """Return the columns of the file, (steps,) each."""
    columns = {
        "step": run.columns["step"].astype(int),
        "tokens": run.columns["tokens"].astype(int),
        "time": run.columns["time"],
        "seconds": run.columns["step_ms"] / 1000,
        "joules": energy.energy_j,
        "watts": energy.power_w,
        "joules_per_token": energy.power_w / run.columns["tokens_per_s"],
    }
    return columns | {f"{gpu}_j": joules for gpu, joules in energy.steps.items()}


def describe_causes(energy: Energy) -> Iterator[str]:
    """Yield the lines of the table."""
    rows = [["", "time", "kWh", "share", "W/GPU", "covered", "cost"]]
    total = energy.total
    for category, cause in [*energy.causes.items(), ("total", total)]:
        cost = energy.prices.cost(cause.joules, cause.gpu_s)
        if cause.seconds:
            rows.append(
                [
                    CATEGORIES.get(category, category),
                    duration(cause.seconds),
                    figures(cause.mean_w * cause.covered_s / 3.6e6),
                    f"{cause.joules / (total.joules or math.nan):.1%}",
                    f"{cause.mean_w:.0f}",
                    f"{cause.covered_s / (cause.gpu_s or math.nan):.1%}",
                    "n/a" if cost is None else f"{cost:.2f}",
                ]
            )
    for name, *cells in rows:
        known = [re.sub("nan%?", "n/a", cell).rjust(10) for cell in cells]
        yield name.ljust(16) + "".join(known)
    if energy.cost is None:
        yield "cost n/a: set PRICE_KWH or PRICE_GPU_HOUR"


def describe_steps(columns: Mapping[str, np.ndarray]) -> str:
    """Return what the median step took."""
    is_covered = np.isfinite(columns["joules"])
    if not is_covered.any():
        return "joules per step n/a: no step has samples of all GPUs of the run, and of no others"
    names = ("joules", "watts", "joules_per_token")
    joules, watts, per_token = (float(np.median(columns[name][is_covered])) for name in names)
    return (
        f"{is_covered.sum():,} of {len(is_covered):,} steps are covered. The median one took "
        f"{figures(joules)} J at {watts:,.0f} W, {figures(1000 * per_token)} mJ per token"
    )


if __name__ == "__main__":
    sys.exit(main())
