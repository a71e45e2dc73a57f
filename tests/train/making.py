"""A job of one process: all of it is real but the data, and what watches it."""

from pathlib import Path
from types import SimpleNamespace

import torch

from record.recorder import Recorder
from record.run_paths import RunPaths
from record.status import Status
from settings.config import Config
from train.checkpoint.identity import Identity
from train.checkpoint.saver import Saver
from train.data.batch import Batch
from train.distributed.world import World
from train.faults.deadlines import Deadlines
from train.faults.guard import Guard
from train.faults.recovery import Recovery
from train.job import Job, Rates
from train.model.model import build
from train.optim import build_optimizer

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here", hosts=("here",))


class Watch:
    """Remembers what is to happen within what time."""

    doing, limit_s, setting = "starting", float("inf"), ""

    def __init__(self):
        self.told = []

    def expect(self, doing, limit_s, setting=""):
        self.told.append((doing, limit_s, setting))
        self.doing, self.limit_s, self.setting = doing, limit_s, setting


class Samples:
    """Random batches, a seed for each step and place in the order."""

    sources = ()

    def __init__(self, config):
        self.config = config

    def batch(self, step, gaps):
        passed = sum(gap.windows for gap in gaps if gap.step <= step)
        seed = torch.Generator().manual_seed(step + 1000 * passed)
        shape = (self.config.batch_windows, self.config.seq_len + 1)
        tokens = torch.randint(self.config.vocab_size, shape, generator=seed)
        first = step * self.config.batch_windows + passed
        samples = range(first, first + self.config.batch_windows)
        return Batch([(tokens[:, :-1], tokens[:, 1:])], tokens[:, 1:].numel(), samples, True)

    def names(self, samples):
        return [f"sample {sample}" for sample in samples]

    def opened(self, step, gaps):
        return {}

    def shares(self, step, gaps):
        return {}

    def differs(self, opened, step, gaps):
        return None


def make_job(config: Config, folder: Path, *hooks, **facts) -> Job:
    """A job with these hooks. facts: fields in the place of those made here."""
    paths = RunPaths(folder)
    model = facts.pop("model", None) or build(config, ALONE.device)
    fields = {
        "config": config,
        "paths": paths,
        "world": ALONE,
        "model": model,
        "optimizer": build_optimizer(model, config),
        "loader": Samples(config),
        "data_fingerprint": "",
        "identity": Identity("made", {}, ["made"], []),
        "vocabulary": SimpleNamespace(sha256=""),
        "recorder": Recorder(paths, True, 0, config.last_step, 5),
        "status": Status(paths.status, True),
        "interrupt": SimpleNamespace(asked=None, training=False),
        "deadlines": Deadlines(config, Watch()),
        "saver": Saver(paths.checkpoints, config, ALONE, 2**20),
        "recovery": Recovery(Guard(8)),
        "rates": Rates(config, ALONE, (1.0, 1.0)),
        "hooks": list(hooks),
    }
    return Job(**fields | facts)
