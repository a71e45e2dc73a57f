"""Ask a model the questions of EVAL_DATA: `make eval` of a fine-tuned run, or of INIT_FROM.

    conversations -> their last reply is the right one -> prompts by the chat template
        with options     the letter that the model finds likeliest after the prompt
        without          what the model writes, always the likeliest token
    -> shared over the processes -> counts of each source -> runs/RUN_NAME/eval/chat_step_N.json

A written answer is right if it equals the right one, apart from case, blanks and a full stop. Thoughts
do not count. Which EVAL_EXAMPLES questions are asked depends on SEED and on what they say.
"""

import collections
import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from finetune.chat import Chat
from finetune.chat_template import Refused
from finetune.conversations import read_all, sources_in
from finetune.examples import choose, hash_of
from finetune.model_folder import Weights
from finetune.row_shapes import Conversation
from record.durable import write_whole
from record.metrics import replace_nonfinite
from record.provenance import provenance
from record.run_paths import RunPaths, name_checkpoint
from settings import ROOT, ExpectedError
from settings.config import Config
from settings.resolve import show_path
from train.data.data_paths import data_dir
from train.data.sources.source import CorpusError
from train.distributed.world import World, broadcast_object, raise_on_all_ranks, sum_over_ranks
from train.evaluate.core.metric import wilson

SPARE_TOKENS = 8  # that a written answer may have beyond twice the right one's
NAMES = {"choice": "multiple choice", "written": "written answers"}

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Counts:
    """What became of questions of one kind.

    Attributes:
        too_long: questions that do not fit into the context, and are not asked.
        chance: how many guessing gets right on average, or always giving the commonest answer.
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
        questions, facts = read_questions(config)
        chat = Chat(weights, config, world.device)
    counts = {}
    try:
        for source, conversations in questions.items():
            counts[source] = ask(chat, conversations, world, config.micro_batch_size)
    except Refused as refused:
        raise CorpusError(f"EVAL_DATA={config.eval_data}: {chat.name}: {refused}") from None
    results = {kind: score(add(counts, kind)) for kind in NAMES}
    if not any(result["asked"] for result in results.values()):
        number = sum(map(len, questions.values()))
        raise CorpusError(
            f"EVAL_DATA={config.eval_data}: None of its {number} questions fits into the "
            f"model's context of {chat.context} tokens. Give shorter ones."
        )
    stops = " or ".join(chat.template.decode([token]) for token in chat.template.stop_ids)
    log.info("%s", "\n".join(describe(results, stops)))
    if world.is_first:
        facts["by_source"] = {
            source: {kind: score(count) for kind, count in of_kinds.items()}
            for source, of_kinds in counts.items()
        }
        facts |= results | {"seconds": time.perf_counter() - began}
        write(config, world, weights, "chat", facts)
    broadcast_object(None)  # leave together
    return 0


def read_questions(config: Config) -> tuple[dict[str, list[Conversation]], dict[str, Any]]:
    """Return EVAL_EXAMPLES questions by their source, and what the JSON says about them.

    Raises CorpusError.
    """
    rows = []
    report = []
    asked = []
    for source, _ in sources_in(config.eval_data, "EVAL_DATA"):
        conversations, lines = read_all(
            source, data_dir(config) / "finetune", config.hf_token, "EVAL_DATA"
        )
        rows += conversations
        report += lines
        for row in conversations:
            # The right answer of others is a call of a tool.
            if row.conversation.messages[-1].get("content"):
                asked.append((source, row.conversation))
    if len(asked) < len(rows):
        log.info(
            "EVAL_DATA: %d rows end with a tool call and are not asked", len(rows) - len(asked)
        )
    hashes = np.array([hash_of(conversation) for _, conversation in asked], dtype=np.uint64)
    chosen = choose(hashes, config.seed, config.eval_examples or None)
    questions: dict[str, list[Conversation]] = {}
    for number in chosen.tolist():
        source, conversation = asked[number]
        questions.setdefault(source, []).append(conversation)
    return questions, {"data": config.eval_data, "rows": len(rows), "report": report}


# ---- Asking


def ask(
    chat: Chat, questions: Sequence[Conversation], world: World, batch_size: int
) -> dict[str, Counts]:
    """Return the counts of each kind of question, over all processes."""
    written = [question for question in questions if not question.options]
    answers = collections.Counter(
        simplify(question.messages[-1]["content"]) for question in written
    )
    commonest = max(answers.values(), default=0) / max(1, len(written))
    mine = questions[world.rank :: world.size]
    counts = (
        ask_choices(chat, [question for question in mine if question.options], batch_size),
        ask_written(chat, [question for question in mine if not question.options], batch_size),
    )
    counts[1].chance = commonest * counts[1].asked
    values = [dataclasses.astuple(one) for one in counts]
    sums = sum_over_ranks(torch.tensor(values, dtype=torch.float64, device=world.device))
    return {kind: Counts(*row) for kind, row in zip(NAMES, sums.tolist(), strict=True)}


def add(counts: Mapping[str, Mapping[str, Counts]], kind: str) -> Counts:
    """Return the counts of a kind of question, over all sources."""
    rows = [dataclasses.astuple(of_kinds[kind]) for of_kinds in counts.values()]
    return Counts(*map(sum, zip(*rows, strict=True)))


def ask_choices(chat: Chat, questions: Sequence[Conversation], batch_size: int) -> Counts:
    """Take the likeliest letter of each question, the first of equally likely ones."""
    counts = Counts()
    fitting = []
    for question in questions:
        prompt, letters = letter_ids(chat, question)
        fits = len(prompt) < chat.context
        counts.asked += fits
        counts.too_long += not fits
        if fits:
            fitting.append((prompt, letters, question))
    for batch in batches(fitting, batch_size):
        prompts = [prompt for prompt, _, _ in batch]
        output = chat.generate(prompts, 1, return_dict_in_generate=True, output_logits=True)
        for logits, (_, letters, question) in zip(output.logits[0], batch, strict=True):
            chosen = question.options[int(logits[letters].argmax())]
            counts.right += chosen == question.messages[-1]["content"]
            counts.chance += 1 / len(letters)
    return counts


def letter_ids(chat: Chat, question: Conversation) -> tuple[list[int], list[int]]:
    """Return the ids up to the letter of a reply, and the id of each option's letter.

    Each option is written as a reply, so its letter is in the token in which it is trained.
    """
    letters = []
    for option in question.options:
        reply = {"role": "assistant", "content": option}
        text = chat.template.render([*question.messages[:-1], reply])
        (encoding,) = chat.template.encode([text])
        end = text.rindex(option) + option.index(".")
        place = sum(begin < end for begin, _ in encoding.offsets) - 1
        letters.append(encoding.ids[place])
    return encoding.ids[:place], letters


def ask_written(chat: Chat, questions: Sequence[Conversation], batch_size: int) -> Counts:
    """Have the model write each answer."""
    counts = Counts()
    fitting = []
    for question in questions:
        prompt = chat.template.prompt_ids(question.messages[:-1], question.tools)
        text = chat.template.render(question.messages, tools=question.tools)
        (encoding,) = chat.template.encode([text])
        fits = len(encoding.ids) <= chat.context
        counts.asked += fits
        counts.too_long += not fits
        if fits:
            most = 2 * (len(encoding.ids) - len(prompt)) + SPARE_TOKENS
            answer = question.messages[-1]["content"]
            fitting.append((prompt, min(most, chat.context - len(prompt)), answer))
    for batch in batches(fitting, batch_size):
        prompts = [prompt for prompt, _, _ in batch]
        tokens = min(max(most for _, most, _ in batch), chat.context - len(prompts[0]))
        for ids, (_, most, answer) in zip(chat.reply_ids(prompts, tokens), batch, strict=True):
            reply = ids[:most]  # whatever the others of the batch may have
            counts.right += is_same(chat.template.read_reply(reply), answer)
            counts.stopped += reply[-1] in chat.template.stop_ids
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
    """Return counts with shares and 95% intervals, None if nothing was asked."""
    right, asked, stopped = int(counts.right), int(counts.asked), int(counts.stopped)
    return {
        "right": right,
        "asked": asked,
        "too_long": int(counts.too_long),
        "stopped": stopped,
        "accuracy": right / asked if asked else None,
        "interval": wilson(right, asked) if asked else None,
        "chance": counts.chance / asked if asked else None,
        "stop_interval": wilson(stopped, asked) if asked else None,
    }


def describe(results: dict[str, dict[str, Any]], stops: str) -> list[str]:
    """Return a line for each kind of question that was asked, and one for how replies ended."""
    lines = []
    for kind, result in results.items():
        if not result["asked"]:
            continue
        line = f"{NAMES[kind]}: {show_result(result)}"
        if result["too_long"]:
            line += f"; {result['too_long']:,} too long to be asked"
        lines.append(line)
        if kind == "written":
            lines.append(f"ended with {stops}: {show_share(result['stopped'], result['asked'])}")
    return lines


def show_result(result: dict[str, Any]) -> str:
    """Return for example `31.0% [25.4, 37.2] of 230, guessing 25.0%`."""
    text = show_share(result["right"], result["asked"])
    return f"{text}, guessing {result['chance']:.1%}" if result["chance"] else text


def show_share(part: int, whole: int) -> str:
    """Return for example `31.0% [25.4, 37.2] of 230`."""
    low, high = wilson(part, whole)
    return f"{part / whole:.1%} [{100 * low:.1f}, {100 * high:.1f}] of {whole:,}"


def write(
    config: Config, world: World, weights: Weights, kind: str, results: dict[str, Any]
) -> None:
    """Write eval/KIND_step_N.json into the run's folder, or KIND_init_NAME.json. Raises CorpusError."""
    name = f"init_{weights.folder.name}"
    if weights.step is not None:
        name = name_checkpoint(weights.step)
    path = RunPaths.of(config.runs_dir, config.run_name, ROOT).evaluation(f"{kind}_{name}")
    facts = {
        "schema": 1,
        "weights": show_path(weights.folder),
        "step": weights.step,
        "time": time.time(),
        "questions": config.eval_examples,
        "seed": config.seed,
        **results,
        "provenance": provenance(world.host, world.size, world.device_name, 0),
    }
    text = json.dumps(replace_nonfinite(facts), indent=1, allow_nan=False) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise CorpusError(
            f"{path}: cannot be written ({error.strerror}). Make room, or choose another RUNS_DIR."
        ) from error
    log.info("written: %s", show_path(path))
