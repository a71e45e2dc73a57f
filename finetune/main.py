"""Entry point of fine-tuning, started by train/launcher.py: train/main.py with another model and other data.

Exit codes are those of train/main.py.
"""

import sys
from pathlib import Path
from typing import Any

from finetune import origin, tuning_settings
from finetune.prepare_data import Data, prepared
from finetune.tuning_job import Fingerprints, agreed_fingerprints, put_together, settled, together
from settings.config import Config
from train import loop
from train.distributed.world import World, from_first
from train.job import Job
from train.main import end_record, main, stopped


class Finetuning:
    """A model of others, or of ours, on conversations."""

    target = "finetune"
    read: Data
    folder: Path
    known: Fingerprints

    def settings(self) -> Config:
        return tuning_settings.load_settings()

    def settled(self, c: Config, world: World) -> Config:
        """DATA is opened here, since its size decides how many steps there are; all processes must have the same."""
        self.folder = together(lambda: origin.find(c))
        self.read = together(lambda: prepared(c, self.folder))
        self.known = agreed_fingerprints(c, self.read, self.folder, world)
        return settled(c, self.read, self.folder, world.size)

    def put_together(self, *what: Any) -> Job:
        return put_together(self.read, self.folder, self.known, *what)

    def run(self, job: Job) -> int:
        """Train, and evaluate before the first step and at the end. Returns the exit code."""
        c = job.config
        if job.evaluator.steps and not job.step:  # type: ignore[attr-defined]
            job.interrupt.training = True
            loop.evaluate(job, full=False)
        if loop.train(job) == "stopped":
            return stopped(job)
        if job.evaluator.steps:  # type: ignore[attr-defined]
            told, result = loop.evaluate(job, full=True)
            if told:
                return stopped(job)
            if result:
                job.recorder.say(
                    f"held-out conversations: perplexity {result.record()['val_ppl']:.4g} of "
                    f"{result.tokens:,} scored tokens"
                )
        end_record(job, "done")
        job.status.phase("done", step=job.step, last_step=c.last_step, exit_code=0)
        from_first(None)  # leave together
        return 0


if __name__ == "__main__":
    sys.exit(main(Finetuning()))
