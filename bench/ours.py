"""Our training step, by the functions that the trainer calls: a process for run.py (worker.py says how)."""

import socket

import torch

from doctor.gpu_probe import worker
from doctor.gpu_probe.shapes import Shape
from settings.config import Config
from train.data.batch import Batch
from train.distributed.world import World
from train.model import attention, compilation
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.step import train_step


def config(shape: Shape, dtype: str = "float32", compiled: bool = False) -> Config:
    """The settings of a run of this shape."""
    return (
        Config()
        .replace(
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.n_embd,
            seq_len=shape.seq_len,
            batch_tokens=shape.tokens,
            grad_clip=worker.CLIP,
            micro_batch_size=shape.sequences,
            dtype=dtype,
            compile="1" if compiled else "0",
            tie_embeddings=True,
        )
        .derived()
    )


class Trainer:
    """A model with its optimizer, compiled where c says so, and a batch: so many times that of the shape."""

    def __init__(self, c: Config, shape: Shape, micro_batches: int = 1):
        device, self.c = worker.device(), c
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.world = World(0, 0, 0, 1, device, name, socket.gethostname())
        self.model = build(c, device, attention.choose(c, device))
        if c.compile == "1":
            compilation.compile_model(self.model)
        self.optimizer = build_optimizer(self.model, c)
        set_rate(self.optimizer, c.learning_rate, c)
        tokens = worker.windows(shape)
        self.part = (tokens[:, :-1], tokens[:, 1:])
        self.batch = Batch(
            micro_batches * [self.part], c.batch_tokens, range(micro_batches * shape.sequences)
        )

    def step(self) -> float:
        """Returns the loss, in nats per token."""
        return train_step(self.model, self.optimizer, self.batch, self.c.grad_clip, self.world).loss


def set_up(shape: Shape, dtype: str, compiled: bool) -> worker.Step:
    trainer = Trainer(config(shape, dtype, compiled), shape)
    return worker.Step(trainer.step, sum(p.numel() for p in trainer.model.parameters()))


if __name__ == "__main__":
    worker.serve(set_up)
