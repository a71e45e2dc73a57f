"""make energy: the energy of a run by cause, as a table, and by step, as a CSV file next to its record.

Exit codes: 0; 64 for an invalid setting; 78 if record or samples are missing or cannot be read.
"""

import math
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from analysis.energy.join import add_energy
from analysis.energy.result import Energy
from analysis.runs import Run, RunError, read_run
from analysis.tables import print_table, write_columns
from record.default_run import choose_run
from record.exit_codes import BAD_DATA, DONE
from record.goodput import CATEGORIES
from record.metrics import duration, figures
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from settings.finding import complain
from settings.resolve import show_path


def main() -> int:
    """Print the table and write the file. Returns the exit code."""
    try:
        config = Config.load(defaults=choose_run())
        folder = RunPaths.of_node(config, ROOT).folder
        run = add_energy(read_run(folder))
        energy = run.energy
        devices = {attempt.get("device") for attempt in run.attempts}
        if energy is None and devices == {"CPU"}:
            raise RunError("This run used no GPU.")
        if energy is None or not energy.coverage:
            remarks = energy.remarks if energy else ()
            raise RunError(
                "\n".join(
                    [f"No samples of its GPUs cover any time of the run in {folder}.", *remarks]
                )
                + f"\nRun `make gpu-sampler RUN_NAME={folder.name}` in a second terminal while it "
                "trains. `make train-2xh100` does so itself"
            )
        columns = find_columns(run, energy)
        path = folder / f"energy_{run.stamp}.csv"
        write_columns(
            path, {name: np.ma.masked_invalid(column) for name, column in columns.items()}
        )
    except OSError as error:
        complain(f"{error}. Check its permissions and the free disk space")
        return BAD_DATA
    except (SettingsError, RunError) as error:
        complain(error)
        return error.exit_code
    sys.stdout.write(f"{run.name}, step {run.columns['step'][-1]:,.0f}: energy of the GPUs\n")
    lines = [describe_steps(columns), *energy.remarks]
    if not (config.price_kwh or config.price_gpu_hour):
        lines.insert(0, "For the cost, set PRICE_KWH or PRICE_GPU_HOUR")
    print_table([*describe_causes(energy, config)], *lines)
    sys.stdout.write(f"{show_path(path)}\n")
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


def describe_causes(energy: Energy, config: Config) -> Iterator[dict[str, str]]:
    """Yield the rows of the table."""
    total = energy.total
    for category, cause in [*energy.causes.items(), ("total", total)]:
        if cause.seconds:
            cells = {
                "time": duration(cause.seconds),
                "kWh": figures(cause.mean_w * cause.covered_s / 3.6e6),
                "share": f"{cause.joules / (total.joules or math.nan):.1%}",
                "W/GPU": f"{cause.mean_w:.0f}",
                "covered": f"{cause.covered_s / (cause.gpu_s or math.nan):.1%}",
                "cost": f"{cause.cost(config.price_kwh, config.price_gpu_hour):.2f}",
            }
            known = {name: "n/a" if "nan" in cell else cell for name, cell in cells.items()}
            yield {"": CATEGORIES.get(category, category), **known}


def describe_steps(columns: Mapping[str, np.ndarray]) -> str:
    """Return what the median step took."""
    is_covered = np.isfinite(columns["joules"])
    if not is_covered.any():
        return "No step has samples of all GPUs of the run, and of no others"
    names = ("joules", "watts", "joules_per_token")
    joules, watts, per_token = (float(np.median(columns[name][is_covered])) for name in names)
    return (
        f"Samples cover {is_covered.sum():,} of {len(is_covered):,} steps. Median of a step: "
        f"{figures(joules)} J, {watts:,.0f} W, {figures(1000 * per_token)} mJ per token"
    )


if __name__ == "__main__":
    sys.exit(main())
