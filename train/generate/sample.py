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

from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from settings.resolve import name_run
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
    prompt = read_prompt(config)
    if chat and not prompt and not is_terminal():
        refuse(
            "PROMPT is not set and standard input is empty, so there is no message to reply to. "
            "Set for example PROMPT=Hello."
        )
    trained = open_trained(config, world)
    refuse_nonfinite(trained)
    introduce(trained)
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


def introduce(trained: Trained) -> None:
    parameters = sum(weight.numel() for weight in trained.model.parameters())
    log.info(
        "%s: %s, %.2fM parameters, SEQ_LEN=%d, on %s",
        trained.source,
        f"step {trained.step}" if trained.facts else "imported weights",
        parameters / 1e6,
        trained.config.seq_len,
        trained.model.rotary.device,
    )


def refuse_nonfinite(trained: Trained) -> None:
    """Raise CheckpointError for the weights of a run that diverged: they make any token as likely."""
    config = trained.config
    named = name_run(RunPaths.of(config.runs_dir, config.run_name, ROOT).folder)
    for name, weight in trained.model.named_parameters():
        if not weight.isfinite().all():
            raise CheckpointError(
                f"{trained.source}: {name} holds values that are infinite or NaN. Choose an earlier "
                f"checkpoint with STEP. `make checkpoints {named}` lists them."
            )


def is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def read_prompt(config: Config) -> str:
    """Return PROMPT, or the text on standard input unless that is a terminal. Raises SettingsError.

    A line end at the end is the shell's and is dropped.
    """
    if config.prompt or sys.stdin is None or is_terminal():
        return config.prompt
    log.info("the prompt is read from standard input")  # which the caller may have left open
    text = decode(sys.stdin.buffer.read())
    return text.removesuffix("\n").removesuffix("\r")


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
    vocabulary = trained.vocabulary
    ids = [vocabulary.end_of_text, *vocabulary.encode(prompt)]
    check_length(config, ids)
    write(trained, ids, before=prompt)


def check_length(config: Config, ids: list[int]) -> None:
    """Refuse more tokens than the context holds. Say if what continues them may outgrow it."""
    if len(ids) > config.seq_len:
        refuse(
            f"PROMPT: {len(ids)} tokens, and the context is SEQ_LEN={config.seq_len}. "
            "Shorten the text."
        )
    if len(ids) + config.sample_tokens > config.seq_len + 1:
        log.info("Context: SEQ_LEN=%d tokens. Older text is dropped.", config.seq_len)


# ---------------------------------------------------------------------------------------------------
# Conversations
# ---------------------------------------------------------------------------------------------------


def reply(trained: Trained, messages: Sequence[Message]) -> str:
    """Write the assistant's next message, and return it."""
    ids = chat_format.render(trained.vocabulary, messages)
    check_length(trained.config, ids)
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


# ---------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------


def write(trained: Trained, ids: list[int], stops: Sequence[int] = (), before: str = "") -> str:
    """Write SAMPLES texts that continue these ids, and return the first.

    A single one is written as it comes.

    Args:
        before: text that each begins with.
    """
    config = trained.config
    samples = range(config.samples)
    output = console.WrappedText(sys.stdout)
    show = output.write if config.samples == 1 else str
    streams = [TextStream(trained.vocabulary, ids) for _ in samples]
    texts = [""] * config.samples
    count = 0
    began = time.perf_counter()
    show(before)
    try:
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
                    part = streams[number].add(token)
                    texts[number] += part
                    count += 1
                    show(part)
    finally:
        took = time.perf_counter() - began
        for number in samples:
            rest = streams[number].rest()
            texts[number] += rest
            show(f"{rest}\n")
    if config.samples > 1:
        for number, text in enumerate(texts):
            head = f"==== {number + 1} of {config.samples}, SEED={config.seed + number}"
            output.write(f"{head}\n{before}{text}\n")
    log.info("\n%d tokens in %.2f s, %.1f tokens/s", count, took, count / took)
    return texts[0]


if __name__ == "__main__":
    sys.exit(main(chat="chat" in sys.argv[1:]))
