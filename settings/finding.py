"""What a check found: PASS, WARN or FAIL, in one line, and what mends it."""

import dataclasses
from collections.abc import Iterable, Sequence

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """name: what ALLOW_FAIL calls the check; fix: the command or setting that mends it; code: how a launcher that it
    stops ends, 64 where a setting is to be changed and 78 where the machine is."""

    name: str
    level: str
    text: str
    fix: str = ""
    code: int = 78


def told(name: str, level: str, sentence: str, code: int = 78) -> Finding:
    """A finding from one sentence, as refusals are: what is behind its first semicolon mends what is before it."""
    text, _, fix = sentence.partition("; ")
    return Finding(name, level, text, fix, code)


def lines(findings: Sequence[Finding]) -> Iterable[str]:
    """A line each, names in one column."""
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        yield f"{finding.level}  {finding.name.ljust(width)}  {finding.text}" + (
            f"; {finding.fix}" if finding.fix else ""
        )


def split(allow_fail: str, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """(those that fail and are to stop a run, those that fail and may not): by the names in ALLOW_FAIL."""
    allowed = set(allow_fail.split(",")) - {""}
    failed = [finding for finding in findings if finding.level == FAIL]
    return [f for f in failed if f.name not in allowed], [f for f in failed if f.name in allowed]


def code_of(stopping: Sequence[Finding]) -> int:
    """The exit code where these are to stop a run: 64 only where settings alone mend it."""
    return 0 if not stopping else 78 if any(finding.code == 78 for finding in stopping) else 64
