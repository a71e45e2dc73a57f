"""scripts/setup.sh with stand-ins for Python, pip, uv and nvidia-smi."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pip
import pytest

from tests.running import wait_until
from tests.scripts.throwaway import Checkout

TOOLS = "bash cat cp cut dirname env find grep id ls mkdir rm sed sha256sum shasum sleep tr"

# Python, and pip in it. CODE_OF_PIP: its exit code; SAYS: its error; GATE, GATE_OF_LOOK, GATE_OF_TORCH: files that it
# waits for; IGNORE_INT: as pip, it does not die of SIGINT; WHEEL: a local build; OLD, NO_VENV: its faults; HAVE: the
# torch in the environment; INSTALLED: packages; PAUSE: Python code instead of venv. Anything else it is asked goes to
# a real Python.
PYTHON = r"""
[[ -z ${IGNORE_INT:-} ]] || trap : INT
echo "python ${*//$'\n'/ }" >> "$CALLS"
compgen -e | grep -E '^(PIP|UV|PYTHON)' > "$CALLS.environment"
case "$*" in
  *version_info*) [[ -z ${OLD:-} ]] ;;
  *"import ensurepip"*) [[ -z ${NO_VENV:-} ]] ;;
  "-m venv "*)
    [[ -z ${PAUSE:-} ]] || exec "$REAL_PYTHON" -c "$PAUSE"
    mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$UV" "$3/bin/uv" ;;
  *--report*)
    while [[ -n ${GATE_OF_LOOK:-} && ! -e $GATE_OF_LOOK ]]; do sleep 0.02; done
    [[ -z ${WHEEL:-} ]] || echo "\"url\": \"file:///wheels/torch-2.13.0%2B$WHEEL-cp311-linux.whl\"," ;;
  *"-m pip install"*)
    echo "WARNING: Location 'file:///nowhere/' is ignored: it is neither a file nor a directory."
    while [[ -n ${GATE:-} && ! -e $GATE ]]; do sleep 0.02; done
    [[ ${CODE_OF_PIP:-0} == 0 ]] || echo "ERROR: ${SAYS:-no matching distribution}" >&2
    exit "${CODE_OF_PIP:-0}" ;;
  *"import importlib.metadata, sys"*)
    for name in "${@:4}"; do [[ " ${INSTALLED:-} " == *" $name "* ]] || exit 1; done ;;
  *'m.version("torch")'*) [[ -n ${HAVE:-} ]] && echo "$HAVE" ;;
  *torch.__version__*)
    while [[ -n ${GATE_OF_TORCH:-} && ! -e $GATE_OF_TORCH ]]; do sleep 0.02; done
    echo "${BUILD:-cpu} Python 3.11.7, torch 2.13.0, 0 GPUs seen" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""

UV = r"""
while [[ -n ${GATE_OF_UV:-} && ! -e $GATE_OF_UV ]]; do sleep 0.02; done
echo "uv $* driver=${UV_CUDA_DRIVER_VERSION:-}" >> "$CALLS"
[[ ${CODE_OF_UV:-0} == 0 ]] || { echo "uv: ${SAYS:-no route to host}" >&2; exit "$CODE_OF_UV"; }
build=$(sed 's/.*--torch-backend=\([a-z0-9]*\).*/\1/; s/auto/cu126/' <<< "$*")
[[ $* == *--dry-run* || ${CODE_OF_DOWNLOAD:-0} == 0 ]] || { echo "uv: $SAYS" >&2; exit "$CODE_OF_DOWNLOAD"; }
{ [[ $* == *--dry-run* ]] && echo " + torch==2.13.0+$build" || echo "UV INSTALLS"; } >&2
"""

BROKEN = "exit 1"
TWO_GPUS = "echo 535.104.05; echo 535.104.05"


class Machine(Checkout):
    def __init__(self, folder):
        super().__init__(folder, "scripts/setup.sh", "scripts/setup_torch.sh", "requirements")
        self.venv = self.root / ".venv"
        self.ready = self.venv / ".ready"
        self.link(*TOOLS.split())
        self.add("python3", PYTHON)
        self.env |= {"UV": str(self.add("../uv", UV)), "REAL_PYTHON": sys.executable}

    def setup(self, *arguments, code=0, **environ):
        return self.run("scripts/setup.sh", *arguments, code=code, **environ)

    def start_setup(self, **environ):
        """Start it, and wait for its first install."""
        process = self.start("scripts/setup.sh", **environ)
        deadline = time.monotonic() + 60
        while not self.calls("pip install"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        return process


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def open_folder():
    """A folder that other users can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def complete(machine):
    """A machine whose environment is complete."""
    machine.setup()
    return machine


# ---- Nothing to build on


@pytest.mark.parametrize("old", ["", "yes"])
def test_without_a_recent_python_it_says_what_to_install(machine, old):
    if not old:
        (machine.bin / "python3").unlink()
    text = machine.setup(code=78, OLD=old)
    assert "no Python >= 3.11" in text and "apt-get install python3 python3-venv" in text
    assert not machine.venv.exists()


def test_a_python_that_was_asked_for_and_is_too_old_is_not_replaced(machine):
    machine.add("python3.9", BROKEN)
    assert "(tried: python3.9)" in machine.setup(code=78, PYTHON="python3.9")
    assert machine.calls() == []


def test_the_next_name_is_tried_where_python3_is_too_old(machine):
    (machine.bin / "python3").rename(machine.bin / "python3.12")
    machine.add("python3", BROKEN)
    machine.setup()
    assert machine.ready.exists()


def test_a_python_without_venv_is_named_with_the_package_it_lacks(machine):
    text = machine.setup(code=78, NO_VENV="yes")
    assert "python3 lacks the venv module: apt-get install python3-venv" in text


def test_a_folder_of_somebody_else_is_left_alone(machine):
    machine.write(".venv/thesis.tex", "years")
    assert "was not made by this script" in machine.setup(code=78)
    assert [path.name for path in machine.venv.iterdir()] == ["thesis.tex"]


def test_an_environment_that_pip_or_uv_made_is_taken_as_it_is(machine):
    machine.write(".venv/bin/pip")
    shutil.copy(machine.bin / "python3", machine.venv / "bin/python")
    packages = "pure-transformer torch"
    machine.setup(INSTALLED=packages)
    assert not machine.calls("pip install") and not machine.ready.exists()
    text = machine.setup("--finetune", code=78, INSTALLED=packages)
    assert "pip install -e '.[finetune]' or uv sync --extra finetune" in text
    machine.setup("--finetune", INSTALLED=f"{packages} transformers peft")


def test_a_place_that_cannot_be_written_to_is_named_with_the_way_out(machine):
    venv = machine.write("file") / "venv"
    text = machine.setup(code=78, VENV=str(venv))
    assert f"setup: cannot write to {venv}: set VENV to a folder that you may write to" in text


@pytest.mark.parametrize("arguments", [["--fast"], ["--fine"], ["--dev", "--finetune"]])
def test_an_unknown_argument_is_refused(machine, arguments):
    assert "usage: scripts/setup.sh" in machine.setup(*arguments, code=64)


# ---- When nothing is to be done, or little


def test_a_finished_setup_is_silent_and_starts_nothing(complete):
    assert complete.setup() == "" and complete.calls() == []


def test_a_changed_lock_file_is_installed_into_the_same_environment(complete):
    complete.write("requirements/base.txt", "numpy==2.0.0\n")
    complete.setup(HAVE="2.13.0+cpu")
    assert complete.calls("pip install .*-r requirements/base.txt")
    assert not complete.calls("-m venv|^uv")
    assert complete.setup() == ""


def test_an_environment_whose_python_is_gone_is_built_again(complete):
    (complete.venv / "bin/python").unlink()
    complete.setup()
    assert complete.calls("-m venv")


# ---- Other tools' variables, and other users' environments


def test_settings_for_other_environments_change_nothing(machine):
    folder = machine.root / "elsewhere"
    (folder / "scripts").mkdir(parents=True)
    other = {
        "CDPATH": str(folder),
        "PYTHONPATH": "/x",
        "PYTHONHOME": "/x",
        "PYTHONSAFEPATH": "1",
        "PYTHONOPTIMIZE": "2",
        "PIP_TARGET": "/x",
        "PIP_CONSTRAINT": "/x",
        "PIP_PYTHON": "/x",
        "PIP_USER": "1",
        "UV_SYSTEM_PYTHON": "1",
        "UV_CONSTRAINT": "/x",
    }
    index = {"PIP_INDEX_URL": "https://a.example.org", "UV_DEFAULT_INDEX": "https://a.example.org"}
    machine.setup(**other, **index)
    names = (machine.log.parent / "calls.environment").read_text().split()
    assert not other.keys() - {"PIP_USER", "CDPATH"} & set(names)
    assert index.keys() < set(names)
    assert machine.ready.exists()


def test_pip_conf_of_other_environments_does_not_choose_the_folder_or_the_packages(machine):
    """The real pip obeys the pip.conf that setup leaves in the environment, before the user's."""
    machine.setup()
    venv = machine.root / "real"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    shutil.copy(machine.venv / "pip.conf", venv)
    wheel = machine.root / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "")
        file.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0"
        )
        file.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("tiny-1.0.dist-info/RECORD", "")
    elsewhere = machine.root / "elsewhere"
    home = machine.write(
        ".config/pip/pip.conf",
        f"[install]\ntarget = {elsewhere}\nconstraint = /nowhere\n"
        f"[global]\nprefix = {elsewhere}\nroot = {elsewhere}\n",
    ).parents[2]
    program = f"import runpy, sys; sys.path.append({str(Path(pip.__file__).parents[1])!r}); "
    program += "runpy.run_module('pip', run_name='__main__')"
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run(
        [str(venv / "bin/python"), "-c", program, *words, str(wheel)],
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
        check=True,
    )
    assert list(venv.glob("lib/*/site-packages/tiny.py")) and not elsewhere.exists()


def test_scripts_without_their_x_bit_do(machine):
    (machine.root / "scripts/setup_torch.sh").chmod(0o644)
    machine.run("bash", "scripts/setup.sh")
    assert machine.ready.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("fault", ["python", "folder"])
def test_an_environment_of_another_user_that_cannot_be_entered_is_called_that(open_folder, fault):
    machine = Machine(open_folder)
    venv = open_folder / "venv"
    machine.setup(VENV=str(venv))
    if fault == "python":
        (venv / "bin/python").unlink()
        hidden = open_folder / "hidden"
        hidden.mkdir(mode=0o700)
        shutil.copy(machine.bin / "python3", hidden)
        (venv / "bin/python").symlink_to(hidden / "python3")
    else:
        venv.chmod(0o700)
    machine.link("readlink", "setpriv")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environ = {"VENV": str(venv), "CALLS": "/dev/null"}
    text = machine.run(*nobody, "bash", "scripts/setup.sh", code=78, **environ)
    assert f"{venv} was made by another user" in text
    assert "PYTHON=/usr/bin/python3 make setup" in text and "set VENV to a folder" in text


# ---- When it is cut short


@pytest.mark.parametrize("disk", ["this", "another"])
def test_a_failed_install_says_what_to_do_and_leaves_no_stamp(machine, disk):
    folder = machine.venv
    if disk == "another":
        folder = machine.root / "scratch"
        folder.mkdir()
        machine.venv.symlink_to(folder)
    text = machine.setup(code=1, CODE_OF_PIP="1")
    _, _, after = text.partition("ERROR: no matching distribution")
    assert "pip failed, see above. The package index has no such version" in after
    assert "is ignored" not in text and not machine.ready.exists()
    half = folder / "half of a package"
    half.touch()
    machine.setup()
    assert (folder / ".ready").exists() and not half.exists()


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("Failed to establish a new connection: Name or service not known", "network and proxy"),
        ("HTTPSConnectionPool(host='x'): Read timed out.", "network and proxy"),
        ("[Errno 28] No space left on device", "no space left"),
        ("[Errno 122] Disk quota exceeded: '/home/x'", "no space left"),
        ("[Errno 13] Permission denied: '/x'", "Set VENV to a folder"),
        ("THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "PIP_NO_CACHE_DIR"),
        ("No matching distribution found for numpy==2.4.1", "pip config list"),
        ("something else", "last lines above"),
    ],
)
def test_the_advice_follows_from_what_pip_says(machine, says, words):
    _, _, advice = machine.setup(code=1, CODE_OF_PIP="1", SAYS=says).partition("see above. ")
    assert words in advice
    assert ("network" in advice) == (words == "network and proxy")


@pytest.mark.parametrize("when", ["CODE_OF_UV", "CODE_OF_DOWNLOAD"])
def test_what_uv_says_is_read_as_well(machine, when):
    said = machine.setup(code=1, SAYS="No space left on device", **{when: "1"})
    assert "There is no space left" in said


@pytest.mark.parametrize("update", [False, True])
def test_a_killed_install_leaves_no_stamp_and_the_next_one_starts_over(machine, update):
    if update:
        machine.setup()
        machine.write("requirements/base.txt", "numpy==2.0.0\n")
    process = machine.start_setup(GATE="never")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not machine.ready.exists()
    machine.setup()
    assert machine.calls("-m venv") and machine.ready.exists()


def test_ctrl_c_is_not_blamed_on_the_network(machine):
    """pip takes SIGINT for an error like any other; its stand-in then ends with exit code 1."""
    process = machine.start_setup(GATE="gate", CODE_OF_PIP="1", IGNORE_INT="yes")
    os.killpg(process.pid, signal.SIGINT)
    machine.write("gate")
    _, text = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "\nSetup interrupted. Run the same command to continue.\n" in text
    assert "network" not in text
    assert not machine.ready.exists()
    machine.setup()


def test_ctrl_c_while_python_makes_the_environment_shows_no_traceback(machine):
    process = machine.start(
        "scripts/setup.sh", PAUSE="import time; open('venv', 'w'); time.sleep(60)"
    )
    wait_until((machine.root / "venv").exists, 60)
    os.killpg(process.pid, signal.SIGINT)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 143
    assert text.strip() == "Setup interrupted. Run the same command to continue."


def test_a_long_installation_is_not_silent(machine):
    process = machine.start_setup(GATE="gate", SETUP_QUIET_S="0.1")
    while "still installing requirements/base.txt, " not in process.stderr.readline():
        pass
    machine.write("gate")
    process.communicate(timeout=120)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"PAUSE": "import os, time\nwhile not os.path.exists('gate'): time.sleep(.01)"},
            "creating .venv",
        ),
        ({"GATE_OF_LOOK": "gate"}, "looking for a wheel of torch"),
        ({"GATE_OF_UV": "gate"}, "choosing a build of torch"),
        ({"GATE_OF_TORCH": "gate"}, "loading torch for the first time"),
    ],
)
def test_no_step_is_silent_for_long(machine, environ, words):
    process = machine.start("scripts/setup.sh", SETUP_QUIET_S="0.1", **environ)
    while f"setup: still {words}, " not in (line := process.stderr.readline()):
        assert line
    machine.write("gate")
    process.communicate(timeout=120)
    assert process.returncode == (1 if "PAUSE" in environ else 0)


def test_a_failed_update_keeps_the_environment_and_is_tried_again(complete):
    complete.setup(code=1, TORCH_BACKEND="cu130", CODE_OF_UV="2")
    assert (complete.venv / "bin/python").exists()
    complete.setup(HAVE="2.13.0+cpu")
    assert complete.calls("pip install")
    assert not complete.calls("-m venv|^uv")
    assert complete.setup() == ""


def test_two_setups_at_once_install_once(machine):
    first = machine.start_setup(GATE="gate")
    log = machine.write("calls of the second")
    second = machine.start("scripts/setup.sh", CALLS=str(log))
    assert second.stderr and "waiting for another setup" in second.stderr.readline()
    machine.write("gate")
    for process in (first, second):
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert "pip install" not in log.read_text()


# ---- Which torch


def test_a_local_wheel_is_taken_by_pip_and_uv_is_not_asked(machine):
    text = machine.setup(WHEEL="cpu")
    assert "torch 2.13.0+cpu (no NVIDIA driver found), from a wheel on this machine" in text
    assert machine.calls(r"pip install .*--no-index torch==2\.13\.0\+cpu$")
    assert not machine.calls("^uv")
    [look] = machine.calls("--report")  # asks no index, and installs nothing
    assert "--no-index" in look and "--dry-run" in look


@pytest.mark.parametrize(
    ("nvidia_smi", "backend", "asked", "announced"),
    [
        ("", "", "cpu", "cpu (no NVIDIA driver found), about 0.2 GB"),
        ("echo NVIDIA-SMI has failed; exit 9", "", "cpu", "cpu (no NVIDIA driver found), about"),
        (
            TWO_GPUS,
            "",
            "auto",
            "cu126 (NVIDIA driver 535.104.05), about 3 GB with the CUDA libraries",
        ),
        (TWO_GPUS, "cu130", "cu130", "cu130 (NVIDIA driver 535.104.05), about 3 GB"),
        (TWO_GPUS, "cpu", "cpu", "cpu (NVIDIA driver 535.104.05), about 0.2 GB"),
    ],
)
def test_the_build_fits_the_driver_and_its_size_is_said_first(
    machine, nvidia_smi, backend, asked, announced
):
    if nvidia_smi:
        machine.add("nvidia-smi", nvidia_smi)
    text = machine.setup(TORCH_BACKEND=backend)
    before, _, _ = text.partition("UV INSTALLS")
    assert f"torch 2.13.0+{announced}" in before and " to download" in before
    assert ("leaves the GPUs unused" in before) == (backend == "cpu")
    assert text.splitlines()[-1].startswith("setup: ready in ")
    plan, install = machine.calls("^uv")
    for call in (plan, install):
        assert f"--torch-backend={asked} " in call and "torch==2.13.0" in call
        if nvidia_smi == TWO_GPUS:
            assert call.endswith("driver=535.104.05")


def test_a_local_wheel_of_another_build_than_asked_for_is_not_taken(machine):
    machine.setup(TORCH_BACKEND="cu126", WHEEL="cpu", BUILD="cu126")
    assert machine.calls("^uv .*--torch-backend=cu126")


def test_asking_for_another_build_changes_torch_and_not_asking_keeps_it(complete):
    complete.setup(TORCH_BACKEND="cu126", BUILD="cu126", HAVE="2.13.0+cpu")
    assert complete.calls("^uv .*--reinstall-package torch .*--torch-backend=cu126")
    for backend in ("", "auto", "cu126"):
        assert complete.setup(TORCH_BACKEND=backend) == ""


# ---- What fine-tuning, tests and linters need


@pytest.mark.parametrize("name", ["dev", "finetune"])
def test_an_extra_adds_its_packages_once(complete, name):
    complete.setup(f"--{name}", code=1, CODE_OF_PIP="1")
    assert complete.setup() == ""  # the base is complete nevertheless
    complete.setup(f"--{name}")
    [call] = complete.calls("pip install")
    assert "--require-hashes" in call and f"-r requirements/{name}.txt" in call
    assert complete.setup(f"--{name}") == "" and complete.calls() == []


def test_dev_has_what_fine_tuning_needs(complete):
    complete.setup("--dev")
    assert complete.setup("--finetune") == "" and complete.calls() == []
