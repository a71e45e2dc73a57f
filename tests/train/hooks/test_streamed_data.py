"""train/hooks/streamed_data.py: when a run waits for data."""

import dataclasses

from tests.train.making import ALONE, Samples, make_job
from train.data.streaming import consumer
from train.data.streaming.consumer import StreamingClient
from train.hooks.streamed_data import StreamedData
from train.step import StepNumbers


class GrowingSamples(Samples):
    """Lacks data at the first two looks, and notes the steps that are looked for."""

    def __init__(self, config):
        super().__init__(config)
        self.looks = []

    def missing(self, step, gaps):
        self.looks.append(step)
        return "stories" if len(self.looks) <= 2 else ""


def test_a_run_waits_until_no_rank_lacks_the_next_step(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(consumer, "LOOK_S", 0.0)
    loader = GrowingSamples(tiny)
    job = make_job(tiny, tmp_path, world=dataclasses.replace(ALONE, rank=1), loader=loader)
    hook = StreamedData(StreamingClient(tiny, job.paths, False, {}, produces=False))
    # Another rank has asked for data.
    hook.after_step(job, StepNumbers(1.0, 1.0, 1.0, frozenset({"data"})))
    assert not hook.before_step(job) and job.waited_s > 0
    assert loader.looks == [0, 0, 0, 1]
    job.waited_s = 0.0
    hook.after_step(job, StepNumbers(1.0, 1.0, 1.0))
    assert not hook.before_step(job) and job.waited_s == 0.0
    assert loader.looks == [0, 0, 0, 1, 1]
