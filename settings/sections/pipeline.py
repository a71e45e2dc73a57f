"""The settings of a pipeline: base, mid-training, SFT. A part of config.py's Config."""

import dataclasses

from settings.declare import setting
from settings.sections.finetuning import OfFinetuning


@dataclasses.dataclass(frozen=True)
class OfPipeline(OfFinetuning):
    """What make pipeline trains on after the base."""

    # ---- Pipeline
    mid_data: str = setting(
        "",
        help="of mid-training: conversations and questions, as DATA takes them, several with "
        "commas between, SOURCE*2 for one that counts twice; exercises: questions that are made up "
        "on the spot, to try it out",
        example="exercises",
    )
    sft_data: str = setting("", help="of SFT, given as MID_DATA is", example="exercises")
