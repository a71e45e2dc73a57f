"""k8s/cluster/where.py: which of two is meant, a run on this machine or one that was sent to a cluster; and in which one."""

import fcntl
import json
from pathlib import Path

import pytest

from k8s.cluster import where
from k8s.cluster.kubectl import Context, Done
from k8s.cluster.where import Place, choose, decide
from settings import SettingsError

HERE = Context("here", "mine", "https://example.org")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def place(runs: Path, **settings: str) -> Place:
    (runs.parent / "empty.env").touch()
    return decide({"RUNS_DIR": str(runs), "ENV_FILE": str(runs.parent / "empty.env"), **settings})


def send(runs: Path, name: str, **facts: str) -> None:
    (runs / name).mkdir(parents=True, exist_ok=True)
    (runs / name / "cluster.json").write_text(json.dumps(facts or {"job_name": "a-job"}))


def train_here(runs: Path, name: str) -> None:
    (runs / name).mkdir(parents=True, exist_ok=True)
    (runs / name / "STATUS.json").write_text("{}")


def test_a_run_that_was_sent_is_the_clusters_and_one_of_here_is_local(runs: Path) -> None:
    train_here(runs, "tiny")
    send(runs, "sent")
    assert not place(runs).cluster and place(runs).paths.name == "tiny"
    assert (
        place(runs, RUN_NAME="sent").cluster and place(runs, RUN_NAME="sent").paths.name == "sent"
    )
    assert not place(runs, RUN_NAME="sent", WHERE="local").cluster
    assert place(runs, RUN_NAME="tiny", WHERE="cluster").cluster


def test_without_a_run_of_the_name_that_of_make_train_8xa100_is_meant_where_it_was_sent(
    runs: Path,
) -> None:
    assert not place(runs).cluster  # nothing anywhere: the local command says so
    send(runs, "xlarge-8xa100")
    found = place(runs)
    assert found.cluster and found.paths.name == "xlarge-8xa100" and found.config.nodes == 4
    train_here(runs, "tiny")
    assert not place(runs).cluster and place(runs).paths.name == "tiny"
    assert place(runs, WHERE="cluster").paths.name == "xlarge-8xa100"
    assert not place(runs, RUN_NAME="absent").cluster


def test_the_cluster_can_be_meant_without_a_note(runs: Path) -> None:
    found = place(runs, WHERE="cluster")
    assert (
        found.cluster and found.sent == {} and found.value("job_name") == "pure-transformer-8xa100"
    )


SITES = {"SYNC": "diloco", "NODES": "4", "SITES": "4", "LIGHTHOUSE": "a:29510"}


def test_the_node_whose_log_is_asked_for_hides_no_run(runs: Path) -> None:
    """make logs NODE_RANK=2 needs no NODES; with those of several sites it is about the site's own folder."""
    send(runs, "sent")
    for settings in ({}, SITES):
        found = place(runs, RUN_NAME="sent", NODE_RANK="2", **settings)
        assert found.cluster and found.paths.name == "sent" and "NODE_RANK" in found.given
    train_here(runs, "tiny")
    assert place(runs, NODE_RANK="2").paths.name == "tiny"
    assert place(runs, NODE_RANK="2", **SITES).paths.name == "tiny/site_2"


def test_a_job_that_has_just_begun_here_is_a_run(runs: Path) -> None:
    send(runs, "xlarge-8xa100")
    (runs / "tiny").mkdir()
    with open(runs / "tiny" / ".job", "w") as job:
        fcntl.flock(job, fcntl.LOCK_EX)
        assert not place(runs).cluster
    assert place(runs).cluster


@pytest.mark.parametrize("text", ["", "[]", '{"job_na'])
def test_a_note_that_cannot_be_read_is_none(runs: Path, text: str) -> None:
    send(runs, "sent")
    (runs / "sent" / "cluster.json").write_text(text)
    assert not place(runs, RUN_NAME="sent").cluster


def test_what_the_user_says_counts_before_the_note_and_that_before_the_default(runs: Path) -> None:
    send(runs, "sent", job_name="noted", volume="noted-volume")
    assert place(runs, RUN_NAME="sent").value("job_name") == "noted"
    assert place(runs, RUN_NAME="sent", JOB_NAME="said").value("job_name") == "said"
    assert place(runs, RUN_NAME="sent").value("volume") == "noted-volume"


def test_settings_that_matter_to_training_alone_refuse_nothing(runs: Path) -> None:
    send(runs, "sent")
    assert place(
        runs, RUN_NAME="sent", NODES="3", BATCH_TOKENS="12345"
    ).cluster  # they do not fit each other
    with pytest.raises(SettingsError, match="RUN_NAME=a b"):
        place(runs, RUN_NAME="a b")


def test_context_and_namespace_of_the_note_are_taken_and_said(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, "kubectl", lambda *_: Done(0, "here\nthere\n", ""))
    send(runs, "sent", context="here", namespace="mine")
    assert choose(place(runs, RUN_NAME="sent"), HERE) == ("here", "mine", [])
    send(runs, "sent", context="here", namespace="theirs")
    name, namespace, said = choose(place(runs, RUN_NAME="sent"), HERE)
    assert (
        (name, namespace) == ("here", "theirs")
        and "kubectl uses mine" in said[0]
        and "NAMESPACE=theirs" in said[0]
    )
    name, namespace, said = choose(place(runs, RUN_NAME="sent", NAMESPACE="said"), HERE)
    assert (name, namespace) == ("here", "said") and "was sent to namespace theirs" in said[0]
    send(runs, "sent", context="there", namespace="theirs")
    name, namespace, said = choose(place(runs, RUN_NAME="sent"), HERE)
    assert (name, namespace) == ("there", "theirs") and len(said) == 1
    assert "kubectl config use-context there" in said[0]


def test_a_context_that_is_gone_is_said_and_the_present_one_used(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, "kubectl", lambda *_: Done(0, "here\n", ""))
    send(runs, "sent", context="gone", namespace="theirs")
    name, namespace, said = choose(place(runs, RUN_NAME="sent"), HERE)
    assert (name, namespace) == (
        "here",
        "theirs",
    ) and "which your kubeconfig does not have" in said[0]


def test_without_a_note_kubectls_own_namespace_is_taken(runs: Path) -> None:
    assert choose(place(runs, WHERE="cluster"), HERE) == ("here", "mine", [])
    assert choose(place(runs, WHERE="cluster", NAMESPACE="said"), HERE) == ("here", "said", [])
