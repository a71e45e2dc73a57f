"""The settings of fine-tuning. A part of config.py's Config."""

import dataclasses

from train.at_sites import AtSites
from train.settings import FROZEN, TRACKED, setting


@dataclasses.dataclass(frozen=True)
class OfFinetuning(AtSites):
    """What is fine-tuned, on which conversations, and how it is measured."""

    # ---- Fine-tuning
    model: str = setting("", help="to fine-tune: a folder in Hugging Face's format with its tokenizer and chat "
                         "template, as make export writes it", example="models/qwen3-1.7b", resume=FROZEN)
    data: str = setting("", help="conversations or pairs of question and answer to fine-tune on: a file of .jsonl or "
                        ".parquet and the like, a folder of them, or OWNER/NAME:CONFIG:SPLIT on the Hugging Face hub; "
                        "docs/finetune.md", example="chats.jsonl", resume=FROZEN)
    eval_data: str = setting("", help="conversations that fine-tuning is evaluated with, given as DATA is. Default: "
                             "some of DATA, which are held out", example="held_out.jsonl", resume=TRACKED)
    eval_conversations: int = setting(200, help="that fine-tuning is evaluated with, always the same ones, by a hash "
                                      "of what they say: of EVAL_DATA, 0 for all of it; else held out of DATA, one in "
                                      "10 at most", minimum=0, resume=FROZEN)
