"""`make chat`: talk to RUN_NAME or INIT_FROM, by the model's own class and chat template.

`make sample` is the same with `sample` as argument: a fine-tuned run continues a text, and other
models do so by train/generate/sample.py.

    messages -> ChatTemplate.prompt_ids -> transformers' generate -> ChatTemplate.read_reply -> history

PROMPT, or standard input that is not a terminal, is one message: standard output has the reply alone.
At a terminal it asks for messages, and remembers them until the context is full. Remarks go to
standard error. A run is opened by its export, which is made if it is missing (model_folder.py).

Exit codes are those of train/generate/command.py.
"""

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.chat_template import ChatTemplate, Message, Refused
from finetune.model_folder import Weights, open_weights, stored_settings
from settings import ExpectedError, SettingsError, explain_error
from settings.config import Config
from settings.resolve import find_explicit, set_target, show_path
from train import console
from train.checkpoint.manifest import CheckpointError
from train.distributed.world import World
from train.generate import sample
from train.generate.command import decode, read_prompt, refuse, run_command
from train.model.generate import COLDEST, REPLACED
from train.model.hf_import import ForeignError, check_types, some
from train.tune import forget_ranks

HELP = (
    "Type a message and press Enter. /reset starts over, /system TEXT starts over with a system "
    "message, Ctrl-C stops a reply, /exit or Ctrl-D exits."
)
UNLIMITED = 2**31  # context of a model that does not name one

log = logging.getLogger(__name__)


class Stream:
    """Writes text to standard output, to a terminal as its tokens come.

    transformers' generate calls `put` and `end`.

    Args:
        read: turns the tokens so far into text; whether they are all is its second argument.
    """

    def __init__(self, read: Callable[[list[int], bool], str]):
        self.read = read
        self.write = console.WrappedText(sys.stdout).write
        self.ids: list[int] = []
        self.shown = ""
        self.has_prompt = False

    def put(self, ids: Tensor) -> None:
        if self.has_prompt:  # which comes first
            self.ids += ids.flatten().tolist()
            text = self.read(self.ids, False)
            if sys.stdout.isatty() and not text.endswith(REPLACED):  # half a character
                self.show(text)
        self.has_prompt = True

    def show(self, text: str) -> None:
        if not text.startswith(self.shown):  # those were thoughts, and the reply begins
            self.write("\n")
            self.shown = ""
        self.write(text[len(self.shown) :])
        self.shown = text

    def end(self) -> None:
        self.show(self.read(self.ids, True))
        self.write("\n")


class Generator:
    """Generates with a model of transformers, which is in eval mode, and its chat template.

    Attributes:
        context: number of tokens that the model can see.
    """

    def __init__(self, model: Any, template: ChatTemplate):
        from transformers import GenerationConfig

        self.model = model
        self.template = template
        tokenizer = template.tokenizer
        tokenizer.pad_token = tokenizer.pad_token or template.stop_token
        model.generation_config = GenerationConfig()  # the folder's must not add to ours
        facts = model.config.get_text_config()
        self.context: int = getattr(facts, "max_position_embeddings", None) or UNLIMITED

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, **options: Any) -> Any:
        """Return what transformers' generate does for a batch of prompts, padded on the left.

        Args:
            prompts: ids.
            tokens: the most that are generated.
            options: of generate. Default: the likeliest tokens.
        """
        tokenizer = self.template.tokenizer
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        return self.model.generate(
            **batch.to(self.model.device),
            max_new_tokens=tokens,
            eos_token_id=self.template.stop_ids,
            pad_token_id=tokenizer.pad_token_id,
            **({"do_sample": False} | options),
        )

    def reply_ids(
        self, prompts: Sequence[Sequence[int]], tokens: int, **options: Any
    ) -> list[list[int]]:
        """Return the ids of the replies, each up to its stop token if it has one."""
        start = max(map(len, prompts))
        replies = []
        for row in self.generate(prompts, tokens, **options)[:, start:].tolist():
            stops = [place for place, token in enumerate(row) if token in self.template.stop_ids]
            replies.append(row[: stops[0] + 1] if stops else row)
        return replies


class Chat(Generator):
    """A model in its own class of transformers, to talk to."""

    def __init__(self, weights: Weights, config: Config, device: torch.device):
        """Read model and template. Raises TokenizerError, ForeignError, CheckpointError."""
        self.config = config
        self.name = show_path(weights.folder)
        stop_token = weights.stop_token or config.stop_token
        template = ChatTemplate(weights.folder, stop_token, self.name)
        dtype = config.dtype if "DTYPE" in find_explicit() else "auto"
        super().__init__(read_model(weights.folder, dtype).to(device), template)
        log.info(
            "%s: %s, %.2fM parameters, context %d, on %s",
            self.name,
            type(self.model).__name__,
            sum(weight.numel() for weight in self.model.parameters()) / 1e6,
            self.context,
            device,
        )

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Return the ids of a conversation up to where the reply begins. Raises ForeignError."""
        try:
            return self.template.prompt_ids(messages)
        except Refused as refused:
            raise ForeignError(f"{self.name}: The chat template refuses this: {refused}.") from None

    # ---- One text

    def sample(self, prompt: list[int], stream: Stream, seed: int) -> None:
        """Write a text as SAMPLE_* say. Raises SettingsError if the prompt fills the context."""
        config = self.config
        room = self.context - len(prompt)
        if room < 1:
            refuse(
                f"PROMPT: {len(prompt)} tokens, and the context of the model is {self.context}. "
                "Shorten the text."
            )
        options: dict[str, Any] = {"streamer": stream}
        if config.sample_temperature:
            options["do_sample"] = True
            options["temperature"] = max(config.sample_temperature, COLDEST)
            options["top_k"] = config.sample_top_k
            options["top_p"] = config.sample_top_p
        torch.manual_seed(seed)
        tokens = min(config.sample_tokens, room)
        began = time.perf_counter()
        (ids,) = self.reply_ids([prompt], tokens, **options)
        took = time.perf_counter() - began
        log.info("\n%d tokens in %.2f s, %.1f tokens/s", len(ids), took, len(ids) / took)
        if ids[-1] not in self.template.stop_ids:
            limit = "SAMPLE_TOKENS" if tokens < room else "the context of the model"
            log.info("(cut off: %s allows %d tokens)", limit, tokens)

    def read_reply(self, ids: list[int], is_all: bool) -> str:
        """Return what can be shown of a reply: nothing while it may still be thoughts."""
        text = self.template.decode(ids).lstrip()
        has_thoughts = text.startswith(("<", "[")) and self.template.thoughts_end not in text
        return "" if has_thoughts and not is_all else self.template.read_reply(ids)

    # ---- A conversation

    def converse(self) -> None:
        """Ask for messages and answer each, until /exit or Ctrl-D."""
        log.info(HELP)
        messages: list[Message] = []
        for line in read_lines():
            command, _, text = line.strip().partition(" ")
            if command == "/exit":
                return
            if command in ("/reset", "/system"):
                messages = [{"role": "system", "content": text.strip()}] if text.strip() else []
                log.info("(a new conversation)")
            elif command:
                messages = self.take_turn(messages, line)

    def take_turn(self, messages: list[Message], line: str) -> list[Message]:
        """Answer a message, and return the conversation with it and the reply.

        Ctrl-C stops the reply, which stays in the conversation as far as it got.
        """
        asked = [*messages, {"role": "user", "content": line}]
        stream = Stream(self.read_reply)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            asked = self.forget_oldest(asked)
            self.sample(self.prompt_ids(asked), stream, self.config.seed)
        except KeyboardInterrupt:
            log.info("\n(stopped)")
        except ExpectedError as error:
            log.info("(%s)", explain_error(error))
            return messages
        finally:
            signal.signal(signal.SIGINT, before)
        reply = self.template.read_reply(stream.ids)
        return [*asked, {"role": "assistant", "content": reply}]

    def forget_oldest(self, messages: list[Message]) -> list[Message]:
        """Return the conversation without its oldest questions and replies, if the context is full."""
        room = min(self.config.sample_tokens, self.context // 2)
        first = int(messages[0]["role"] == "system")
        remaining = messages
        while len(remaining) > first + 1 and len(self.prompt_ids(remaining)) > self.context - room:
            remaining = remaining[:first] + remaining[first + 2 :]
        if forgotten := len(messages) - len(remaining):
            log.info(
                "(the context of %d tokens is full: the oldest %d messages are forgotten)",
                self.context,
                forgotten,
            )
        return remaining


def read_model(folder: Path, dtype: str) -> Any:
    """Return the model of a folder in eval mode. No code of the model's runs.

    Raises ForeignError, and CheckpointError if a weight is not finite.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as their_logging

    their_logging.disable_progress_bar()
    check_types(folder)  # says also what a half download lacks
    try:
        opened: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many types
        words = " ".join(str(error).split())[:300]
        raise ForeignError(f"{folder}: transformers cannot open the model: {words}") from error
    model, report = opened
    if missing := sorted(report["missing_keys"]):
        raise ForeignError(f"{folder}: The files lack {some(missing)}. Get the folder again.")
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():  # of a run that diverged: any token would be as likely
            raise CheckpointError(
                f"{show_path(folder)}: {name} holds values that are infinite or NaN. Choose an "
                "earlier checkpoint with STEP (make checkpoints lists them)."
            )
    return model.eval()


def read_lines() -> Iterator[str]:
    """Yield the lines that are typed, after a prompt, until Ctrl-D."""
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            sys.stderr.write("\n")
            return
        try:
            yield decode(line).rstrip("\r\n")
        except SettingsError as error:
            log.info("(%s)", error)


def continue_text(config: Config, world: World) -> int:
    """Write SAMPLES texts that begin with the prompt. Returns the exit code."""
    if not stored_settings(config).get("MODEL"):
        return sample.run(config, world)
    prompt = read_prompt(config)
    chat = Chat(open_weights(config), config, world.device)
    tokenizer = chat.template.tokenizer
    text = (tokenizer.bos_token or "") + prompt or chat.template.stop_token
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def read(ids: list[int], is_all: bool) -> str:
        whole = tokenizer.decode(prompt_ids + ids, skip_special_tokens=True)
        return str(whole[len(prompt) :])

    for number in range(config.samples):
        stream = Stream(read)
        if config.samples > 1:
            stream.write(f"==== {number + 1} of {config.samples}, SEED={config.seed + number}\n")
        stream.write(prompt)
        chat.sample(prompt_ids, stream, config.seed + number)
    return 0


def talk(config: Config, world: World) -> int:
    """Answer PROMPT, or talk. Returns the exit code."""
    message = read_prompt(config)
    if not message and not sys.stdin.isatty():
        refuse(
            "PROMPT is not set and standard input is empty, so there is no message to reply to. "
            "Set for example PROMPT=Hello."
        )
    weights = open_weights(config)
    chat = Chat(weights, config, world.device)
    if weights.settings and not weights.is_tuned:
        log.info("%s was not fine-tuned: it has never seen a conversation.", config.run_name)
    if message:
        prompt = chat.prompt_ids([{"role": "user", "content": message}])
        chat.sample(prompt, Stream(chat.read_reply), config.seed)
    else:
        chat.converse()
    return 0


def main(argv: Sequence[str]) -> int:
    """Talk, or with `sample` continue a text. Returns the exit code."""
    forget_ranks()
    if "sample" in argv:
        return run_command(continue_text, sys.stderr)
    set_target("chat")
    return run_command(talk, sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
