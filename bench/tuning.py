"""How fast fine-tuning is next to TRL's SFTTrainer, packed and padded, on the same model and examples.

    python -m bench.tuning ROUNDS           a JSON line for each kind of lengths
    python -m bench.tuning ours FOLDER LENGTHS

Real tokens are those of examples, scored or not; padding is none. Each round starts all contenders in turn, each for
one epoch on one core, and counts its own CPU time. TRL comes from the environment in peers/trl:
`python -m venv peers/trl && peers/trl/bin/pip install trl`. Without it there are our figures alone.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import tuning_data
from bench.peers import CHECKOUTS
from doctor.gpu_probe.messages import say
from finetune import hf_model
from finetune.batches import Batches
from finetune.loader import tensors
from settings import ROOT, load_preset
from train.data.batch import Batch
from train.distributed import world as distributed
from train.optim import build_optimizer, set_rate
from train.step import train_step

TRL = CHECKOUTS / "trl" / "bin" / "python"


class InMemory:
    """What finetune.batches asks of finetune.examples.Examples."""

    def __init__(self, examples: list[tuning_data.Example]):
        self.examples = examples
        self.positions = np.array([len(one.ids) - 1 for one in examples])
        self.index = {"scored": np.array([sum(one.scored) for one in examples])}

    def example(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        one = self.examples[number]
        return np.array(one.ids), np.array(one.scored)


def train(folder: str, lengths: str) -> None:
    """Train one epoch, as make finetune does."""
    torch.set_num_threads(1)
    config = load_preset(
        PRESET="finetune",
        DEVICE="cpu",
        DTYPE="float32",
        SEQ_LEN=str(tuning_data.WINDOW),
        MICRO_BATCH_SIZE=str(tuning_data.ROWS),
        BATCH_TOKENS=str(tuning_data.WINDOW * tuning_data.ROWS),
    )
    world = distributed.join(config)
    examples = tuning_data.make_examples(lengths)
    stored: Any = InMemory(examples)
    chosen = np.arange(len(examples))
    rows = tuning_data.ROWS
    batches = Batches(stored, chosen, tuning_data.WINDOW, rows, rows, seed=1, epochs=1)
    model = hf_model.build(Path(folder), config, world.device)
    optimizer = build_optimizer(model, config)
    begin = time.process_time()
    for number in range(batches.steps):
        step = batches.step(number)
        micro_batches = [tensors(part, world.device) for part in step.micro_batches]
        set_rate(optimizer, 1e-4, config)
        train_step(
            model,
            optimizer,
            Batch(micro_batches, step.scored, step.windows, step.whole),
            1.0,
            world,
        )
    tuning_data.report(time.process_time() - begin, examples)


def turn(contender: str, folder: str, lengths: str) -> dict[str, Any]:
    """Return what a contender reports of an epoch."""
    command = [sys.executable, "-m", "bench.tuning", "ours", folder, lengths]
    if contender != "ours":
        how = contender.removeprefix("TRL ")
        command = [str(TRL), str(ROOT / "bench" / "tuning_trl.py"), folder, lengths, how]
    command = ["env", "OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", *command]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(rounds: int) -> None:
    contenders = tuning_data.CONTENDERS if TRL.exists() else ("ours",)
    if len(contenders) == 1:
        sys.stderr.write(
            "TRL is left out: make it with python -m venv peers/trl && "
            "peers/trl/bin/pip install trl\n"
        )
    with tempfile.TemporaryDirectory() as folder:
        tuning_data.save_model(Path(folder))
        for lengths in tuning_data.LENGTHS:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
            for _ in range(rounds):
                for name in contenders:
                    found[name].append(turn(name, folder, lengths))
            rates = {
                name: [one["tokens"] / one["cpu_s"] for one in turns]
                for name, turns in found.items()
            }
            peaks = {name: max(one["mib"] for one in turns) for name, turns in found.items()}
            say(lengths=lengths, tokens_per_cpu_s=rates, peak_mib=peaks)


if __name__ == "__main__":
    if sys.argv[1] == "ours":
        train(*sys.argv[2:])
    else:
        main(int(sys.argv[1]))
