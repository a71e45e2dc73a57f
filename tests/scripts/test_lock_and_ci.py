"""The lock files: whole, hashed, agreeing with each other; and .ci/run, which stops where something fails."""

import importlib.metadata
import re
import shutil
import subprocess
import tomllib

import pytest

from tests.scripts.test_setup import ROOT, Machine, machine

__all__ = ["machine"]  # a fixture

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# ---- The lock files


@pytest.mark.parametrize("name", ["base", "finetune", "dev"])
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
    ("inner", "outer"), [("base", "finetune"), ("base", "dev"), ("finetune", "dev")]
)
def test_pins_agree_with_those_they_are_installed_over(inner: str, outer: str) -> None:
    base, more = pinned(inner), pinned(outer)
    assert base.keys() & more.keys()
    assert {
        name: more[name] for name in base.keys() & more.keys() if not more[name] <= base[name]
    } == {}


def test_torch_is_pinned_in_one_place_and_all_it_needs_is_locked() -> None:
    pins = pinned("base")
    for name in ("base", "finetune", "dev"):
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


@pytest.mark.parametrize("name", ["base", "finetune", "dev"])
def test_a_lock_file_has_all_that_is_declared(name: str) -> None:
    wanted = [*PROJECT["dependencies"]]
    for extra in {"base": (), "finetune": ("finetune",), "dev": ("finetune", "dev")}[name]:
        wanted += PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower() for line in wanted}
    assert names - pinned(name).keys() == {"torch"} | ({"pure-transformer"} & names)


# ---- .ci/run


def test_ci_stops_at_the_first_failure_with_its_code(machine: Machine) -> None:
    (machine.root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", machine.root / ".ci" / "run")
    for name in ("git", "g++", "buildah", "debootstrap", "chromium", "ip"):
        machine.add(name, "#!/usr/bin/env bash\n")
    machine.add(
        "make",
        '#!/usr/bin/env bash\necho "make $*" >> "$LOG"; [[ $* != "${FAILS:-}" ]] || exit 3\n',
    )
    whole = ["setup", "lint", "train MAX_STEPS=400", "test", "image-test", "test-faults"]
    lab = machine.root / "scripts" / "wan_lab.sh"
    lab.write_text('#!/usr/bin/env bash\necho "lab $WAN_LAB" >> "$LOG"; exit 78\n')
    lab.chmod(0o755)
    for fails, code, wanted in (("lint", 3, whole[:2]), ("", 0, whole)):
        machine.log.write_text("")
        done = subprocess.run(
            [".ci/run"],
            cwd=machine.root,
            env=machine.env | {"FAILS": fails},
            text=True,
            capture_output=True,
        )
        assert done.returncode == code, done.stderr
        assert machine.calls("^make") == [f"make {target}" for target in wanted]
        assert machine.calls("^lab") == ["lab link,engine"] * (not fails)
        assert re.search(
            rf"ci: make {wanted[min(1, code)]} took \d+ s, exit code {code}", done.stdout
        )
