"""python -m doctor as a user sees it, and the part of it that make train runs."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from doctor import __main__ as doctor
from doctor import kernels, machine
from doctor.quick import quick
from settings import ROOT
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding

SECRETS = {"WANDB_API_KEY": "k3y-of-forty-characters", "HF_TOKEN": "hf_t0ken"}


def environment(tmp_path: Path) -> dict[str, str]:
    """Whoever is asked on a network is a port of this machine that nobody listens on."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "env").touch()
    return {
        "ENV_FILE": str(tmp_path / "env"),
        "RUNS_DIR": str(tmp_path / "runs"),
        "DATA_DIR": str(tmp_path / "data"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "CUDA_VISIBLE_DEVICES": "",
        "NO_PROXY": "127.0.0.1",
        "WHERE": "local",
    }


def run(tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment(tmp_path) | settings,
        check=False,
    )


def test_a_machine_that_will_do_passes_and_stays_as_it_was(tmp_path: Path) -> None:
    done = run(tmp_path, MORE="1")
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    names = [line.split()[1] for line in done.stdout.splitlines()[:-1]]
    for name in (
        "python",
        "torch",
        "gpus",
        "attention",
        "compiler",
        "host-memory",
        "shm",
        "open-files",
        "disk",
        "disk-speed",
        "hub",
        "wandb",
        "clock",
    ):
        assert names.count(name) == 1, done.stdout
    assert re.search("PASS  attention    (sdpa|math) on the CPU", done.stdout)  # math in bfloat16
    assert list((tmp_path / "runs").iterdir()) == [] and not (tmp_path / "data").exists()


def test_what_fails_is_said_last_with_the_code_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (
        environment(tmp_path)
        | SECRETS
        | {"DEVICE": "cuda", "DATA_MIX": "usmle:1", "WANDB_MODE": "online"}
    )
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", settings["HF_ENDPOINT"])
    monkeypatch.setattr(
        kernels, "by_torch", lambda: kernels.ByTorch("2.13.0")
    )  # which takes seconds
    code, (out, err) = doctor.main(), capfd.readouterr()
    lines = out.splitlines()
    levels = [line.split()[0] for line in lines if line[:4] in (PASS, WARN, FAIL)]
    assert levels == sorted(levels, key=[PASS, WARN, FAIL].index) and code == 78 and err == ""
    assert (
        "WARN  wandb" in out
        and "of which the run needs DATA_MIX: GBaker/MedQA-USMLE-4-options" in out
    )
    assert "FAIL  gpus" in out and lines[-1].startswith("A run would be stopped by gpus, hub.")
    monkeypatch.setenv("ALLOW_FAIL", "hub")
    monkeypatch.setenv("JSON", "1")
    code, (as_json, err) = doctor.main(), capfd.readouterr()
    found = json.loads(as_json)
    assert found["stops"] == ["gpus"] and found["code"] == code == 64 and err == ""
    assert set(found["findings"][0]) == {"name", "level", "text", "fix", "code"}
    assert not [secret for secret in SECRETS.values() if secret in out + as_json]


def test_settings_that_are_bad_are_said_first(tmp_path: Path) -> None:
    done = run(tmp_path, LEARNING_RATE="nan")
    assert done.returncode == 64 and "LEARNING_RATE=nan" in done.stderr and done.stdout == ""
    done = run(tmp_path, ALLOW_FAIL="disc")
    assert done.returncode == 64 and "no check disc; did you mean disk?" in done.stderr
    assert done.stdout == ""


ONE, TWO = (
    Finding("disk", FAIL, "full", "make room"),
    Finding("gpus", FAIL, "none", "rent some", 64),
)


@pytest.mark.parametrize(
    ("found", "allow", "code", "last"),
    [
        ([Finding("a", WARN, "so", "do")], "", 0, "WARN  a  so; do\n"),
        (
            [TWO],
            "",
            64,
            "A run would be stopped by gpus. To start it all the same: ALLOW_FAIL=gpus\n",
        ),
        (
            [TWO, ONE, ONE],
            "x",
            78,
            "A run would be stopped by gpus, disk. To start it all the same: "
            "ALLOW_FAIL=x,gpus,disk\n",
        ),
        (
            [TWO, ONE],
            "disk",
            64,
            "A run would be stopped by gpus. To start it all the same: ALLOW_FAIL=disk,gpus\n",
        ),
        ([TWO], "gpus", 0, "ALLOW_FAIL lets a run start in spite of gpus\n"),
    ],
)
def test_the_end_says_what_stops_a_run_and_how_to_start_it(
    found: list[Finding], allow: str, code: int, last: str
) -> None:
    c = Config(allow_fail=allow)
    assert f"\n{doctor.as_text(found, c, 1.23)}".endswith("\n" + last)
    content = json.loads(doctor.as_json(found, c, 1.23))
    assert content["code"] == code == doctor.code_of(doctor.split(allow, found)[0])
    assert len(content["findings"]) == len(found)


def test_what_passes_is_counted_and_more_lists_it() -> None:
    passing = [Finding("shm", PASS, "big"), Finding("clock", PASS, "right")]
    measured = Finding("probe-disk", PASS, "100 MB/s")
    warned = Finding("wandb", WARN, "no key", "log in")
    findings = [passing[0], warned, measured, passing[1]]
    assert doctor.as_text(findings, Config(), 1.23).splitlines() == [
        "PASS  2 checks (MORE=1 lists them)",
        "PASS  probe-disk  100 MB/s",
        "WARN  wandb       no key; log in",
    ]
    assert doctor.as_text(findings, Config(more=True), 1.23).splitlines() == [
        "PASS  shm         big",
        "PASS  probe-disk  100 MB/s",
        "PASS  clock       right",
        "WARN  wandb       no key; log in",
        "3 PASS, 1 WARN, 0 FAIL, in 1.2 s",
    ]


# ---- This machine, a cluster, or both


@pytest.mark.parametrize(
    ("where", "has_context", "names"),
    [
        ("local", True, ["here"]),
        ("cluster", True, ["there"]),
        ("cluster", False, ["there"]),
        ("auto", True, ["here", "there"]),
        ("auto", False, ["here"]),
    ],
)
def test_where_says_what_is_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    has_context: bool,
    names: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in (
        environment(tmp_path) | {"WHERE": where, "JSON": "1", "PRESET": "xlarge-8xa100"}
    ).items():
        monkeypatch.setenv(name, value)
    asked: list[Config] = []
    monkeypatch.setattr(doctor.cluster_checks, "has_context", lambda: has_context)
    monkeypatch.setattr(
        doctor.cluster_checks, "findings", lambda c: asked.append(c) or [Finding("there", PASS, "")]
    )
    monkeypatch.setattr(doctor.local_checks, "findings", lambda _: [Finding("here", PASS, "")])
    assert doctor.main() == 0
    assert [f["name"] for f in json.loads(capfd.readouterr().out)["findings"]] == names
    assert [c.nodes for c in asked] == ([4] if "there" in names else [])  # the settings of a launch


def test_settings_that_only_a_launch_refuses_stop_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        environment(tmp_path)
        | {"WHERE": "auto", "TOKENIZER": "my/tokenizer.json", "PRESET": "xlarge-8xa100"}
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor.cluster_checks, "has_context", lambda: True)
    monkeypatch.setattr(doctor.local_checks, "findings", lambda _: [])
    assert (
        doctor.main() == 0
        and "WARN  cluster  not looked at: TOKENIZER=my/tokenizer.json" in capfd.readouterr().out
    )
    monkeypatch.setenv("WHERE", "cluster")
    assert doctor.main() == 64 and "TOKENIZER=my/tokenizer.json" in capfd.readouterr().err


def test_probe_measures_last_and_what_cannot_be_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (environment(tmp_path) | {"PROBE": "1", "MORE": "1"}).items():
        monkeypatch.setenv(name, value)
    kept: list[object] = []
    monkeypatch.setattr(doctor.local_checks, "findings", lambda _: [Finding("here", PASS, "")])
    monkeypatch.setattr(doctor.probing, "measure", lambda c, say: say("products") or "measured")
    monkeypatch.setattr(
        doctor.probed, "findings", lambda c, found: [Finding("probe-disk", PASS, found)]
    )
    monkeypatch.setattr(doctor.probing, "keep", lambda c, found: kept.append(found))
    assert doctor.main() == 0 and kept == ["measured"]
    out, err = capfd.readouterr()
    assert [line.split()[1] for line in out.splitlines()[:2]] == [
        "here",
        "probe-disk",
    ] and err == "probe: products\n"
    disturbed = [Finding("probe-alone", WARN, "other processes took 68% of the processors")]
    with monkeypatch.context() as patched:
        patched.setattr(doctor.probed, "findings", lambda c, found: list(disturbed))
        assert doctor.main() == 0 and kept == ["measured"]
        assert "is not kept for make plan" in capfd.readouterr().out
    monkeypatch.setattr(
        doctor.probing, "keep", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    assert doctor.main() == 0 and "WARN  probe-kept" in capfd.readouterr().out


# ---- The part that make train runs


def config(tmp_path: Path, **values: Any) -> Config:
    return dataclasses.replace(
        Config(), runs_dir=str(tmp_path), data_dir=str(tmp_path), **values
    ).derived()


def test_the_quick_part_sees_what_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert {finding.level for finding in quick(config(tmp_path))} == {PASS}
    failed = [
        f
        for f in quick(config(tmp_path, device="cuda", attention="fa3", dtype="bfloat16"))
        if f.level == FAIL
    ]
    assert [(f.name, f.code) for f in failed] == [("gpus", 64), ("attention", 64)]
    huge = config(tmp_path, n_embd=2**18, n_head=2, n_layer=4096)
    assert {f.name for f in quick(huge) if f.level == FAIL} == {"host-memory", "disk"}


@pytest.mark.parametrize(("processes", "stopping"), [(1, []), (2, [("loopback", 78)])])
def test_several_processes_need_a_loopback_interface(
    processes: int, stopping: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "loopback_fault", lambda: "Network is unreachable")
    found = quick(config(tmp_path, device="cpu", nproc=processes))
    assert [(f.name, f.code) for f in found if f.level == FAIL] == stopping


def test_the_quick_part_loads_no_torch_and_asks_no_network(
    tmp_path: Path, data: dict[str, str]
) -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*_): raise SystemExit('asks a network')\n"
        "socket.create_connection = socket.getaddrinfo = refuse\n"
        "from settings import load_config; from doctor.quick import quick\n"
        "quick(load_config())\n"
        "sys.exit(str(sorted({'torch', 'numpy', 'tokenizers', 'huggingface_hub'} & sys.modules.keys())))"
    )
    (tmp_path / "env").touch()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **data, "ENV_FILE": str(tmp_path / "env"), "RUNS_DIR": str(tmp_path)},
    )
    assert done.stderr.strip() == "[]"
