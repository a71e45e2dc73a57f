"""What a check found: PASS, WARN or FAIL, what was found, and what fixes it."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    name: what ALLOW_FAIL calls the check.
    fix: the command or setting that fixes it.
    code: the exit code of a launcher that it stops: 64 if a setting must change, 78 if the machine must,
        71 where a pod may find another machine.
    """

    name: str
    level: str
    text: str
    fix: str = ""
    code: int = 78


def from_sentence(name: str, level: str, sentence: str, code: int = 78) -> Finding:
    """Make a finding of one sentence: the fix is what follows its first semicolon."""
    text, _, fix = sentence.partition("; ")
    return Finding(name, level, text, fix, code)


def format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each finding, with the names in one column."""
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        line = f"{finding.level}  {finding.name:{width}}  {finding.text}"
        if finding.fix:
            separator = ". " if finding.fix[0].isupper() else "; "
            line += separator + finding.fix
        yield line


def split(allow_fail: str, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return the failures that stop a run, and those that do not because ALLOW_FAIL names them."""
    names = allow_fail.split(",")
    failed = [finding for finding in findings if finding.level == FAIL]
    stopping = [finding for finding in failed if finding.name not in names]
    return stopping, [finding for finding in failed if finding.name in names]


def code_of(stopping: Sequence[Finding]) -> int:
    """Return the exit code: 0 if nothing stops the run, 64 if changing settings is enough, else 78."""
    return max((finding.code for finding in stopping), default=0)
