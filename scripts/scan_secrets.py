"""Finds secrets in the working tree and in the whole history, by the rules of .gitleaks.toml. Standard library only.

    usage: python scripts/scan_secrets.py [REPOSITORY]      (default: the repository that this script is a part of)
    reads: REPOSITORY/.gitleaks.toml
    exits: 0 none found, 1 some found, 78 cannot scan: no git, no repository, bad rules

    tracked files, and untracked ones that git does not ignore -> lines with a secret
    every blob, commit message and tag that a ref or the index reaches, each once -> the commit that brought it in

A secret is never printed, only its first three characters. Binary files are searched as they are, byte by byte: what
they compress is not seen. What is not searched is named: files over LARGEST, other repositories within this one.
The time is in proportion to the bytes of all different versions of all files, about 60 MB/s on one core.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RULES = ".gitleaks.toml"
ALLOW = b"gitleaks:allow"
LARGEST = 64 * 2**20  # bytes; what is larger is data, and is named
# No object is fetched from a server, and none is seen in the place of another.
ENVIRONMENT = os.environ | {"GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C"}

KEYS = {"title", "extend", "rules", "allowlists"}
RULE_KEYS = {
    "id": str,
    "description": str,
    "regex": str,
    "secretGroup": int,
    "entropy": (int, float),
    "keywords": list,
    "allowlists": list,
}
ALLOWLIST_KEYS = {"description": str, "regexes": list}


class CannotScan(Exception):
    """What stands in the way, for the user to read."""


# ---- Rules


@dataclass(frozen=True)
class Rule:
    id: str
    regex: re.Pattern[bytes]
    group: int
    entropy: float
    keywords: tuple[bytes, ...]
    allowed: tuple[re.Pattern[bytes], ...]


def not_shared(regex: str) -> str | None:
    """What in an expression Go and Python do not read alike, or None. RULES says what they do."""
    if not regex.isascii():
        return "a character that is not ASCII"
    for escape in re.findall(r"\\.", regex, re.S):
        if escape[1].isalnum() and escape[1] not in "AbBdDsSwWnrtfx":
            return escape
    bare = re.sub(r"\\.", "e", regex, flags=re.S)
    if "[:" in bare:
        return "[:"
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "c", bare)
    if odd := re.search(r"\$|\[|[*+?}]\+|\{,|(?<!^)\(\?[ims]+\)|\(\?(?!:|P<\w+>|[ims]+[:)])", bare):
        return bare[odd.start() : odd.start() + 4]
    if large := [number for number in re.findall(r"\d+(?=[\d,]*\})", bare) if int(number) > 1000]:
        return f"a repetition of {large[0]}"
    return None


def compiled(regex: str, where: str) -> re.Pattern[bytes]:
    if odd := not_shared(regex):
        raise CannotScan(
            f"{where}: Go and Python do not read this alike, or one of them not at all: {odd}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pattern = re.compile(regex.encode())
    except (re.error, FutureWarning) as error:
        raise CannotScan(f"{where}: {error}") from error
    if pattern.search(b""):
        raise CannotScan(f"{where}: matches the empty text")
    return pattern


def checked(table: Any, kinds: dict[str, Any], where: str) -> dict[str, Any]:
    """The table, if each of its keys is known and of its kind."""
    if not isinstance(table, dict):
        raise CannotScan(f"{where}: must be a table")
    for key, value in table.items():
        if key not in kinds:
            raise CannotScan(
                f"{where}: {key} is not read by {Path(__file__).name}; it reads {', '.join(kinds)}"
            )
        if not isinstance(value, kinds[key]) or isinstance(value, bool):
            raise CannotScan(f"{where}: {key} = {value!r} is of the wrong kind")
        if key in ("keywords", "regexes") and not (
            value and all(isinstance(item, str) and item for item in value)
        ):
            raise CannotScan(f"{where}: {key} must be a list of texts")
    return table


def allowed_by(lists: Any, where: str) -> tuple[re.Pattern[bytes], ...]:
    patterns = []
    for entry in lists:
        regexes = checked(entry, ALLOWLIST_KEYS, f"{where}, allowlists").get("regexes")
        if not regexes:
            raise CannotScan(f"{where}, allowlists: no regexes")
        patterns += [compiled(regex, f"{where}, allowlists") for regex in regexes]
    return tuple(patterns)


def rule_of(table: Any, number: int, everywhere: tuple[re.Pattern[bytes], ...]) -> Rule:
    name = table.get("id") if isinstance(table, dict) else None
    where = f"{RULES}: rule {name or number}"
    table = checked(table, RULE_KEYS, where)
    if missing := {"id", "regex"} - table.keys():
        raise CannotScan(f"{where}: no {' and no '.join(sorted(missing))}")
    regex, group = compiled(table["regex"], where), table.get("secretGroup", 0)
    if not (regex.groups == group == 0 or 0 < group <= regex.groups):
        raise CannotScan(
            f"{where}: secretGroup is {group}, and the expression has {regex.groups} groups"
        )
    if upper := [word for word in table.get("keywords", []) if word != word.lower()]:
        raise CannotScan(f"{where}: keywords must be lower case, {upper[0]} is not")
    return Rule(
        table["id"],
        regex,
        group,
        table.get("entropy", 0.0),
        tuple(word.encode() for word in table.get("keywords", [])),
        everywhere + allowed_by(table.get("allowlists", []), where),
    )


def load_rules(path: Path) -> list[Rule]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CannotScan(f"{RULES}: {error}") from error
    if unknown := content.keys() - KEYS:
        raise CannotScan(
            f"{RULES}: {', '.join(sorted(unknown))}: not read by {Path(__file__).name}"
        )
    if content.get("extend", {}) not in ({}, {"useDefault": True}):
        raise CannotScan(
            f"{RULES}: of extend, only useDefault = true is understood (gitleaks then adds its rules)"
        )
    for key in ("rules", "allowlists"):
        if not isinstance(content.get(key, []), list):
            raise CannotScan(f"{RULES}: {key} must be written [[{key}]]")
    everywhere = allowed_by(content.get("allowlists", []), RULES)
    rules = [
        rule_of(table, number, everywhere)
        for number, table in enumerate(content.get("rules", []), 1)
    ]
    if not rules:
        raise CannotScan(f"{RULES}: no rules")
    if double := [name for name, count in Counter(rule.id for rule in rules).items() if count > 1]:
        raise CannotScan(f"{RULES}: rule {double[0]}: twice")
    return rules


# ---- Searching a text


def entropy(value: bytes) -> float:
    """Shannon's, in bits a character, of how often each one occurs."""
    return -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())


def secrets_in(data: bytes, rules: list[Rule]) -> Iterator[tuple[int, str, bytes]]:
    """(line, rule, value) of each secret in a text, each value once a line."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # UTF-16, as Windows' shell writes it
        data = data.decode("utf-16", "replace").encode()
    lower, seen = data.lower(), set()
    for rule in rules:
        if rule.keywords and not any(word in lower for word in rule.keywords):
            continue
        for match in rule.regex.finditer(data):
            value = match[rule.group]
            end = data.find(b"\n", match.end())
            lines = data[data.rfind(b"\n", 0, match.start()) + 1 : end if end >= 0 else len(data)]
            if (
                not value
                or ALLOW in lines
                or (rule.entropy and entropy(value) <= rule.entropy)
                or any(pattern.search(value) for pattern in rule.allowed)
            ):
                continue
            line = data.count(b"\n", 0, match.start(rule.group)) + 1
            if (line, value) not in seen:
                seen.add((line, value))
                yield line, rule.id, value


def printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def redacted(value: bytes) -> str:
    return f"{printable(value[:3].decode('ascii', 'replace'))}*** ({len(value)} characters)"


# ---- Reading the repository


@dataclass
class Scan:
    """What was found and what was looked at."""

    root: Path
    rules: list[Rule]
    found: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    objects: int = 0
    binary: int = 0

    def git(self, *arguments: str, given: bytes = b"") -> bytes:
        try:
            return subprocess.run(
                ["git", *arguments],
                cwd=self.root,
                env=ENVIRONMENT,
                input=given,
                check=True,
                capture_output=True,
            ).stdout
        except FileNotFoundError as error:
            raise CannotScan("no git here, or no such folder: nothing was scanned") from error
        except subprocess.CalledProcessError as error:
            raise CannotScan(
                f"git {arguments[0]}: {error.stderr.decode(errors='replace').strip()}"
            ) from error

    def skip(self, name: str, why: str) -> None:
        self.notes.append(f"not scanned: {printable(name)} ({why})")

    def too_large(self, name: str, size: int) -> bool:
        if size > LARGEST:
            self.skip(name, f"{size / 2**20:.0f} MiB, the limit is {LARGEST // 2**20}")
        return size > LARGEST

    def search(self, data: bytes) -> Iterator[tuple[int, str, bytes]]:
        self.binary += b"\0" in data[:8000]  # as git itself tells them
        return secrets_in(data, self.rules)

    def tree(self) -> None:
        names = self.git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split(
            b"\0"
        )
        for name in sorted({os.fsdecode(name) for name in names if name}):
            path = self.root / name
            try:
                if path.is_symlink():
                    data = os.fsencode(os.readlink(path))
                elif path.is_dir():
                    self.skip(name, "a repository of its own")
                    continue
                elif not path.exists():  # deleted and not yet committed; the index has it
                    continue
                elif not path.is_file():
                    self.skip(name, "no file")
                    continue
                elif self.too_large(name, path.stat().st_size):
                    continue
                else:
                    data = path.read_bytes()
            except OSError as error:
                self.skip(name, str(error.strerror))
                continue
            self.files += 1
            self.found += [
                f"{printable(name)}:{line}: {rule}: {redacted(value)}"
                for line, rule, value in self.search(data)
            ]

    def reachable(self) -> dict[str, str]:
        """The blobs, commits and tags that a ref or the index reaches, and one path of each blob."""
        listed = (
            self.git("rev-list", "--objects", "--all", "--indexed-objects")
            .decode(errors="replace")
            .splitlines()
        )
        paths = {sha: path for sha, _, path in (line.partition(" ") for line in listed)}
        about = self.git(
            "cat-file", "--batch-check", given="".join(f"{sha}\n" for sha in paths).encode()
        ).decode()
        wanted, missing = {}, 0
        for sha, kind, *size in (line.split() for line in about.splitlines()):
            missing += kind == "missing"
            if kind in ("blob", "commit", "tag") and not self.too_large(
                paths[sha] or sha, int(size[0])
            ):
                wanted[sha] = paths[sha]
        if missing:
            self.notes.append(
                f"{missing} objects of the history are not in this clone (a partial one): not scanned"
            )
        return wanted

    def contents(self, shas: list[str]) -> Iterator[tuple[str, str, bytes]]:
        """(sha, kind, content) of each object, one at a time."""
        with tempfile.TemporaryFile() as wanted:
            wanted.write("".join(f"{sha}\n" for sha in shas).encode())
            wanted.seek(0)
            with subprocess.Popen(
                ["git", "cat-file", "--batch"],
                cwd=self.root,
                env=ENVIRONMENT,
                stdin=wanted,
                stdout=subprocess.PIPE,
            ) as batch:
                assert batch.stdout is not None
                for sha in shas:
                    header = batch.stdout.readline().split()
                    if len(header) != 3:
                        raise CannotScan(f"git cat-file: cannot read {sha}; see git fsck")
                    yield sha, header[1].decode(), batch.stdout.read(int(header[2]))
                    batch.stdout.read(1)

    def origins(self, shas: set[str]) -> dict[str, tuple[int, str]]:
        """When and where blobs first came in: (age, commit:path). Reads all commits, so it is for findings only."""
        commits = self.git("rev-list", "--all", "--reverse")
        changes = self.git(
            "-c",
            "core.quotePath=false",
            "diff-tree",
            "--stdin",
            "-r",
            "--root",
            "-m",
            "--no-renames",
            given=commits,
        )
        origins: dict[str, tuple[int, str]] = {}
        commit = ""
        for age, line in enumerate(changes.decode(errors="replace").splitlines()):
            if not line.startswith(":"):
                commit = line
            elif (sha := line.split()[3]) in shas and sha not in origins:
                origins[sha] = age, f"{commit[:10]}:{line.partition(chr(9))[2]}"
        return origins

    def history(self) -> None:
        if self.git("rev-parse", "--is-shallow-repository").strip() == b"true":
            self.notes.append(
                "a shallow clone: only the history that is here was scanned; git fetch --unshallow"
            )
        paths = self.reachable()
        blobs: dict[tuple[str, bytes], list[tuple[str, int]]] = {}
        for sha, kind, data in self.contents(list(paths)):
            self.objects += 1
            if kind != "blob":
                data = data.partition(b"\n\n")[2]
            for line, rule, value in self.search(data):
                if kind == "blob":
                    blobs.setdefault((rule, value), []).append((sha, line))
                else:
                    self.found.append(
                        f"{sha[:10]}:({kind} message):{line}: {rule}: {redacted(value)}"
                    )
        origins = (
            self.origins({sha for places in blobs.values() for sha, _ in places}) if blobs else {}
        )
        for (
            (rule, value),
            places,
        ) in blobs.items():  # a secret stays in all later versions of its file: once is enough
            in_index = sys.maxsize
            (_, place), line = min(
                (origins.get(sha, (in_index, f"(index):{paths[sha]}")), line)
                for sha, line in places
            )
            more = f", in {len(places)} versions" if len(places) > 1 else ""
            self.found.append(f"{printable(place)}:{line}: {rule}: {redacted(value)}{more}")


def scan(root: Path) -> int:
    """Prints what was found; returns the exit code."""
    result = Scan(root, load_rules(root / RULES))
    if not (
        root / ".git"
    ).exists():  # a file in a worktree; and the repository around a folder is not its own
        raise CannotScan(
            f"{root} is no git repository: nothing was scanned (is this a copy without .git?)"
        )
    result.tree()
    result.history()
    for line in result.found:
        print(line)
    for note in result.notes:
        print(f"secrets: {note}")
    searched = (
        f"{result.files} files and {result.objects} objects of the history ({result.binary} binary)"
    )
    if not result.found:
        print(f"secrets: none in {searched}")
        return 0
    print(
        f"secrets: {len(result.found)} found in {searched}. Revoke them where they were issued: history keeps what "
        f"was committed, and others have it. For a documented fake see the top of {RULES}"
    )
    return 1


def main() -> int:
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        print(str(__doc__).split("\n\n")[1], file=sys.stderr)
        return 64
    try:
        return scan(Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parent.parent).resolve())
    except CannotScan as error:
        print(f"secrets: {error}", file=sys.stderr)
        return 78


if __name__ == "__main__":
    sys.exit(main())
