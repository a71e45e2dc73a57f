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
from train.model.hf_import import ForeignError, some, weight_files

HELP = (
    "Type a message and press Enter. /reset starts over, /system TEXT starts over with a system "
    "message, Ctrl-C stops a reply, /exit or Ctrl-D exits."
)
UNLIMITED = 2**31  # context of a model that does not name one
Read = Callable[[list[int]], str]
Output = Callable[[str], None]

log = logging.getLogger(__name__)


class Stream:
    """Writes text as tokens come. transformers' generate calls `put` and `end`.

    Args:
        read: turns the tokens so far into the text that can be shown.
        read_all: turns all tokens into text.
        write: gets the parts of the text.
    """

    def __init__(self, read: Read, read_all: Read, write: Output):
        self.read = read
        self.read_all = read_all
        self.write = write
        self.ids: list[int] = []
        self.shown = ""
        self.has_prompt = False

    def put(self, ids: Tensor) -> None:
        if not self.has_prompt:  # which comes first
            self.has_prompt = True
            return
        self.ids += ids.flatten().tolist()
        self.show(self.read(self.ids))

    def show(self, text: str) -> None:
        if text.startswith(self.shown) and not text.endswith(REPLACED):  # half a character
            self.write(text[len(self.shown) :])
            self.shown = text

    def end(self) -> None:
        """Write what was held back, and end the line."""
        self.show(self.read_all(self.ids))
        self.write("\n")


class Chat:
    """A model in its own class of transformers, with its chat template.

    Attributes:
        context: number of tokens that the model can see.
    """

    def __init__(self, weights: Weights, config: Config, device: torch.device):
        """Read both. Raises TokenizerError, ForeignError, CheckpointError."""
        from transformers import GenerationConfig

        self.config = config
        self.name = show_path(weights.folder)
        stop_token = weights.stop_token or config.stop_token
        self.template = ChatTemplate(weights.folder, stop_token, self.name)
        has_dtype = "DTYPE" in find_explicit()
        self.model = read_model(weights.folder, config.dtype if has_dtype else "auto").to(device)
        facts = self.model.config.get_text_config()
        self.context = getattr(facts, "max_position_embeddings", None) or UNLIMITED
        self.model.generation_config = GenerationConfig()  # the folder's must not add to ours

    def describe(self) -> str:
        size = sum(weight.numel() for weight in self.model.parameters())
        return (
            f"{self.name}: {type(self.model).__name__}, {size / 1e6:.2f}M parameters, context "
            f"{self.context}, on {self.model.device}"
        )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, **options: Any) -> Any:
        """Return what transformers' generate does for a batch of prompts, padded on the left.

        Args:
            prompts: ids.
            tokens: the most that are generated.
            options: of generate. Default: the likeliest tokens.
        """
        pad = self.template.stop_ids[0]
        longest = max(map(len, prompts))
        blanks = [longest - len(prompt) for prompt in prompts]
        ids = [[pad] * blank + [*prompt] for blank, prompt in zip(blanks, prompts, strict=True)]
        seen = [[0] * blank + [1] * (longest - blank) for blank in blanks]
        device = self.model.device
        return self.model.generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(seen, device=device),
            max_new_tokens=tokens,
            eos_token_id=self.template.stop_ids,
            pad_token_id=pad,
            **({"do_sample": False} | options),
        )

    def reply_ids(
        self, prompts: Sequence[Sequence[int]], tokens: int, **options: Any
    ) -> list[list[int]]:
        """Return the ids of the replies, each up to its stop token if it has one."""
        start = max(map(len, prompts))
        rows = self.generate(prompts, tokens, **options)[:, start:].tolist()
        stops = self.template.stop_ids
        ends = [
            next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
            for row in rows
        ]
        return [row[:end] for row, end in zip(rows, ends, strict=True)]

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Return the ids of a conversation up to where the reply begins. Raises ForeignError."""
        try:
            return self.template.prompt_ids(messages)
        except Refused as refused:
            raise ForeignError(f"{self.name}: The chat template refuses this: {refused}.") from None

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text to continue, after the token that begins each text."""
        tokenizer = self.template.tokenizer
        ids: list[int] = tokenizer(text)["input_ids"]
        begin = tokenizer.bos_token_id
        if begin is None and not ids:
            begin = self.template.stop_ids[0]
        if begin is None or ids[:1] == [begin]:
            return ids
        return [begin, *ids]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self.template.tokenizer.decode(ids, skip_special_tokens=True))

    # ---- One reply

    def sample(self, prompt: list[int], stream: Stream, seed: int) -> list[int]:
        """Generate a text as SAMPLE_* say, and return its ids. Raises SettingsError."""
        config = self.config
        room = self.context - len(prompt)
        if room < 1:
            refuse(
                f"PROMPT: {len(prompt)} tokens, and the context of the model is {self.context}. "
                "Shorten the text."
            )
        options: dict[str, Any] = {"do_sample": config.sample_temperature > 0}
        if options["do_sample"]:
            options["temperature"] = max(config.sample_temperature, COLDEST)
            options["top_k"] = config.sample_top_k
            options["top_p"] = config.sample_top_p
        torch.manual_seed(seed)
        tokens = min(config.sample_tokens, room)
        began = time.perf_counter()
        (ids,) = self.reply_ids([prompt], tokens, streamer=stream, **options)
        took = time.perf_counter() - began
        log.info("\n%d tokens in %.2f s, %.1f tokens/s", len(ids), took, len(ids) / took)
        if ids[-1] not in self.template.stop_ids:
            limit = "SAMPLE_TOKENS" if tokens < room else "the context of the model"
            log.info("(cut off: %s allows %d tokens)", limit, tokens)
        return ids

    def read_so_far(self, ids: list[int]) -> str:
        """Return what can be shown of a reply: nothing while it may still be thoughts."""
        text = self.template.decode(ids).lstrip()
        if text.startswith(("<", "[")) and self.template.thoughts_end not in text:
            return ""
        return self.template.read_reply(ids)

    def new_stream(self) -> Stream:
        """Return what writes a reply to standard output."""
        write = console.WrappedText(sys.stdout).write
        return Stream(self.read_so_far, self.template.read_reply, write)

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
        stream = self.new_stream()
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
        kept = messages
        while len(kept) > first + 1 and len(self.prompt_ids(kept)) > self.context - room:
            kept = kept[:first] + kept[first + 2 :]
        if forgotten := len(messages) - len(kept):
            log.info(
                "(the context of %d tokens is full: the oldest %d messages are forgotten)",
                self.context,
                forgotten,
            )
        return kept


def read_model(folder: Path, dtype: str) -> Any:
    """Return the model of a folder in eval mode. No code of the model's runs.

    Raises ForeignError, and CheckpointError if a weight is not finite.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as their_logging

    their_logging.disable_progress_bar()
    weight_files(folder)  # says what a half download lacks
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
    log.info("%s", chat.describe())
    prompt_ids = chat.text_ids(prompt)
    before = chat.decode(prompt_ids)
    output = console.WrappedText(sys.stdout).write

    def read(ids: list[int]) -> str:
        return chat.decode(prompt_ids + ids)[len(before) :]  # a first blank may depend on it

    for number in range(config.samples):
        seed = config.seed + number
        if config.samples > 1:
            output(f"==== {number + 1} of {config.samples}, SEED={seed}\n")
        output(prompt)
        chat.sample(prompt_ids, Stream(read, read, output), seed)
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
    log.info("%s", chat.describe())
    if weights.settings and not weights.is_tuned:
        log.info("%s was not fine-tuned: it has never seen a conversation.", config.run_name)
    if message:
        prompt = chat.prompt_ids([{"role": "user", "content": message}])
        chat.sample(prompt, chat.new_stream(), config.seed)
    else:
        chat.converse()
    return 0


def main(argv: Sequence[str]) -> int:
    """Talk, or with `sample` continue a text. Returns the exit code."""
    if "sample" in argv:
        return run_command(continue_text, sys.stderr)
    set_target("chat")
    return run_command(talk, sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
