"""Plant one fault after another in a copy of a checkout, and print which test notices it.

    python -m tests.plant_faults [--list] [--checkout FOLDER] [NAME ..]

tests/mutants.toml lists the faults. Only the tests that a fault names run, and no slow ones unless
it names a single test. Each fault gets one line: noticed by TEST, unnoticed, or does not apply. A
test that fails without the fault too has noticed nothing. The exit code is 1 if any fault is
unnoticed.
"""

import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from settings import ROOT

FAULTS_FILE = ROOT / "tests" / "mutants.toml"
LIMIT_S = 600.0  # for the tests of one fault, on a machine that does other things too
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
DOES_NOT_APPLY = "does not apply"
UNNOTICED = "unnoticed"
# Of processes that tests start. Bytecode would hide a fault of the same size, planted in the same
# second.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclasses.dataclass(frozen=True)
class PlantedFault:
    """A fault, as a change in the text of one file.

    Attributes:
        file: path in the checkout.
        old, new: the text to replace, which occurs once, and its replacement.
        tests: files or folders of tests, or FILE::TEST, one of which should fail.
        effect: what a user would meet.
        noticed_on_base: whether these tests noticed it at commit 9fc3810.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    effect: str
    noticed_on_base: bool

    def is_in(self, checkout: Path) -> bool:
        """Return whether the checkout has the text to replace exactly once."""
        path = checkout / self.file
        return path.is_file() and path.read_text().count(self.old) == 1


def read_faults() -> list[PlantedFault]:
    """Return the faults of tests/mutants.toml, in their order."""
    content = tomllib.loads(FAULTS_FILE.read_text())
    return [PlantedFault(**entry) for entry in content["fault"]]


def copy_checkout(checkout: Path, target: Path) -> None:
    """Copy the files of a git checkout, without what git ignores, such as runs and data."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = checkout / name
        if source.is_file():  # and not deleted since the last commit
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    (target / ".venv").symlink_to(ROOT / ".venv")


def try_fault(fault: PlantedFault, checkout: Path) -> str:
    """Plant a fault, run its tests, and undo it. Returns what became of it."""
    if not fault.is_in(checkout):
        return DOES_NOT_APPLY
    tests = [test for test in fault.tests if (checkout / file_of(test)).exists()]
    if not tests:
        return UNNOTICED
    options = []
    if not any("::" in test for test in tests):
        options = ["-m", "not slow"]
    path = checkout / fault.file
    sound = path.read_text()
    path.write_text(sound.replace(fault.old, fault.new))
    try:
        failed = run_pytest([*options, *tests], checkout)
    finally:
        path.write_text(sound)
    if not failed:
        return UNNOTICED
    if run_pytest([*options, failed], checkout):
        return f"{UNNOTICED}: {failed} fails without it too"
    return f"noticed by {failed}"


def file_of(test: str) -> str:
    """Return the file or folder of a test."""
    return test.partition("::")[0]


def run_pytest(arguments: list[str], checkout: Path) -> str:
    """Run pytest until a test fails, in a copy of this process, which has torch already.

    Returns:
        The test that failed, or "". If LIMIT_S is over: the file or folder that runs last.

    Raises:
        RuntimeError: pytest could not collect the tests.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        pid = os.fork()
        if pid == 0:
            become_pytest(arguments, checkout, output.fileno())
        code = wait_for(pid)
        output.seek(0)
        text = output.read()
    if code == -signal.SIGKILL:
        return arguments[-1]
    failed = FAILED.search(text)
    if code == 1 and failed:
        return failed[1]
    if code:
        raise RuntimeError(f"pytest ended with {code}:\n{text[-2000:]}")
    return ""


def become_pytest(arguments: list[str], checkout: Path, output: int) -> NoReturn:
    """Run pytest in this process, in a group of its own, and end as it ends."""
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(checkout)
    sys.path[0] = str(checkout)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("settings", "tests"):  # of this checkout
            del sys.modules[name]
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))


def wait_for(pid: int) -> int:
    """Return the exit code of a process, killed with its group after LIMIT_S or at Ctrl-C."""
    deadline = time.monotonic() + LIMIT_S
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
        while not ended:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.1)
            ended, status = os.waitpid(pid, os.WNOHANG)
    except KeyboardInterrupt:
        os.killpg(pid, signal.SIGKILL)
        raise
    return os.waitstatus_to_exitcode(status)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults, and see which test notices each.")
    parser.add_argument("--list", action="store_true", help="list the faults, and plant none")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="plant them in this one")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all faults")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    faults = {fault.name: fault for fault in read_faults()}
    unknown = [name for name in arguments.names if name not in faults]
    if unknown:
        parser.error(f"{FAULTS_FILE.name} has no {', '.join(unknown)}; --list prints the names")
    chosen = [faults[name] for name in arguments.names or faults]
    if arguments.list:
        for fault in chosen:
            print(f"{fault.name:28} {fault.file}: {fault.effect}")
        return 0
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="faults.", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # some tests become another user
        copy = Path(folder).resolve() / "checkout"
        copy_checkout(arguments.checkout, copy)
        for fault in chosen:
            outcome = try_fault(fault, copy)
            unnoticed += outcome.startswith(UNNOTICED)
            print(f"{fault.name:28} {outcome}", flush=True)
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
