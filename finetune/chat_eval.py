"""Ask a model the questions of EVAL_DATA: `make eval` of a fine-tuned run, or of INIT_FROM.

    conversations -> their last reply is the right one -> prompts by the chat template
        with options     the letter that the model finds likeliest after the prompt
        without          what the model writes, always the likeliest token
    -> shared over the processes -> counts -> runs/RUN_NAME/eval/chat_step_N.json

A written answer is right if it equals the right one, apart from case, blanks and a full stop. Thoughts
do not count. Which EVAL_EXAMPLES questions are asked depends on SEED and on what they say.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from finetune import exercises, reading, several, subset
from finetune.chat import Chat
from finetune.chat_template import Message
from finetune.model_folder import Weights
from finetune.reading import Tally, conversations, pinned_files
from finetune.store import hash_of
from record.durable import write_whole
from record.metrics import replace_nonfinite
from record.provenance import provenance
from record.run_paths import RunPaths, name_checkpoint
from settings import ROOT, ExpectedError
from settings.config import Config
from settings.resolve import show_path
from train.data.data_paths import data_dir
from train.data.prepare import one_at_a_time
from train.data.sources.source import CorpusError
from train.distributed.world import World, broadcast_object, raise_on_all_ranks, sum_over_ranks
from train.evaluate.core.metric import wilson

SPARE_TOKENS = 8  # that a written answer may have beyond twice the right one's

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question and its right answer.

    Attributes:
        messages: up to the reply.
        answer: the right reply.
        options: the replies to choose from, `A. text` each; () if the answer is to be written.
    """

    messages: list[Message]
    answer: str
    options: tuple[str, ...] = ()


@dataclasses.dataclass
class Counts:
    """What became of questions of one kind, of which some may be too long to be asked.

    Attributes:
        chance: how many guessing gets right, on average.
        stopped: replies that ended with a stop token.
    """

    right: float = 0
    asked: float = 0
    too_long: float = 0
    chance: float = 0
    stopped: float = 0


def measure(config: Config, world: World, weights: Weights) -> int:
    """Ask everything, print the results and write them down. Returns the exit code."""
    began = time.perf_counter()
    with raise_on_all_ranks(ExpectedError, OSError):
        questions, rows, report = read_questions(config)
        chat = Chat(weights, config, world.device)
    log.info("%s x %d", chat.describe(), world.size)
    choice, written = ask(chat, questions, world, config.micro_batch_size)
    if not choice.asked + written.asked:
        raise CorpusError(
            f"EVAL_DATA={config.eval_data}: None of its {len(questions)} questions fits into the "
            f"model's context of {chat.context} tokens. Give shorter ones."
        )
    results = {"choice": score(choice), "written": score(written)}
    stops = " ".join(chat.template.decode([token]) for token in chat.template.stop_ids)
    log.info("%s", "\n".join(describe(results, stops)))
    if world.is_first:
        facts = {
            "schema": 1,
            "weights": show_path(weights.folder),
            "time": time.time(),
            "seconds": time.perf_counter() - began,
            "rows": rows,
            **results,
            "data": config.eval_data,
            "questions": config.eval_examples,
            "seed": config.seed,
            "report": report,
            "provenance": provenance(world.host, world.size, world.device_name, 0),
        }
        write(config, name_result(weights), facts)
    broadcast_object(None)  # leave together
    return 0


def read_questions(config: Config) -> tuple[list[Question], int, list[str]]:
    """Return EVAL_EXAMPLES questions, the number of rows, and what became of them. Raises CorpusError."""
    found: list[Question] = []
    hashes: list[int] = []
    report: list[str] = []
    folder = data_dir(config) / "finetune"
    with one_at_a_time(folder):  # files of the Hub are deleted once they are read
        for source, _ in several.sources_in(exercises.data_of(config, "EVAL_DATA"), "EVAL_DATA"):
            pinned, files = pinned_files(source, folder, config.hf_token, "EVAL_DATA")
            tally = Tally()
            for row in conversations(pinned, files, tally):
                messages = [
                    {"role": message.role, "content": message.text}
                    for message in row.conversation.messages
                ]
                answer = messages.pop()["content"]
                found.append(Question(messages, answer, row.conversation.options))
                hashes.append(hash_of(row.conversation.messages))
            reading.check_dropped(pinned, tally, reading.SENTENCES)
            report += tally.report(reading.SENTENCES)
    chosen = subset.chosen(
        np.array(hashes, dtype=np.uint64), config.seed, config.eval_examples or None
    )
    return [found[number] for number in chosen.tolist()], len(found), report


# ---- Asking


def ask(
    chat: Chat, questions: Sequence[Question], world: World, batch_size: int
) -> tuple[Counts, Counts]:
    """Return the counts of questions with options and of the others, summed over all processes."""
    mine = questions[world.rank :: world.size]
    counts = [
        ask_choices(chat, [one for one in mine if one.options], batch_size),
        ask_written(chat, [one for one in mine if not one.options], batch_size),
    ]
    values = [list(dataclasses.astuple(one)) for one in counts]
    sums = sum_over_ranks(torch.tensor(values, dtype=torch.float64, device=world.device))
    choice, written = sums.tolist()
    return Counts(*choice), Counts(*written)


def ask_choices(chat: Chat, questions: Sequence[Question], batch_size: int) -> Counts:
    """Take the likeliest letter of each question, the first of equally likely ones."""
    made = []
    for question in questions:
        prompt, letters = letter_ids(chat, question)
        made.append((prompt, letters, question))
    fitting = [one for one in made if len(one[0]) < chat.context]
    counts = Counts(asked=len(fitting), too_long=len(made) - len(fitting))
    for batch in batches(fitting, batch_size):
        prompts = [prompt for prompt, _, _ in batch]
        found = chat.generate(prompts, 1, return_dict_in_generate=True, output_logits=True)
        for logits, (_, letters, question) in zip(found.logits[0], batch, strict=True):
            chosen = int(logits[letters].argmax())
            counts.right += question.options[chosen] == question.answer
            counts.chance += 1 / len(letters)
    return counts


def letter_ids(chat: Chat, question: Question) -> tuple[list[int], list[int]]:
    """Return the ids up to the letter of a reply, and the id of each option's letter.

    Each option is written as a reply, so its letter is in the token in which it is trained.
    """
    letters = []
    for option in question.options:
        reply = {"role": "assistant", "content": option}
        text = chat.template.render([*question.messages, reply])
        encoding = chat.template.encode([text])[0]
        end = text.rindex(option) + option.index(".")
        place = sum(begin < end for begin, _ in encoding.offsets) - 1
        letters.append(encoding.ids[place])
    return encoding.ids[:place], letters


def ask_written(chat: Chat, questions: Sequence[Question], batch_size: int) -> Counts:
    """Have the model write each answer."""
    counts = Counts()
    fitting = []
    for question in questions:
        prompt = chat.prompt_ids(question.messages)
        reply = {"role": "assistant", "content": question.answer}
        text = chat.template.render([*question.messages, reply])
        right = len(chat.template.encode([text])[0].ids) - len(prompt)
        room = chat.context - len(prompt)
        if right > room:
            counts.too_long += 1
            continue
        counts.asked += 1
        fitting.append((prompt, min(2 * right + SPARE_TOKENS, room), question))
    for batch in batches(fitting, batch_size):
        prompts = [prompt for prompt, _, _ in batch]
        tokens = min(max(most for _, most, _ in batch), chat.context - len(prompts[0]))
        for ids, (_, most, question) in zip(chat.reply_ids(prompts, tokens), batch, strict=True):
            reply_ids = ids[:most]  # whatever the others of the batch may have
            counts.right += is_same(chat.template.read_reply(reply_ids), question.answer)
            counts.stopped += reply_ids[-1] in chat.template.stop_ids
    return counts


def batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Yield batches of prompts of similar length, the longest first."""
    ordered = sorted(items, key=lambda item: len(item[0]), reverse=True)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def is_same(written: str, answer: str) -> bool:
    """Tell whether an answer is the right one, apart from case, blanks and a full stop."""
    return simplify(written) == simplify(answer)


def simplify(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(" .!")


# ---- Telling


def score(counts: Counts) -> dict[str, Any]:
    """Return counts as the JSON has them, with shares and 95% intervals; None if nothing was asked."""
    asked = int(counts.asked)
    facts: dict[str, Any] = {
        "right": int(counts.right),
        "asked": asked,
        "too_long": int(counts.too_long),
        "stopped": int(counts.stopped),
        "accuracy": None,
        "interval": None,
        "chance": None,
        "stop_interval": None,
    }
    if asked:
        facts["accuracy"] = facts["right"] / asked
        facts["interval"] = wilson(facts["right"], asked)
        facts["chance"] = counts.chance / asked
        facts["stop_interval"] = wilson(facts["stopped"], asked)
    return facts


def describe(results: dict[str, Any], stops: str) -> list[str]:
    """Return a line for each kind of question that was asked, and one for how replies ended."""
    lines = []
    for kind, name in (("choice", "multiple choice"), ("written", "written answers")):
        if results[kind]["asked"]:
            lines.append(f"{name}: {words(results[kind])}")
    written = results["written"]
    if written["asked"]:
        share = written["stopped"] / written["asked"]
        low, high = written["stop_interval"]
        lines.append(
            f"ended with {stops}: {share:.1%} [{100 * low:.1f}, {100 * high:.1f}] of the written answers"
        )
    return lines


def words(result: dict[str, Any]) -> str:
    """Return for example `31.0% [25.4, 37.2] of 230, guessing 25.0%`."""
    low, high = result["interval"]
    text = f"{result['accuracy']:.1%} [{100 * low:.1f}, {100 * high:.1f}] of {result['asked']:,}"
    if result["chance"]:
        text += f", guessing {result['chance']:.1%}"
    if result["too_long"]:
        text += f"; {result['too_long']:,} too long to be asked"
    return text


def name_result(weights: Weights, kind: str = "chat") -> str:
    """Return the name of a result: by the step that was measured, or by the folder."""
    if weights.step is not None:
        return f"{kind}_{name_checkpoint(weights.step)}"
    return f"{kind}_init_{weights.folder.name}"


def write(config: Config, name: str, facts: dict[str, Any]) -> None:
    """Write a result into the run's folder. Raises CorpusError."""
    path = RunPaths.of(config.runs_dir, config.run_name, ROOT).evaluation(name)
    text = json.dumps(replace_nonfinite(facts), indent=1, allow_nan=False) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise CorpusError(
            f"{path}: cannot be written ({error.strerror}). Make room, or choose another RUNS_DIR."
        ) from error
    log.info("written: %s", show_path(path))
