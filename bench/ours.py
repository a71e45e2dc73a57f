"""Our training step, by the functions that the trainer calls: a process for run.py (worker.py says how)."""

import dataclasses
import socket

import torch

from bench import worker
from bench.shapes import Shape
from train import attention, compilation
from train.batch import Batch
from train.config import Config
from train.distributed import World
from train.model import build
from train.optim import build_optimizer, set_rate
from train.step import train_step


def config(shape: Shape, dtype: str = "float32", compiled: bool = False) -> Config:
    """The settings of a run of this shape."""
    return dataclasses.replace(
        Config(), vocab_size=shape.vocab_size, n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
        seq_len=shape.seq_len, batch_tokens=shape.tokens, grad_clip=worker.CLIP,
        micro_batch_size=shape.sequences, dtype=dtype, compile="1" if compiled else "0", tie_embeddings=True).derived()


def set_up(shape: Shape, dtype: str, compiled: bool) -> worker.Step:
    device, c = worker.device(), config(shape, dtype, compiled)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    world = World(0, 0, 0, 1, device, name, socket.gethostname())
    model = build(c, device, attention.choose(c, device))
    if compiled:
        compilation.compile_model(model)
    optimizer = build_optimizer(model, c)
    set_rate(optimizer, c.learning_rate, c)
    tokens = worker.windows(shape)
    batch = Batch([(tokens[:, :-1], tokens[:, 1:])], shape.tokens, range(shape.sequences))
    return worker.Step(lambda: train_step(model, optimizer, batch, c.grad_clip, world).loss,
                       sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    worker.serve(set_up)
