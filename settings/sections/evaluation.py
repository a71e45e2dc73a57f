"""The settings of evaluation: validation loss, and the CORE metric. A part of config.py's Config."""

import dataclasses

from settings.declare import TRACKED, setting
from settings.sections.pipeline import OfPipeline


@dataclasses.dataclass(frozen=True)
class OfEvaluation(OfPipeline):
    """What is measured of a model, when, and by how much text."""

    # ---- Evaluation
    eval_every: int = setting(
        1000,
        help="validation loss after so many steps; 0: only at the end",
        unit="steps",
        minimum=0,
    )
    eval_tokens: int = setting(
        65536,
        help="of validation text while training, a fixed subset. The end of a run "
        "takes all, up to 20 times as much",
        unit="tokens",
        minimum=256,
        resume=TRACKED,
    )
    eval_minutes: float = setting(
        10,
        help="an evaluation that takes longer is given up, that of the end after 20 "
        "times as long; the run goes on",
        unit="minutes",
        above=0,
    )
    core_every: int = setting(
        0,
        help="the CORE metric after so many steps and at the end, by EVAL_EXAMPLES of each "
        "task; 0: never while training. make eval has it at any time",
        unit="steps",
        minimum=0,
    )
    core_bundle: str = setting(
        "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip@sha256:"
        "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200",
        help="Tasks of CORE, which make data-report also looks for in the text: a folder, a .zip, or the "
        "address of one with its hash. none leaves CORE out; docs/evaluation.md",
        pattern=r"https?://[^#,\s]+@sha256:[0-9a-f]{64}|(?!https?:)/?[^\s/-][^\s]*",
        example="../eval_bundle",
    )
    eval_examples: int = setting(
        500,
        help="Questions to ask of each task of CORE, and of EVAL_DATA, at most; always the same "
        "ones. 0 asks all, as published figures do",
        minimum=0,
    )
    sample_tokens: int = setting(
        160,
        help="length of the text sample at the end, 0: none; and of make sample",
        unit="tokens",
        minimum=0,
    )
