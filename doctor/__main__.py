"""make doctor: looks at what the run of the settings will stand on, and says what would go wrong, and the fix.

    WHERE=local, cluster      this machine, or the cluster that kubectl knows; auto: both, if kubectl knows one
    PROBE=1                   measures this machine for a minute, for make plan
    python -m doctor          a line for each check that does not pass, failures last
    MORE=1, JSON=1            a line for each check; the same as JSON
    exit code                 0; 78 or 64 where something fails that ALLOW_FAIL does not name

It changes nothing but, with PROBE=1, what is known of this machine (plan/measured.py).
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from doctor import cluster_checks, local_checks, probed, probing
from k8s.cluster import where
from k8s.cluster.job_spec import cluster_config
from plan.allow_fail import refuse_unknown_checks
from plan.report import wrapped
from record.tracker_settings import check_trackers
from settings import SettingsError, explain_error, load_config, terminal
from settings.config import Config
from settings.finding import (
    FAIL,
    PASS,
    WARN,
    Finding,
    code_of,
    format_findings,
    from_sentence,
    split,
)
from settings.terminal import complain

SCHEMA = 1
ORDER = (PASS, WARN, FAIL)  # what matters stands where the eye is when it is through


def as_text(findings: Sequence[Finding], c: Config, seconds: float) -> str:
    """Return a line for each finding that somebody would act on, or that PROBE=1 measured.

    What passes is counted. MORE=1 lists it, and says how long all took.
    """
    stopping, allowed = split(c.allow_fail, findings)
    shown = [f for f in findings if c.more or f.level != PASS or f.name.startswith("probe-")]
    passed = len(findings) - len(shown)
    lines = [f"PASS  {passed} checks (MORE=1 lists them)"] if passed else []
    lines += format_findings(sorted(shown, key=lambda finding: ORDER.index(finding.level)))
    if c.more:
        counts = ", ".join(f"{sum(f.level == level for f in findings)} {level}" for level in ORDER)
        lines.append(f"{counts}, in {seconds:.1f} s")
    if allowed:
        lines.append(f"ALLOW_FAIL lets a run start in spite of {', '.join(unique(allowed))}")
    if stopping:
        names = dict.fromkeys([*filter(None, c.allow_fail.split(",")), *unique(stopping)])
        lines.append(
            f"A run would be stopped by {', '.join(unique(stopping))}. To start it all the same: "
            f"ALLOW_FAIL={','.join(names)}"
        )
    if terminal.find_columns():
        lines = [part for line in lines for part in wrapped(line)]
    return "".join(f"{line}\n" for line in lines)


def unique(findings: Sequence[Finding]) -> list[str]:
    return list(dict.fromkeys(finding.name for finding in findings))


def as_json(findings: Sequence[Finding], c: Config, seconds: float) -> str:
    stopping, _ = split(c.allow_fail, findings)
    content = {
        "schema": SCHEMA,
        "code": code_of(stopping),
        "stops": unique(stopping),
        "seconds": round(seconds, 1),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    return json.dumps(content, indent=1) + "\n"


def run_checks(c: Config) -> list[Finding]:
    """Check this machine and the cluster at once: each waits for others most of the time. Raises SettingsError."""
    if c.where == "cluster":
        return cluster_checks.findings(cluster_config()[0])
    check_trackers(c)
    with ThreadPoolExecutor() as pool:
        of_cluster = None
        if c.where == "auto" and cluster_checks.has_context():
            of_cluster = pool.submit(check_cluster)
        findings = local_checks.findings(c)
        return findings + (of_cluster.result() if of_cluster else [])


def check_cluster() -> list[Finding]:
    """Check a cluster that was not asked for by name: settings that only a launch would refuse are a warning."""
    try:
        return cluster_checks.findings(cluster_config()[0])
    except SettingsError as error:
        return [
            from_sentence("cluster", WARN, f"not looked at: {problem}; WHERE=local leaves it out")
            for problem in error.problems
        ]


def measure(c: Config) -> list[Finding]:
    """Measure this machine for PROBE=1, after all else, which would disturb it. Progress goes to standard error."""

    def say(text: str) -> None:
        complain(f"probe: {text}")

    measured = probing.measure(c, say)
    findings = probed.findings(c, measured)
    if any(finding.name == "probe-alone" for finding in findings):
        text = "what was measured is not kept for make plan: other programs used this machine meanwhile"
        return [*findings, Finding("probe-kept", WARN, text, "measure again when it is idle")]
    try:
        probing.keep(c, measured)
    except OSError as error:
        findings.append(
            Finding(
                "probe-kept",
                WARN,
                f"what was measured cannot be kept for make plan ({error.strerror})",
                "mend what is wrong with RUNS_DIR",
            )
        )
    return findings


def main() -> int:
    """Return the exit code."""
    began = time.monotonic()
    try:
        # load_config would check the settings of a cluster's run as one of this machine
        c = where.decide().config
        c = c if c.where == "cluster" else load_config()
        refuse_unknown_checks(c.allow_fail)
        findings = run_checks(c)
    except SettingsError as error:
        complain(explain_error(error))
        return error.exit_code
    if c.probe and c.where != "cluster":
        findings += measure(c)
    format_all = as_json if c.json else as_text
    sys.stdout.write(format_all(findings, c, time.monotonic() - began))
    return code_of(split(c.allow_fail, findings)[0])


if __name__ == "__main__":
    sys.exit(main())
