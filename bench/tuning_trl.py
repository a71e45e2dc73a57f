"""One epoch of TRL's SFTTrainer, in a process of its own: bench/tuning.py starts it by a Python that has TRL.

PYTHON bench/tuning_trl.py FOLDER LENGTHS packed|padded
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import tuning_data


def main(folder: str, lengths: str, how: str) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    examples = tuning_data.make_examples(lengths)
    rows = {
        "input_ids": [example.ids for example in examples],
        "completion_mask": [[int(one) for one in example.scored] for example in examples],
    }
    mean = sum(len(example.ids) for example in examples) / len(examples)
    size = tuning_data.ROWS
    if how == "padded":  # as many real tokens in a step
        size = round(size * tuning_data.WINDOW / mean)
    config = SFTConfig(
        output_dir=f"{folder}/trl",
        packing=how == "packed",
        max_length=tuning_data.WINDOW,
        per_device_train_batch_size=size,
        num_train_epochs=1,
        completion_only_loss=True,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer: Any = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )
    begin = time.process_time()
    trainer.train()
    tuning_data.report(time.process_time() - begin, examples)


if __name__ == "__main__":
    main(*sys.argv[1:])
