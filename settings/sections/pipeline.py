"""The settings of a pipeline: base, mid-training, SFT, chat evaluation. A part of config.py's Config."""

import dataclasses

from settings.declare import setting
from settings.sections.finetuning import OfFinetuning


@dataclasses.dataclass(frozen=True)
class OfPipeline(OfFinetuning):
    """What make pipeline trains on behind the base, and the questions that a chat is measured with."""

    # ---- Pipeline
    mid_data: str = setting(
        "",
        help="of mid-training: conversations and questions, as DATA takes them, several with "
        "commas between, SOURCE*2 for one that counts twice; exercises: questions that are made up "
        "on the spot, to try it out",
        example="exercises",
    )
    mid_epochs: int = setting(1, help="of mid-training", minimum=1, maximum=1000)
    mid_learning_rate: float | None = setting(
        None,
        help="of mid-training, at its peak. Default: a tenth of LEARNING_RATE",
        above=0,
        maximum=10,
        example="2e-4",
    )
    mid_batch_tokens: int | None = setting(
        None,
        help="of a step of mid-training. Default: BATCH_TOKENS",
        unit="tokens",
        minimum=2,
        example="65536",
    )
    sft_data: str = setting("", help="of SFT, given as MID_DATA is", example="exercises")
    sft_epochs: int = setting(1, help="of SFT", minimum=1, maximum=1000)
    sft_learning_rate: float | None = setting(
        None,
        help="of SFT, at its peak. Default: a thirtieth of LEARNING_RATE",
        above=0,
        maximum=10,
        example="6e-5",
    )
    sft_batch_tokens: int | None = setting(
        None,
        help="of a step of SFT. Default: BATCH_TOKENS",
        unit="tokens",
        minimum=2,
        example="65536",
    )
    chat_eval_data: str = setting(
        "",
        help="questions with answers, given as MID_DATA is, with which CHAT=1 make eval "
        "measures a model; a pipeline fine-tunes on none of them",
        example="held_out.jsonl",
    )
    chat_eval_questions: int = setting(
        500,
        help="asked of CHAT_EVAL_DATA at most, always the same ones, by a hash of "
        "what they say; 0: all",
        minimum=0,
    )
