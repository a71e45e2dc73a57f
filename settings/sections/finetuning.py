"""The settings of fine-tuning. A part of config.py's Config."""

import dataclasses

from settings.declare import FROZEN, TRACKED, setting
from settings.sections.sites import AtSites


@dataclasses.dataclass(frozen=True)
class OfFinetuning(AtSites):
    """What is fine-tuned, on which conversations, and how it is measured."""

    # ---- Fine-tuning
    model: str = setting(
        "",
        help="to fine-tune: a run of RUNS_DIR by its name, a folder in Hugging Face's format with "
        "tokenizer and chat template, as make export writes it, or OWNER/NAME or OWNER/NAME@COMMIT on "
        "the Hugging Face hub",
        example="models/qwen3-1.7b",
        resume=FROZEN,
    )
    data: str = setting(
        "",
        help="conversations or pairs of question and answer to fine-tune on: a file of .jsonl or "
        ".parquet and the like, a folder of them, or OWNER/NAME:CONFIG:SPLIT on the Hugging Face hub; "
        "docs/finetune.md",
        example="chats.jsonl",
        resume=FROZEN,
    )
    eval_data: str = setting(
        "",
        help="Conversations to evaluate fine-tuning with, given as for DATA, several with commas "
        "between; exercises stands for generated questions. make eval asks a fine-tuned run their "
        "questions. Default: one in ten of DATA is held out, at most 200",
        example="held_out.jsonl",
        resume=TRACKED,
    )
    epochs: int = setting(
        1,
        help="of fine-tuning: how often each conversation is trained on. MAX_STEPS ends it earlier",
        minimum=1,
        maximum=1000,
        resume=TRACKED,
    )
    lora_rank: int = setting(
        0,
        help="of LoRA's adapters, which alone are trained then; 0: all weights are",
        minimum=0,
        maximum=4096,
        resume=FROZEN,
    )
    lora_alpha: float | None = setting(
        None,
        help="an adapter is weighed by LORA_ALPHA / LORA_RANK. Default: twice LORA_RANK",
        above=0,
        resume=FROZEN,
        example="32",
    )
    lora_dropout: float = setting(
        0.0,
        help="share of an adapter's inputs left out in training",
        minimum=0,
        maximum=0.9,
        resume=TRACKED,
    )
    lora_targets: str = setting(
        "attention,mlp",
        help="what gets an adapter, with commas between: attention, mlp (of a "
        "mixture of experts the shared one), experts, or matrices by the last part of their "
        "name",
        pattern=r"[A-Za-z0-9_.]+(,[A-Za-z0-9_.]+)*",
        resume=FROZEN,
    )
    checkpoint_mode: str = setting(
        "full",
        help="of a LoRA fine-tuning: adapters and moments, from which a run goes on "
        "to the bit; or lite: adapters alone, in peft's format, behind which the optimizer "
        "starts anew",
        choices=("full", "lite"),
    )
