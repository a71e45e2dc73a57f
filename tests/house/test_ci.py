""".ci/run with a make that does nothing, and the parts of the tests that it runs in turn."""

import argparse
import re
import types
from pathlib import Path

import pytest

from tests.conftest import parse_part, part_of, pytest_collection_modifyitems
from tests.scripts.throwaway import Checkout

STAGES = (
    "bash .ci/run install_packages",
    "make setup",
    "make lint",
    "make train MAX_STEPS=400",
    "make test",
    "make gpu-rehearsal",
)
# It notes its targets, fails at FAILS and hangs at HANGS.
MAKE = """
echo "make $* ${PART-}" >>"$CALLS"
[[ $* != "${HANGS-}" ]] || sleep 60
[[ $* != test ]] || echo "100 passed, 3 warnings in 12.30s"
[[ $* != test-faults ]] || echo "1 failed, 20 passed in 99.00s (0:01:39)"
[[ $* != "${FAILS-}" ]] || exit 3
"""
# As without /dev/net/tun.
LAB = """#!/usr/bin/env bash
echo "lab $WAN_LAB" >>"$CALLS"
exit 78
"""


class Ci(Checkout):
    def __init__(self, folder: Path):
        super().__init__(folder, ".ci/run")
        self.link(
            "bash", "dirname", "env", "grep", "id", "mktemp", "rm", "sleep", "tail", "timeout", "tr"
        )
        for tool in ("g++", "buildah", "debootstrap", "chromium", "ip", "python3"):
            self.add(tool)
        self.add("git", '[[ -n ${COMMITS-} ]] && echo "$COMMITS"')
        self.add("make", MAKE)
        self.write(".venv/bin/python", LAB).chmod(0o755)

    def lines(self, code: int = 0, **environ: str) -> list[str]:
        """Return the lines that it prints."""
        return self.run(".ci/run", code=code, **environ).splitlines()

    def targets(self) -> list[str]:
        return [call.split()[1] for call in self.calls()]


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    return Ci(tmp_path)


def test_all_stages_run_and_those_that_failed_are_listed(ci: Ci) -> None:
    lines = ci.lines(COMMITS="6")
    targets = ci.targets()
    assert targets == [
        "setup",
        "lint",
        "train",
        "test",
        "gpu-rehearsal",
        "image-test",
        "test-faults",
    ]
    assert "ci: stages that failed: 0 of 8" in lines
    assert lines[-1] == "1 failed, 20 passed in 99.00s (0:01:39)"

    lines = ci.lines(code=1, COMMITS="6", FAILS="lint")
    assert ci.targets() == targets
    summary = lines[lines.index("ci: stages that failed: 1 of 8") :]
    assert [line for line in summary if line.endswith("FAILED")] == [summary[3]]
    assert re.fullmatch(r"ci: make lint took \d+ s, exit code 3: FAILED", summary[3])
    for stage, line in zip(STAGES, summary[1:], strict=False):
        assert line.startswith(f"ci: {stage} took ")


def test_nothing_runs_after_a_setup_that_failed(ci: Ci) -> None:
    lines = ci.lines(code=1, COMMITS="6", FAILS="setup")
    assert ci.targets() == ["setup"] and lines[-1] == "ci: no tests were run"


@pytest.mark.parametrize(
    ("commits", "part", "in_turn"),
    [
        ("", "1/4", "make image-test "),  # there is no git
        ("1", "2/4", "lab link,engine"),
        ("2", "3/4", "make certify CERTIFY=short NPROC=1 "),
        ("3", "4/4", "make image-test "),
        ("5", "2/4", "make certify CERTIFY=short NPROC=2 "),
    ],
)
def test_what_runs_depends_on_the_number_of_commits(
    ci: Ci, commits: str, part: str, in_turn: str
) -> None:
    ci.lines(COMMITS=commits)
    *_, other, faults = ci.calls()
    assert other == in_turn and faults.endswith(f" {part}")


def test_a_stage_ends_at_its_limit_and_the_next_one_runs(ci: Ci) -> None:
    script = ci.root / ".ci/run"
    text = script.read_text()
    assert text.count("stage 600 make lint") == 1
    script.write_text(text.replace("stage 600 make lint", "stage 1 make lint"))
    lines = ci.lines(code=1, COMMITS="6", HANGS="lint")
    assert len(ci.calls()) == 7
    assert any("make lint" in line and "stopped at its limit of 1 s" in line for line in lines)


# ---- pytest --part


def test_parts_of_the_tests_are_of_a_size_and_do_not_depend_on_parameters() -> None:
    parts = [part_of(f"tests/a/test_{n % 50}.py::test_{n}", 4) for n in range(800)]
    assert {*parts} == {1, 2, 3, 4}
    assert all(150 < parts.count(part) < 250 for part in {*parts})
    assert part_of("tests/a.py::test_b[1]", 4) == part_of("tests/a.py::test_b[x[2]]", 4)


def test_each_test_is_in_one_part(request: pytest.FixtureRequest) -> None:
    collected = request.session.items
    in_parts = []
    for part in (1, 2, 3):
        items = [*collected]
        deselected: list[pytest.Item] = []
        hook = types.SimpleNamespace(
            pytest_deselected=lambda items, to=deselected: to.extend(items)
        )
        config = types.SimpleNamespace(getoption={"part": (part, 3)}.get, hook=hook)
        pytest_collection_modifyitems(config, items)
        assert sorted(map(id, items + deselected)) == sorted(map(id, collected))
        in_parts += items
    assert sorted(map(id, in_parts)) == sorted(map(id, collected))


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/", "-1/4"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be I/N"):
        parse_part(text)
