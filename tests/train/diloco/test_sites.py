"""SYNC=diloco with real processes: against DiLoCo worked out in one process, and with sites that come and go."""

import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch

from settings import load_config
from tests.conftest import TINY
from tests.running import losses, same, tensors, wait_for, wait_until
from tests.train.diloco.sites import Sites
from tests.train.making import ALONE
from train.data import prepare
from train.data.batch import Loader
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.schedule import lr_at
from train.step import train_step

Started = Callable[..., Sites]


@pytest.fixture
def started(tmp_path, data):
    """Starts the sites of a run; nothing of it outlives the test."""
    jobs: list[Sites] = []

    def start(sites=2, folder="job", **settings):
        (tmp_path / folder).mkdir()
        jobs.append(Sites(tmp_path / folder, data, sites, **settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


# ---- DiLoCo, once more


def train_in_one_process(env, steps):
    """Return the global weights by algorithm 1 of Douillard et al. 2023, with fragments algorithm 2 of Douillard et al.
    2025, for all sites in one process. Only inner steps are the trainer's."""
    configs = [load_config(env | {"NODE_RANK": rank}) for rank in "01"]
    c = configs[0]
    vocabulary = prepare.vocabulary(c)
    models = [build(c, ALONE.device) for _ in configs]
    optimizers = [build_optimizer(model, c) for model in models]
    loaders = [
        Loader(each, prepare.open_sources(each, vocabulary), ALONE, vocabulary.end_of_text)
        for each in configs
    ]
    common = {name: w.detach().clone() for name, w in models[0].named_parameters()}
    momentum = dict.fromkeys(common, 0.0)
    interval = c.sync_every // c.sync_fragments
    mean = {}

    def average_changes(sync):
        for name, weight in common.items():
            # table and last norm go with the first fragment
            block = int(name.split(".")[1]) if name.startswith("layers.") else 0
            if block % c.sync_fragments == sync % c.sync_fragments:
                own = [model.get_parameter(name).detach() for model in models]
                mean[name] = sum(weight - w for w in own) / len(own)

    def step_outer():
        for name, change in mean.items():
            momentum[name] = c.outer_momentum * momentum[name] + change
            common[name] -= c.outer_learning_rate * (change + c.outer_momentum * momentum[name])
            for model in models:
                own = model.get_parameter(name).data
                own.copy_((common[name] + own) / 2 if c.sync_delay else common[name])
        mean.clear()

    for step in range(1, steps + 1):
        for model, optimizer, loader in zip(models, optimizers, loaders, strict=True):
            set_rate(optimizer, lr_at(step, c), c)
            train_step(model, optimizer, loader.batch(step - 1), c.grad_clip, ALONE)
        if (step + c.sync_delay) % interval == 0:
            average_changes((step + c.sync_delay) // interval - 1)
        if step % interval == 0:
            step_outer()
    for sync in range(steps // interval, steps // interval + c.sync_fragments - 1):
        average_changes(sync)
        step_outer()
    return common


def assert_trained_as_one_process(job, steps):
    """Compare weights, in common and of each site, with those of one process.

    AdamW divides a gradient by its own size. Where that is nothing but rounding, so is the update: one
    element in a thousand, at most, may be off by a hundredth of the learning rate.
    """
    expected = train_in_one_process(job.env, steps)
    largest = 0.01 * float(TINY["LEARNING_RATE"])
    for rank in (0, 1):
        saved = tensors(job.run(rank), steps)
        for name, weight in expected.items():
            for kind in ("outer.weights", "model"):
                off = (saved[f"{kind}.{name}"] - weight).abs()
                assert (off > 2e-6 + 1e-4 * weight.abs()).float().mean() <= 1e-3, name
                assert off.max() < largest, name
                assert off.norm() <= 5e-5 * weight.norm(), name
    assert job.hashes(0) == job.hashes(1)


def test_two_sites_train_as_the_algorithm_says_and_have_the_same_weights(started):
    job = started(MAX_STEPS=12, SYNC_EVERY=4, SYNC_DTYPE="float32")
    logs = job.ends(0, 0)
    assert_trained_as_one_process(job, 12)
    for rank in (0, 1):
        syncs = [(e["step"], e["outer_step"], e["sites"]) for e in job.events(rank, "sync")]
        assert syncs == [(4, 1, 2), (8, 2, 2), (12, 3, 2)]
        assert {e["replica"] for e in job.events(rank, "step")} == {rank}
        assert f"hash {job.hashes(rank)[1]}" in logs[rank]
    assert len(set(job.hashes(0).values())) == 3
    assert losses(job.run(0)) != losses(job.run(1))  # each has trained on its own part


@pytest.mark.slow
def test_fragments_that_travel_while_training_goes_on_do_as_the_algorithm_says(started):
    streaming = {"SYNC_EVERY": 8, "SYNC_FRAGMENTS": 2, "SYNC_DELAY": 1}
    job = started(MAX_STEPS=16, SYNC_DTYPE="float32", SAVE_EVERY=16, **streaming)
    job.ends(0, 0)
    assert_trained_as_one_process(job, 16)
    assert [e["fragment"] for e in job.events(0, "sync")] == [0, 1, 0, 1, 0]


@pytest.mark.slow
def test_a_site_of_two_processes_sends_each_weight_once_and_trains_as_one_of_one(started):
    job = started(MAX_STEPS=12, SYNC_EVERY=4, SYNC_DTYPE="float32", PARALLEL="fsdp", NPROC=2)
    job.ends(0, 0)
    assert_trained_as_one_process(job, 12)
    saved = tensors(job.run(0), 12)
    weights = sum(w.numel() for name, w in saved.items() if name.startswith("model."))
    assert job.last(0)["bytes"] == pytest.approx(4 * weights / 2, rel=0.05)


# ---- Sites that come and go

STOPS = """
import os, signal, sys
from train import loop, main
step = loop.train_step
left = [{steps}]
def stopped(*args, **kwargs):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGTERM)
    stops = {{"stop"}} if left[0] == 0 else set()
    return step(*args, **kwargs | {{"requests": kwargs["requests"] - {{"stop"}} | stops}})
loop.train_step = stopped
sys.exit(main.main())
"""


def stop_after(job, *steps):
    """Start sites again. Each is told to stop at its number of steps."""
    for rank, count in enumerate(steps):
        job.again(rank, [sys.executable, "-c", STOPS.format(steps=count)])
    job.ends(*[75] * len(steps))


@pytest.mark.slow
@pytest.mark.fault(39)
def test_told_to_stop_all_sites_save_and_go_on_as_if_nothing_had_been(started):
    settings = {"MAX_STEPS": 60, "SYNC_EVERY": 6}
    whole = started(folder="whole", **settings)
    whole.ends(0, 0)
    job = started(folder="stopped", start=False, **settings)
    stop_after(job, 14, 16)  # both between syncs 2 and 3
    for rank in (0, 1):
        job.again(rank)
    job.ends(0, 0)
    assert job.hashes(0) == job.hashes(1) == whole.hashes(0)
    for rank in (0, 1):
        assert same(tensors(job.run(rank), 60), tensors(whole.run(rank), 60))


@pytest.mark.slow
@pytest.mark.fault(39)
def test_a_site_that_is_killed_stops_no_other_and_catches_up(started):
    """Of two processes each; of one each it is in tests/k8s/test_sites_end_to_end.py."""
    job = started(MAX_STEPS=20_000, SYNC_EVERY=10, PARALLEL="fsdp", NPROC=2)
    job.wait(0, syncs=2)
    job.lose(1)
    job.wait(0, syncs=3, sites=1)
    alone = job.last(0)["outer_step"]
    job.again(1)
    job.wait(1, syncs=alone + 1, sites=2)
    job.wait(0, syncs=job.last(1)["outer_step"] + 3)
    job.stop()
    assert "sites (away: 1), " in job.log(0).read_text()
    (gap,) = job.events(1, "gap")
    assert gap["reason"] == "away" and gap["from"] < gap["to"] == gap["step"]
    assert job.agreed(after=gap["to"] // 10) >= 2
    for entry in job.events(0, "rollback"):  # it died in a sync: at most one interval is lost
        assert entry["from"] - entry["step"] <= 10


DIES = """
import os, sys
from train import main
from train.diloco import allreduce as striped
Gloo = striped.StripedGloo
reset, swap, begun, shared = Gloo.reset, Gloo.swap, [], set()
def counting(self):
    begun.append(1)
    reset(self)
def dying(*args):
    shared.add(len(begun))
    if len(shared) == 3:  # within the third sync with another site
        os._exit(9)
    return swap(*args)
Gloo.reset, Gloo.swap = counting, dying
sys.exit(main.main())
"""


@pytest.mark.slow
@pytest.mark.fault(40)
def test_a_sync_that_fails_costs_the_steps_since_the_last_one(started):
    job = started(start=False, MAX_STEPS=20_000, SYNC_EVERY=10, START_TIMEOUT_S=10)
    job.again(0)
    job.wait(0, syncs=1, sites=1)
    job.again(1, [sys.executable, "-c", DIES])
    assert job.sites[1].wait(240) == 9, job.said()
    wait_until(lambda: job.events(0, "rollback"))
    (lost,) = job.events(0, "rollback")
    last = [entry for entry in job.events(0, "sync") if entry["time"] < lost["time"]][-1]
    job.wait(0, syncs=last["outer_step"] + 1, sites=1)
    assert last["sites"] == 2 and (lost["from"], lost["step"]) == (last["step"] + 10, last["step"])
    assert lost["passed_over"] == 10 * 16  # sequences of a step
    job.again(1)
    job.wait(1, syncs=last["outer_step"] + 2, sites=2)
    job.wait(0, syncs=job.last(1)["outer_step"] + 2)
    job.stop()
    assert job.agreed(after=last["outer_step"])


@pytest.mark.slow
@pytest.mark.fault(41)
def test_without_its_lighthouse_a_site_waits_and_goes_on_when_it_is_back(started):
    """The new one counts quorums from 1 again, as the old one did for sites that are long gone."""
    job = started(MAX_STEPS=20_000, SYNC_EVERY=10, SITE_WAIT_S=10)
    job.wait(0, syncs=2)
    job.lose(1)
    job.again(1)
    job.wait(1, syncs=job.last(0)["outer_step"] + 2, sites=2)
    job.lighthouse.kill()
    job.lighthouse.wait()
    alone, undone = job.last(0)["outer_step"], len(job.events(0, "rollback"))
    job.lighthouse = job.light()
    for rank in (0, 1):
        job.wait(rank, syncs=alone + 4, sites=2)
    for entry in job.events(0, "rollback")[undone:]:  # one of them had begun with the old one
        assert entry["step"] <= 10 * (alone + 1)
    job.stop()
    # each may have made some more by itself
    assert job.agreed() > job.agreed(after=alone) >= 1


SLOW = """
import sys, time
from train import loop, main
step = loop.train_step
def slow(*args, **kwargs):
    time.sleep(1.0)
    return step(*args, **kwargs)
loop.train_step = slow
sys.exit(main.main())
"""


@pytest.mark.slow
@pytest.mark.fault(39)
def test_a_stop_is_heard_while_a_site_waits_for_the_others(started):
    job = started(start=False, MAX_STEPS=20_000, SYNC_EVERY=10, SITE_WAIT_S=100)
    job.again(0)
    job.again(1, [sys.executable, "-c", SLOW])  # it lives, and the other waits for it
    wait_for(job.run(0) / "STATUS.json", '"syncing"')
    time.sleep(1.0)
    job.sites[0].send_signal(signal.SIGTERM)
    assert job.sites[0].wait(240) == 75, job.said()
    (*_, saved) = job.events(0, "checkpoint")
    assert saved["step"] == job.events(0, "step")[-1]["step"] == 10


@pytest.mark.slow
def test_stopped_behind_the_last_step_sites_still_sync_and_a_longer_run_goes_on_from_there(
    started,
):
    job = started(MAX_STEPS=10, SYNC_EVERY=8, SYNC_FRAGMENTS=2, start=False)
    stop_after(job, 10, 10)
    assert [e["step"] for e in job.events(0, "sync")] == [4, 8]
    for steps in ("10", "17"):  # both fragments at the end; two further intervals, and both
        for rank in (0, 1):
            job.again(rank, MAX_STEPS=steps)
        job.ends(0, 0)
        first, other = (tensors(job.run(rank), int(steps)) for rank in (0, 1))
        names = [name for name in first if name.startswith(("model.", "outer.weights."))]
        assert names and all(torch.equal(first[name], other[name]) for name in names)
    assert [e["step"] for e in job.events(0, "sync")] == [4, 8, 10, 10, 14, 17, 17]


@pytest.mark.slow
def test_a_checkpoint_of_one_site_alone_is_taken_over_by_one_that_starts(started):
    job = started(MAX_STEPS=14, SYNC_EVERY=10, BATCH_TOKENS=512, start=False)
    job.again(0, SYNC="ddp", SITES="1", NODES="1", MAX_STEPS="6")
    assert job.sites[0].wait(240) == 0, job.said()
    for rank in (0, 1):
        job.again(rank)
    job.ends(0, 0)
    assert job.hashes(0) == job.hashes(1) and len(job.hashes(0)) == 2
    (gap,) = job.events(1, "gap")
    assert (gap["from"], gap["to"]) == (0, 10) and not job.events(0, "gap")
    assert [entry["step"] for entry in job.events(1, "step")] == [11, 12, 13, 14]


# ---- A control, in which DiLoCo is something simpler; another is in test_outer_step.py


@pytest.mark.slow
def test_one_site_that_takes_the_mean_trains_as_one_without_syncs(started):
    """To the bit. Site 1 never comes."""
    mean = {"OUTER_LEARNING_RATE": 1.0, "OUTER_MOMENTUM": 0.0, "SYNC_DTYPE": "float32"}
    settings = mean | {"MAX_STEPS": 12, "START_TIMEOUT_S": 10, "start": False}
    often, never = (
        started(folder=f"every_{steps}", SYNC_EVERY=steps, **settings) for steps in (3, 1000)
    )
    for job, steps in ((often, [3, 6, 9, 12]), (never, [12])):
        job.again(0)
        job.ends(0)
        assert [(e["step"], e["sites"]) for e in job.events(0, "sync")] == [(s, 1) for s in steps]
    assert losses(often.run(0)) == losses(never.run(0))
    assert same(tensors(often.run(0), 12), tensors(never.run(0), 12))
