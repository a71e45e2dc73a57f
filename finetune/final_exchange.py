"""At its end the trained model answers a question: of a held-out conversation, if there is one."""

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from finetune.chat import Generator
from finetune.hf_model import Tuned
from finetune.prepare_data import Data
from finetune.preview import clean
from train.distributed.parallel import is_fsdp, unwrap
from train.hooks.final_sample import FinalSample

if TYPE_CHECKING:
    from train.job import Job


class FinalExchange(FinalSample):
    """Prints a question of the data, the model's reply and the one in the data."""

    activity = "asking a question"

    def __init__(self, data: Data):
        self.data = data

    def generate(self, job: "Job") -> None:
        try:
            exchange = self.ask(job)
        except (RuntimeError, ValueError) as error:  # the run is complete without it
            exchange = f"No question was asked: {type(error).__name__}: {error}"
        job.recorder.say(exchange, f"\n{exchange}")

    def ask(self, job: "Job") -> str:
        """Return the exchange as text."""
        data = self.data
        examples, number, kind = data.examples, int(data.train[0]), "trained on"
        if len(data.held_out):
            examples, number, kind = data.evaluation, int(data.held_out[0]), "held out"
        ids, scored = examples.example(number)
        begin = int(np.flatnonzero(scored)[0])
        model = unwrap(job.model)
        assert isinstance(model, Tuned)
        # Training may use an attention that has no cache. Nothing is trained after this.
        model.lm.set_attn_implementation("sdpa" if model.lm._supports_sdpa else "eager")
        generator = Generator(model.lm, data.template)
        tokens = min(job.config.sample_tokens, generator.context - begin)
        model.eval()
        if is_fsdp(model):
            model.unshard()  # type: ignore[operator]  # what is outside of the blocks, which do it by themselves
        with model.autocast(job.world.device):
            (reply,) = generator.reply_ids([ids[:begin].tolist()], tokens)
        template = data.template
        parts = {
            f"The question of {examples.place(number)} ({kind}):": template.special.sub(
                "", template.decode(ids[:begin].tolist())
            ),
            f"The reply after step {job.step}:": template.read_reply(reply),
            "The reply in the data:": template.read_reply(ids[begin:].tolist()),
        }
        lines = []
        for title, text in parts.items():
            lines += [title, textwrap.indent(clean(text.strip()), "    ")]
        return "\n".join(lines)
