"""Entry point of fine-tuning, started by train/launcher.py: train/main.py with another model and other data.

Exit codes are those of train/main.py.
"""

import sys
from pathlib import Path

from finetune import model_folder, tuning_job, tuning_settings
from finetune.prepare_data import Data, prepared
from finetune.tuning_job import Fingerprints, agreed_fingerprints, settled
from settings import ExpectedError
from settings.config import Config
from train.assemble import Attempt
from train.distributed.world import World, raise_on_all_ranks
from train.job import Job
from train.main import Training, main


class Finetuning(Training):
    """A model of others, or of ours, on conversations."""

    target = "finetune"
    read: Data
    folder: Path
    known: Fingerprints

    def load_settings(self) -> Config:
        return tuning_settings.load_settings()

    def resolve_from_data(self, config: Config, world: World) -> Config:
        """DATA is opened here, since its size decides how many steps there are; all processes must have the same."""
        with raise_on_all_ranks(ExpectedError):
            self.folder = model_folder.find(config)
            self.read = prepared(config, self.folder)
        self.known = agreed_fingerprints(config, self.read, self.folder, world)
        return settled(config, self.read, self.folder, world.size)

    def build_job(self, attempt: Attempt) -> Job:
        return tuning_job.build_job(self.read, self.folder, self.known, attempt)


if __name__ == "__main__":
    sys.exit(main(Finetuning()))
