"""Runs whose shards are made while they train: the same losses as on finished ones, whatever happens meanwhile."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from record import metrics as record_reader
from tests.faults.conftest import LAUNCH, made_once
from tests.faults.hub import REPOSITORY, Hub, hub
from tests.faults.inject import Fault, faulty, processes
from tests.faults.streams import Disk, declare_in, make_sources, prepare, settings, steps
from tests.running import ROOT, losses, same, tensors, train, wait_until

TRAINER = [sys.executable, "-m", "train.main"]
SLOW = Fault("document", "sleep", value=0.15, every=True)


@pytest.fixture(scope="session")
def sources(shared):
    folder = shared / "sources"
    with made_once(folder) as mine:
        if mine:
            make_sources(folder / "here")
    return folder / "here"


@pytest.fixture(scope="session")
def finished(shared, sources, data):
    """A run on shards that make data has made, and that folder of shards."""
    folder = shared / "finished"
    with made_once(folder) as mine:
        if mine:
            env = settings(folder, sources, data["TOKENIZER"], DATA_STREAM=0)
            prepare(env, "data")
            train(env)
    return folder


@pytest.fixture(scope="session")
def finished_pair(shared, sources, data, finished):
    """The same run with two processes."""
    folder = shared / "finished_pair"
    with made_once(folder) as mine:
        if mine:
            train(
                settings(
                    folder,
                    sources,
                    data["TOKENIZER"],
                    DATA_STREAM=0,
                    NPROC=2,
                    DATA_DIR=finished / "data",
                ),
                command=LAUNCH,
            )
    return folder


def producers(folder):
    return [pid for pid, command in processes(folder) if "train.data.streaming.producer" in command]


def shards(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.bin"))
    }


def ended(process, code, seconds=150):
    out, _ = process.communicate(timeout=seconds)
    assert process.returncode == code, out
    return out


def start(env, command=TRAINER):
    return subprocess.Popen(
        command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
def test_a_run_that_streams_equals_one_on_finished_shards(tmp_path, sources, data, finished):
    env = settings(tmp_path, sources, data["TOKENIZER"])
    assert "will be streamed while the run trains" in prepare(env)
    train(env)
    assert losses(tmp_path / "run") == losses(finished / "run")
    assert same(tensors(tmp_path / "run", 40), tensors(finished / "run", 40))
    wait_until(lambda: not processes(tmp_path), 30)
    made, whole = shards(tmp_path / "data"), shards(finished / "data")
    assert made.items() <= whole.items()
    prepare(env, "data")
    assert shards(tmp_path / "data") == whole


@pytest.mark.slow
def test_a_producer_slower_than_training_shows_as_waits_that_no_time_out_ends(
    tmp_path, sources, data, finished_pair
):
    env = settings(tmp_path, sources, data["TOKENIZER"], TRAIN_TIMEOUT_S=8, NPROC=2)
    prepare(env)
    slow = faulty(env, tmp_path, SLOW, Fault("document", "sleep when waited for", n=50, value=12))
    out = train(slow, command=LAUNCH)
    assert losses(tmp_path / "run") == losses(finished_pair / "run")
    waits = {step["step"]: step["data_wait_s"] for step in steps(tmp_path)}
    assert max(waits.values()) > 8, waits
    said = [
        int(step) + 1 for step in re.findall(r"for data at step (\d+)", out)
    ]  # the step before is named
    assert len(said) == len(set(said))
    # what is recorded has the time of reading too, so that it may be above 2 s where the wait was not
    assert (
        {step for step, wait in waits.items() if wait > 3}
        <= set(said)
        <= {step for step, wait in waits.items() if wait > 2}
    ), (said, waits)
    assert "waiting for data: long" in out and "; made so far: long 0.0M tokens" in out
    assert "the trainer failed" not in out and "no progress" not in out
    # a busy machine has stragglers; a wait that was taken for work would be one of its length
    assert all(step["straggler"]["own_s"] < 5 for step in steps(tmp_path) if step.get("straggler"))
    last = [
        r
        for r in record_reader.read_records(tmp_path / "run" / "metrics.jsonl")
        if r["event"] == "end"
    ][-1]
    assert last["goodput"]["data_wait"] == pytest.approx(sum(waits.values()), abs=0.5)
    worked = sum(step["step_ms"] for step in steps(tmp_path)) / 1000 - sum(waits.values())
    assert last["goodput"]["training"] == pytest.approx(worked, abs=0.5)
    wait_until(lambda: not processes(tmp_path), 30)


@pytest.mark.slow
def test_a_run_may_go_from_shards_in_the_making_to_finished_ones_and_back(
    tmp_path, sources, data, finished
):
    env = settings(tmp_path, sources, data["TOKENIZER"])
    slow = faulty(env, tmp_path, SLOW)
    prepare(env)
    train(slow | {"MAX_STEPS": "6"})
    assert "going on behind" in prepare(env, "data")
    out = train(env | {"DATA_STREAM": "0", "MAX_STEPS": "14"})
    assert "resumed from step_0000006" in out and not producers(tmp_path)
    (tmp_path / "data").rename(tmp_path / "lost")  # and with it all that was made
    declare_in(tmp_path / "data", sources)
    prepare(env)
    assert "resumed from step_0000014" in train(slow)
    assert losses(tmp_path / "run") == losses(finished / "run")
    assert same(tensors(tmp_path / "run", 40), tensors(finished / "run", 40))


@pytest.mark.slow
def test_producers_and_jobs_that_are_killed_again_and_again_change_nothing(
    tmp_path, sources, data, finished
):
    env = settings(tmp_path, sources, data["TOKENIZER"], SAVE_EVERY=3)
    prepare(env)
    slow = faulty(
        env,
        tmp_path,
        SLOW,
        Fault("seal", "kill", n=3, every=True),
        Fault("document", "kill", n=9),
        Fault("numbers", "kill", step=9),
        Fault("numbers", "kill", step=23),
    )
    out = ""
    for _ in range(2):
        done = subprocess.run(
            TRAINER,
            env=slow,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=270,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stdout
        out += done.stdout
    out += train(slow)
    assert "the producer of data has stopped: it ended with code -9" in out
    assert losses(tmp_path / "run") == losses(finished / "run")
    assert shards(tmp_path / "data").items() <= shards(finished / "data").items()
    assert not list((tmp_path / "data").rglob("*.tmp*"))


# ---------------------------------------------------------------------------------------------------
# The disk
# ---------------------------------------------------------------------------------------------------

ROUND = {"MAX_STEPS": 60, "SAVE_EVERY": 5, "GROUP_SHARDS": 2}  # 1.4 times round 16 shards
SHARD = 256 + 2 * 1200  # bytes, at most


@pytest.fixture(scope="session")
def larger(shared, data):
    """Runs on finished shards of a source that is larger, with small and with large steps."""
    folder = shared / "larger"
    with made_once(folder) as mine:
        if mine:
            make_sources(folder / "sources", long=120)
            env = settings(folder, folder / "sources", data["TOKENIZER"], **ROUND, DATA_STREAM=0)
            prepare(env, "data")
            train(env)
            train(env | {"RUN_NAME": "large", "BATCH_TOKENS": "10240", "MAX_STEPS": "6"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cap", "more"),
    [
        (14_000, {}),
        (14_000, {"SAVE_EVERY": 1000}),
        (14_000, {"SAVE_EVERY": "0"}),
        (1000, {}),
        (
            14_000,
            {"RUN_NAME": "large", "BATCH_TOKENS": 10240, "MAX_STEPS": 6, "SAVE_EVERY": "0"},
        ),
    ],
    ids=[
        "saved often",
        "saved when it is asked for",
        "never saved",
        "less than a shard",
        "a step over many groups",
    ],
)
def test_the_disk_holds_what_it_may_and_what_is_needed_and_no_more(
    tmp_path, data, larger, cap, more
):
    env = settings(
        tmp_path,
        larger / "sources",
        data["TOKENIZER"],
        **(ROUND | {"DATA_CACHE_GB": cap / 1e9} | more),
    )
    prepare(env)
    with Disk(tmp_path / "data") as disk:
        out = train(faulty(env, tmp_path, Fault("step", "sleep", value=0.2, every=True)))
    name = str(more.get("RUN_NAME", "run"))
    assert losses(tmp_path / name) == losses(larger / name)
    if name == "run":
        needed = SHARD * (2 * 2 + 2)  # of both sources, the group that training is in and the next
        meanwhile = SHARD * 2  # a group lasts less than a second here, and checkpoints take that
        assert disk.most <= max(cap, needed) + needed + meanwhile, disk.most / SHARD
    assert {
        name for name in disk.came_back if name.startswith("long")
    } and "deleted train_00000.bin" in out
    assert "the trainer failed" not in out
    made = shards(tmp_path / "data")
    assert made.items() <= shards(larger / "data").items()
    prepare(env, "data")
    assert shards(tmp_path / "data") == shards(larger / "data")


# ---------------------------------------------------------------------------------------------------
# Producers that come no further, and trainers that are told to stop
# ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_producer_that_dies_again_and_again_ends_the_run_saved_when_it_has_waited_long_enough(
    tmp_path, sources, data, finished, nproc
):
    env = settings(
        tmp_path,
        sources,
        data["TOKENIZER"],
        NPROC=nproc,
        DATA_TIMEOUT_S=20,
        MAX_RESTARTS=2,
        TRAIN_TIMEOUT_S=16,
    )
    prepare(env)
    dying = faulty(env, tmp_path, Fault("document", "kill", step=5, every=True))
    out = train(dying, command=LAUNCH, code=78)
    assert (
        out.count("the producer of data has stopped: it ended with code -9") == 1
        and "the trainer failed" not in out
    )
    assert re.search(r"has come no further for \d+ s: it ended with code -9", out)
    (state, taken) = (
        json.loads((tmp_path / "run" / "STATUS.json").read_text()),
        steps(tmp_path)[-1]["step"],
    )
    assert (state["phase"], state["exit_code"], f"stands at step {taken}, saved" in out) == (
        "crashed",
        78,
        True,
    )
    assert taken > 5 and (tmp_path / "run" / "checkpoints" / f"step_{taken:07d}").exists()
    wait_until(lambda: not processes(tmp_path), 30)
    train(settings(tmp_path, sources, data["TOKENIZER"], NPROC=nproc), command=LAUNCH)
    if nproc == 1:
        assert losses(tmp_path / "run") == losses(finished / "run")


@pytest.mark.slow
def test_a_producer_that_is_refused_is_said_once_while_there_is_data_and_then_ends_the_run(
    tmp_path, data
):
    sources = make_sources(tmp_path / "sources")
    env = settings(tmp_path, sources, data["TOKENIZER"], NPROC=2, MAX_RESTARTS=2)
    prepare(env)
    process = start(
        faulty(
            env,
            tmp_path,
            Fault("document", "kill", step=6),
            Fault("step", "sleep", value=0.3, every=True),
        ),
        LAUNCH,
    )
    try:
        wait_until(
            (tmp_path / ".fault_0_rank_0").exists
        )  # the producer is killed: it reads no more
        wait_until((tmp_path / "run" / "metrics.jsonl").exists)
        (sources / "long.jsonl").write_text(
            '{"text": "something else"}\n'
        )  # what is read already is not asked for
        out = ended(process, 78)
    finally:
        process.kill()
    assert "the trainer failed" not in out and "saved; the same command goes on" in out
    assert "long.jsonl: 27 bytes, not" in out
    said = (tmp_path / "run" / "train.log").read_text()
    assert said.count("the producer of data was refused:") == 1
    assert said.count("the producer of data has stopped: ") in (
        1,
        2,
    )  # by SIGKILL, and then for what it found


@pytest.mark.slow
def test_told_to_stop_while_it_waits_a_run_saves_and_its_producer_is_gone_with_it(
    tmp_path, sources, data, finished
):
    env = settings(tmp_path, sources, data["TOKENIZER"], NPROC=2)
    prepare(env)
    process = start(faulty(env, tmp_path, Fault("document", "sleep", step=5, value=600)), LAUNCH)
    try:
        wait_until(
            lambda: (
                "waiting for data: long" in (tmp_path / "run" / "train.log").read_text()
                if (tmp_path / "run" / "train.log").exists()
                else False
            )
        )
        process.send_signal(signal.SIGTERM)
        out = ended(process, 75)
    finally:
        process.kill()
    taken = steps(tmp_path)[-1]["step"]
    assert f"after step {taken}/40 and saved" in out and "the trainer failed" not in out
    assert (tmp_path / "run" / "checkpoints" / f"step_{taken:07d}").exists()
    wait_until(lambda: not processes(tmp_path), 30)
    train(env)


@pytest.mark.slow
def test_a_producer_ends_with_its_trainer_whatever_it_is_doing_and_the_next_goes_on_at_once(
    tmp_path, sources, data, finished
):
    env = settings(tmp_path, sources, data["TOKENIZER"])
    prepare(env)
    process = start(faulty(env, tmp_path, Fault("document", "sleep", step=5, value=600)))
    try:
        wait_until(
            lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(steps(tmp_path)) > 3
        )
        (producer,) = producers(tmp_path)
        assert (
            os.getpgid(producer) == producer
        )  # what is typed at the trainer's terminal does not reach it
        before = shards(tmp_path / "data")
        process.kill()
        began = time.monotonic()
        out = train(env)
    finally:
        process.kill()
        process.communicate()
    assert time.monotonic() - began < 300 and not Path(f"/proc/{producer}").exists()
    assert before.items() <= shards(tmp_path / "data").items()
    assert losses(tmp_path / "run") == losses(finished / "run") and "another process" not in out


@pytest.mark.slow
def test_the_first_step_comes_as_soon_as_each_source_has_a_shard_and_a_stop_before_that_is_heeded(
    tmp_path, sources, data
):
    env = settings(tmp_path, sources, data["TOKENIZER"], NPROC=2)
    prepare(env)
    never = faulty(
        env, tmp_path / "never", Fault("document", "sleep", step=0, value=600, every=True)
    )
    process = start(never, LAUNCH)
    try:
        wait_until(
            lambda: (
                producers(tmp_path)
                and "waiting for the first" in (tmp_path / "run" / "train.log").read_text()
            )
        )
        process.send_signal(signal.SIGTERM)
        out = ended(process, 75)
    finally:
        process.kill()
    assert "stopped by SIGTERM before training" in out and "the trainer failed" not in out
    wait_until(lambda: not processes(tmp_path), 30)
    (tmp_path / "late").mkdir()
    process = start(
        faulty(env, tmp_path / "late", Fault("document", "sleep", step=3, value=600, every=True)),
        LAUNCH,
    )
    try:
        wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and steps(tmp_path))
        assert (
            len(list((tmp_path / "data").rglob("train_*.bin"))) == 5
        )  # three of one, all two of the other
    finally:
        process.send_signal(signal.SIGTERM)
        ended(process, 75)


@pytest.mark.slow
def test_a_source_that_cannot_be_read_ends_a_start_with_its_message(tmp_path, data):
    sources = make_sources(tmp_path / "sources")
    (sources / "short.jsonl").write_text('{"words": 1}\n' * 120)
    env = settings(tmp_path, sources, data["TOKENIZER"], NPROC=2, MAX_RESTARTS=2)
    prepare(env)
    began = time.monotonic()
    out = train(env, command=LAUNCH, code=78)
    assert time.monotonic() - began < 300 and "the trainer failed" not in out
    assert "the producer of data was refused: " in out and "short.jsonl" in out


@pytest.mark.slow
def test_the_producer_alone_speaks_to_the_hub_and_what_that_refuses_ends_the_run(
    tmp_path, data, monkeypatch
):
    asked: list[str] = []

    def process_request(self, request, client):
        asked.append(process_at(client[1]))
        super(Hub, self).process_request(request, client)

    monkeypatch.setattr(Hub, "process_request", process_request)
    local = make_sources(tmp_path / "local")
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "far.toml").write_text(
        f'repository = "{REPOSITORY}"\ntext = "text"\nid = "id"\nvalidation_fraction = 0.15\n'
    )
    with hub(files={"train.jsonl": (local / "long.jsonl").read_bytes()}) as server:
        env = settings(
            tmp_path,
            tmp_path / "sources",
            data["TOKENIZER"],
            DATA_MIX="far:1",
            NPROC=2,
            DATA_STREAM="auto",
        ) | server.environment(tmp_path)
        assert "far will be streamed" in prepare(env)
        assert all("train.data.prepare" in command for command in asked) and asked
        asked.clear()
        process = start(
            faulty(
                env,
                tmp_path,
                Fault("document", "sleep", step=5, value=12),
                Fault("document", "kill", step=5),
            ),
            LAUNCH,
        )
        try:
            wait_until((tmp_path / "run" / "metrics.jsonl").exists)
            assert all("train.data.streaming.producer" in command for command in asked) and asked
            server.repositories[REPOSITORY].manner = "403 file"
            out = ended(process, 78)
        finally:
            process.kill()
        assert all("train.data.streaming.producer" in command for command in asked)
    assert "the trainer failed" not in out and "waiting for data: far" in out
    assert "the producer of data was refused: the hub refuses train.jsonl" in out and "(403)" in out
    taken = steps(tmp_path)[-1]["step"]
    assert f"stands at step {taken}, saved" in out


def process_at(port):
    """The command line of the process that has this end of a connection on the loopback interface."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(row[9] for row in rows if row[1] == f"0100007F:{port:04X}")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == f"socket:[{inode}]":
                return (link.parents[1] / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has just ended, or is somebody else's
            continue
    raise AssertionError(f"no process has port {port}")
