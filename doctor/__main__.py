"""make doctor: looks at what the run of the settings will stand on, and says what would go wrong, and the fix.

    WHERE=local, cluster      this machine, or the cluster that kubectl knows; auto: both, if kubectl knows one
    PROBE=1                   measures this machine for a minute, for make plan
    python -m doctor          a line a check, what fails last; JSON=1: the same as JSON
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


def text(found: Sequence[Finding], allow_fail: str, seconds: float) -> str:
    stopping, allowed = split(allow_fail, found)
    counts = ", ".join(f"{sum(f.level == level for f in found)} {level}" for level in ORDER)
    said = [
        *format_findings(sorted(found, key=lambda finding: ORDER.index(finding.level))),
        f"doctor: {counts}, in {seconds:.1f} s",
    ]
    if allowed:
        said.append(f"ALLOW_FAIL lets a run start in spite of {names(allowed)}")
    if stopping:
        said.append(
            f"a run would be stopped by {names(stopping)}; to start it all the same: "
            f"ALLOW_FAIL={','.join(dict.fromkeys([*filter(None, allow_fail.split(',')), *unique(stopping)]))}"
        )
    if terminal.find_columns():
        said = [part for line in said for part in wrapped(line)]
    return "".join(f"{line}\n" for line in said)


def names(found: Sequence[Finding]) -> str:
    return ", ".join(unique(found))


def unique(found: Sequence[Finding]) -> list[str]:
    return list(dict.fromkeys(finding.name for finding in found))


def as_json(found: Sequence[Finding], allow_fail: str, seconds: float) -> str:
    stopping, _ = split(allow_fail, found)
    content = {
        "schema": SCHEMA,
        "code": code_of(stopping),
        "stops": unique(stopping),
        "seconds": round(seconds, 1),
        "findings": [dataclasses.asdict(finding) for finding in found],
    }
    return json.dumps(content, indent=1) + "\n"


def look(c: Config) -> list[Finding]:
    """Both sides at once: each waits for others most of the time. Raises SettingsError."""
    if c.where == "cluster":
        return cluster_checks.findings(cluster_config()[0])
    check_trackers(c)
    with ThreadPoolExecutor() as pool:
        there = (
            pool.submit(of_cluster) if c.where == "auto" and cluster_checks.has_context() else None
        )
        found = local_checks.findings(c)
        return found + (there.result() if there else [])


def of_cluster() -> list[Finding]:
    """Of a cluster that was not asked for by name: settings that only a launch would refuse are a warning."""
    try:
        return cluster_checks.findings(cluster_config()[0])
    except SettingsError as error:
        return [
            from_sentence("cluster", WARN, f"not looked at: {problem}; WHERE=local leaves it out")
            for problem in error.problems
        ]


def measure(c: Config) -> list[Finding]:
    """PROBE=1, after all else, which would disturb it. What it does is said on standard error."""

    def say(text: str) -> None:
        complain(f"probe: {text}")

    measured = probing.measure(c, say)
    found = probed.findings(c, measured)
    if any(finding.name == "probe-alone" for finding in found):
        text = "what was measured is not kept for make plan: other programs used this machine meanwhile"
        return [*found, Finding("probe-kept", WARN, text, "measure again when it is idle")]
    try:
        probing.keep(c, measured)
    except OSError as error:
        found.append(
            Finding(
                "probe-kept",
                WARN,
                f"what was measured cannot be kept for make plan ({error.strerror})",
                "mend what is wrong with RUNS_DIR",
            )
        )
    return found


def main() -> int:
    """Returns the exit code."""
    began = time.monotonic()
    try:
        c = (
            where.decide().config
        )  # of a cluster's run, which load_config would check as one of this machine
        c = c if c.where == "cluster" else load_config()
        refuse_unknown_checks(c.allow_fail)
        found = look(c)
    except SettingsError as error:
        complain(explain_error(error))
        return error.exit_code
    if c.probe and c.where != "cluster":
        found += measure(c)
    say = as_json if c.json else text
    sys.stdout.write(say(found, c.allow_fail, time.monotonic() - began))
    return code_of(split(c.allow_fail, found)[0])


if __name__ == "__main__":
    sys.exit(main())
