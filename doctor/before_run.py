"""What make train does first: the quick part of make doctor and of make plan. It prints the hours, and what is wrong.

    python -m doctor.before_run [finetune]     exits 0, or with the code of what fails: 64 or 78 (settings/finding.py)

finetune: MODEL on DATA is what is planned, where its config.json is here.

It loads no torch, asks no network and writes nothing: half a second that may save hours.
"""

import datetime
import sys

from doctor.quick import quick
from plan.allow_fail import refuse_unknown_checks
from plan.finetuning import tuned_report, tuning
from plan.finetuning.tuning import Tuning
from plan.fleet import fleet_of
from plan.network import links
from plan.planner import Plan, plan
from plan.report import brief
from record.trackers.processes import check_trackers
from settings import SettingsError
from settings.checks import PRETRAINING
from settings.config import Config
from settings.finding import FAIL, PASS, Finding, code_of, complain, format_findings, say, split
from train.data.data_paths import fit_vocabulary
from train.data.sources.source import CorpusError


def look(c: Config, finetune: bool = False) -> tuple[list[Finding], str]:
    """What is not as it should be, and the plan in a line."""
    found = [
        finding
        for finding in quick(c)
        if finding.level != PASS and not (finetune and finding.name == "host-memory")
    ]  # it assumes our model
    if any(finding.name == "gpus" and finding.level == FAIL for finding in found):
        return found, ""  # there is nothing to plan for
    here = c.replace(cards="here")
    try:
        p: Plan | Tuning = (
            tuning.plan(here, fleet_of(here))
            if finetune
            else plan(here, fleet_of(here), datetime.datetime.now())
        )
    except SettingsError as error:  # a card that nothing is known of trains all the same
        return found, f"plan: n/a: {'; '.join(error.problems)}"
    except CorpusError:  # what prepares the data prints it
        return found, ""
    if p.fleet.on_cpu and any(finding.name == "memory" for finding in p.findings):
        found = [
            finding for finding in found if finding.name != "host-memory"
        ]  # the same, and the plan says what fits
    said = {finding.name for finding in found}
    return found + [finding for finding in p.findings if finding.name not in said], (
        tuned_report.brief(p) if isinstance(p, Tuning) else brief(p, c)
    )


def main(words: list[str]) -> int:
    finetune = words == ["finetune"]
    try:
        c = links.loaded(
            lambda measured: Config.load(defaults=measured, without=PRETRAINING if finetune else ())
        )
        c = fit_vocabulary(c)
        check_trackers(c)
        refuse_unknown_checks(c.allow_fail)
    except SettingsError as error:
        complain(error)
        return error.exit_code
    found, planned = look(c, finetune)
    stopping, _ = split(c.allow_fail, found)
    for line in format_findings([finding for finding in found if finding not in stopping]):
        say(line)
    if planned and not c.node_rank:
        say(planned)
    if stopping:
        allowed = ",".join(
            dict.fromkeys([*filter(None, c.allow_fail.split(",")), *(f.name for f in stopping)])
        )
        for line in format_findings(stopping):
            complain(line)
        complain(f"Nothing was started. To start anyway: ALLOW_FAIL={allowed}")
    return code_of(stopping)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
