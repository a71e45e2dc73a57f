"""Python, its packages and torch: read without loading any, and judged on made facts."""

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch

from doctor import installed
from doctor.installed import Build, Environment
from settings import ROOT
from settings.finding import FAIL, PASS, WARN

GOOD = Environment((3, 12, 4), ".venv", "ours")


def test_torch_is_known_without_being_loaded() -> None:
    cuda = (
        tuple(int(part) for part in torch.version.cuda.split(".")[:2])
        if torch.version.cuda
        else None
    )
    assert installed.torch_build() == Build(torch.__version__, cuda)
    code = "import sys; from doctor import installed; installed.torch_build(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_cuda_of_a_build_is_read_from_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('must not be loaded')")
    (package / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0'\n"
        "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from doctor import installed; "
        "b = installed.torch_build(); sys.exit(str((b.version, b.cuda)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "('2.13.0', (13, 0))"


def test_pins_are_read_as_pip_does() -> None:
    text = textwrap.dedent("""\
        # made by a tool
        numpy==2.3.1 \\
            --hash=sha256:00
            # via x==1
        contourpy==1.3.3 ; python_full_version < '3.12' \\
            --hash=sha256:00
        contourpy==1.4.0 ; python_full_version >= '3.12' \\
            --hash=sha256:00
        colorama==0.4.6 ; sys_platform == 'win32' \\
            --hash=sha256:00
        yarl==1.20
        """)
    assert installed.pins(text) == {
        "numpy": ["2.3.1"],
        "contourpy": ["1.3.3", "1.4.0"],
        "yarl": ["1.20"],
    }


def test_this_environment_is_as_pinned() -> None:
    here = installed.environment()
    assert here.version == sys.version_info[:3]
    if here.stamp == "ours":  # make setup was through with it
        assert (here.missing, here.differing) == ((), ())
    sed = subprocess.run(
        ["sed", "-n", "s/^torch==//p", "requirements/torch.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert installed.pinned_torch() == sed.stdout.strip()  # as scripts/setup_torch.sh reads it


def test_packages_that_are_absent_or_of_another_version_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "base.txt").write_text("numpy==0.1\nno-such-package==1.0\n")
    (tmp_path / "requirements" / "torch.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(installed, "ROOT", tmp_path)
    here = installed.environment()
    assert here.missing == ("no-such-package",) and here.differing == (
        ("numpy", numpy.__version__, "0.1"),
    )


def test_the_stamp_tells_who_made_the_environment(tmp_path: Path) -> None:
    assert installed.stamp(tmp_path) == "none"
    script = 'cat requirements/base.txt requirements/torch.txt | sha256sum | cut -d " " -f 1'
    digest = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    (tmp_path / ".ready").write_text(f"{digest} cpu\n")  # as scripts/setup.sh does
    assert installed.stamp(tmp_path) == "ours"
    (tmp_path / ".ready").write_text("unfinished none\n")
    assert installed.stamp(tmp_path) == "older"


def test_python_is_judged() -> None:
    cases = {
        PASS: [GOOD, dataclasses.replace(GOOD, stamp="none")],
        WARN: [
            dataclasses.replace(GOOD, stamp="older"),
            dataclasses.replace(GOOD, differing=(("numpy", "1.26.4", "2.3.1"),)),
        ],
        FAIL: [
            dataclasses.replace(GOOD, version=(3, 10, 12)),
            dataclasses.replace(GOOD, missing=("xxhash",)),
        ],
    }
    for level, environments in cases.items():
        for environment in environments:
            finding = installed.python(environment)
            assert finding.level == level and bool(finding.fix) == (level != PASS)
    assert "numpy 1.26.4 (pinned: 2.3.1)" in installed.python(cases[WARN][1]).text
    many = dataclasses.replace(GOOD, missing=tuple("abcdef"))
    assert installed.python(many).text.endswith("lacks a, b, c, d and 2 more")


def test_torch_is_judged() -> None:
    assert installed.torch(Build(None), "2.13.0").level == FAIL
    assert installed.torch(Build("2.13.0+cu126", (12, 6)), "2.13.0").level == PASS
    older = installed.torch(Build("2.11.0+cpu"), "2.13.0")
    assert older.level == WARN and "tested is 2.13.0" in older.text and older.fix == "make setup"
