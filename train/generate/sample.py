"""`make sample`: text from a run's checkpoint, or from INIT_FROM.

    PROMPT, or standard input, or the prompt of the run's own sample -> SAMPLES texts -> standard output

Standard output has the text alone; several follow each other, each under a line of its own. Remarks
go to standard error. Sample n of SEED=s equals the first one of SEED=s+n-1. `make chat` is the same
with `chat` as argument: the prompt is a message and the text the reply. At a terminal without
PROMPT, it asks for messages until Ctrl-D.

A prompt longer than SEQ_LEN is refused. A text that outgrows SEQ_LEN continues from its latest half.

Exit codes are those of command.py.
"""

import functools
import io
import logging
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from settings import SettingsError
from settings.config import Config
from train import console
from train.checkpoint.manifest import CheckpointError
from train.data import prepare
from train.distributed.world import World
from train.generate import chat_format
from train.generate.chat_format import Message
from train.generate.command import run_command
from train.generate.load_run import Trained, open_trained
from train.model.generate import Choice, TextStream, generate

log = logging.getLogger(__name__)


def main(chat: bool = False) -> int:
    """Continue a text, or with `chat` reply to messages. Returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale has
    return run_command(functools.partial(run, chat), sys.stderr)


def run(chat: bool, config: Config, world: World) -> int:
    """Open the model and write what is asked for."""
    if not config.sample_tokens:
        refuse("SAMPLE_TOKENS=0: Leaves no room for text. Set for example SAMPLE_TOKENS=160.")
    prompt = config.prompt
    if not prompt and not sys.stdin.isatty():
        log.info("the prompt is read from standard input")  # which the caller may have left open
        # A line end at the end is the shell's.
        prompt = decode(sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")
        if chat and not prompt:
            refuse(
                "PROMPT is not set and standard input is empty, so there is no message to reply to. "
                "Set for example PROMPT=Hello."
            )
    trained = open_trained(config, world)
    for name, weight in trained.model.named_parameters():
        if not weight.isfinite().all():  # of a run that diverged: any token would be as likely
            raise CheckpointError(
                f"{trained.source}: {name} holds values that are infinite or NaN. Choose an earlier "
                "checkpoint with STEP (make checkpoints lists them)."
            )
    log.info(
        "%s: %s, %.2fM parameters, SEQ_LEN=%d, on %s",
        trained.source,
        f"step {trained.step}" if trained.facts else "imported weights",
        sum(weight.numel() for weight in trained.model.parameters()) / 1e6,
        trained.config.seq_len,
        world.device,
    )
    trained.model.to(trained.model.dtype)  # once, and not for each token
    if not chat:
        continue_prompt(trained, prompt)
    elif prompt:
        reply(trained, [Message("user", prompt)])
    else:
        converse(trained)
    return 0


def refuse(problem: str) -> NoReturn:
    raise SettingsError([problem])


def decode(content: bytes) -> str:
    """Decode what was typed. Raises SettingsError."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        refuse(f"Standard input: its byte {error.start} is not UTF-8. Give text, or PROMPT.")


def continue_prompt(trained: Trained, prompt: str) -> None:
    """Write SAMPLES texts that begin with the prompt, by default that of the sample of the run."""
    config = trained.config
    if not prompt and trained.facts:
        prompt = prepare.source_of(config, next(iter(config.mixture))).prompt
        log.info('PROMPT is not set, so the text starts with "%s"', prompt)
    ids = [trained.vocabulary.end_of_text, *trained.vocabulary.encode(prompt)]
    write(trained, ids, before=prompt)


def reply(trained: Trained, messages: Sequence[Message]) -> str:
    """Write the assistant's next message, and return it."""
    ids = chat_format.render(trained.vocabulary, messages)
    return write(trained, ids, [chat_format.end_of_message(trained.vocabulary)])


def converse(trained: Trained) -> None:
    """Ask for messages and answer each, until Ctrl-D."""
    chat_format.format_of(trained.vocabulary)  # raises before anybody writes
    log.info("Type a message and press Enter. Ctrl-D exits.")
    messages: list[Message] = []
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            sys.stderr.write("\n")
            return
        if not line.strip():
            continue
        try:
            asked = [*messages, Message("user", decode(line).rstrip("\r\n"))]
            forget_oldest(trained, asked)
            messages = [*asked, Message("assistant", reply(trained, asked))]
        except SettingsError as error:
            log.info("(%s)", error.problems[0])


def forget_oldest(trained: Trained, messages: list[Message]) -> None:
    """Drop messages until SEQ_LEN has room for an answer, of half of it at most."""
    config = trained.config
    most = config.seq_len - min(config.sample_tokens, config.seq_len // 2)
    before = len(messages)
    while len(messages) > 1 and len(chat_format.render(trained.vocabulary, messages)) > most:
        del messages[:2]  # a question and its answer
    if len(messages) < before:
        log.info(
            "(the conversation has outgrown SEQ_LEN=%d: its first %d messages are forgotten)",
            config.seq_len,
            before - len(messages),
        )


def write(trained: Trained, ids: list[int], stops: Sequence[int] = (), before: str = "") -> str:
    """Write SAMPLES texts that continue these ids, and return the first.

    A single one is written as it comes. Raises SettingsError if SEQ_LEN has no room for the ids.

    Args:
        before: text that each begins with.
    """
    config = trained.config
    if len(ids) > config.seq_len:
        refuse(
            f"PROMPT: {len(ids)} tokens, and the context is SEQ_LEN={config.seq_len}. "
            "Shorten the text."
        )
    if len(ids) + config.sample_tokens > config.seq_len + 1:
        log.info("Context: SEQ_LEN=%d tokens. Older text is dropped.", config.seq_len)
    samples = range(config.samples)
    output = console.WrappedText(sys.stdout)
    is_single = config.samples == 1
    streams = [TextStream(trained.vocabulary, ids) for _ in samples]
    texts = [""] * config.samples
    count = 0

    def add(number: int, part: str) -> None:
        texts[number] += part
        if is_single:
            output.write(part)

    began = time.perf_counter()
    try:
        if is_single:
            output.write(before)
        rows = generate(
            trained.model,
            [ids for _ in samples],
            config.sample_tokens,
            Choice(config.sample_temperature, config.sample_top_k, config.sample_top_p),
            [config.seed + number for number in samples],
            trained.vocabulary,
            stops,
        )
        for row in rows:
            for number, token in enumerate(row):
                if token is not None:
                    add(number, streams[number].add(token))
                    count += 1
    finally:
        for number in samples:
            add(number, streams[number].rest())
        if is_single:
            output.write("\n")
    took = time.perf_counter() - began
    if not is_single:
        for number, text in enumerate(texts):
            head = f"==== {number + 1} of {config.samples}, SEED={config.seed + number}"
            output.write(f"{head}\n{before}{text}\n")
    log.info("\n%d tokens in %.2f s, %.1f tokens/s", count, took, count / took)
    return texts[0]


if __name__ == "__main__":
    sys.exit(main(chat="chat" in sys.argv[1:]))
