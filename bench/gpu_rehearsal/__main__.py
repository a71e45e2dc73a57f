"""`make gpu-rehearsal`: rehearse cases, a line each. The exit code is 1 if one fails.

CASE="a100 fsdp"    one case, in the words of cases.py
ALL=1               these, and all presets for GPUs at full size
"""

import sys
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.gpu_rehearsal import rehearsal
from bench.gpu_rehearsal.cases import CASES, COMPILED, PRESETS, config_of
from settings import ROOT, SettingsError, explain_error
from settings.terminal import complain, say

KIB = 2**10
GIB = 2**30
BAD_SETTING = 64
NO_TRITON = (
    "Kernels were not compiled, since the package triton is absent. To install it (190 MB): "
    ".venv/bin/python -m pip install --no-deps triton==3.7.1"
)


def report(case: str) -> bool:
    """Run a case, print its line, and return whether all is true of it."""
    began = time.perf_counter()
    line = ""
    problem = ""
    try:
        result = rehearsal.rehearse(config_of(case.split()))
        line = f"attention {'+'.join(result.kernels) or 'varlen'}, {outcome(result)}, "
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


def outcome(result: rehearsal.Result) -> str:
    if compiled := result.compiled:
        if not compiled.has_triton:
            return f"{compiled.graphs} graphs"
        shared_kib = compiled.shared_bytes / KIB
        return (
            f"{compiled.graphs} graphs, {compiled.kernels} kernels of at most {shared_kib:.0f} KiB"
        )
    return (
        f"peak {result.peak_bytes / GIB:.2f} GiB ({result.operation}), "
        f"plan {result.planned_bytes / GIB:.2f} GiB ({result.moment}, {result.plan_error:+.1%})"
    )


def place_of(error: Exception) -> str:
    """Say where in the product an error comes from, innermost first."""
    places = []
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(ROOT / "train"):
            places.append(f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}")
    return f" [{' < '.join(places[:-4:-1])}]" if places else ""


def main(arguments: Sequence[str]) -> int:
    cases: Sequence[str] = CASES
    if arguments == ["--all"]:
        cases = CASES + PRESETS
    elif arguments:
        cases = [" ".join(arguments)]
    try:
        results = [report(case) for case in cases]
    except SettingsError as error:
        complain(explain_error(error))
        return BAD_SETTING
    if set(cases) & set(COMPILED) and find_spec("triton") is None:
        say(NO_TRITON)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
