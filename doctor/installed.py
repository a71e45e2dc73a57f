"""Python and its packages, as make setup makes them: which there are, without loading one."""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from record.provenance import commit, explain_missing_commit
from settings import ROOT
from settings.finding import FAIL, PASS, WARN, Finding
from settings.resolve import show_path

OLDEST = (3, 11)
LOCKS = (
    "requirements/base.txt",
    "requirements/torch.txt",
)  # in this order, as scripts/setup.sh hashes them


@dataclasses.dataclass(frozen=True)
class Build:
    """Of torch. version: None where it is not installed; cuda: (13, 0), None for a build without."""

    version: str | None
    cuda: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Environment:
    """folder: of this Python; stamp: "ours" where make setup finished it from these lock files, "older" from others,
    "none" where it did not make it. missing, differing: of what the lock files pin, (name, installed, pinned)."""

    version: tuple[int, int, int]
    folder: str
    stamp: str
    missing: tuple[str, ...] = ()
    differing: tuple[tuple[str, str, str], ...] = ()


# ---------------------------------------------------------------------------------------------------
# Gathered
# ---------------------------------------------------------------------------------------------------


def torch_build() -> Build:
    """By the file in which torch keeps its own version, since a wheel's name need not tell its CUDA."""
    spec = importlib.util.find_spec("torch")  # finds, and does not load
    if spec is None or not spec.origin:
        return Build(None)
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return Build(None)
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", text, re.MULTILINE)
    return Build(version[1] if version else None, (int(cuda[1]), int(cuda[2])) if cuda else None)


def pinned_torch() -> str:
    found = re.search(r"^torch==(\S+)", (ROOT / LOCKS[1]).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def environment() -> Environment:
    missing, differing = [], []
    for name, versions in pins((ROOT / LOCKS[0]).read_text(encoding="utf-8")).items():
        try:
            has = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if has not in versions:
            differing.append((name, has, " or ".join(versions)))
    return Environment(
        (sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        show_path(Path(sys.prefix)),
        stamp(Path(sys.prefix)),
        tuple(missing),
        tuple(differing),
    )


def pins(text: str) -> dict[str, list[str]]:
    """Package -> versions, of which there are several where they depend on Python's own; those for some systems only
    are left out."""
    found: dict[str, list[str]] = {}
    for name, version, marker in re.findall(
        r"^([A-Za-z0-9._-]+)==(\S+)(?: ;(.*?))? *\\?$", text, re.MULTILINE
    ):
        if "platform" not in marker:
            found.setdefault(name, []).append(version)
    return found


def stamp(folder: Path) -> str:
    """What the stamp says that make setup leaves in an environment when it is through."""
    try:
        made_from = (folder / ".ready").read_text(encoding="utf-8").split()[0]
    except (OSError, UnicodeDecodeError, IndexError):
        return "none"
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in LOCKS)).hexdigest()
    return "ours" if made_from == digest else "older"


# ---------------------------------------------------------------------------------------------------
# Judged
# ---------------------------------------------------------------------------------------------------


def python(e: Environment) -> Finding:
    said = f"Python {'.'.join(map(str, e.version))} in {e.folder}"
    if e.version < OLDEST:
        return Finding(
            "python",
            FAIL,
            f"{said}: this needs {OLDEST[0]}.{OLDEST[1]} or later",
            "remove .venv, set PYTHON to the path of one that is, and make setup",
        )
    if e.missing:
        return Finding("python", FAIL, f"{said} lacks {listed(e.missing)}", "make setup")
    if e.differing:
        differ = [f"{name} {has} (pinned: {pin})" for name, has, pin in e.differing]
        return Finding(
            "python", WARN, f"{said} has other versions than tested: {listed(differ)}", "make setup"
        )
    if e.stamp == "older":
        return Finding("python", WARN, f"{said} was made from older lock files", "make setup")
    made = "all packages as pinned" + (
        ", though not made by make setup" if e.stamp == "none" else ""
    )
    return Finding("python", PASS, f"{said}, {made}")


def torch(build: Build, pinned: str) -> Finding:
    if build.version is None:
        return Finding("torch", FAIL, "torch is not installed", "make setup")
    for_cuda = f"for CUDA {build.cuda[0]}.{build.cuda[1]}" if build.cuda else "without CUDA"
    if build.version.split("+")[0] != pinned:
        return Finding(
            "torch", WARN, f"torch {build.version}, {for_cuda}; tested is {pinned}", "make setup"
        )
    return Finding("torch", PASS, f"torch {build.version}, the pinned version, {for_cuda}")


def code() -> Finding:
    """Whether a run can record which code it is trained with."""
    found = commit()
    if not found["git"]:
        why = explain_missing_commit()
        return Finding("commit", WARN, f"The run will not record the commit of its code: {why}")
    changed = " and changes that are not committed" if found["git_dirty"] else ""
    return Finding("commit", PASS, f"commit {found['git'][:12]}{changed}")


def listed(names: tuple[str, ...] | list[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
