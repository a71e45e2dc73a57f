"""Settings of text generation."""

from settings.declare import ANY, Count, Positive, Section, Tokens, section, setting
from settings.targets import GENERATE, TRAIN


@section
class Sampling(Section):
    """How text is sampled."""

    USED_BY = GENERATE

    prompt: str = setting(
        "",
        "Text to continue, or the message to answer. Default: standard input; in a terminal, "
        "`make sample` starts as the sample of the run does, and `make chat` asks. "
        "make does not read it from the environment, where shells have a PROMPT of their own.",
        format=ANY,
        example="Once upon a time",
    )
    sample_tokens: Tokens = setting(
        160,
        "Length of the text that `make sample` generates, and of the sample at the end of a run. "
        "0 generates none.",
        used_by=GENERATE | TRAIN,
    )
    samples: Count = setting(
        1, "Number of texts that `make sample` writes.", maximum=1024, used_by={"sample"}
    )
    sample_temperature: float = setting(
        0.8, "Sampling temperature. 0 always chooses the most likely token.", maximum=100
    )
    sample_top_k: int = setting(
        50,
        "Sample from this many of the most likely tokens. 0 samples from all of them.",
        needs="SAMPLE_TEMPERATURE!=0",
    )
    sample_top_p: Positive = setting(
        1,
        "Sample from the fewest most likely tokens whose probabilities sum to this.",
        needs="SAMPLE_TEMPERATURE!=0",
        maximum=1,
    )
