"""SYNC=diloco with real processes: against DiLoCo worked out in one process, and with sites that come and go."""

import json
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch

from settings.config import Config
from tests.conftest import TINY
from tests.running import losses, same, tensors, wait_for, wait_until
from tests.train.diloco.sites import Sites
from train import optim
from train.data import prepare
from train.data.batch import Loader
from train.distributed.world import World
from train.model.model import build
from train.schedule import lr_at

Started = Callable[..., Sites]


@pytest.fixture
def started(tmp_path, data):
    """Starts the sites of a run; nothing of it outlives the test."""
    jobs: list[Sites] = []

    def start(sites: int, folder: str = "job", **settings: object) -> Sites:
        (tmp_path / folder).mkdir()
        jobs.append(Sites(tmp_path / folder, data, sites, **settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


# ---------------------------------------------------------------------------------------------------
# DiLoCo, once more
# ---------------------------------------------------------------------------------------------------


class OneProcess:
    """Algorithm 1 of Douillard et al. 2023 with AdamW inside and Nesterov outside, for all sites in one process; with
    fragments algorithm 2 of Douillard et al. 2025. Nothing of torchft, nor of the trainer's loop and step."""

    def __init__(self, env):
        c = self.c = Config.load({**env, "NODE_RANK": "0"})
        self.common = {
            name: w.detach().clone() for name, w in build(c, torch.device("cpu")).named_parameters()
        }
        self.momentum = {name: torch.zeros_like(w) for name, w in self.common.items()}
        self.sites = [self.site(rank, env) for rank in range(c.sites)]
        self.in_flight: tuple[list[str], dict[str, torch.Tensor]] | None = None

    def site(self, rank, env):
        c = Config.load({**env, "NODE_RANK": str(rank)})
        model, vocabulary = build(c, torch.device("cpu")), prepare.vocabulary(c)
        matrices = [w for w in model.parameters() if w.ndim == 2]
        vectors = [w for w in model.parameters() if w.ndim == 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": c.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(c.adam_beta1, c.adam_beta2),
            eps=optim.ADAM_EPS,
        )
        world = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")
        return (
            model,
            optimizer,
            Loader(c, prepare.open_sources(c, vocabulary), world, vocabulary.end_of_text),
        )

    def train(self, steps):
        c = self.c
        turn = c.sync_every // c.sync_fragments
        for step in range(steps):
            for model, optimizer, loader in self.sites:
                self.inner(step, model, optimizer, loader)
            if (step + 1) % turn == (turn - c.sync_delay) % turn:
                self.in_flight = self.changes((step + c.sync_delay) // turn % c.sync_fragments)
            if (step + 1) % turn == 0 and self.in_flight:
                self.outer(*self.in_flight)
                self.in_flight = None

    def inner(self, step, model, optimizer, loader):
        total = 0
        for tokens, targets in loader.batch(step).micro_batches:
            loss = torch.nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"
            )
            loss.backward()
            total += targets.numel()
        for w in model.parameters():
            w.grad /= total
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.c.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step + 1, self.c)
        optimizer.step()
        optimizer.zero_grad()

    def changes(self, fragment):
        """The names of a fragment's weights and the mean change of each; table and last norm go with the first."""
        c = self.c
        block = {
            name: int(name.split(".")[1]) if name.startswith("layers.") else 0
            for name in self.common
        }
        names = [name for name in self.common if block[name] % c.sync_fragments == fragment]
        own = [dict(model.named_parameters()) for model, _, _ in self.sites]
        with torch.no_grad():
            return names, {
                name: sum(self.common[name] - weights[name] for weights in own) / len(own)
                for name in names
            }

    def outer(self, names, mean):
        c = self.c
        for name in names:
            self.momentum[name] = c.outer_momentum * self.momentum[name] + mean[name]
            self.common[name] -= c.outer_learning_rate * (
                mean[name] + c.outer_momentum * self.momentum[name]
            )
            for model, _, _ in self.sites:
                w = model.get_parameter(name)
                w.data = self.common[name] + (0.5 if c.sync_delay else 0.0) * (
                    w.data - self.common[name]
                )


def close(run, step, expected):
    """The common weights of a checkpoint are these.

    AdamW divides a gradient by its own size, so where a gradient is nothing but rounding, rounding
    decides the update, and kernels of another processor round otherwise: such elements, one in a
    thousand at most, may be off by a hundredth of the learning rate.
    """
    found = tensors(run, step)
    rounding = 0.01 * float(TINY["LEARNING_RATE"])
    for name, w in expected.items():
        for weight in (found[f"outer.weights.{name}"], found[f"model.{name}"]):
            off = (weight - w).abs()
            assert (off > 2e-6 + 1e-4 * w.abs()).float().mean() <= 1e-3, name
            assert off.max() < rounding, name
            assert off.norm() <= 5e-5 * w.norm(), name


def test_two_sites_train_as_the_algorithm_says_and_have_the_same_weights(started):
    settings = {"MAX_STEPS": 12, "SYNC_EVERY": 4, "SYNC_DTYPE": "float32"}
    job = started(2, **settings)
    said = job.ends(0, 0)
    reference = OneProcess(job.env)
    reference.train(12)
    for rank in (0, 1):
        close(job.run(rank), 12, reference.common)
        assert [(e["step"], e["outer_step"], e["sites"]) for e in job.events(rank, "sync")] == [
            (4, 1, 2),
            (8, 2, 2),
            (12, 3, 2),
        ]
        assert {e["replica"] for e in job.events(rank, "step")} == {rank}
        (end,) = job.events(rank, "end")
        assert end["reason"] == "done" and "hash" in said[rank]
    assert job.hashes(0) == job.hashes(1) and len(set(job.hashes(0).values())) == 3
    assert losses(job.run(0)) != losses(job.run(1))  # each has trained on its own part
    assert same(
        {k: v for k, v in tensors(job.run(0), 12).items() if "model." in k or "outer." in k},
        {k: v for k, v in tensors(job.run(1), 12).items() if "model." in k or "outer." in k},
    )


@pytest.mark.slow
def test_fragments_that_travel_while_training_goes_on_do_as_the_algorithm_says(started):
    job = started(
        2,
        MAX_STEPS=16,
        SYNC_EVERY=8,
        SYNC_FRAGMENTS=2,
        SYNC_DELAY=1,
        SYNC_DTYPE="float32",
        SAVE_EVERY=16,
    )
    job.ends(0, 0)
    reference = OneProcess(job.env)
    reference.train(16)
    reference.outer(
        *reference.changes(0)
    )  # what the last exchange was not about has its own at the end
    for rank in (0, 1):
        close(job.run(rank), 16, reference.common)
        assert [e["fragment"] for e in job.events(rank, "sync")] == [0, 1, 0, 1, 0]
    assert job.hashes(0) == job.hashes(1)


@pytest.mark.slow
def test_a_site_of_two_processes_sends_each_weight_once_and_trains_as_one_of_one(started):
    settings = {"MAX_STEPS": 12, "SYNC_EVERY": 4, "SYNC_DTYPE": "float32", "PARALLEL": "fsdp"}
    split = started(2, "split", **settings | {"NPROC": 2})
    split.ends(0, 0)
    reference = OneProcess(split.env)
    reference.train(12)
    for rank in (0, 1):
        close(split.run(rank), 12, reference.common)
    assert split.hashes(0) == split.hashes(1)
    weights = sum(w.numel() for w in reference.common.values())
    (*_, last) = split.events(0, "sync")
    assert last["bytes"] == pytest.approx(
        4 * weights / 2, rel=0.05
    )  # of two sites each sends what it has once


# ---------------------------------------------------------------------------------------------------
# Sites that come and go
# ---------------------------------------------------------------------------------------------------

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


@pytest.mark.slow
@pytest.mark.fault(39)
def test_told_to_stop_all_sites_save_and_go_on_as_if_nothing_had_been(started):
    settings = {"MAX_STEPS": 60, "SYNC_EVERY": 6}
    whole = started(2, "whole", **settings)
    whole.ends(0, 0)
    job = started(2, "stopped", start=False, **settings)
    for rank, steps in ((0, 14), (1, 16)):  # both between exchanges 2 and 3
        job.again(rank, [sys.executable, "-c", STOPS.format(steps=steps)])
    job.ends(75, 75)
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
    job = started(2, MAX_STEPS=20_000, SYNC_EVERY=10, PARALLEL="fsdp", NPROC=2)
    last = len(job.sites) - 1
    job.wait(0, exchanges=2)
    job.lose(last)
    job.wait(0, exchanges=3, sites=last)
    back = job.events(0, "sync")[-1]["outer_step"]
    job.again(last)
    job.wait(last, exchanges=back + 1, sites=last + 1)
    job.wait(0, exchanges=job.events(last, "sync")[-1]["outer_step"] + 3)
    job.tell(signal.SIGTERM)
    job.ends(*[75] * (last + 1))
    assert f"sites (away: {last}), " in job.log(0).read_text()
    (gap,) = job.events(last, "gap")
    assert gap["reason"] == "away" and gap["from"] < gap["to"] == gap["step"]
    assert job.agreed(last, 0, behind=gap["to"] // 10) >= 2
    for entry in job.events(
        0, "rollback"
    ):  # an exchange in which it died: what is lost is one turn at most
        assert entry["from"] - entry["step"] <= 10
    saved = max(int(folder.name[5:]) for folder in (job.run(last) / "checkpoints").glob("step_*"))
    manifest = json.loads(
        (job.run(last) / "checkpoints" / f"step_{saved:07d}" / "MANIFEST.json").read_text()
    )
    assert manifest["sites"]["away"] == [[gap["from"], gap["to"]]]


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
    if len(shared) == 3:  # within the third exchange with another site
        os._exit(9)
    return swap(*args)
Gloo.reset, Gloo.swap = counting, dying
sys.exit(main.main())
"""


@pytest.mark.slow
@pytest.mark.fault(40)
def test_an_exchange_that_fails_costs_the_steps_since_the_last_one(started):
    job = started(2, MAX_STEPS=20_000, SYNC_EVERY=10)
    job.wait(0, exchanges=1)
    job.lose(1)
    job.wait(0, exchanges=job.events(0, "sync")[-1]["outer_step"] + 1, sites=1)
    undone = len(job.events(0, "rollback"))  # it may have been lost within an exchange, too
    job.again(1, [sys.executable, "-c", DIES])
    assert job.sites[1].wait(240) == 9, job.log(1).read_text()
    wait_until(lambda: len(job.events(0, "rollback")) > undone)
    lost = job.events(0, "rollback")[-1]
    last = [entry for entry in job.events(0, "sync") if entry["time"] < lost["time"]][-1]
    job.wait(0, exchanges=last["outer_step"] + 1, sites=1)
    assert last["sites"] == 2 and (lost["from"], lost["step"]) == (last["step"] + 10, last["step"])
    assert (
        lost["passed_over"]
        == 10 * job.events(0, "step")[0]["tokens"] // Config.load(job.env).seq_len
    )
    assert (
        f"back to step {last['step']}, what the sites have in common; 10 steps"
        in job.log(0).read_text()
    )
    job.again(1)
    job.wait(1, exchanges=last["outer_step"] + 2, sites=2)
    job.wait(0, exchanges=job.events(1, "sync")[-1]["outer_step"] + 2)
    job.tell(signal.SIGTERM)
    job.ends(75, 75)
    assert job.agreed(1, 0, behind=last["outer_step"])


@pytest.mark.slow
@pytest.mark.fault(41)
def test_without_its_lighthouse_a_site_waits_and_goes_on_when_it_is_back(started):
    """The new one counts quorums from 1 again, as the old one did for sites that are long gone."""
    job = started(2, MAX_STEPS=20_000, SYNC_EVERY=10, SITE_WAIT_S=10)
    job.wait(0, exchanges=2)
    job.lose(1)
    job.again(1)
    job.wait(1, exchanges=job.events(0, "sync")[-1]["outer_step"] + 2, sites=2)
    job.lighthouse.kill()
    job.lighthouse.wait()
    alone, undone = job.events(0, "sync")[-1]["outer_step"], len(job.events(0, "rollback"))
    job.lighthouse = job.light()
    for rank in (0, 1):
        job.wait(rank, exchanges=alone + 4, sites=2)
    for entry in job.events(0, "rollback")[
        undone:
    ]:  # of an exchange that one of them had begun with the old one
        assert entry["step"] <= 10 * (alone + 1)
    job.tell(signal.SIGTERM)
    job.ends(75, 75)
    assert (
        job.agreed(0, 1) > job.agreed(0, 1, behind=alone) >= 1
    )  # each may have made some more by itself


@pytest.mark.slow
@pytest.mark.fault(41)
def test_a_lighthouse_that_comes_to_the_same_number_again_leaves_nobody_waiting(started):
    """Quorum 1 is the first site's alone and 2 is of both, from the new lighthouse as from the old one; the second site
    was away when the new one's first stood, and knows that number of both as the one for which it has connected."""
    job = started(
        2,
        start=False,
        MAX_STEPS=20_000,
        SYNC_EVERY=10,
        SITE_WAIT_S=5,
        START_TIMEOUT_S=15,
        TRAIN_TIMEOUT_S=600,
    )
    job.again(0)
    job.wait(0, exchanges=1, sites=1)
    job.again(1)
    job.wait(1, exchanges=2, sites=2)
    job.lighthouse.kill()
    job.lighthouse.wait()
    job.pause(1)
    before = job.events(0, "sync")[-1]["outer_step"]
    job.lighthouse = job.light()
    job.wait(0, exchanges=before + 1, sites=1)
    job.resume(1)
    alone = job.events(0, "sync")[-1]["outer_step"]
    for rank in (0, 1):
        job.wait(rank, exchanges=alone + 2, sites=2)
    job.tell(signal.SIGTERM)
    job.ends(75, 75)
    assert job.agreed(0, 1, behind=alone) >= 1


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
    job = started(2, MAX_STEPS=20_000, SYNC_EVERY=10, SITE_WAIT_S=100)
    job.wait(0, exchanges=1)
    job.lose(1)
    job.again(1, [sys.executable, "-c", SLOW])  # it lives, and the others wait for it
    job.wait(1, exchanges=2)
    wait_for(job.run(0) / "STATUS.json", '"exchanging"')
    time.sleep(1.0)
    job.sites[0].send_signal(signal.SIGTERM)
    assert job.sites[0].wait(240) == 75, job.log(0).read_text()
    (*_, saved) = job.events(0, "checkpoint")
    assert saved["step"] == job.events(0, "step")[-1]["step"]


@pytest.mark.slow
def test_stopped_behind_the_last_step_sites_still_exchange_and_a_longer_run_goes_on_from_there(
    started,
):
    job = started(2, MAX_STEPS=10, SYNC_EVERY=8, SYNC_FRAGMENTS=2, start=False)
    for rank in (0, 1):
        job.again(rank, [sys.executable, "-c", STOPS.format(steps=10)])
    job.ends(75, 75)
    assert [e["outer_step"] for e in job.events(0, "sync")] == [1, 2]  # behind steps 4 and 8
    for steps, exchanges in (
        ("10", 4),
        ("17", 7),
    ):  # both fragments at the end; two further turns from 10 on, and both
        for rank in (0, 1):
            job.again(rank, MAX_STEPS=steps)
        job.ends(0, 0)
        assert job.hashes(0) == job.hashes(1) and max(job.hashes(0)) == exchanges
        assert job.events(0, "end")[-1]["reason"] == "done" and job.events(0, "step")[-1][
            "step"
        ] == int(steps)
        first, other = (tensors(job.run(rank), int(steps)) for rank in (0, 1))
        assert all(
            torch.equal(first[key], other[key])
            for key in first
            if key.startswith(("model.", "outer.weights."))
        )
    assert [e["step"] for e in job.events(0, "sync")] == [4, 8, 10, 10, 14, 17, 17]


@pytest.mark.slow
def test_a_checkpoint_of_one_site_alone_is_taken_over_by_one_that_starts(started):
    """Neither has seen an exchange: only their weights tell them apart."""
    job = started(2, MAX_STEPS=14, SYNC_EVERY=10, BATCH_TOKENS=512, start=False)
    job.again(0, SYNC="ddp", SITES="1", NODES="1", MAX_STEPS="6")
    assert job.sites[0].wait(240) == 0, job.log(0).read_text()
    for rank in (0, 1):
        job.again(rank)
    job.ends(0, 0)
    assert job.hashes(0) == job.hashes(1) and len(job.hashes(0)) == 2
    (gap,) = job.events(1, "gap")
    assert (gap["from"], gap["to"]) == (0, 10) and not job.events(0, "gap")
    assert [entry["step"] for entry in job.events(1, "step")] == [11, 12, 13, 14]


# ---------------------------------------------------------------------------------------------------
# Controls: settings with which DiLoCo is something simpler
# ---------------------------------------------------------------------------------------------------

MEAN = {"OUTER_LEARNING_RATE": 1.0, "OUTER_MOMENTUM": 0.0, "SYNC_DTYPE": "float32"}


@pytest.mark.slow
def test_one_site_that_takes_the_mean_trains_as_one_without_exchanges(started):
    """To the bit. Site 1 never comes."""
    settings = MEAN | {"MAX_STEPS": 12, "START_TIMEOUT_S": 10}
    often, never = (
        started(2, f"every_{steps}", start=False, SYNC_EVERY=steps, **settings)
        for steps in (3, 1000)
    )
    for job in (often, never):
        job.again(0)
        assert job.sites[0].wait(240) == 0, job.said()
    exchanges = [(entry["step"], entry["sites"]) for entry in often.events(0, "sync")]
    assert exchanges == [(3, 1), (6, 1), (9, 1), (12, 1)]
    assert [entry["step"] for entry in never.events(0, "sync")] == [12]
    assert losses(often.run(0)) == losses(never.run(0))
    found, expected = (tensors(job.run(0), 12) for job in (often, never))
    assert same(found, expected)


SGD = """
import sys
import torch
from train import assemble, loop, main, optim

def build_optimizer(model, config):
    return optim.Optimizer([torch.optim.SGD(model.parameters(), lr=config.learning_rate)])

def set_rate(optimizer, rate, config):
    optimizer.parts[0].param_groups[0]["lr"] = rate

assemble.build_optimizer = build_optimizer
loop.set_rate = set_rate
sys.exit(main.main())
"""


@pytest.mark.slow
def test_four_sites_that_exchange_each_step_of_sgd_train_as_ddp_does(started):
    """Up to rounding: the mean of what SGD does with four gradients is what it does with their mean."""
    settings = MEAN | {
        "MAX_STEPS": 8,
        "SYNC_EVERY": 1,
        "GRAD_CLIP": 0,
        "LEARNING_RATE": 0.3,
        "MIN_LEARNING_RATE": 0.03,
    }
    job = started(4, start=False, **settings)
    script = job.folder / "sgd.py"
    script.write_text(SGD)
    for rank in range(4):
        job.again(rank, [sys.executable, str(script)])
    job.ends(0, 0, 0, 0)
    assert len(job.hashes(0)) == 8
    assert all(job.hashes(rank) == job.hashes(0) for rank in range(4))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ddp = started(4, "ddp", start=False, **settings)
    ddp.again(
        0,
        [*torchrun, "--nproc-per-node", "4", str(script)],
        SYNC="ddp",
        SITES="1",
        NODES="1",
        NPROC="4",
    )
    assert ddp.sites[0].wait(240) == 0, ddp.said()
    expected = tensors(ddp.folder / "run", 8)
    found = tensors(job.run(0), 8)
    weights = [name for name in expected if name.startswith("model.")]
    moved = 0.0
    for name in weights:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
        moved = max(moved, float((found[name] - found[name].mean()).abs().max()))
    assert weights and moved > 0.01


# ---------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fault(42)
def test_sites_with_other_settings_or_the_same_number_are_named(started):
    job = started(2, MAX_STEPS=100000, SYNC_EVERY=10)
    job.wait(0, exchanges=1)
    job.lose(1)
    job.again(1, LEARNING_RATE="1e-3")
    assert job.sites[1].wait(240) == 64 and "LEARNING_RATE" in job.log(1).read_text()
    job.again(1, RUNS_DIR=str(job.folder / "elsewhere"), NODE_RANK="0", MAX_RESTARTS="0")
    assert job.sites[1].wait(240) == 69
    assert "site 0 is there already" in job.log(1).read_text()
