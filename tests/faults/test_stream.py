"""Runs whose shards are made while they train: the same losses as on finished ones, whatever happens meanwhile."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from bench.certify.strike import find_processes
from tests.faults.conftest import make_once
from tests.faults.hub import REPOSITORY, Hub, hub
from tests.faults.inject import Fault
from tests.faults.streams import Disk, declare, declare_in, make_sources, make_stream, shards
from tests.running import wait_until

SLOW = Fault("document", "sleep", value=0.15, every=True)


@pytest.fixture(scope="session")
def sources(shared):
    folder = shared / "sources"
    make_once(folder, lambda: make_sources(folder / "here"))
    return folder / "here"


@pytest.fixture(scope="session")
def finished(shared, sources, data):
    """A run on shards that make data has made."""
    trial = make_stream(shared / "finished", sources, data["TOKENIZER"], DATA_STREAM=0)

    def make():
        trial.prepare("data")
        trial.train()

    make_once(trial.folder, make)
    return trial


@pytest.fixture
def stream(tmp_path, sources, data):
    """A run in the test's folder that streams."""
    with contextlib.closing(make_stream(tmp_path, sources, data["TOKENIZER"])) as trial:
        yield trial


def producers(trial):
    running = find_processes(trial.folder)
    return [pid for pid, command in running if "train.data.streaming.producer" in command]


@pytest.mark.slow
def test_a_producer_slower_than_training_shows_as_waits_that_no_time_out_ends(stream, finished):
    stream.prepare()
    pause = Fault("document", "sleep when waited for", n=50, value=12)
    out = stream.train(SLOW, pause, NPROC=2, TRAIN_TIMEOUT_S=8)
    # Two processes add up in another order.
    assert {step: loss for step, (loss, _) in stream.losses.items()} == pytest.approx(
        {step: loss for step, (loss, _) in finished.losses.items()}, rel=1e-5
    )
    waits = {step["step"]: step["data_wait_s"] for step in stream.steps}
    assert max(waits.values()) > 8, waits
    # The step before is named, once. The record has the time of reading too.
    named = [int(step) + 1 for step in re.findall(r"for data at step (\d+)", out)]
    assert len(named) == len(set(named))
    long, longer = ({step for step, wait in waits.items() if wait > limit} for limit in (2, 3))
    assert longer <= set(named) <= long, (named, waits)
    assert "waiting for data: long" in out and "; made so far: long " in out
    assert "the trainer failed" not in out and "no progress" not in out
    # A busy machine has stragglers; a wait that was taken for work would be one of its length.
    stragglers = [step["straggler"] for step in stream.steps if step.get("straggler")]
    assert all(straggler["compute_s"] < 5 for straggler in stragglers)
    waited_s = sum(waits.values())
    trained_s = sum(step["step_ms"] for step in stream.steps) / 1000 - waited_s
    goodput = stream.events("end")[-1]["goodput"]
    assert goodput["data_wait"] == pytest.approx(waited_s, abs=0.5)
    assert goodput["training"] == pytest.approx(trained_s, abs=0.5)
    stream.wait_until_gone()


@pytest.mark.slow
def test_a_run_may_go_from_shards_in_the_making_to_finished_ones_and_back(
    stream, sources, finished
):
    stream.prepare()
    stream.train(SLOW, MAX_STEPS=6)
    assert "continuing after" in stream.prepare("data")
    out = stream.train(DATA_STREAM=0, MAX_STEPS=14)
    assert "resumed from step_0000006" in out and not producers(stream)
    (stream.folder / "data").rename(stream.folder / "lost")  # and with it all that was made
    declare_in(stream.folder / "data", sources)
    stream.prepare()
    assert "resumed from step_0000014" in stream.train(SLOW)
    assert stream.losses == finished.losses and stream.has_tensors_of(finished, 40)


@pytest.mark.slow
def test_producers_and_jobs_that_are_killed_again_and_again_change_nothing(stream, finished):
    assert "will be streamed while the run trains" in stream.prepare()
    faults = [
        SLOW,
        Fault("seal", "kill", n=3, every=True),
        Fault("document", "kill", n=9),
        Fault("numbers", "kill", step=9),
        Fault("numbers", "kill", step=23),
    ]
    out = ""
    for code in (-signal.SIGKILL, -signal.SIGKILL, 0):
        out += stream.train(*faults, SAVE_EVERY=3, code=code)
    assert "the producer of data has stopped: it ended with code -9" in out
    assert stream.losses == finished.losses
    assert shards(stream).items() <= shards(finished).items()
    assert not list((stream.folder / "data").rglob("*.tmp*"))


# ---------------------------------------------------------------------------------------------------
# The disk
# ---------------------------------------------------------------------------------------------------

ROUND = {"MAX_STEPS": 60, "SAVE_EVERY": 5}  # 1.4 times round 16 shards
LARGE = {"BATCH_TOKENS": 10240, "MAX_STEPS": 6}  # a step over many groups
SHARD = 256 + 2 * 1200  # bytes, at most


@pytest.fixture(scope="session")
def larger(shared, data):
    """Runs on finished shards of a source that is larger, with small and with large steps."""
    folder = shared / "larger"
    folder.mkdir(exist_ok=True)
    small, large = (
        make_stream(folder / name, folder / "sources", data["TOKENIZER"], DATA_STREAM=0, **settings)
        for name, settings in (("small", ROUND), ("large", LARGE))
    )

    def make():
        make_sources(folder / "sources", long=120)
        for trial in (small, large):
            trial.prepare("data")
            trial.train()

    make_once(folder, make)
    return small, large


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cap", "settings"),
    [
        (14_000, ROUND),
        (14_000, ROUND | {"SAVE_EVERY": 1000}),
        (14_000, ROUND | {"SAVE_EVERY": 0}),
        (1000, ROUND),
        (14_000, LARGE | {"SAVE_EVERY": 0}),
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
    tmp_path, data, larger, cap, settings
):
    small, large = larger
    sources = small.folder.parent / "sources"
    settings = settings | {"DATA_CACHE_GB": cap / 1e9}
    stream = make_stream(tmp_path, sources, data["TOKENIZER"], **settings)
    stream.prepare()
    with Disk(tmp_path / "data") as disk:
        out = stream.train(Fault("step", "sleep", value=0.2, every=True))
    if "BATCH_TOKENS" in settings:
        assert stream.losses == large.losses
    else:
        assert stream.losses == small.losses
        needed = SHARD * (2 * 2 + 2)  # of both sources, the group that training is in and the next
        meanwhile = SHARD * 2  # a group lasts less than a second here, and checkpoints take that
        assert disk.most <= max(cap, needed) + needed + meanwhile, disk.most / SHARD
    assert [name for name in disk.came_back if name.startswith("long")]
    assert "deleted train_00000.bin" in out and "the trainer failed" not in out
    assert shards(stream).items() <= shards(small).items()
    stream.prepare("data")
    assert shards(stream) == shards(small)


# ---------------------------------------------------------------------------------------------------
# Producers that come no further, and trainers that are told to stop
# ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_producer_that_dies_again_and_again_ends_the_run_saved_when_it_has_waited_long_enough(
    stream, finished, nproc
):
    stream.settings |= {"NPROC": nproc}
    stream.prepare()
    limits = {"DATA_TIMEOUT_S": 20, "MAX_RESTARTS": 2, "TRAIN_TIMEOUT_S": 16}
    out = stream.train(Fault("document", "kill", step=5, every=True), code=78, **limits)
    assert out.count("the producer of data has stopped: it ended with code -9") == 1
    assert re.search(r"has come no further for \d+ s: it ended with code -9", out)
    last = stream.steps[-1]["step"]
    assert f"stands at step {last}, saved" in out and "the trainer failed" not in out
    state = json.loads((stream.run / "STATUS.json").read_text())
    assert (state["phase"], state["exit_code"]) == ("crashed", 78)
    assert last > 5 and stream.saved[-1] == last
    stream.wait_until_gone()
    stream.train()
    if nproc == 1:
        assert stream.losses == finished.losses


@pytest.mark.slow
def test_told_to_stop_while_it_waits_a_run_saves_and_its_producer_is_gone_with_it(stream):
    stream.settings |= {"NPROC": 2}
    stream.prepare()
    process = stream.start(Fault("document", "sleep", step=5, value=600))
    wait_until(lambda: "waiting for data: long" in stream.log)
    process.send_signal(signal.SIGTERM)
    out = stream.end(process, 75)
    last = stream.steps[-1]["step"]
    assert f"after step {last}/40 and saved" in out and "the trainer failed" not in out
    assert stream.saved[-1] == last
    stream.wait_until_gone()
    stream.train()


@pytest.mark.slow
def test_a_producer_ends_with_its_trainer_whatever_it_is_doing_and_the_next_goes_on_at_once(
    stream, finished
):
    stream.prepare()
    process = stream.start(Fault("document", "sleep", step=5, value=600))
    wait_until(lambda: len(stream.steps) > 3)
    (producer,) = producers(stream)
    # What is typed at the trainer's terminal does not reach it.
    assert os.getpgid(producer) == producer
    before = shards(stream)
    process.kill()
    process.wait()
    out = stream.train()
    assert producer not in producers(stream)  # of one that has ended, the system may keep a trace
    assert before.items() <= shards(stream).items()
    assert stream.losses == finished.losses and "another process" not in out


@pytest.mark.slow
def test_the_first_step_comes_as_soon_as_each_source_has_a_shard_and_a_stop_before_that_is_heeded(
    stream,
):
    stream.settings |= {"NPROC": 2}
    stream.prepare()
    process = stream.start(Fault("document", "sleep", step=0, value=600, every=True))
    wait_until(lambda: producers(stream) and "waiting for the first" in stream.log)
    process.send_signal(signal.SIGTERM)
    out = stream.end(process, 143)
    assert "stopped by SIGTERM before training" in out and "the trainer failed" not in out
    stream.wait_until_gone()
    process = stream.start(Fault("document", "sleep", step=3, value=600, every=True))
    wait_until(lambda: stream.steps)
    made = list((stream.folder / "data").rglob("train_*.bin"))
    assert len(made) == 5  # three of one, all two of the other
    process.send_signal(signal.SIGTERM)
    stream.end(process, 75)


@pytest.mark.slow
def test_a_source_that_cannot_be_read_ends_a_start_with_its_message(tmp_path, data):
    sources = make_sources(tmp_path / "sources")
    (sources / "short.jsonl").write_text('{"words": 1}\n' * 120)
    stream = make_stream(tmp_path, sources, data["TOKENIZER"], NPROC=2, MAX_RESTARTS=2)
    stream.prepare()
    out = stream.train(code=78)
    assert "the trainer failed" not in out
    assert "the producer of data was refused: " in out and "short.jsonl" in out


@pytest.mark.slow
def test_the_producer_alone_speaks_to_the_hub_and_what_that_refuses_ends_the_run(
    tmp_path, data, monkeypatch
):
    """Files are asked for in training alone; a refusal is said once while there is data, and then ends the run."""
    clients: list[str] = []

    def process_request(self, request, client):
        clients.append(process_at(client[1]))
        super(Hub, self).process_request(request, client)

    monkeypatch.setattr(Hub, "process_request", process_request)
    rows = (make_sources(tmp_path / "local") / "long.jsonl").read_bytes()
    (tmp_path / "sources").mkdir()
    declare(tmp_path / "sources" / "far.toml", f'repository = "{REPOSITORY}"')
    with hub(files={"train.jsonl": rows}) as server:
        stream = make_stream(
            tmp_path,
            tmp_path / "sources",
            data["TOKENIZER"],
            DATA_MIX="far:1",
            NPROC=2,
            MAX_RESTARTS=2,
            DATA_STREAM="auto",
        )
        stream.where |= server.environment(tmp_path)
        assert "far will be streamed" in stream.prepare()
        assert {"train.data.prepare" in client for client in clients} == {True}
        assert not [line for line in server.requests if line.endswith("train.jsonl")]
        clients.clear()
        pause = Fault("document", "sleep", step=5, value=12)
        process = stream.start(pause, Fault("document", "kill", step=5))
        wait_until((stream.run / "metrics.jsonl").exists)
        server.repositories[REPOSITORY].manner = "403 file"
        out = stream.end(process, 78)
    assert {"train.data.streaming.producer" in client for client in clients} == {True}
    assert "the trainer failed" not in out and "waiting for data: far" in out
    refusal = "the producer of data was refused: the hub refuses train.jsonl"
    assert refusal in out and "(403)" in out and stream.log.count(refusal) == 1
    assert f"stands at step {stream.steps[-1]['step']}, saved" in out


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
