"""Find secrets in the working tree and in the history, by the rules of .gitleaks.toml.

    python -m scripts.scan_secrets [REPOSITORY]     default: this one

It searches tracked files, files that git does not ignore, and every line and message that a commit
of any branch or tag added. detect-secrets is no replacement: its last release is of May 2024, and it lacks half of the rules.
A line with gitleaks:allow is skipped. Exit codes: 0 none found, 1 some found, 78 it cannot scan.
"""

import math
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
]
Rule = dict[str, Any]


def entropy(value: bytes) -> float:
    """Compute Shannon's entropy in bits per character."""
    shares = [count / len(value) for count in Counter(value).values()]
    return -sum(share * math.log2(share) for share in shares)


def find(text: bytes, rules: list[Rule]) -> Iterator[tuple[int, str, bytes]]:
    """Yield the line, the rule and the value of each secret in a text."""
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):  # UTF-16, as Windows' shell writes it
        text = text.decode("utf-16", "replace").encode()
    lower = text.lower()
    for rule in rules:
        words = rule.get("keywords", [""])
        if not any(word.encode() in lower for word in words):
            continue
        for match in re.finditer(rule["regex"].encode(), text):
            value = match[rule.get("secretGroup", 0)]
            begin = text.rfind(b"\n", 0, match.start()) + 1
            lines = text[begin : match.end()] + text[match.end() :].partition(b"\n")[0]
            is_fake = any(re.search(entry.encode(), value) for entry in rule["allowed"])
            if ALLOW not in lines and not is_fake and entropy(value) > rule.get("entropy", 0):
                yield text.count(b"\n", 0, match.start()) + 1, rule["id"], value


def git(root: Path, *words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=root, check=True, stdout=subprocess.PIPE)
    return done.stdout


def scan_tree(root: Path, rules: list[Rule]) -> Iterator[tuple[str, bytes]]:
    names = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split(b"\0")
    for name in sorted({os.fsdecode(name) for name in names if name}):
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
    commits = git(root, *LOG, "--format=%x00commit %h%n%B").split(COMMIT)[1:]
    tags = b"tags\n" + git(root, "for-each-ref", "refs/tags", "--format=%(contents)")
    for commit in [*commits, tags]:
        name, _, text = commit.partition(b"\n")
        lines = text.split(b"\n")
        added = [line[1:] if line.startswith(b"+") else line for line in lines if line[:1] != b"-"]
        for _, rule, value in find(b"\n".join(added), rules):
            yield f"{name.decode()}: {rule}", value


def load_rules(path: Path) -> list[Rule]:
    content = tomllib.loads(path.read_text())
    for rule in content["rules"]:
        tables = rule.get("allowlists", []) + content.get("allowlists", [])
        rule["allowed"] = [regex for table in tables for regex in table["regexes"]]
    return list(content["rules"])


def main(words: list[str]) -> int:
    root = Path(words[0] if words else ROOT).resolve()
    try:
        rules = load_rules(root / ".gitleaks.toml")
        (root / ".git").stat()  # the repository around a folder is not its own
        found = [*scan_tree(root, rules), *scan_history(root, rules)]
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        print(f"secrets: nothing was scanned: {error}", file=sys.stderr)
        return BAD_DATA
    for where, value in found:
        start = value[:3].decode("ascii", "replace")
        print(
            f"{where}: {start!r}... ({len(value)} characters)".encode("ascii", "replace").decode()
        )
    if found:
        print(f"secrets: {len(found)} found. Revoke them: others have what was committed.")
        return 1
    print("secrets: none")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
