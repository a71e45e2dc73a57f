"""kubectl as it is called, and its complaints as sentences with a way out: with the real one, and a stand-in for it."""

import sys
from pathlib import Path

import pytest

from k8s.cluster import kubectl as k
from k8s.cluster.kubectl import Done, Refused, kubectl, refusal

CONTEXT = """apiVersion: v1
kind: Config
current-context: {current}
contexts: [{{name: lab, context: {{cluster: lab, user: me{namespace}}}}}]
clusters: [{{name: lab, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{token: not-to-be-seen}}}}]
"""


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(CONTEXT.format(current="lab", namespace=", namespace: ours", port=free_port))
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def put_program(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "kubectl").chmod(0o755)


def test_that_of_path_is_called_with_the_arguments_and_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(tmp_path / "bin", 'echo "$# $2"; cat; echo oh >&2; exit 3')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert kubectl("a", "b c", stdin="in\n") == Done(3, "2 b c\nin\n", "oh\n")
    assert kubectl("a", "b").out == "2 b\n"  # nothing to read, not the terminal


def test_without_one_on_path_that_of_the_virtual_environment_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(Refused, match="no kubectl on PATH; `make setup-dev`") as refused:
        k.program()
    assert refused.value.code == 78
    put_program(tmp_path / "bin", "exit 0")
    assert k.program() == str(tmp_path / "bin" / "kubectl")


def test_a_call_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_program(tmp_path / "bin", "exec sleep 30")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(Refused, match="not answered `kubectl get jobs` in 0 s") as refused:
        kubectl("get", "jobs", "x", timeout=0.2)
    assert refused.value.code == 69


def test_the_context_is_the_users(kubeconfig: Path, free_port: int) -> None:
    assert k.context() == k.Context("lab", "ours", f"http://127.0.0.1:{free_port}")
    kubeconfig.write_text(CONTEXT.format(current="lab", namespace="", port=free_port))
    assert k.context().namespace == "default"


def test_a_context_is_kept_to(kubeconfig: Path, free_port: int) -> None:
    here = k.context()
    text = (
        kubeconfig.read_text()
        .replace("current-context: lab", "current-context: other")
        .replace("contexts: [", "contexts: [{name: other, context: {cluster: lab, user: me}}, ")
    )
    with k.keeping_to(here):
        kubeconfig.write_text(text)
        assert k.context() == here
    assert k.context().name == "other"


@pytest.mark.parametrize("current", ['""', "gone"])
def test_no_context_is_told_with_how_to_choose_one(kubeconfig: Path, current: str) -> None:
    kubeconfig.write_text(CONTEXT.format(current=current, namespace="", port=1))
    with pytest.raises(Refused, match="kubectl config use-context NAME") as refused:
        k.context()
    assert refused.value.code == 78 and len(refused.value.sentences) == 1


def test_a_cluster_that_does_not_answer_is_told_with_the_contexts_name(
    kubeconfig: Path, free_port: int
) -> None:
    with pytest.raises(Refused) as refused:
        k.reach()
    assert refused.value.code == 69
    assert (
        f"the cluster of context lab does not answer at http://127.0.0.1:{free_port}"
        in refused.value.sentence
    )
    assert "kubectl config use-context NAME" in refused.value.sentence
    assert (
        "not-to-be-seen" not in refused.value.sentence and "memcache" not in refused.value.sentence
    )


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            'Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot create resource "jobs" in API group '
            '"batch" in the namespace "lab"',
            "you may not create jobs in namespace lab; ask",
        ),
        (
            'Error from server (Forbidden): nodes "a" is forbidden: User "me" cannot get resource "nodes" in API group "" at '
            "the cluster scope",
            "you may not get nodes; ask",
        ),
        (
            'Error from server (NotFound): namespaces "gone" not found',
            "NAMESPACE=gone: there is no such namespace in this cluster; choose one of yours with NAMESPACE",
        ),
        (
            'Error from server (NotFound): error when creating "STDIN": namespaces "gone" not found',
            "kubectl create namespace gone",
        ),
        (
            "error: You must be logged in to the server (Unauthorized)",
            "the cluster does not know you (You must be",
        ),
        (
            'Error from server (Forbidden): error when creating "STDIN": pods "x" is forbidden: exceeded quota: gpu, '
            "requested: requests.nvidia.com/gpu=8, used: 0, limited: 4",
            "(exceeded quota: gpu, requested:",
        ),
        (
            "error: something new\nand more",
            "kubectl get x: something new and more; kubectl describes it further",
        ),
    ],
)
def test_a_complaint_becomes_a_sentence(said: str, sentence: str) -> None:
    refused = refusal(Done(1, "", said), ("get", "x"))
    assert sentence in refused.sentence and "\n" not in refused.sentence
    assert refused.code == 78
    assert refused.kind == ("rights" if "cannot" in said else "")


def test_kubectls_own_log_lines_and_warnings_are_no_part_of_its_complaint() -> None:
    said = 'E1122 00:55:58.1 1 memcache.go:265] "Unhandled Error"\nWarning: old version\nerror: error: no such thing\n'
    assert Done(1, "", said).complaint == "no such thing"
    assert Done(7, "", "").complaint == "code 7"
