"""The lock files in requirements/: complete, with hashes, agreeing with each other."""

import collections
import importlib.metadata
import re
import tomllib

import pytest

from settings import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "base": [],
    "finetune": ["finetune"],
    "trackers": ["trackers"],
    "dev": ["finetune", "dev"],
}
NAME = "[A-Za-z0-9][A-Za-z0-9_.-]*"


def read_lock_file(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.txt").read_text()


def read_pins(name: str) -> dict[str, set[str]]:
    """Return the versions of each package; there are several where platforms differ."""
    pins = collections.defaultdict(set)
    text = read_lock_file(name)
    for package, version in re.findall(rf"^({NAME})==([^\s;]+)", text, re.M):
        pins[package].add(version)
    return pins


def find_names(requirements: list[str]) -> set[str]:
    names = set()
    for requirement in requirements:
        match = re.match(NAME, requirement)
        assert match
        names.add(match[0].lower())
    return names


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_file_pins_with_hashes_and_names_no_index(name: str) -> None:
    text = read_lock_file(name)
    assert not re.search(r"https?:|--(extra-)?index|--find-links|file:", text)
    assert "#    scripts/lock.sh" in text
    entries = re.findall(r"^[a-z0-9].*?(?=^[a-z0-9]|\Z)", text, re.M | re.S)
    assert len(entries) > 30
    for entry in entries:
        assert re.match(rf"{NAME}==", entry)
        assert "--hash=sha256:" in entry


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_file_has_all_that_is_declared_but_torch(name: str) -> None:
    declared = [*PROJECT["dependencies"]]
    for extra in EXTRAS[name]:
        declared += PROJECT["optional-dependencies"][extra]
    missing = find_names(declared) - read_pins(name).keys()
    assert missing - {"pure-transformer"} == {"torch"}


@pytest.mark.parametrize(
    ("inner", "outer"),
    [("base", "finetune"), ("base", "trackers"), ("base", "dev"), ("finetune", "dev")],
)
def test_pins_agree_with_those_they_are_installed_over(inner: str, outer: str) -> None:
    below = read_pins(inner)
    above = read_pins(outer)
    shared = below.keys() & above.keys()
    assert shared
    for package in shared:
        assert above[package] <= below[package], package


def test_torch_is_pinned_once_and_all_that_it_needs_is_locked() -> None:
    pins = read_pins("torch")
    assert pins.keys() == {"torch"}
    [version] = pins["torch"]
    assert f"torch=={version}" in PROJECT["dependencies"]
    required = importlib.metadata.requires("torch") or []
    needed = find_names([line for line in required if "extra ==" not in line])
    assert len(needed) > 5
    for name in needed - read_pins("base").keys():
        assert re.match("nvidia-|cuda-|triton", name)
