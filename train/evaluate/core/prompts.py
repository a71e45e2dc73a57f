"""Which tokens: an example as text for a model, and where in it the scored part begins.

    multiple_choice     SHOTS query DELIMITER choice        choice after choice; scored is what the choices differ in
    schema              SHOTS context DELIMITER continuation  context after context; scored is what they all end with
    language_modeling   SHOTS context DELIMITER continuation  scored is the continuation

Each text is tokenized whole, behind the token that precedes documents, and is compared as tokens: scored is what lies
behind the common beginning, or the common end. So a token that holds the end of a question and the begin of an answer
is scored as part of the answer. All of that, and the blank lines between shots, is as in nanochat's core_eval.py; what
follows where that has no rule is in docs/evaluation.md.
"""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence

from train.data.tokenizer import Vocabulary
from train.evaluate.core.tasks import CHOICE, LANGUAGE, SCHEMA, Example, Task, shots_of

TEXTS_AT_ONCE = 2048


@dataclasses.dataclass(frozen=True)
class Choice:
    """A text as tokens, of which those from `start` on are scored; `cut` more were before them."""

    tokens: array
    start: int
    cut: int = 0


@dataclasses.dataclass(frozen=True)
class Question:
    """An example in tokens. gold: which of its choices is right; of language_modeling there is one.

    too_long: the scored part of a choice alone exceeds the context, so that it cannot be asked. merged: the end of the
    question was in one token with the begin of the answer, in language_modeling.
    """

    number: int
    choices: tuple[Choice, ...]
    gold: int
    too_long: bool = False
    merged: bool = False

    @property
    def cropped(self) -> bool:
        return any(choice.cut for choice in self.choices)

    def __len__(self) -> int:
        return max(len(choice.tokens) for choice in self.choices)


def texts_of(task: Task, example: Example, shots: Sequence[Example]) -> list[str]:
    """The texts of an example: of each choice, or context; of language_modeling without and with the answer."""
    answered = "".join(
        f"{question}{task.delimiter}{answer}\n\n"
        for question, answer in (question_and_answer(task, shot) for shot in shots)
    )
    if task.kind == CHOICE:
        return [
            f"{answered}{example['query']}{task.delimiter}{choice}" for choice in example["choices"]
        ]
    if task.kind == SCHEMA:
        return [
            f"{answered}{context}{task.delimiter}{example['continuation']}"
            for context in example["context_options"]
        ]
    question = f"{answered}{example['context'].strip()}{task.delimiter}"
    return [question.strip(), question + example["continuation"]]


def question_and_answer(task: Task, example: Example) -> tuple[str, str]:
    """As a shot shows it."""
    if task.kind == CHOICE:
        return example["query"], example["choices"][example["gold"]]
    if task.kind == SCHEMA:
        return example["context_options"][example["gold"]], example["continuation"]
    return example["context"].strip(), example["continuation"]


def questions(
    task: Task,
    examples: Sequence[Example],
    numbers: Sequence[int],
    vocabulary: Vocabulary,
    longest: int,
) -> Iterator[Question]:
    """These examples in tokens, in their order. longest: tokens of a text, of which the first are cut where it has
    more."""
    waiting: list[tuple[int, list[str]]] = []

    def flush() -> Iterator[Question]:
        encoded = iter(
            vocabulary.tokenizer.encode_batch_fast(
                [text for _, texts in waiting for text in texts], add_special_tokens=False
            )
        )
        for number, texts in waiting:
            ids = [[vocabulary.end_of_text, *next(encoded).ids] for _ in texts]
            yield question_of(task, examples[number], number, ids, longest)
        waiting.clear()

    for number in numbers:
        waiting.append((number, texts_of(task, examples[number], shots_of(task, examples, number))))
        if sum(len(texts) for _, texts in waiting) >= TEXTS_AT_ONCE:
            yield from flush()
    yield from flush()


def question_of(
    task: Task, example: Example, number: int, ids: list[list[int]], longest: int
) -> Question:
    """From the tokens of its texts to what is scored of them."""
    gold, merged = int(example.get("gold", 0)), False
    if task.kind == LANGUAGE:
        start = common(ids)
        merged = start < len(ids[0])
        ids, starts = ids[1:], [start]
    elif task.kind == SCHEMA:
        scored = min(max(common([list(reversed(one)) for one in ids]), 1), min(map(len, ids)) - 1)
        starts = [len(one) - scored for one in ids]
    else:  # of a choice that another one begins with, the last token is scored
        starts = [min(common(ids), min(map(len, ids)) - 1)] * len(ids)
    choices = []
    for one, start in zip(ids, starts, strict=True):
        cut = max(0, len(one) - longest)
        choices.append(Choice(array("i", one[cut:]), start - cut, cut))
    return Question(
        number, tuple(choices), gold, any(choice.start < 1 for choice in choices), merged
    )


def common(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens they have in common at their beginning."""
    for i, tokens in enumerate(zip(*sequences, strict=False)):
        if any(token != tokens[0] for token in tokens):
            return i
    return min(map(len, sequences))
