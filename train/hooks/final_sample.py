"""SAMPLE_TOKENS: at its end a model writes a few short texts."""

import re
import textwrap
from typing import TYPE_CHECKING, cast

from record.durable import make_printable, write_whole
from train.console import measure
from train.data import prepare
from train.distributed.parallel import is_fsdp, unwrap
from train.hooks.hook import Hook
from train.model.generate import continue_text
from train.model.model import Transformer

if TYPE_CHECKING:
    from train.job import Job

TEXTS = 3
TEMPERATURE = 0.6
SHOWN_LINES = 8  # of each text, on a terminal; sample.txt has all
SHOWN_COLUMNS = 76  # of a line, beside its indentation


class FinalSample(Hook):
    """Writes sample.txt. Fine-tuning generates something else: finetune/final_exchange.py."""

    activity = "sampling"

    def at_end(self, job: "Job") -> None:
        config = job.config
        # If each process has a part of the weights, all generate, and all the same.
        if not config.sample_tokens or not (job.world.is_first or is_fsdp(job.model)):
            return
        limit_s = config.start_timeout_s + config.sample_tokens
        with job.activity(self.activity, limit_s, "START_TIMEOUT_S", phase="sampling"):
            self.generate(job)

    def generate(self, job: "Job") -> None:
        """Generate, on the processes that have the weights, and print it on the first."""
        try:
            texts = write_texts(job)
        except Exception as error:  # the run is complete without it
            if is_fsdp(job.model):
                raise
            job.recorder.say(f"no sample: {type(error).__name__}: {error}")
            return
        if not job.world.is_first:
            return
        whole = "\n\n".join(texts)
        shown = "\n\n".join(map(excerpt, texts))
        job.recorder.say(
            f"sample, step {job.step}:\n{textwrap.indent(whole, '    ')}",
            f"\nSamples (full text in sample.txt):\n{textwrap.indent(shown, '    ')}",
        )
        try:
            write_whole(job.paths.sample, f"{whole}\n".encode())
        except OSError as error:
            job.recorder.say(f"{job.paths.sample}: cannot be written ({error.strerror})")


def write_texts(job: "Job") -> list[str]:
    """Return the texts, in whole lines where they have any."""
    config = job.config
    model = cast(Transformer, unwrap(job.model))
    prompt = prepare.source_of(config, job.loader.mixture.names[0]).prompt
    length = max(1, config.sample_tokens // TEXTS)
    texts = []
    for number in range(TEXTS):
        seed = config.seed + number
        text = continue_text(model, job.vocabulary, prompt, length, seed, TEMPERATURE)
        texts.append(text.rpartition("\n")[0].rstrip() or text)
    return texts


def excerpt(text: str) -> str:
    """Return the first lines of a text, each cut to what a terminal shows in a line.

    There are no blank lines around it, and at most one between two others.
    """
    lines = re.sub(r"\n\s*\n", "\n\n", f"\n{text}\n").strip("\n").split("\n")
    shown = []
    for line in lines[:SHOWN_LINES]:
        cut = make_printable(line.expandtabs())
        if measure(cut) > SHOWN_COLUMNS:
            while measure(cut) > SHOWN_COLUMNS - 3:
                cut = cut[:-1]
            cut += "..."
        shown.append(cut)
    return "\n".join(shown)
