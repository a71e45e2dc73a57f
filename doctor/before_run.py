"""What make train does first: the quick part of make doctor and of make plan. It prints the hours, and what is wrong.

    python -m doctor.before_run [finetune]     exits 0, or with the code of what fails: 64 or 78
                                               (settings/finding.py), in a pod 71, too

finetune: MODEL on DATA is what is planned, where its config.json is here.

It loads no torch and asks no network: half a second that may save hours. What is predicted of a run that may start is
written into its folder (plan/accounting/prediction.py).
"""

import datetime
import sys

from doctor.quick import quick
from plan.accounting.prediction import keep_prediction
from plan.allow_fail import refuse_unknown_checks
from plan.fleet import fleet_of
from plan.network import links
from plan.planner import Plan, make_plan
from plan.report import brief
from record.exit_codes import MACHINE_FAULT
from record.run_paths import RunPaths
from record.tracker_settings import check_trackers
from settings import ROOT, SettingsError, explain_error, load_config
from settings.checks import PRETRAINING
from settings.config import Config
from settings.finding import FAIL, PASS, Finding, code_of, format_findings, split
from settings.resolve import find_fitted, show_path
from settings.terminal import complain, say
from train.data.data_paths import fit_vocabulary
from train.data.sources.source import CorpusError
from train.distributed.pod import list_node


def look(c: Config, finetune: bool = False) -> tuple[list[Finding], str, Plan | None]:
    """What is not as it should be, and the plan, in a line too."""
    found = [
        finding
        for finding in quick(c)
        if finding.level != PASS and not (finetune and finding.name == "host-memory")
    ]  # it assumes our model
    if any(finding.name == "gpus" and finding.level == FAIL for finding in found):
        return found, "", None  # there is nothing to plan for
    here = c.replace(cards="here")
    try:
        plan = make_plan(
            here,
            fleet_of(here),
            datetime.datetime.now(),
            places=None if finetune else (),  # quick() has looked at the disks of a pretraining
            fitted=find_fitted() if finetune else (),
            may_measure=bool(c.target_hours or c.target_tokens_per_s or c.mfu),
        )
    except SettingsError as error:  # a card that nothing is known of trains all the same
        # A model that is not here yet is planned once it is (finetune/prepare_data.py).
        return found, "" if finetune else f"plan: n/a: {'; '.join(error.problems)}", None
    except CorpusError:  # what prepares the data prints it
        return found, "", None
    if plan.run.fleet.on_cpu and any(finding.name == "memory" for finding in plan.findings):
        found = [
            finding for finding in found if finding.name != "host-memory"
        ]  # the same, and the plan says what fits
    said = {finding.name for finding in found}
    planned = [finding for finding in plan.findings if finding.name not in said]
    return found + planned, brief(plan, c), plan


def main(words: list[str]) -> int:
    finetune = words == ["finetune"]
    try:
        c = links.loaded(
            lambda measured: load_config(defaults=measured, without=PRETRAINING if finetune else ())
        )
        c = fit_vocabulary(c)
        check_trackers(c)
        refuse_unknown_checks(c.allow_fail)
    except SettingsError as error:
        complain(explain_error(error))
        return error.exit_code
    found, planned, plan = look(c, finetune)
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
    elif plan and not c.node_rank:
        paths = RunPaths.of_node(c, ROOT)
        try:
            keep_prediction(plan, paths)
        except (OSError, ValueError) as error:
            say(f"This run will not be compared with its plan: {show_path(paths.plan)} {error}")
    faults = [finding for finding in stopping if finding.code == MACHINE_FAULT]
    for fault in faults:
        list_node(ROOT / c.runs_dir, fault.name, fault.text)
    if faults:
        return MACHINE_FAULT  # another machine may have no other problem, either
    return code_of(stopping)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
