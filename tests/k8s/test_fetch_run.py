"""k8s/fetch_run.py: a run comes whole from the volume to this machine, whatever happens on the way."""

import json
import os
import shutil
from pathlib import Path

import pytest

from k8s import jobs, transfer
from k8s.cluster import volume
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import (
    IMAGE,
    JOB,
    RUN,
    ReaderRuns,
    put_job,
    put_pod,
    put_volume,
    shell,
    write_checkpoint,
    write_run,
)
from train.checkpoint import find

BIG = 3 * 2**20  # of a checkpoint's file: more than one part, and than what comes in one answer


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs-here"


@pytest.fixture
def user(
    cluster: Cluster,
    tmp_path: Path,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    """Somebody who sent the run `a-run` to the cluster, where a pod of it runs; called, returns how a command ended."""
    (runs / RUN).mkdir(parents=True)
    (tmp_path / "empty.env").touch()
    (runs / RUN / "cluster.json").write_text(
        json.dumps(
            {
                "job_name": JOB,
                "namespace": "lab",
                "context": "test",
                "image": IMAGE,
                "volume": "pure-transformer",
            }
        )
    )
    for name, value in {
        "RUNS_DIR": str(runs),
        "RUN_NAME": RUN,
        "ENV_FILE": str(tmp_path / "empty.env"),
        **cluster.env,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(volume, "POLL_S", 0.05)
    monkeypatch.setattr(transfer, "PAUSE_S", 0.01)
    cluster.exec = shell(tmp_path / "volume")
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running", node="a")

    def call(command: str = "fetch-run", **more: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name, value in more.items():
                patch.setenv(name, value)
            code = jobs.main([command])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def files_of(folder: Path) -> dict[str, bytes]:
    """Content by name, of all but our own notes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("fetched.json", "cluster.json")
    }


def is_part(argv: list[str]) -> bool:
    """Whether a command brings a part of a file."""
    return argv[:3] == ["sh", "-c", transfer.PART]


def test_a_run_is_brought_whole_and_a_trainer_takes_its_checkpoint(
    user, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume")
    (there / "wandb").mkdir()
    (there / "wandb" / "huge").write_bytes(b"x")
    (there / ".lock").write_bytes(b"pid 1")
    (there / "checkpoints" / ".trash-5").mkdir()
    code, out, err = user()
    assert code == 0 and err == ""
    here = files_of(runs / RUN)
    expected = {
        name: content
        for name, content in files_of(there).items()
        if "wandb" not in name and name != ".lock" and "step_0001000" not in name
    }
    assert here.keys() == expected.keys()
    manifests = {name for name in here if name.endswith("MANIFEST.json")}
    assert {name: here[name] for name in here.keys() - manifests} == {
        name: expected[name] for name in expected.keys() - manifests
    }
    assert all(json.loads(here[name]) == json.loads(expected[name]) for name in manifests)
    found = find.find_latest(runs / RUN / "checkpoints")
    assert found and found[1]["step"] == 2000
    assert (
        "checkpoint step_0002000, verified by its manifest" in out
        and "make plots RUN_NAME=a-run" in out
    )


def test_plots_of_a_run_in_the_cluster_bring_its_record_and_no_weights(
    user, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume")
    step = {
        "schema": 1,
        "event": "step",
        "mono_s": 5.0,
        "host": "pod",
        "attempt": 0,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "step_ms": 100.0,
        "tokens_per_s": 5120.0,
        "mfu": None,
        "mem_gib": 1.0,
    }
    records = [
        {
            "schema": 1,
            "event": "start",
            "time": 1e9,
            "mono_s": 4.0,
            "host": "pod",
            "attempt": 0,
            "step": 0,
            "tokens": 0,
        },
        *({**step, "time": 1e9 + n, "step": n, "tokens": 512 * n} for n in (1, 2, 3)),
    ]
    (there / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (there / "gpu_metrics_20260102_030405.json").write_text("{}")
    code, out, err = user("plots")
    assert code == 0 and err == "", err
    assert (runs / RUN / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    assert (runs / RUN / "gpu_metrics_20260102_030405.json").exists() and not (
        runs / RUN / "checkpoints"
    ).exists()
    (table,) = (
        path
        for path in (runs / RUN).glob("training_*.csv")
        if "evals" not in path.name and "events" not in path.name
    )
    assert [line.split(",")[0] for line in table.read_text().splitlines()] == [
        "step",
        "1",
        "2",
        "3",
    ]
    assert (runs / RUN / "plots" / "loss_curves.html").exists() and "loss_curves.png" in out


def test_a_second_call_brings_only_what_has_changed(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume")
    assert user()[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (runs / RUN).rglob("*") if path.is_file()}
    code, out, _ = user()
    assert (
        code == 0
        and "fetched 0 files (7 had not changed); checkpoint step_0002000 was here already: 0 kB"
        in out
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with open(there / "train.log", "a") as log:
        log.write("another line\n")
    write_checkpoint(there, 3000)
    code, out, _ = user()
    assert code == 0 and "fetched 1 files (6 had not changed) and checkpoint step_0003000" in out
    assert (runs / RUN / "train.log").read_bytes() == (there / "train.log").read_bytes()
    assert find.committed(runs / RUN / "checkpoints") == [2000, 3000]


def test_a_record_that_has_grown_is_continued(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume")
    with open(there / "metrics.jsonl", "ab") as record:
        record.write(b"x" * BIG)
    assert user()[0] == 0
    with open(there / "metrics.jsonl", "ab") as record:
        record.write(b"y" * 1000)
    offsets: list[int] = []
    plain = cluster.exec

    def counted(pod: str, container: str, argv: list[str], **more: bytes) -> tuple:
        if is_part(argv):
            offsets.append(int(argv[4]))
        return plain(pod, container, argv, **more)

    cluster.exec = counted
    code, _, _ = user()
    assert (
        code == 0
        and (runs / RUN / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    )
    assert offsets == [(there / "metrics.jsonl").stat().st_size - 999]
    shutil.copy(there / "train.log", there / "metrics.jsonl")  # it is another now, and shorter
    assert user()[0] == 0
    assert (runs / RUN / "metrics.jsonl").read_bytes() == (there / "train.log").read_bytes()


def test_a_connection_that_breaks_is_taken_up_where_it_was(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume", ())
    write_checkpoint(there, 5, BIG)
    plain, moved = cluster.exec, []

    def breaking(pod: str, container: str, argv: list[str], **more: bytes) -> tuple:
        code, out, *_ = plain(pod, container, argv, **more)
        if is_part(argv) and len(out) > 2**20:
            out = out[: 2**20 + 17]  # ends early, and says that all is well, as kubectl exec does
        if is_part(argv):
            moved.append(len(out))
        return code, out

    cluster.exec = breaking
    code, _, err = user()
    assert code == 0, err
    assert find.find_latest(runs / RUN / "checkpoints")
    assert sum(moved) == sum(
        path.stat().st_size
        for path in (there / "checkpoints" / "step_0000005").iterdir()
        if path.name != "MANIFEST.json"
    )
    assert len(moved) > 6


def test_a_connection_that_never_holds_is_given_up_and_the_next_call_goes_on(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume", ())
    write_checkpoint(there, 5, BIG)
    plain = cluster.exec

    def dying(pod: str, container: str, argv: list[str], **more: bytes) -> tuple:
        if is_part(argv) and argv[5].endswith("__0_0.distcp"):
            if int(argv[4]) > 1:
                return 1, b""
            _, out, *_ = plain(pod, container, argv, **more)
            return 1, out[: 2**20]
        return plain(pod, container, argv, **more)

    cluster.exec = dying
    code, _, err = user()
    assert (
        code == 69
        and f"comes no further than {2**20} of {BIG} bytes" in err
        and "Run the same command to resume." in err
    )
    assert find.committed(runs / RUN / "checkpoints") == []
    assert find.find_latest(runs / RUN / "checkpoints") is None
    offsets: list[int] = []

    def counted(pod: str, container: str, argv: list[str], **more: bytes) -> tuple:
        if is_part(argv) and argv[5].endswith("__0_0.distcp"):
            offsets.append(int(argv[4]))
        return plain(pod, container, argv, **more)

    cluster.exec = counted
    assert user()[0] == 0
    assert offsets == [2**20 + 1] and find.committed(runs / RUN / "checkpoints") == [5]


def flipping(cluster: Cluster, name: str, times: int) -> list[int]:
    """From now on the first byte of a file is flipped on its way, so many times. Returns what counts them."""
    plain, count = cluster.exec, [0]

    def flip(pod: str, container: str, argv: list[str], **more: bytes) -> tuple:
        code, out, *_ = plain(pod, container, argv, **more)
        if (
            any(word.endswith(name) for word in argv)
            and count[0] < times
            and out
            and (is_part(argv) or argv[2] == transfer.BOTH)
        ):
            count[0] += 1
            out = out[:-1] + bytes([out[-1] ^ 1])
        return code, out

    cluster.exec = flip
    return count


@pytest.mark.parametrize("name", ["__0_0.distcp", "train.log", "metrics.jsonl"])
def test_a_flipped_byte_is_found_and_the_file_brought_again(
    user, cluster: Cluster, tmp_path: Path, runs: Path, name: str
) -> None:
    there = write_run(tmp_path / "volume", (1000,))
    with open(there / "metrics.jsonl", "ab") as record:
        record.write(b"x" * BIG)
    count = flipping(cluster, name, 1)
    code, _, err = user()
    assert code == 0 and count == [1], err
    for path in (f"checkpoints/step_0001000/{name}", name):
        if (there / path).exists():
            assert (runs / RUN / path).read_bytes() == (there / path).read_bytes()


def test_a_checkpoint_that_never_arrives_whole_gets_no_name(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume", (1000, 2000))
    damaged = there / "checkpoints" / "step_0002000" / "__0_0.distcp"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, err = user()
    assert (
        code == 1
        and "__0_0.distcp arrives with another hash than its manifest says" in err
        and "STEP" in err
    )
    assert find.committed(runs / RUN / "checkpoints") == []
    assert user(STEP="1000")[0] == 0
    assert find.committed(runs / RUN / "checkpoints") == [1000]
    code, _, err = user(STEP="7")
    assert (
        code == 64
        and "STEP=7: that checkpoint is not on the volume; whole ones are of steps 1000, 2000"
        in err
    )


def test_a_checkpoint_that_is_half_written_there_is_passed_over(
    user, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume", (1000, 2000))
    os.truncate(there / "checkpoints" / "step_0002000" / "__1_0.distcp", 10)
    assert user()[0] == 0
    assert find.committed(runs / RUN / "checkpoints") == [1000]
    code, _, err = user(STEP="2000")
    assert code == 64 and "STEP=2000: that checkpoint is damaged: __1_0.distcp has 10 bytes" in err


def test_a_checkpoint_that_is_deleted_meanwhile_is_said(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume", (1000,))
    plain = cluster.exec

    def pruning(pod: str, container: str, argv: list[str], **more: bytes) -> tuple:
        if is_part(argv):
            shutil.rmtree(there / "checkpoints" / "step_0001000", ignore_errors=True)
        return plain(pod, container, argv, **more)

    cluster.exec = pruning
    code, _, err = user()
    assert code == 1 and "was deleted on the volume while it was fetched" in err
    assert find.committed(runs / RUN / "checkpoints") == []


def test_a_status_that_is_replaced_all_the_time_is_brought_whole(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume")
    plain, count = cluster.exec, [0]

    def living(pod: str, container: str, argv: list[str], **more: bytes) -> tuple:
        count[0] += 1
        (there / "STATUS.json").write_text(
            json.dumps({"phase": "training", "count": "x" * count[0]})
        )
        return plain(pod, container, argv, **more)

    cluster.exec = living
    assert user()[0] == 0
    assert json.loads((runs / RUN / "STATUS.json").read_text())["phase"] == "training"


def test_after_the_pods_are_gone_a_reader_brings_it(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    write_run(tmp_path / "volume")
    calls: list[tuple[str, str]] = []
    cluster.exec = shell(tmp_path / "volume", calls)
    assert user("stop")[0] == 0
    with ReaderRuns(cluster) as reader:
        code, _, _ = user()
    assert code == 0 and len(reader.made) == 1 and set(calls) == {(f"{JOB}-reader", "reader")}
    assert find.find_latest(runs / RUN / "checkpoints") and cluster.objects("Pod") == []


def test_a_pod_that_goes_away_is_followed_by_a_reader(
    user, cluster: Cluster, tmp_path: Path, runs: Path
) -> None:
    there = write_run(tmp_path / "volume", ())
    write_checkpoint(there, 5, BIG)
    plain, gone = cluster.exec, []

    def leaving(pod: str, container: str, argv: list[str], **more: bytes) -> tuple:
        code, out, *_ = plain(pod, container, argv, **more)
        if container == "trainer" and is_part(argv) and argv[5].endswith("__0_0.distcp"):
            gone.append(pod)
            cluster.set_pod(pod, exit_code=143)
            return 137, out[: 2**20]
        return code, out

    cluster.exec = leaving
    with ReaderRuns(cluster) as reader:
        code, _, err = user()
    assert code == 0 and len(gone) == 1 and len(reader.made) == 1, err
    assert find.find_latest(runs / RUN / "checkpoints")


# ---- What is refused


def test_a_run_of_this_machine_is_never_mixed_with_one_of_the_cluster(
    user, tmp_path: Path, runs: Path
) -> None:
    write_run(tmp_path / "volume")
    (runs / RUN / "metrics.jsonl").write_text("mine\n")
    code, _, err = user()
    assert code == 78 and "holds a run of this machine" in err and "RUNS_DIR=fetched" in err
    assert (runs / RUN / "metrics.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("what", ["metrics.jsonl", "config.json", "checkpoint"])
def test_a_run_that_was_trained_further_here_is_left_alone(
    user, tmp_path: Path, runs: Path, what: str
) -> None:
    write_run(tmp_path / "volume")
    assert user()[0] == 0
    if what == "checkpoint":
        write_checkpoint(runs / RUN, 2500)
    else:
        with open(runs / RUN / what, "a") as file:
            file.write("more\n")
    before = files_of(runs / RUN)
    code, _, err = user()
    assert code == 78 and "was trained further here since it was fetched" in err
    assert files_of(runs / RUN) == before


def test_a_kill_between_note_and_name_is_no_training(
    user, cluster: Cluster, tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = write_run(tmp_path / "volume")
    assert user()[0] == 0
    (there / "config.json").write_text('{"settings": {}, "attempts": [1]}')
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(target).name == "config.json":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        assert user()[0] == 130
    assert user()[0] == 0
    assert (runs / RUN / "config.json").read_bytes() == (there / "config.json").read_bytes()


def test_a_folder_fetched_from_elsewhere_is_not_overwritten(
    user, tmp_path: Path, runs: Path
) -> None:
    write_run(tmp_path / "volume")
    assert user()[0] == 0
    record = json.loads((runs / RUN / "fetched.json").read_text())
    record["from"]["namespace"] = "another"
    (runs / RUN / "fetched.json").write_text(json.dumps(record))
    code, _, err = user()
    assert code == 78 and "was fetched from" in err


def test_without_room_nothing_is_begun(
    user, tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "volume")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    code, _, err = user()
    assert code == 78 and "the disk has 1.05 MB free" in err and "RUNS_DIR" in err
    assert files_of(runs / RUN) == {}


def test_a_run_that_is_not_on_the_volume_is_said(user, tmp_path: Path) -> None:
    (tmp_path / "volume" / "runs").mkdir(parents=True)
    code, _, err = user()
    assert (
        code == 78
        and f"there is no run {RUN} on volume pure-transformer" in err
        and err.count("\n") == 1
    )


def test_a_claim_is_asked_for_before_a_reader_is_made(user, cluster: Cluster) -> None:
    put_volume(cluster)
    cluster.store.delete(cluster.key("PersistentVolumeClaim", "pure-transformer"))
    user("stop")
    code, _, err = user()
    assert code == 78 and "there is no such claim" in err
    assert not [r for r in cluster.requests if r.method == "POST" and r.path.endswith("/pods")]
