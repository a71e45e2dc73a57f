"""`make sample`: text from a run's checkpoint, or from INIT_FROM, as it comes.

    PROMPT, or standard input, or what the run's sample began with -> tokens -> SAMPLES texts at once -> standard output

Standard output has the text alone, several one behind the other under a line each; what is said of it goes to standard
error. Sample n of SEED=s is the first of SEED=s+n-1. `make chat` is the same with `chat` as argument: the prompt is a
message and the text the reply; at a terminal without PROMPT, messages are asked for until Ctrl-D.

A prompt longer than SEQ_LEN is refused. A text that outgrows it continues, with its latest half as context (generate.py).

Exit codes: 0 done, 64 a setting is bad, 78 data or environment are bad, 130 Ctrl-C.
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
from train.model.generate import Choice, Shown, cache_for, generate

log = logging.getLogger(__name__)


def main(chat: bool = False) -> int:
    """Continue a text, or with `chat` reply to messages. Return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # DCP, in one process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            encoding="utf-8"
        )  # the model writes any character, whatever the locale has
    try:
        c, remarks = settings_of_command()
        if not c.sample_tokens:
            raise SettingsError(
                ["SAMPLE_TOKENS=0 leaves no room for any text. Set for example SAMPLE_TOKENS=160."]
            )
        for remark in remarks:
            log.info("%s", remark)
        text = asked(c)
        if chat and text is None and not at_terminal():
            raise SettingsError(
                [
                    "PROMPT is not set and standard input is empty, so there is no message to reply to. "
                    "Set for example PROMPT=Hello."
                ]
            )
        opened = open_trained(c, join(c, trains=False))
        refuse_no_numbers(opened)
        log.info(
            "%s: %s, %.2fM parameters, SEQ_LEN=%d, on %s",
            opened.source,
            f"step {opened.step}" if opened.facts else "weights of others",
            sum(w.numel() for w in opened.model.parameters()) / 1e6,
            opened.config.seq_len,
            opened.model.rotary.device,
        )
        if chat and text is None:
            converse(opened)
        elif chat:
            reply(opened, [Message("user", text or "")])
        else:
            continued(opened, first_words(opened) if text is None else text)
        return 0
    except SettingsError as error:
        log.error("%s", error)
        return 64
    except (*PROBLEMS, CorpusError) as error:
        log.error("%s", error)
        return 78
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    except BrokenPipeError:  # who read has enough; without this Python would say so at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def refuse_no_numbers(opened: Trained) -> None:
    """Raises CheckpointError for weights of a run that diverged: any token would do for them."""
    for name, weight in opened.model.named_parameters():
        if not weight.isfinite().all():
            raise CheckpointError(
                f"{opened.source}: {name} holds values that are infinite or no numbers; take an "
                "earlier checkpoint (STEP; make checkpoints lists them)"
            )


def asked(c: Config) -> str | None:
    """The prompt: PROMPT, or what is on standard input where that is no terminal; None where there is neither. A line
    end at its end is the shell's and no part of it. Raises SettingsError."""
    if "PROMPT" in find_explicit() or sys.stdin is None or at_terminal():
        return c.prompt or None
    log.info(
        "the prompt is read from standard input"
    )  # which a program that calls this may have left open
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise SettingsError(
            [f"standard input: its byte {error.start} is not UTF-8; give text, or PROMPT"]
        ) from None
    return text.removesuffix("\n").removesuffix("\r") or None


def first_words(opened: Trained) -> str:
    """What a text begins with where nothing was asked: as the sample at the end of the run does."""
    if not opened.facts:
        return ""
    prompt = prepare.source_of(opened.config, next(iter(opened.config.mixture))).prompt
    log.info('PROMPT is not set, so the text starts with "%s"', prompt)
    return prompt


def continued(opened: Trained, prompt: str) -> None:
    """Write SAMPLES texts that begin with the prompt. One is written as it comes."""
    c, v = opened.config, opened.vocabulary
    ids = [v.end_of_text, *v.encode(prompt)]
    check_length(c, ids)
    if c.samples == 1:
        put(prompt)
        write(opened, ids)
        put("\n")
        return
    written(opened, ids, prompt=prompt)


def check_length(c: Config, ids: list[int]) -> None:
    """Refuse more tokens than the context holds. Say if what continues them may outgrow it."""
    if len(ids) > c.seq_len:
        raise SettingsError(
            [
                f"PROMPT: {len(ids)} tokens, and the context is SEQ_LEN={c.seq_len}. Shorten the text."
            ]
        )
    if len(ids) + c.sample_tokens > c.seq_len + 1:
        log.info(
            "Context: SEQ_LEN=%d tokens. Older text is dropped.",
            c.seq_len,
        )


def reply(opened: Trained, messages: Sequence[Message]) -> str:
    """Write the assistant's next message, and return it."""
    c, v = opened.config, opened.vocabulary
    ids = chat_format.render(v, messages)
    check_length(c, ids)
    stop = chat_format.end_of_message(v)
    if c.samples > 1:
        return written(opened, ids, [stop])[0]
    text = write(opened, ids, [stop])
    put("\n")
    return text


def converse(opened: Trained) -> None:
    """Ask for messages and answer each, until Ctrl-D. What no longer fits into SEQ_LEN, with room for an answer of half
    of it at most, is forgotten, and said to be."""
    c, v, messages = opened.config, opened.vocabulary, list[Message]()
    most = c.seq_len - min(c.sample_tokens, c.seq_len // 2)
    chat_format.format_of(v)  # before anybody writes
    log.info("a message a line; Ctrl-D ends")
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
            messages.append(Message("user", line.decode().rstrip("\r\n")))
        except UnicodeDecodeError as error:
            log.info("(byte %d of it is not UTF-8; write it again)", error.start)
            continue
        before = len(messages)
        while len(messages) > 1 and len(chat_format.render(v, messages)) > most:
            del messages[:2]  # a question and its answer
        if len(messages) < before:
            log.info(
                "(the conversation has outgrown SEQ_LEN=%d: its first %d messages are forgotten)",
                c.seq_len,
                before - len(messages),
            )
        try:
            messages.append(Message("assistant", reply(opened, messages)))
        except SettingsError as error:
            messages.pop()
            log.info("(%s)", error.problems[0])


def write(opened: Trained, ids: list[int], stops: Sequence[int] = ()) -> str:
    """Write one text as it comes, without what it continues, and return it."""
    shown, text, began, count = Shown(opened.vocabulary, ids), "", time.perf_counter(), 0
    for (token,) in tokens(opened, ids, 1, stops):
        if token is not None:
            text += put(shown.add(token))
            count += 1
    text += put(shown.rest())
    say_pace(count, began)
    return text


def written(
    opened: Trained, ids: list[int], stops: Sequence[int] = (), prompt: str = ""
) -> list[str]:
    """Write SAMPLES texts, each after the prompt and under a line, and return them without the prompt."""
    c = opened.config
    began = time.perf_counter()
    rows = list(zip(*tokens(opened, ids, c.samples, stops), strict=True))
    texts = []
    for number, row in enumerate(rows):
        shown = Shown(opened.vocabulary, ids)
        text = "".join(shown.add(token) for token in row if token is not None) + shown.rest()
        put(f"==== {number + 1} of {c.samples}, SEED={c.seed + number}\n{prompt}{text}\n")
        texts.append(text)
    say_pace(sum(token is not None for row in rows for token in row), began)
    return texts


def tokens(
    opened: Trained, ids: list[int], rows: int, stops: Sequence[int]
) -> Iterator[list[int | None]]:
    """The next token of each of so many texts that go on from these ids."""
    c = opened.config
    texts = [ids] * rows
    return generate(
        cache_for(opened.model, texts, c.sample_tokens),
        texts,
        c.sample_tokens,
        Choice(c.sample_temperature, c.sample_top_k, c.sample_top_p),
        [c.seed + i for i in range(rows)],
        opened.vocabulary,
        c.seq_len,
        stops,
    )


def say_pace(count: int, began: float) -> None:
    took = time.perf_counter() - began
    sys.stdout.flush()
    log.info("\n%d tokens in %.2f s, %.1f tokens/s", count, took, count / took)


def put(text: str) -> str:
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


if __name__ == "__main__":
    sys.exit(main(chat="chat" in sys.argv[1:]))
