"""Fine-tuning in the rehearsal: finetune/main.py's own model and batches, with stand-ins for the files of MODEL."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.gpu_rehearsal.fake_cuda import really  # before torch

import torch  # isort: skip
from torch import Tensor

from bench.gpu_rehearsal.cases import MODELS
from finetune import hf_model
from finetune.adapter import Adapters
from finetune.batches import Batches
from finetune.hf_model import Tuned
from finetune.loader import Loader
from finetune.main import build_model
from finetune.perplexity import Evaluator
from settings.config import Config
from train.distributed.world import World
from train.model import hf_import

N_LAYER = 2


class File(dict):
    """safetensors' safe_open, of a file that has each weight of the model next to it, in bfloat16, without numbers."""

    def __init__(self, path: Path, framework: str):
        lm = hf_model.on_meta(hf_model.configuration(path.parent), torch.bfloat16)
        super().__init__({name: Slice(weight.shape) for name, weight in lm.named_parameters()})

    get_slice = dict.__getitem__

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *_: object) -> None: ...


class Slice:
    """A weight that is not read yet."""

    def __init__(self, shape: torch.Size):
        self.shape = shape

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> Tensor:
        return torch.empty(self.shape, dtype=torch.bfloat16, device="cpu")[index]


@contextlib.contextmanager
def model_folder(config: Config) -> Iterator[Config]:
    """Have MODEL be the folder of such a model with N_LAYER layers. Does nothing where MODEL is not set."""
    if not config.model:
        yield config
        return
    facts = MODELS[config.model] | {"num_hidden_layers": N_LAYER, "dtype": "bfloat16"}
    with (
        tempfile.TemporaryDirectory() as folder,
        # transformers' other threads would know nothing of fake tensors
        mock.patch.dict("os.environ", {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        mock.patch.object(hf_import, "safe_open", File),
        # modules on the meta device are moved, and the head is found by its numbers
        mock.patch.object(hf_model, "on_meta", really(hf_model.on_meta)),
        mock.patch.object(hf_model, "find_head", really(hf_model.find_head)),
        mock.patch.object(Adapters, "join", really(Adapters.join)),
    ):
        Path(folder, "config.json").write_text(json.dumps(facts))
        Path(folder, "model.safetensors").touch()
        yield config.replace(model=folder)


def blank(kind: Any, **attributes: Any) -> Any:
    """Return an object of a class with these attributes, and without what its constructor opens."""
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


class Finetuning:
    """What fine-tuning has of its own. transformers' own code generates, which is not rehearsed."""

    def __init__(self, config: Config, world: World):
        self.config = config
        self.world = world
        no_examples = np.empty(0, dtype=np.int64)
        batches = blank(Batches, seq_len=config.seq_len, chosen=no_examples)
        size = config.micro_batch(world.size)
        self.loader = blank(Loader, world=world, batches=batches, micro_batch=size)
        part = batches.arrays([no_examples] * size)
        self.evaluator = blank(
            Evaluator, config=config, world=world, read_batches=lambda *_: iter([part])
        )

    def build(self) -> Tuned:
        adapters = Adapters.of(self.config)
        return build_model(Path(self.config.model), self.config, self.world, adapters)

    def micro_batches(self, count: int) -> list[tuple[Tensor, ...]]:
        """Return `count` windows in which nothing is scored."""
        return [self.loader.blank() for _ in range(count // self.loader.micro_batch)]

    def generate(self, model: Any) -> None: ...
