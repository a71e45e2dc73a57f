"""Secrets on their way to the cluster: on standard input, and nowhere else, wherever one might look."""

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k8s.cluster import kubectl as k
from settings import ROOT
from tests.cluster_sim.cluster import Cluster
from tests.k8s.user import User, a_user

user = a_user
TOKEN, KEY = "hf-not-to-be-seen-by-anybody", "5a" * 20
FORMS = [
    form for value in (TOKEN, KEY) for form in (value.encode(), base64.b64encode(value.encode()))
]


def seen_in(content: bytes) -> bool:
    return any(form in content for form in FORMS)


def command_lines() -> set[bytes]:
    """Of every process that there is now."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                found.add(Path(entry.path, "cmdline").read_bytes())
            except OSError:  # it has just ended
                continue
    return found


def test_a_secret_is_on_standard_input_and_nowhere_else(
    user: User, cluster: Cluster, tmp_path: Path
) -> None:
    spy, said = tmp_path / "bin" / "kubectl", tmp_path / "calls"
    spy.parent.mkdir()
    spy.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>"{said}"\nexec "{k.program()}" "$@"\n')
    spy.chmod(0o755)
    # One of them is in the environment, the other in ENV_FILE.
    env_file = tmp_path / "own.env"
    env_file.write_text(f"HF_TOKEN={TOKEN}\n")
    env = user.environment(
        WANDB_API_KEY=KEY, ENV_FILE=str(env_file), PATH=f"{spy.parent}:{os.environ['PATH']}"
    )
    code = "from k8s import launch; launch.PLACE_S = 0.0; raise SystemExit(launch.main([]))"
    lines: set[bytes] = set()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        while process.poll() is None:
            lines |= command_lines()
            time.sleep(0.005)
        assert process.stdout is not None
        out = process.stdout.read()
    assert process.returncode == 0, out.decode()

    (secret,) = cluster.objects("Secret")
    values = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    run_secret = values.pop("RUN_SECRET")  # made here
    assert len(run_secret) == 64
    assert values == {"HF_TOKEN": TOKEN, "WANDB_API_KEY": KEY}
    assert secret["metadata"]["labels"] == {
        "app.kubernetes.io/name": "pure-transformer"
    }  # of no one job
    assert run_secret.encode() not in out + said.read_bytes() + b"".join(lines)
    calls = said.read_bytes()
    assert b"apply --server-side" in calls and not seen_in(calls)
    assert any(b"apply" in line for line in lines) and not any(map(seen_in, lines))
    assert b"HF_TOKEN and WANDB_API_KEY sent" in out and not seen_in(out)
    showing = [
        request
        for request in cluster.requests
        if seen_in(request.body) or seen_in(f"{request.path}{request.query}".encode())
    ]
    assert {(request.method, request.path) for request in showing} == {
        ("PATCH", "/api/v1/namespaces/lab/secrets/pure-transformer-secrets")
    }
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != env_file]
    assert any(path.name == "cluster.json" for path in files)
    assert [path for path in files if seen_in(path.read_bytes())] == []


def test_values_that_are_there_are_never_asked_for(user: User, cluster: Cluster) -> None:
    cluster.put(
        {
            "kind": "Secret",
            "apiVersion": "v1",
            "metadata": {"name": "pure-transformer-secrets"},
            "data": {"HF_TOKEN": base64.b64encode(TOKEN.encode()).decode()},
        }
    )
    done = user.launch()
    assert done.code == 0
    assert not seen_in((done.out + done.err).encode())
    assert "RUN_SECRET sent" in done.out  # there is nothing else to send


def test_sending_one_key_leaves_the_other(user: User, cluster: Cluster) -> None:
    assert user.launch(HF_TOKEN=TOKEN).code == 0
    assert user.launch("restart", WANDB_API_KEY=KEY).code == 0
    (secret,) = cluster.objects("Secret")
    values = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    run_secret = values.pop("RUN_SECRET")  # made here
    assert len(run_secret) == 64
    assert values == {"HF_TOKEN": TOKEN, "WANDB_API_KEY": KEY}
    assert user.launch("restart", HF_TOKEN="hf_another").code == 0  # what is set here counts
    (secret,) = cluster.objects("Secret")
    assert base64.b64decode(secret["data"]["HF_TOKEN"]) == b"hf_another"
    assert base64.b64decode(secret["data"]["RUN_SECRET"]).decode() == run_secret  # pods have it


def test_somebody_elses_key_is_not_replaced(user: User, cluster: Cluster) -> None:
    k.succeed(
        "create",
        "secret",
        "generic",
        "pure-transformer-secrets",
        "--from-file=HF_TOKEN=/dev/stdin",
        stdin="hf_theirs",
    )
    done = user.launch(HF_TOKEN=TOKEN)
    assert done.code == 78
    assert (
        "that Secret has another HF_TOKEN, which kubectl-create has put there; leave HF_TOKEN out here"
        in done.err
    )
    assert "kubectl delete secret pure-transformer-secrets -n lab" in done.err
    assert not seen_in((done.out + done.err).encode())
    (secret,) = cluster.objects("Secret")
    assert base64.b64decode(secret["data"]["HF_TOKEN"]) == b"hf_theirs"
    assert cluster.objects("Job") == []
    assert user.launch().code == 0


def test_jobs_of_other_names_share_a_secret(user: User, cluster: Cluster) -> None:
    for name in ("first", "second"):
        done = user.launch(JOB_NAME=name, HF_TOKEN=TOKEN, WANDB_API_KEY=KEY)
        assert done.code == 0, done.err
    (secret,) = cluster.objects("Secret")
    assert set(secret["data"]) == {"RUN_SECRET", "HF_TOKEN", "WANDB_API_KEY"}
    assert {job["metadata"]["name"] for job in cluster.objects("Job")} == {"first", "second"}


def test_what_is_no_key_and_anothers_is_not_said_to_be_a_key(user: User, cluster: Cluster) -> None:
    k.succeed(
        "create",
        "-f",
        "-",
        stdin=json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": "pure-transformer-secrets",
                    "labels": {"app.kubernetes.io/name": "theirs"},
                },
            }
        ),
    )
    done = user.launch(HF_TOKEN=TOKEN)
    assert done.code == 78 and "another HF_TOKEN" not in done.err
    assert (
        "something else than HF_TOKEN is kubectl-create's in that Secret (Apply failed with 1 conflict"
        in done.err
    )
    assert (
        "app.kubernetes.io/name" in done.err and "leave HF_TOKEN out here, or delete it" in done.err
    )
    assert not seen_in((done.out + done.err).encode()) and cluster.objects("Job") == []


def test_a_secret_on_makes_command_line_is_refused(user: User, cluster: Cluster) -> None:
    done = user.launch(HF_TOKEN=TOKEN, MAKE_SETTINGS="HF_TOKEN")
    assert (
        done.code == 64
        and "HF_TOKEN (command line): A secret belongs in the environment" in done.err
    )
    assert not seen_in((done.out + done.err).encode()) and cluster.requests == []


@pytest.mark.parametrize("command", ["train", "data"])
def test_no_manifest_has_a_secret(user: User, cluster: Cluster, command: str) -> None:
    done = user.launch(command, HF_TOKEN=TOKEN, WANDB_API_KEY=KEY, DRY_RUN="1", WHERE="cluster")
    assert done.code == 0 and "kind: Job" in done.out
    assert not seen_in((done.out + done.err).encode())
