"""What a check found: PASS, WARN or FAIL, what was found, and what fixes it. And how people are told.

On a terminal lines wrap between words. Anywhere else they stay as they are.
"""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    name: what ALLOW_FAIL calls the check.
    fix: the command or setting that fixes it.
    code: the exit code of a launcher that it stops: 64 if a setting must change, 78 if the machine must.
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


def say(text: object, stream: TextIO | None = None) -> None:
    """Print lines at once, by default to standard output."""
    stream = stream or sys.stdout
    lines = str(text)
    if stream.isatty():
        lines = wrap(lines)
    stream.write(f"{lines}\n")
    stream.flush()


def complain(text: object) -> None:
    """Print lines to standard error."""
    say(text, sys.stderr)


def wrap(text: str) -> str:
    """Break lines at blanks where a terminal would break them in the middle of a word.

    An indented command stays whole, so that it can be copied.
    """
    columns = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        is_command = indent and line.startswith("make ", len(indent))
        if len(line) <= columns or is_command:
            lines.append(line)
            continue
        lines += textwrap.wrap(
            line,
            columns,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
