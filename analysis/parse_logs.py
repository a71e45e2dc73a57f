"""Any training log to CSV and curves: `python -m analysis.parse_logs PATH... [--log-dir DIR]`.

    --csv          a training_YYYYMMDD_HHMMSS.csv of every run next to the output, and its evaluations in a second file
    --static       a PNG instead of the page
    --output FILE  a page or figure, or a folder for both; default: DIR, or next to the first PATH
    --check        by how much each log contradicts itself; draws nothing unless --static or --output is given

A PATH is a log, packed by gzip or not, a trainer_state.json, a run folder of this repository, or a folder of these.
Folders in folders are searched too, and what several links lead to is read once. Trainers are declared in
analysis/logs/dialects (docs/logs.md). Exit codes: 0 at least one run was found, 64 invalid arguments, 78 no run was
found, none that can be drawn, or something could not be read or written.
"""

import sys
from collections.abc import Sequence

from analysis import plots


def main(argv: Sequence[str]) -> int:
    """Read what the arguments name, and write what they ask for; return the exit code."""
    return plots.main(argv, is_for_logs=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
