"""scripts/setup.sh with stand-ins for Python, pip, uv and nvidia-smi, which write down how they were called.

The PATH of each test holds these and a few system tools, and nothing else.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = (
    "bash",
    "cat",
    "cp",
    "cut",
    "dirname",
    "env",
    "find",
    "grep",
    "id",
    "ls",
    "mkdir",
    "rm",
    "sed",
    "sha256sum",
    "shasum",
    "sleep",
    "tr",
)

# Python, and pip in it. PIP_CODE: its exit code; GATE: a file it waits for; IGNORE_INT: as pip, it does not die of
# SIGINT; WHEEL: a local build; OLD, NO_VENV: its faults; HAVE: the torch in the environment. Anything else it is
# asked goes to a real Python.
PYTHON = f"""#!/usr/bin/env bash
[[ -z ${{IGNORE_INT:-}} ]] || trap : INT
echo "python ${{*//$'\\n'/ }}" >> "$LOG"
case "$*" in
  *version_info*) [[ -z ${{OLD:-}} ]] ;;
  *"import ensurepip"*) [[ -z ${{NO_VENV:-}} ]] ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$UV" "$3/bin/uv" ;;
  *--report*) [[ -z ${{WHEEL:-}} ]] || echo "\\"url\\": \\"file:///wheels/torch-2.13.0%2B$WHEEL-cp311-linux.whl\\"," ;;
  *"-m pip install"*)
    echo "WARNING: Location 'file:///nowhere/' is ignored: it is neither a file nor a directory."
    while [[ -n ${{GATE:-}} && ! -e $GATE ]]; do sleep 0.02; done
    [[ ${{PIP_CODE:-0}} == 0 ]] || echo "ERROR: no matching distribution" >&2
    exit "${{PIP_CODE:-0}}" ;;
  *"import importlib.metadata, sys"*)
    for name in "${{@:4}}"; do [[ " ${{INSTALLED:-}} " == *" $name "* ]] || exit 1; done ;;
  *'m.version("torch")'*) [[ -n ${{HAVE:-}} ]] && echo "$HAVE" ;;
  *torch.__version__*) echo "${{BUILD:-cpu}} Python 3.11.7, torch 2.13.0, 0 GPUs seen" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""

UV = """#!/usr/bin/env bash
echo "uv $* driver=${UV_CUDA_DRIVER_VERSION:-}" >> "$LOG"
[[ ${UV_CODE:-0} == 0 ]] || { echo "uv: no route to host" >&2; exit "$UV_CODE"; }
build=$(sed 's/.*--torch-backend=\\([a-z0-9]*\\).*/\\1/; s/auto/cu126/' <<< "$*")
{ [[ $* == *--dry-run* ]] && echo " + torch==2.13.0+$build" || echo "UV INSTALLS"; } >&2
"""

NVIDIA_SMI = """#!/usr/bin/env bash
echo 535.104.05
echo 535.104.05
"""


class Machine:
    """A copy of the scripts, a PATH of stand-ins, and the calls that these received."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.log = folder / "repository", folder / "bin", folder / "calls"
        self.venv = self.root / ".venv"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("setup.sh", "setup_torch.sh"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts" / name)
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        for name in TOOLS:
            if found := shutil.which(name):
                (self.bin / name).symlink_to(found)
        self.add("python3", PYTHON)
        self.env = {"PATH": str(self.bin), "LOG": str(self.log), "UV": str(self.add("../uv", UV))}

    def add(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        self.log.write_text("")
        return subprocess.Popen(
            ["scripts/setup.sh", *arguments],
            cwd=self.root,
            env=self.env | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def setup(self, *arguments: str, code: int = 0, **env: str) -> str:
        """What the script says; its exit code must be `code`."""
        process = self.start(*arguments, **env)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == code, said
        return said

    def calls(self, pattern: str = "") -> list[str]:
        return [line for line in self.log.read_text().splitlines() if re.search(pattern, line)]

    @property
    def ready(self) -> bool:
        return (self.venv / ".ready").exists()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


# ---- Nothing to build on


@pytest.mark.parametrize("fault", ["none", "old"])
def test_without_a_recent_python_it_says_what_to_install(machine: Machine, fault: str) -> None:
    if fault == "none":
        (machine.bin / "python3").unlink()
    said = machine.setup(code=78, OLD="yes")
    assert "no Python >= 3.11" in said
    assert "apt-get install python3 python3-venv" in said
    assert not machine.venv.exists()


def test_a_python_that_was_asked_for_and_is_too_old_is_not_replaced(machine: Machine) -> None:
    machine.add("python3.9", "#!/usr/bin/env bash\nexit 1\n")
    assert "(tried: python3.9)" in machine.setup(code=78, PYTHON="python3.9")
    assert machine.calls() == []


def test_the_next_name_is_tried_where_python3_is_too_old(machine: Machine) -> None:
    (machine.bin / "python3").rename(machine.bin / "python3.12")
    machine.add("python3", "#!/usr/bin/env bash\nexit 1\n")
    machine.setup()
    assert machine.ready


def test_a_python_without_venv_is_named_with_the_package_it_lacks(machine: Machine) -> None:
    assert "python3 lacks the venv module: apt-get install python3-venv" in machine.setup(
        code=78, NO_VENV="yes"
    )


def test_a_folder_of_somebody_else_is_left_alone(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").write_text("years")
    assert "was not made by this script" in machine.setup(code=78)
    assert [path.name for path in machine.venv.iterdir()] == ["thesis.tex"]


def test_an_environment_that_pip_or_uv_made_is_taken_as_it_is(machine: Machine) -> None:
    (machine.venv / "bin").mkdir(parents=True)
    shutil.copy(machine.bin / "python3", machine.venv / "bin" / "python")
    installed = {"INSTALLED": "pure-transformer torch"}
    machine.setup(**installed)
    assert not machine.calls("pip install") and not (machine.venv / ".ready").exists()
    lacking = machine.setup("--finetune", code=78, **installed)
    assert "pip install -e '.[finetune]' or uv sync --extra finetune" in lacking
    complete = {"INSTALLED": f"{installed['INSTALLED']} transformers peft"}
    machine.setup("--finetune", **complete)


def test_a_place_that_cannot_be_written_to_is_told_with_the_way_out(
    machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    said = machine.setup(code=78, VENV=str(tmp_path / "file" / "venv"))
    assert (
        said.startswith("setup: cannot write to ")
        and "set VENV to a folder that you may write to" in said
    )


def test_an_unknown_argument_is_refused(machine: Machine) -> None:
    assert "usage: scripts/setup.sh" in machine.setup("--fast", code=64)


# ---- When nothing is to be done


def test_a_finished_setup_is_silent_quick_and_starts_nothing(machine: Machine) -> None:
    machine.setup()
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        assert machine.setup() == ""
        seconds.append(time.monotonic() - start)
        assert machine.calls() == []
    assert min(seconds) < 1


def test_a_changed_lock_file_is_installed_into_the_same_environment(machine: Machine) -> None:
    machine.setup()
    (machine.root / "requirements" / "base.txt").write_text("numpy==2.0.0\n")
    machine.setup(HAVE="2.13.0+cpu")
    assert machine.calls("pip install .*-r requirements/base.txt")
    assert not machine.calls("-m venv")
    assert not machine.calls("^uv")
    assert machine.setup() == ""


def test_an_environment_whose_python_is_gone_is_made_anew(machine: Machine) -> None:
    machine.setup()
    (machine.venv / "bin" / "python").unlink()
    machine.setup()
    assert machine.calls("-m venv")


# ---- When it is cut short


def test_a_failed_install_says_what_to_do_and_leaves_no_stamp(machine: Machine) -> None:
    said = machine.setup(code=1, PIP_CODE="1")
    assert said.index("ERROR: no matching distribution") < said.index(
        "pip failed, see above. Check network and proxy"
    )
    assert "is ignored" not in said
    assert not machine.ready
    (machine.venv / "half").write_text("a file of a package that is not all there")
    machine.setup()
    assert machine.ready
    assert not (machine.venv / "half").exists()


def test_a_killed_install_leaves_no_stamp_and_the_next_one_starts_anew(
    machine: Machine, tmp_path: Path
) -> None:
    process = machine.start(GATE=str(tmp_path / "never"))
    wait_for(lambda: machine.calls("pip install"))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not machine.ready
    machine.setup()
    assert machine.calls("-m venv")
    assert machine.ready


def test_a_killed_update_leaves_no_stamp(machine: Machine, tmp_path: Path) -> None:
    machine.setup()
    (machine.root / "requirements" / "base.txt").write_text("numpy==2.0.0\n")
    process = machine.start(GATE=str(tmp_path / "never"))
    wait_for(lambda: machine.calls("pip install"))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not machine.ready
    machine.setup()
    assert machine.calls("-m venv")


def test_ctrl_c_is_not_blamed_on_the_network(machine: Machine, tmp_path: Path) -> None:
    """pip takes SIGINT for an error like any other; here it is the stand-in, which is let go with exit code 1."""
    gate = tmp_path / "gate"
    process = machine.start(GATE=str(gate), PIP_CODE="1", IGNORE_INT="yes")
    wait_for(lambda: machine.calls("pip install"))
    os.killpg(process.pid, signal.SIGINT)
    gate.touch()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "setup: interrupted; the same command goes on" in said and "network" not in said
    assert not machine.ready
    machine.setup()


def test_an_environment_on_another_disk_is_made_anew_there(
    machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    machine.venv.symlink_to(tmp_path / "scratch")
    machine.setup(code=1, PIP_CODE="1")
    (tmp_path / "scratch" / "half").write_text("a file of a package that is not all there")
    machine.setup()
    assert machine.ready and machine.venv.is_symlink()
    assert not (tmp_path / "scratch" / "half").exists()


def test_a_failed_update_keeps_the_environment_and_is_tried_again(machine: Machine) -> None:
    machine.setup()
    machine.setup(code=1, TORCH_BACKEND="cu130", UV_CODE="2")
    assert (machine.venv / "bin" / "python").exists()
    machine.setup(HAVE="2.13.0+cpu")
    assert machine.calls("pip install")
    assert not machine.calls("-m venv|^uv")
    assert machine.setup() == ""


def test_two_setups_at_once_install_once(machine: Machine, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = machine.start(GATE=str(gate))
    wait_for(lambda: machine.calls("pip install"))
    second = subprocess.Popen(
        ["scripts/setup.sh"], cwd=machine.root, env=machine.env, text=True, stderr=subprocess.PIPE
    )
    assert second.stderr is not None
    assert "waiting for another setup" in second.stderr.readline()
    gate.touch()
    assert first.wait(timeout=120) == 0
    assert second.wait(timeout=120) == 0
    assert len(machine.calls("pip install .*-r requirements/base.txt")) == 1
    second.communicate()
    first.communicate()


# ---- Which torch


def test_a_local_wheel_is_taken_by_pip_and_uv_is_not_asked(machine: Machine) -> None:
    said = machine.setup(WHEEL="cpu")
    assert "torch 2.13.0+cpu (no NVIDIA driver found), from a wheel on this machine" in said
    assert machine.calls(r"pip install .*--no-index torch==2\.13\.0\+cpu$")
    assert not machine.calls("^uv")


def test_looking_for_a_local_wheel_asks_no_index(machine: Machine) -> None:
    machine.setup()
    assert [
        call
        for call in machine.calls("--report")
        if "--no-index" not in call or "--dry-run" not in call
    ] == []
    assert machine.calls("--report")


def test_a_cpu_wheel_on_a_machine_with_gpus_is_remarked_on(machine: Machine) -> None:
    machine.add("nvidia-smi", NVIDIA_SMI)
    said = machine.setup(WHEEL="cpu")
    assert "leaves the GPUs unused; TORCH_BACKEND=cu126" in said


def test_a_driver_gets_the_build_that_uv_knows_and_its_size_is_said_first(machine: Machine) -> None:
    machine.add("nvidia-smi", NVIDIA_SMI)
    said = machine.setup(BUILD="cu126")
    announced = "torch 2.13.0+cu126 (NVIDIA driver 535.104.05), about 3 GB with the CUDA libraries to download"
    assert said.index(announced) < said.index("UV INSTALLS")
    calls = machine.calls("^uv")
    assert len(calls) == 2
    for call in calls:
        assert "--torch-backend=auto" in call
        assert "torch==2.13.0" in call
        assert call.endswith("driver=535.104.05")
    assert "unused" not in said


def test_a_driver_that_does_not_answer_counts_as_none(machine: Machine) -> None:
    machine.add("nvidia-smi", "#!/usr/bin/env bash\necho NVIDIA-SMI has failed; exit 9\n")
    assert "(no NVIDIA driver found)" in machine.setup()


def test_without_a_driver_the_cpu_build_is_named_and_its_size_said_first(machine: Machine) -> None:
    said = machine.setup()
    announced = "torch 2.13.0+cpu (no NVIDIA driver found), about 0.2 GB to download"
    assert said.index(announced) < said.index("UV INSTALLS")
    assert [call for call in machine.calls("^uv") if "--torch-backend=cpu" not in call] == []
    assert "ready in" in said.splitlines()[-1]


@pytest.mark.parametrize("backend", ["cpu", "cu130"])
def test_torch_backend_is_passed_through(machine: Machine, backend: str) -> None:
    machine.add("nvidia-smi", NVIDIA_SMI)
    said = machine.setup(TORCH_BACKEND=backend, BUILD=backend)
    assert f"torch 2.13.0+{backend} (NVIDIA driver 535.104.05)" in said
    calls = machine.calls("^uv")
    assert calls
    assert [call for call in calls if f"--torch-backend={backend}" not in call] == []


def test_a_local_wheel_of_another_build_than_asked_for_is_not_taken(machine: Machine) -> None:
    machine.setup(TORCH_BACKEND="cu126", WHEEL="cpu", BUILD="cu126")
    assert machine.calls("^uv .*--torch-backend=cu126")


def test_asking_for_another_build_changes_torch_and_not_asking_keeps_it(machine: Machine) -> None:
    machine.setup()
    machine.setup(TORCH_BACKEND="cu126", BUILD="cu126", HAVE="2.13.0+cpu")
    assert machine.calls("^uv .*--reinstall-package torch .*--torch-backend=cu126")
    for backend in ({}, {"TORCH_BACKEND": "auto"}, {"TORCH_BACKEND": "cu126"}):
        assert machine.setup(**backend) == ""


# ---- What tests and linters need


def test_dev_adds_its_packages_once(machine: Machine) -> None:
    machine.setup()
    machine.setup("--dev")
    assert machine.calls("pip install .*--require-hashes .*-r requirements/dev.txt")
    assert not machine.calls("-r requirements/base.txt")
    assert machine.setup("--dev") == ""
    assert machine.calls() == []


def test_fine_tuning_adds_its_packages_once_and_dev_has_them(machine: Machine) -> None:
    machine.setup()
    machine.setup("--finetune")
    assert machine.calls("pip install .*--require-hashes .*-r requirements/finetune.txt")
    assert not machine.calls("-r requirements/dev.txt")
    assert machine.setup("--finetune") == "" and machine.calls() == []
    machine.setup("--dev")
    (machine.venv / ".ready-finetune").unlink()
    assert machine.setup("--finetune") == "" and machine.calls() == []
    machine.setup("--fine", code=64)


def test_a_failed_dev_install_leaves_the_base_ready(machine: Machine) -> None:
    machine.setup()
    machine.setup("--dev", code=1, PIP_CODE="1")
    assert machine.setup() == ""
    machine.setup("--dev")
    assert (machine.venv / ".ready-dev").exists()
