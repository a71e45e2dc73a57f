"""Find secrets in the working tree and in the history, by the rules of .gitleaks.toml.

    python -m scripts.scan_secrets [REPOSITORY]     default: this one

It searches tracked files, untracked files that git does not ignore, and every line and message that
a commit of any branch or tag added. A line with gitleaks:allow is skipped. (detect-secrets would be
no replacement: its last release is of May 2024, and it lacks half of the rules.)
Exit codes: 0 none found, 1 some found, 78 it cannot scan.
"""

import math
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from record.exit_codes import BAD_DATA
from settings import ROOT

ALLOW = b"gitleaks:allow"
COMMIT = b"\0commit "
LOG = [
    "log",
    "--all",
    "--patch",
    "--text",
    "-m",
    "--unified=0",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--format=%x00commit %h%n%B",
]


@dataclass(frozen=True)
class Rule:
    """A rule of .gitleaks.toml.

    Attributes:
        keywords: one of them must be in the text, in any case.
        group: of the regex; 0 is all of it. That is the secret.
        entropy: a secret has more than this, in bits per character.
        fakes: what matches one of them is a known example.
    """

    id: str
    keywords: list[bytes]
    regex: re.Pattern[bytes]
    group: int
    entropy: float
    fakes: list[re.Pattern[bytes]]

    def is_secret(self, value: bytes) -> bool:
        for fake in self.fakes:
            if fake.search(value):
                return False
        return entropy(value) > self.entropy


def entropy(value: bytes) -> float:
    """Compute Shannon's entropy in bits per character."""
    total = 0.0
    counts = Counter(value)
    for count in counts.values():
        share = count / len(value)
        total -= share * math.log2(share)
    return total


def find(text: bytes, rules: list[Rule]) -> Iterator[tuple[int, str, bytes]]:
    """Yield the line, the rule and the value of each secret in a text."""
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):  # UTF-16, as Windows' shell writes it
        text = text.decode("utf-16", "replace").encode()
    lower = text.lower()
    for rule in rules:
        if not any(word in lower for word in rule.keywords):
            continue
        for match in rule.regex.finditer(text):
            value = match[rule.group]
            if rule.is_secret(value) and ALLOW not in whole_lines(text, match):
                lines_before = text.count(b"\n", 0, match.start())
                yield lines_before + 1, rule.id, value


def whole_lines(text: bytes, match: re.Match[bytes]) -> bytes:
    """Return the lines that a match is in."""
    begin = text.rfind(b"\n", 0, match.start()) + 1
    end = text.find(b"\n", match.end())
    if end < 0:
        end = len(text)
    return text[begin:end]


def git(root: Path, *words: str) -> bytes:
    return subprocess.check_output(["git", *words], cwd=root)


def scan_tree(root: Path, rules: list[Rule]) -> Iterator[tuple[str, bytes]]:
    """Search the files that git tracks or could add."""
    listing = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = {os.fsdecode(name) for name in listing.split(b"\0") if name}
    for name in sorted(names):
        path = root / name
        text = b""
        if path.is_symlink():
            text = os.fsencode(os.readlink(path))
        elif path.is_file():
            text = path.read_bytes()
        for line, rule, value in find(text, rules):
            yield f"{name}:{line}: {rule}", value


def scan_history(root: Path, rules: list[Rule]) -> Iterator[tuple[str, bytes]]:
    """Search the messages of commits and tags, and the lines that each commit adds."""
    commits = git(root, *LOG).split(COMMIT)[1:]
    tags = git(root, "for-each-ref", "refs/tags", "--format=%(contents)")
    for commit in [*commits, b"tags\n" + tags]:
        name, _, text = commit.partition(b"\n")
        added = []
        for line in text.split(b"\n"):
            if not line.startswith(b"-"):
                added.append(line.removeprefix(b"+"))
        for _, rule, value in find(b"\n".join(added), rules):
            yield f"{name.decode()}: {rule}", value


def load_rules(path: Path) -> list[Rule]:
    content = tomllib.loads(path.read_text())
    rules = []
    for table in content["rules"]:
        fakes = []
        own = table.get("allowlists", [])
        common = content.get("allowlists", [])
        for allowlist in own + common:
            fakes += [re.compile(regex.encode()) for regex in allowlist["regexes"]]
        rule = Rule(
            id=table["id"],
            keywords=[word.encode() for word in table.get("keywords", [""])],
            regex=re.compile(table["regex"].encode()),
            group=table.get("secretGroup", 0),
            entropy=table.get("entropy", 0.0),
            fakes=fakes,
        )
        rules.append(rule)
    return rules


def main(words: list[str]) -> int:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # names of any bytes
    root = ROOT
    if words:
        root = Path(words[0]).resolve()
    try:
        rules = load_rules(root / ".gitleaks.toml")
        (root / ".git").stat()  # a repository around this folder is not its own
        secrets = [*scan_tree(root, rules), *scan_history(root, rules)]
    except (OSError, ValueError, KeyError, re.error, subprocess.CalledProcessError) as error:
        print(f"secrets: nothing was scanned: {error}", file=sys.stderr)
        return BAD_DATA
    for place, value in secrets:
        start = value[:3].decode("ascii", "replace")
        print(f"{place}: {start!r}... ({len(value)} characters)")
    if secrets:
        print(f"secrets: {len(secrets)} found. Revoke them: others have what was committed.")
        return 1
    print("secrets: none")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
