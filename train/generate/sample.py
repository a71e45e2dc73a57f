"""`make sample`: text from a run's checkpoint, or from INIT_FROM.

    PROMPT, or standard input, or the prompt of the run's own sample -> SAMPLES texts -> standard output

Standard output has the text alone; several follow each other, each under a line of its own. Remarks
go to standard error. Sample n of SEED=s equals the first one of SEED=s+n-1. `make chat` is the same
with `chat` as argument: the prompt is a message and the text the reply. At a terminal without
PROMPT, it asks for messages until Ctrl-D.

A prompt longer than SEQ_LEN is refused. A text that outgrows SEQ_LEN continues from its latest half.

Exit codes: 0 done, 64 a setting is wrong, 78 data or environment are bad, 130 Ctrl-C.
"""

import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

from settings import SettingsError
from settings.config import Config
from settings.resolve import find_explicit
from train.checkpoint.manifest import CheckpointError
from train.data import prepare
from train.data.sources.source import CorpusError
from train.distributed.world import join
from train.generate import chat_format
from train.generate.chat_format import Message
from train.generate.load_run import PROBLEMS, Trained, open_trained, settings_of_command
from train.model.generate import Choice, TextStream, generate

log = logging.getLogger(__name__)


def main(chat: bool = False) -> int:
    """Continue a text, or with `chat` reply to messages. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # DCP, in one process
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale has
    try:
        run(chat)
    except SettingsError as error:
        log.error("%s", error)
        return error.exit_code
    except (*PROBLEMS, CorpusError) as error:
        log.error("%s", error)
        return 78
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    except BrokenPipeError:  # the reader has enough; else Python would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run(chat: bool) -> None:
    """Open the model and write what is asked for."""
    config, remarks = settings_of_command()
    if not config.sample_tokens:
        refuse("SAMPLE_TOKENS=0: Leaves no room for text. Set for example SAMPLE_TOKENS=160.")
    for remark in remarks:
        log.info("%s", remark)
    prompt = read_prompt(config)
    if chat and prompt is None and not is_terminal():
        refuse(
            "PROMPT is not set and standard input is empty, so there is no message to reply to. "
            "Set for example PROMPT=Hello."
        )
    trained = open_trained(config, join(config, trains=False))
    refuse_nonfinite(trained)
    introduce(trained)
    trained.model.to(trained.model.dtype)  # once, and not for each token
    if chat and prompt is None:
        converse(trained)
    elif chat:
        reply(trained, [Message("user", prompt or "")])
    else:
        continue_prompt(trained, prompt)


def refuse(problem: str) -> None:
    raise SettingsError([problem])


def is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


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
    for name, weight in trained.model.named_parameters():
        if not weight.isfinite().all():
            raise CheckpointError(
                f"{trained.source}: {name} holds values that are infinite or NaN. Choose an earlier "
                "checkpoint with STEP (make checkpoints lists them)."
            )


def read_prompt(config: Config) -> str | None:
    """Return PROMPT, or the text on standard input unless that is a terminal, or None.

    A line end at the end is the shell's and is dropped. Raises SettingsError.
    """
    if "PROMPT" in find_explicit() or sys.stdin is None or is_terminal():
        return config.prompt or None
    log.info("the prompt is read from standard input")  # which the caller may have left open
    text = decode(sys.stdin.buffer.read())
    return text.removesuffix("\n").removesuffix("\r") or None


def decode(content: bytes) -> str:
    """Decode what was typed. Raises SettingsError."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        refuse(f"Standard input: its byte {error.start} is not UTF-8. Give text, or PROMPT.")
        raise


def continue_prompt(trained: Trained, prompt: str | None) -> None:
    """Write SAMPLES texts that begin with the prompt, by default that of the sample of the run."""
    config = trained.config
    if prompt is None and trained.facts:
        prompt = prepare.source_of(config, next(iter(config.mixture))).prompt
        log.info('PROMPT is not set, so the text starts with "%s"', prompt)
    prompt = prompt or ""
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
            messages.append(Message("user", decode(line).rstrip("\r\n")))
            forget_oldest(trained, messages)
            messages.append(Message("assistant", reply(trained, messages)))
        except SettingsError as error:
            log.info("(%s)", error.problems[0])
            if messages and messages[-1].role == "user":
                messages.pop()


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
    samples = trained.config.samples
    streams = [TextStream(trained.vocabulary, ids) for _ in range(samples)]
    texts = [""] * samples
    count = 0
    began = time.perf_counter()
    if samples == 1:
        put(before)
    for row in generate_rows(trained, ids, stops):
        for place, token in enumerate(row):
            if token is None:
                continue
            part = streams[place].add(token)
            texts[place] += part
            count += 1
            if samples == 1:
                put(part)
    took = time.perf_counter() - began
    rests = [one.rest() for one in streams]
    texts = [text + rest for text, rest in zip(texts, rests, strict=True)]
    if samples == 1:
        put(f"{rests[0]}\n")
    else:
        for number, text in enumerate(texts):
            seed = trained.config.seed + number
            put(f"==== {number + 1} of {samples}, SEED={seed}\n{before}{text}\n")
    log.info("\n%d tokens in %.2f s, %.1f tokens/s", count, took, count / took)
    return texts[0]


def generate_rows(
    trained: Trained, ids: list[int], stops: Sequence[int]
) -> Iterator[list[int | None]]:
    """Yield the next token of each of SAMPLES texts that continue these ids."""
    config = trained.config
    rows = range(config.samples)
    return generate(
        trained.model,
        [ids for _ in rows],
        config.sample_tokens,
        Choice(config.sample_temperature, config.sample_top_k, config.sample_top_p),
        [config.seed + row for row in rows],
        trained.vocabulary,
        stops,
    )


def put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(chat="chat" in sys.argv[1:]))
