"""A run folder as the trainer leaves it, of weights that took a step, and its export."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from export import convert as command
from settings.config import Config
from tests.train.checkpoint.test_checkpoint import ALONE, go_on, save, states_of
from train.data.tokenizer import load
from train.generate.command import STOPS
from train.model.model import Transformer, build
from train.optim import build_optimizer

LLAMA = {"n_kv_head": 2, "tie_embeddings": True}
QWEN = {
    "qk_norm": True,
    "n_kv_head": 2,
    "tie_embeddings": False,
    "rope_theta": 500_000.0,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """models: step -> the model whose weights that checkpoint has."""

    config: Config
    folder: Path
    models: dict[int, Transformer]

    @property
    def export(self) -> Path:
        return self.folder / "export"

    def command(self, monkeypatch: pytest.MonkeyPatch, **given: object) -> int:
        """make export with these settings, in this process; the exit code."""
        empty = self.folder / "empty.env"
        empty.touch()
        settings = {
            "ENV_FILE": empty,
            "RUNS_DIR": self.config.runs_dir,
            "RUN_NAME": self.config.run_name,
            "DATA_DIR": self.config.data_dir,
            "DEVICE": "cpu",
            **given,
        }
        monkeypatch.setattr(
            os, "environ", {"PATH": os.environ["PATH"]} | {k: str(v) for k, v in settings.items()}
        )
        handlers = {number: signal.getsignal(number) for number in STOPS}
        try:
            return command.main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def make_run(
    parent: Path, c: Config, steps: tuple[int, ...] = (3,), norm_eps: float | None = None
) -> Run:
    """c: with a TOKENIZER that is a path."""
    c = dataclasses.replace(
        c, runs_dir=str(parent), run_name="a-run", device="cpu", data_dir=str(parent / "data")
    )
    folder, models = parent / "a-run", {}
    sha256 = load(Path(c.tokenizer)).sha256
    for step in steps:
        model = build(dataclasses.replace(c, seed=step), ALONE.device, norm_eps=norm_eps)
        with torch.no_grad():
            for weight in model.parameters():  # norms of 1 would hide one that is left out
                if weight.ndim == 1:
                    weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(step))
        optimizer = build_optimizer(model, c)
        go_on(c, model, optimizer, 1)  # so that there are moments
        data = states_of(step)["data"]
        save(
            folder / "checkpoints",
            step,
            model,
            optimizer,
            {"tokens": step * c.batch_tokens, "data": data | {"tokenizer_sha256": sha256}},
        )
        models[step] = model.eval()
    attempt = {
        "host": "secret-host",
        "world_size": 2,
        "device": "NVIDIA H100",
        "git": 40 * "a",
        "git_dirty": True,
        "torch": "2.13.0",
        "norm_eps": norm_eps,
    }
    (folder / "config.json").write_text(
        json.dumps({"settings": c.stored(), "attempts": [attempt, attempt]})
    )
    return Run(c, folder, models)
