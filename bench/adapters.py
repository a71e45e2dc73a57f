"""What a checkpoint costs a fine-tuning: of all weights, of adapters with their moments, and of adapters alone.

    python -m bench.adapters WHAT ROUNDS      (WHAT: all, full or lite)

Writes a JSON line as saving.py does. The model is a Llama of transformers' of 27M random weights, its adapters have
rank 64 (4.1M). Needs what make finetune installs.
"""

import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from bench import saving
from doctor.gpu_probe import messages
from finetune import lite
from finetune.adapter import Adapters
from finetune.hf_model import Tuned
from settings import ROOT
from settings.config import Config
from train.checkpoint import checkpoint
from train.checkpoint.saver import Saver
from train.data.batch import Batch
from train.distributed import world as distributed
from train.optim import build_optimizer, set_rate

KINDS = {"all": "all weights", "full": "LoRA, full", "lite": "LoRA, lite"}
T, WINDOWS = 64, 8


def main(what: str, rounds: int) -> None:
    """Steps, with a save behind every second."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    c = (
        Config()
        .replace(
            seq_len=T,
            batch_tokens=T * WINDOWS,
            micro_batch_size=WINDOWS,
            keep_last=2,
            lora_rank=0 if what == "all" else 64,
            checkpoint_mode="lite" if what == "lite" else "full",
        )
        .derived()
    )
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # DCP, in one process
    world = distributed.join(c)
    torch.set_num_threads(os.cpu_count() or 1)
    shape = LlamaConfig(
        vocab_size=8192,
        hidden_size=480,
        intermediate_size=1280,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    lm = AutoModelForCausalLM.from_config(shape).to(world.device)
    model = Tuned(lm, torch.float32)
    light = None
    if adapters := Adapters.of(c):
        light = lite.of(c, adapters, lm)
        adapters.join(lm)
        adapters.fill(model, c, world.device)
    folder = tempfile.mkdtemp(dir=ROOT / "bench")
    saver = Saver(Path(folder), c, world, checkpoint.needed_bytes(model))
    saver.lite = light
    optimizer = build_optimizer(model, c)
    set_rate(optimizer, 1e-4, c)
    tokens = torch.randint(shape.vocab_size, (WINDOWS, T), device=world.device)
    positions = torch.arange(T, device=world.device).expand(WINDOWS, T)
    bounds = torch.arange(0, T * WINDOWS + 1, T, dtype=torch.int32, device=world.device)
    batch = Batch([(tokens, tokens.roll(-1, 1), positions, bounds)], T * WINDOWS, range(WINDOWS))
    found = saving.saves(rounds, model, optimizer, batch, saver, world)
    shutil.rmtree(folder)
    messages.say(processes=1, parallel=KINDS[what], **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
