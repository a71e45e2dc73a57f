"""The lock files: whole, hashed, agreeing with each other; .ci/run and the parts that it runs in turn."""

import argparse
import importlib.metadata
import itertools
import re
import shutil
import subprocess
import tomllib
import types

import pytest

from tests.conftest import parse_part, part_of, pytest_collection_modifyitems
from tests.scripts.test_setup import ROOT, Machine, machine

__all__ = ["machine"]  # a fixture

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# ---- The lock files


@pytest.mark.parametrize("name", ["base", "finetune", "trackers", "dev"])
def test_a_lock_file_pins_with_hashes_and_names_no_index(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert not re.search(r"https?:|--(extra-)?index|--find-links|file:", text)
    assert "#    scripts/lock.sh" in text
    pins = re.findall(r"^[a-z0-9]\S*.*?(?=^[a-z0-9]|\Z)", text, re.M | re.S)
    assert len(pins) > 30
    assert [
        pin.split()[0] for pin in pins if "==" not in pin.split()[0] or "--hash=sha256:" not in pin
    ] == []


def pinned(name: str) -> dict[str, set[str]]:
    pins: dict[str, set[str]] = {}
    for package, version in re.findall(
        r"^([a-z0-9][a-z0-9._-]*)==([^\s;]+)",
        (ROOT / "requirements" / f"{name}.txt").read_text(),
        re.M,
    ):
        pins.setdefault(package, set()).add(version)
    return pins


@pytest.mark.parametrize(
    ("inner", "outer"),
    [("base", "finetune"), ("base", "trackers"), ("base", "dev"), ("finetune", "dev")],
)
def test_pins_agree_with_those_they_are_installed_over(inner: str, outer: str) -> None:
    base, more = pinned(inner), pinned(outer)
    assert base.keys() & more.keys()
    assert {
        name: more[name] for name in base.keys() & more.keys() if not more[name] <= base[name]
    } == {}


def test_torch_is_pinned_in_one_place_and_all_it_needs_is_locked() -> None:
    pins = pinned("base")
    for name in ("base", "finetune", "trackers", "dev"):
        assert "torch" not in pinned(name)
    (version,) = pinned("torch")["torch"]
    assert f"torch=={version}" in PROJECT["dependencies"]
    needs = [
        re.split(r"[^A-Za-z0-9_.-]", line)[0]
        for line in importlib.metadata.requires("torch") or []
        if "extra ==" not in line
    ]
    assert len(needs) > 5
    assert [
        name for name in needs if name not in pins and not re.match("nvidia-|cuda-|triton", name)
    ] == []


@pytest.mark.parametrize("name", ["base", "finetune", "trackers", "dev"])
def test_a_lock_file_has_all_that_is_declared(name: str) -> None:
    wanted = [*PROJECT["dependencies"]]
    for extra in {"base": (), "dev": ("finetune", "dev")}.get(name, (name,)):
        wanted += PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower() for line in wanted}
    assert names - pinned(name).keys() == {"torch"} | ({"pure-transformer"} & names)


# ---- .ci/run

STAGES = (
    ".ci/run install_packages",
    "make setup",
    "make lint",
    "make train MAX_STEPS=400",
    "make test",
)


@pytest.fixture
def ci(machine: Machine) -> Machine:
    """.ci/run with a make that notes its targets, fails at FAILS and hangs at HANGS."""
    (machine.root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", machine.root / ".ci" / "run")
    for name in ("mktemp", "tail", "timeout"):
        (machine.bin / name).symlink_to(shutil.which(name))
    for name in ("g++", "buildah", "debootstrap", "chromium", "ip"):
        machine.add(name, "#!/usr/bin/env bash\n")
    machine.add("git", '#!/usr/bin/env bash\n[[ -n ${COMMITS-} ]] && echo "$COMMITS"\n')
    machine.add(
        "make",
        """#!/usr/bin/env bash
echo "make $* ${PART-}" >>"$LOG_OF_CALLS"
[[ $* != "${HANGS-}" ]] || sleep 60
[[ $* != test ]] || echo "100 passed, 3 warnings in 12.30s"
[[ $* != test-faults ]] || echo "1 failed, 20 passed in 99.00s (0:01:39)"
[[ $* != "${FAILS-}" ]] || exit 3
""",
    )
    lab = machine.root / ".venv" / "bin" / "python"
    lab.parent.mkdir(parents=True, exist_ok=True)
    lab.write_text('#!/usr/bin/env bash\necho "lab $WAN_LAB" >>"$LOG_OF_CALLS"; exit 78\n')
    lab.chmod(0o755)
    return machine


def run_ci(ci: Machine, **settings: str) -> tuple[int, list[str], list[str]]:
    """Return its exit code, the lines that it printed, and what it ran."""
    ci.log.write_text("")
    done = subprocess.run(
        [".ci/run"],
        cwd=ci.root,
        env=ci.env | {"LOG_OF_CALLS": str(ci.log)} | settings,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines(), ci.log.read_text().splitlines()


def test_ci_runs_all_stages_and_lists_those_that_failed(ci: Machine) -> None:
    code, lines, calls = run_ci(ci, COMMITS="6")
    targets = [call.split()[1] for call in calls]
    assert targets == ["setup", "lint", "train", "test", "image-test", "test-faults"]
    assert code == 0 and "ci: stages that failed: 0 of 7" in lines
    assert lines[-1] == "1 failed, 20 passed in 99.00s (0:01:39)"

    code, lines, failed_calls = run_ci(ci, COMMITS="6", FAILS="lint")
    assert code == 1 and failed_calls == calls
    summary = lines[lines.index("ci: stages that failed: 1 of 7") :]
    assert [line for line in summary if line.endswith("FAILED")] == [summary[3]]
    assert re.fullmatch(r"ci: make lint took \d+ s, exit code 3: FAILED", summary[3])
    for stage, line in zip(STAGES, summary[1:], strict=False):
        assert line.startswith(f"ci: {stage} took ")


def test_ci_stops_when_setup_fails(ci: Machine) -> None:
    code, lines, calls = run_ci(ci, COMMITS="6", FAILS="setup")
    assert code == 1 and [call.split()[1] for call in calls] == ["setup"]
    assert lines[-1] == "ci: no tests were run"


def test_ci_rotates_with_the_number_of_commits(ci: Machine) -> None:
    parts = {}
    for commits in ("", "1", "2", "3"):  # "": there is no git
        code, _, calls = run_ci(ci, COMMITS=commits)
        parts[commits] = calls[-1].split()[-1]
        in_turn = "lab link,engine" if commits in ("1", "3") else "make image-test "
        assert code == 0 and calls[-2] == in_turn, "without /dev/net/tun the lab exits with 78"
    assert parts == {"": "1/4", "1": "2/4", "2": "3/4", "3": "4/4"}


def test_ci_ends_a_stage_at_its_limit_and_goes_on(ci: Machine) -> None:
    script = ci.root / ".ci" / "run"
    text = script.read_text()
    assert text.count("stage 600 make lint") == 1
    script.write_text(text.replace("stage 600 make lint", "stage 1 make lint"))
    code, lines, calls = run_ci(ci, COMMITS="6", HANGS="lint")
    assert code == 1 and len(calls) == 6
    assert any("make lint" in line and "stopped at its limit of 1 s" in line for line in lines)


# ---- pytest --part


def test_parts_of_the_tests_are_disjoint_and_complete() -> None:
    names = [f"tests/a/test_{n % 50}.py::test_{n}" for n in range(800)]
    parts = [part_of(name, 4) for name in names]
    assert {*parts} == {1, 2, 3, 4} and all(150 < parts.count(part) < 250 for part in {*parts})
    assert part_of("tests/a.py::test_b[1]", 4) == part_of("tests/a.py::test_b[x[2]]", 4)
    assert part_of("tests/a.py::test_b", 1) == 1


def test_part_deselects_the_other_parts(request: pytest.FixtureRequest) -> None:
    collected = request.session.items
    lists = []
    for part in (1, 2, 3):
        items, deselected = list(collected), []
        config = types.SimpleNamespace(
            getoption={"part": (part, 3)}.get,
            hook=types.SimpleNamespace(
                pytest_deselected=lambda items, to=deselected: to.extend(items)
            ),
        )
        pytest_collection_modifyitems(config, items)
        assert {*items} | {*deselected} == {*collected} and not {*items} & {*deselected}
        lists.append(items)
    assert sorted(map(id, itertools.chain(*lists))) == sorted(map(id, collected))


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/", "-1/4"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be I/N"):
        parse_part(text)
