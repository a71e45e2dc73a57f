"""make plan: `python -m plan` prints what the run that the settings describe will take.

MORE=1 adds every layout, JSON=1 prints it for programs, SWEEP=depth or gpus compares runs in a table, REVIEW=1 compares
earlier plans with their runs. If MODEL is set, or the preset is one of fine-tuning, a fine-tuning is planned.

Exit codes: 0; 64 if the settings ask for something impossible; 78 if the data is bad, or RUNS_DIR or DATA_DIR cannot
be read.
"""

import datetime
import json
import sys
from typing import Any

from plan import sweep
from plan.accounting import review
from plan.allow_fail import refuse_unknown_checks
from plan.finetuning.data_steps import NotCounted, with_steps
from plan.fleet import fleet_of
from plan.load import load
from plan.planner import make_plan, probe_of, with_past_runs
from plan.report import report
from plan.run import run_of
from plan.storage import FolderError
from record.exit_codes import BAD_DATA
from record.locks import RunFolderError
from settings import ROOT, SettingsError, explain_error
from settings.finding import code_of, split
from settings.resolve import find_fitted
from settings.terminal import complain
from train.data.sources.source import CorpusError


def main() -> int:
    try:
        config = load()
        refuse_unknown_checks(config.allow_fail)
        if config.review:
            folder = ROOT / config.runs_dir
            summary = review.review(folder)
            sys.stdout.write(as_text(summary) if config.json else review.report(summary, folder))
            return 0
        fleet = fleet_of(config)
        if config.sweep:
            run = with_past_runs(run_of(config, fleet))
            swept = sweep.compare(run, probe_of(config, fleet, may_measure=True))
            sys.stdout.write(as_text(swept.as_json()) if config.json else sweep.report(swept))
            return 0
        fitted = find_fitted()
        if config.model and config.data:
            try:
                config = with_steps(config, fitted, fleet.processes)
                fitted = set()
            except NotCounted as reason:
                complain(f"The steps of DATA={config.data} are not known: {reason}")
        plan = make_plan(config, fleet, datetime.datetime.now(), fitted=fitted)
    except SettingsError as error:
        complain(explain_error(error))
        return error.exit_code
    except (FolderError, CorpusError, RunFolderError) as error:
        complain(error)
        return BAD_DATA
    sys.stdout.write(as_text(plan.as_json()) if config.json else report(plan, config.more))
    stopping, _ = split(config.allow_fail, plan.findings)
    return code_of(stopping)


def as_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
