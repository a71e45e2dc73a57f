"""`make gpu-rehearsal`: rehearse cases, a line each. The exit code is 1 if one fails.

CASE="a100 fsdp"    one case, in the words of cases.py
ALL=1               all presets for GPUs, at full size
"""

import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_rehearsal import rehearsal
from bench.gpu_rehearsal.cases import PAIRS, PRESETS, config_of
from settings import ROOT, SettingsError, explain_error
from settings.terminal import complain, say

GIB = 2**30
BAD_SETTING = 64


def report(case: str) -> bool:
    """Run a case, print its line, and return whether all is true of it."""
    began = time.perf_counter()
    line = ""
    problem = ""
    try:
        result = rehearsal.rehearse(config_of(case.split()))
        line = (
            f"attention {'+'.join((result.kernel, *result.kernels))}, "
            f"peak {result.peak_bytes / GIB:.2f} GiB ({result.operation}), "
            f"plan {result.planned_bytes / GIB:.2f} GiB ({result.moment}, {result.plan_error:+.1%}), "
        )
        rehearsal.check_plan(result)
    except SettingsError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        problem = f"{type(error).__name__}: {reason}{place_of(error)}, "
    verdict = "FAIL" if problem else "ok  "
    seconds = time.perf_counter() - began
    say(f"{verdict} {case}: {line}{problem}{seconds:.0f} s")
    return not problem


def place_of(error: Exception) -> str:
    """Say where in the product an error comes from, innermost first."""
    places = []
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(ROOT / "train"):
            places.append(f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}")
    return f" [{' < '.join(places[:-4:-1])}]" if places else ""


def main(arguments: Sequence[str]) -> int:
    cases: Sequence[str] = PAIRS
    if arguments == ["--all"]:
        cases = PRESETS
    elif arguments:
        cases = [" ".join(arguments)]
    try:
        results = [report(case) for case in cases]
    except SettingsError as error:
        complain(explain_error(error))
        return BAD_SETTING
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
