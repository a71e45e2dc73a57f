"""Settings of fine-tuning, and of the stages that `make pipeline` runs after pretraining."""

from settings.declare import (
    DERIVED,
    FREE,
    FROZEN,
    TRACKED,
    Count,
    Format,
    Positive,
    Section,
    section,
    setting,
)
from settings.targets import FINETUNE

PIPELINE = {"pipeline"}


@section
class Tuning(Section):
    """Model, conversations and stages."""

    USED_BY = FINETUNE

    model: str = setting(
        "",
        "Model to fine-tune: the name of a run, a folder in Hugging Face format, or OWNER/NAME "
        "(or OWNER/NAME@COMMIT) on the Hub.",
        example="tiny",
        resume=FROZEN,
        used_by=FINETUNE - PIPELINE,
    )
    eval_data: str = setting(
        "",
        "Held-out conversations for the validation loss of fine-tuning, given as for DATA. "
        "`make eval` asks their questions. Default: one in ten of DATA, at most 200.",
        example="held-out.jsonl",
        resume=TRACKED,
        used_by=FINETUNE | {"eval"},
    )
    stop_token: str = setting(
        "",
        "Special token that ends a reply, for a chat template that ends one with none. "
        "Default: the template's own.",
        example="<|im_end|>",
        resume=FROZEN,
        used_by=FINETUNE | {"chat", "eval"},
    )
    epochs: Count = setting(
        1,
        "Number of passes over DATA. MAX_STEPS can end fine-tuning earlier. Default: 1 to 5, for about "
        "100 steps. `make finetune` also chooses SEQ_LEN and BATCH_TOKENS for MODEL and DATA, up to those "
        "of its preset, and LEARNING_RATE for LORA_RANK, unless they are set.",
        maximum=1000,
        resume=TRACKED,
    )
    mid_data: str = setting(
        "HuggingFaceTB/smol-smoltalk,cais/mmlu:all:auxiliary_train,openai/gsm8k:main:train",
        "Data of mid-training, given as for DATA in `make finetune`. `exercises` stands for "
        "conversations that are made up.",
        used_by=PIPELINE,
    )
    sft_data: str = setting(
        "HuggingFaceTB/smoltalk:everyday-conversations:train,"
        "HuggingFaceTB/smoltalk:smol-constraints:train,allenai/ai2_arc:ARC-Easy:train,"
        "allenai/ai2_arc:ARC-Challenge:train,openai/gsm8k:main:train",
        "Data of supervised fine-tuning (SFT) in the pipeline, given as for MID_DATA.",
        used_by=PIPELINE,
    )


@section
class LoRA(Section):
    """Low-rank adapters."""

    USED_BY = FINETUNE
    RESUME = FROZEN

    lora_rank: int = setting(
        0,
        "Rank of the LoRA adapters, which are then the only trainable parameters. "
        "0 trains all parameters.",
        maximum=4096,
    )
    lora_alpha: Positive | None = setting(
        DERIVED,
        "Scale of the adapters: they are multiplied by LORA_ALPHA / LORA_RANK. "
        "Default: twice LORA_RANK.",
        needs="LORA_RANK!=0",
    )
    lora_dropout: float = setting(
        0.0,
        "Dropout probability of an adapter's inputs.",
        maximum=0.9,
        needs="LORA_RANK!=0",
        resume=TRACKED,
    )
    lora_targets: str = setting(
        "attention,mlp",
        "Layers that get an adapter: `attention`, `mlp` (in a mixture of experts, the shared one), "
        "`experts`, or the last parts of parameter names.",
        format=Format(
            r"[A-Za-z0-9_.]+(,[A-Za-z0-9_.]+)*", "names of layers with commas between them"
        ),
        needs="LORA_RANK!=0",
    )
    checkpoint_mode: str = setting(
        "full",
        "Checkpoints of a LoRA run: adapters and optimizer state, which resume exactly (`full`), "
        "or adapters alone in PEFT format, which restart the optimizer (`lite`).",
        choices=("full", "lite"),
        needs="LORA_RANK!=0",
        resume=FREE,
    )
