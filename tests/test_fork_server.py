"""The fork server's processes: each acts as a Python that was started for its command."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.forked import ROOT, Forked, server_address, start_server
from tests.processes import run_ranks, run_trainer
from tests.running import wait_until

DESCRIBE = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "environment": dict(os.environ), "folder": os.getcwd(),
    "input": sys.stdin.read(), "name": __name__, "imported": "torch" in sys.modules,
    "group": os.getpgrp(),
}))
"""


def run(
    command: list[str], environment: dict[str, str] | None = None, text: str = "", **more: object
) -> tuple[int, str]:
    """Run a command; returns its exit code and what it printed."""
    output_reader, output_writer = os.pipe()
    input_reader, input_writer = os.pipe()
    os.write(input_writer, text.encode())
    os.close(input_writer)
    environment = environment or {"PATH": os.environ["PATH"]}
    descriptors = (input_reader, output_writer, output_writer)
    process = Forked(command, environment, descriptors=descriptors, **more)
    os.close(input_reader)
    os.close(output_writer)
    with open(output_reader) as output:
        printed = output.read()
    return process.wait(), printed


def test_a_process_has_the_arguments_environment_folder_and_descriptors_it_is_given(
    tmp_path: Path,
) -> None:
    environment = {"ONE": "1", "PYTHONPATH": str(tmp_path)}
    command = ["-u", "-c", DESCRIBE, "-x", "a b"]
    code, printed = run(command, environment, "typed", folder=tmp_path)
    facts = json.loads(printed)
    assert code == 0 and facts["imported"]
    assert facts["argv"] == ["-c", "-x", "a b"] and facts["path"] == ""
    assert facts["environment"] == environment and facts["folder"] == str(tmp_path)
    assert facts["input"] == "typed" and facts["name"] == "__main__"


def test_a_module_is_main_and_finds_its_folder(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(DESCRIBE)
    facts = json.loads(run(["-m", "asked", "x"], folder=tmp_path)[1])
    assert facts["argv"] == [str(tmp_path / "asked.py"), "x"] and facts["path"] == str(tmp_path)
    assert facts["name"] == "__main__"


def test_descriptors_of_other_processes_stay_in_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORK_SERVER", start_server(os.getpid()))  # the other serves other tests too
    code = "import os; print(sorted(os.listdir('/proc/self/fd')), len(os.listdir(f'/proc/{os.getppid()}/fd')))"
    alone = run(["-c", code])
    others = [Forked(["-c", "import time; time.sleep(100)"], {}) for _ in range(3)]
    own, server = run(["-c", code])[1].split("] ")
    assert own == alone[1].split("] ")[0] and int(server) == int(alone[1].split("] ")[1]) + 3
    for process in others:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(["-c", code]) == alone


def test_the_process_group_is_the_servers_unless_another_is_asked_for() -> None:
    groups = [
        json.loads(run(["-c", DESCRIBE], group=group)[1])["group"] for group in (False, False, True)
    ]
    assert groups[0] == groups[1] != groups[2]


@pytest.mark.parametrize(
    ("code", "text", "exitcode", "printed"),
    [
        ("raise SystemExit(7)", "", 7, ""),
        ("import sys; sys.exit('why')", "", 1, "why\n"),
        ("1 / 0", "", 1, "ZeroDivisionError"),
        ("import atexit; atexit.register(print, 'end'); print('a', end=' ')", "", 0, "a end\n"),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
            "",
            0,
            "late\n",
        ),
        ("import os; os.kill(os.getpid(), 9)", "", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", "", -15, ""),
        ("import os; os.kill(os.getpid(), 2)", "", -2, "KeyboardInterrupt"),
        ("print(input())", "typed\n", 0, "typed\n"),
        ("import sys; sys.stdout.close()", "", 0, ""),
        ("import os; os.dup2(os.open('/dev/full', 1), 1); print('x')", "", 120, ""),
        ("import sys; sys.stdout.reconfigure(errors='replace'); print('x')", "", 0, "x\n"),
    ],
)
def test_a_process_ends_as_python_does(code: str, text: str, exitcode: int, printed: str) -> None:
    real = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"]},
        input=text,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert real.returncode == exitcode and printed in real.stdout
    found = run(["-c", code], text=text)
    assert found[0] == exitcode and printed in found[1]


def test_signals_reach_a_process_and_closing_kills_it(tmp_path: Path) -> None:
    sleep = ["-c", "import time; time.sleep(100)"]
    process = Forked(sleep, {})
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM

    process = Forked(sleep, {})
    process.close()
    wait_until(lambda: not Path("/proc", str(process.pid)).exists(), 20)


def test_the_client_stands_for_its_process() -> None:
    client = [sys.executable, "tests/forked.py", "-c"]
    environment = os.environ | {"FORK_SERVER": server_address()}

    def start(code: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*client, code], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
        )

    process = start("import sys; print('torch' in sys.modules); sys.exit(5)")
    assert process.communicate(timeout=60)[0] == "True\n" and process.returncode == 5
    process = start("import time; print('ready', flush=True); time.sleep(100)")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM


def test_nothing_is_imported_twice_and_no_zombie_stays() -> None:
    code = "import sys, torch; print(id(torch), id(sys.modules['train.step']))"
    assert len({run(["-c", code])[1] for _ in range(3)}) == 1, "the same objects in each copy"
    pid = int(run(["-c", "import os; print(os.getppid())"])[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    states = [Path("/proc", child, "stat").read_text().rpartition(")")[2] for child in children]
    assert not [state for state in states if state.split()[0] == "Z"]


def test_the_server_ends_with_its_owner_and_kills_what_it_has_started(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests import forked
process = forked.Forked(["-c", "import os, time; print(os.getppid(), flush=True); time.sleep(100)"], {{}})
print(process.pid, flush=True)
sys.stdin.read()
"""
    environment = {name: value for name, value in os.environ.items() if name != "FORK_SERVER"}
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment | {"TMPDIR": str(tmp_path)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    pids = [int(owner.stdout.readline()) for _ in range(2)]
    assert all(Path("/proc", str(pid)).exists() for pid in pids)
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids), 20)
    assert not list(tmp_path.glob("fork.*")), "its socket"


def fail_as_rank(rank: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1")
    time.sleep(100)


def test_a_rank_that_fails_ends_the_others_with_their_stacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(AssertionError, match="exit codes of the ranks"):
        run_ranks(fail_as_rank, (), 2)
    printed = capfd.readouterr().err
    assert "ValueError: of rank 1" in printed and "in fail_as_rank" in printed


def test_a_trainer_that_hangs_prints_its_stacks() -> None:
    code = "import time\ndef stuck(): time.sleep(100)\nstuck()"
    with pytest.raises(AssertionError, match=r"not done in 1 s(.|\n)* in stuck"):
        run_trainer(["-c", code], {"OMP_NUM_THREADS": "1"}, seconds=1)


def test_a_server_of_ones_own_is_started_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("FORK_SERVER", raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    start_server.cache_clear()
    assert server_address() == server_address() and len(started) == 1
    start_server.cache_clear()
