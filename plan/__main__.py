"""make plan: `python -m plan` prints the plan of the run that the settings describe; JSON=1 as JSON, SWEEP=... a table.
Where MODEL is set, or the preset is for fine-tuning, it is the plan of that (plan/finetuning/tuning.py).

Exit codes: 0; 64 if the settings ask for something impossible; 78 if the data is bad, or RUNS_DIR or DATA_DIR cannot be
read.
"""

import datetime
import json
import sys
from collections.abc import Callable, Collection
from typing import Any

from plan import storage
from plan.allow_fail import refuse_unknown_checks
from plan.as_json import as_json
from plan.finetuning import tuned_report, tuning
from plan.fleet import fleet_of
from plan.network import links
from plan.planner import plan, probe_of
from plan.report import told
from plan.sweep import report_rows, sweep
from record.exit_codes import BAD_DATA
from settings import SettingsError
from settings.checks import CHECKS, check_batch
from settings.config import Config
from settings.finding import code_of, complain, split
from train.data.data_paths import fit_vocabulary
from train.data.sources.source import CorpusError

Rule = Callable[[Any], Any]
EVERY_RULE = tuple(CHECKS)  # none is asked before it is known what is planned


def main() -> int:
    try:
        asked = links.loaded(lambda measured: loaded(measured, EVERY_RULE))
        refuse_unknown_checks(asked.allow_fail)
        if tuning.is_tuning(asked):
            return of_tuning()
        c = fit_vocabulary(links.loaded(lambda measured: loaded(measured, (check_batch,))))
        fleet = fleet_of(c)
        if c.sweep:
            swept = sweep.sweep(c, fleet, probe_of(c, fleet))
            sys.stdout.write(dumped(swept.as_json()) if c.json else report_rows.text(swept))
            return 0
        found = plan(
            c, fleet, datetime.datetime.now(), storage.places(c) if c.cards in ("", "here") else ()
        )
    except SettingsError as error:
        complain(error)
        return error.exit_code
    except (storage.FolderError, CorpusError) as error:
        complain(error)
        return BAD_DATA
    sys.stdout.write(dumped(as_json(found)) if c.json else told(found))
    stopping, _ = split(c.allow_fail, found.findings)
    return code_of(stopping)


def loaded(defaults: dict[str, str], without: Collection[Rule]) -> Config:
    """A plan of several nodes needs no address of the first; how many processes share BATCH_TOKENS says CARDS."""
    return Config.load(defaults={"MASTER_ADDR": "planned"} | defaults, without=without)


def of_tuning() -> int:
    """The plan of a fine-tuning. Raises SettingsError."""
    c = links.loaded(lambda measured: loaded(measured, EVERY_RULE))
    preset = (
        {"PRESET": tuning.PRESET} if c.preset == Config().preset else {}
    )  # as make finetune has it
    c = tuning.in_nodes(links.loaded(lambda measured: loaded(preset | measured, tuning.NOT_ASKED)))
    if c.sweep:
        raise SettingsError([f"SWEEP={c.sweep}: not of a fine-tuning; leave it out"])
    found = tuning.plan(c, fleet_of(c))
    sys.stdout.write(dumped(tuned_report.as_json(found)) if c.json else tuned_report.told(found))
    stopping, _ = split(c.allow_fail, found.findings)
    return code_of(stopping)


def dumped(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
