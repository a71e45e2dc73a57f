"""Turns an example into the texts that a model reads, as tokens, and finds the part that is scored.

    multiple_choice     SHOTS query DELIMITER choice            one text per choice; they differ in the scored end
    schema              SHOTS context DELIMITER continuation    one text per context; the scored end is the same
    language_modeling   SHOTS context DELIMITER continuation    the continuation is scored

Each text is tokenized whole, after the token that precedes documents. Texts are compared as tokens:
scored is what comes after the common beginning, or the common end. So a token that holds the end of
a question and the beginning of an answer is scored as part of the answer. This, and the blank lines
between shots, is as in nanochat's core_eval.py. docs/evaluation.md says what happens where that has
no rule.
"""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence

from train.data.tokenizer import Vocabulary
from train.evaluate.core.tasks import (
    LANGUAGE,
    SCHEMA,
    Example,
    Task,
    gold_of,
    list_pairs,
    shots_of,
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A text as tokens.

    Attributes:
        start: of the scored tokens.
        cut: tokens that were before these and did not fit into the context.
    """

    tokens: array
    start: int
    cut: int = 0


@dataclasses.dataclass(frozen=True)
class Question:
    """An example in tokens.

    Attributes:
        number: of the example in its task.
        choices: in language_modeling there is one.
        gold: which of them is right.
        too_long: the scored part of a choice alone exceeds the context, so that it cannot be asked.
        merged: in language_modeling, the question's end and the answer's beginning are one token.
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
    """Build the texts of an example: one per choice or context; of language_modeling without and with the answer."""
    before = ""
    for shot in shots:
        question, answer = list_pairs(task, shot)[gold_of(shot)]
        before += f"{question}{task.delimiter}{answer}\n\n"
    texts = []
    for question, answer in list_pairs(task, example):
        start = f"{before}{question}{task.delimiter}"
        if task.kind == LANGUAGE:
            texts.append(start.strip())
        texts.append(start + answer)
    return texts


def questions(
    task: Task,
    examples: Sequence[Example],
    numbers: Sequence[int],
    vocabulary: Vocabulary,
    longest: int,
) -> Iterator[Question]:
    """Tokenize these examples, in their order. longest: tokens of a text; the first ones are cut if it has more."""
    for number in numbers:
        texts = texts_of(task, examples[number], shots_of(task, examples, number))
        encoded = vocabulary.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokens = [[vocabulary.end_of_text, *text.ids] for text in encoded]
        yield question_of(task, examples[number], number, tokens, longest)


def question_of(
    task: Task, example: Example, number: int, tokens: list[list[int]], longest: int
) -> Question:
    """Find what is scored in the tokens of an example's texts."""
    merged = False
    shortest = min(map(len, tokens))
    if task.kind == LANGUAGE:
        question, whole = tokens
        start = common(tokens)
        merged = start < len(question)
        tokens, starts = [whole], [start]
    elif task.kind == SCHEMA:
        same_end = common([text[::-1] for text in tokens])
        scored = min(max(same_end, 1), shortest - 1)
        starts = [len(text) - scored for text in tokens]
    else:  # of a choice that another one begins with, the last token is scored
        starts = [min(common(tokens), shortest - 1)] * len(tokens)
    choices = []
    for text, start in zip(tokens, starts, strict=True):
        cut = max(0, len(text) - longest)
        choices.append(Choice(array("i", text[cut:]), start - cut, cut))
    too_long = any(choice.start < 1 for choice in choices)
    return Question(number, tuple(choices), gold_of(example), too_long, merged)


def common(sequences: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all begin with."""
    for i, tokens in enumerate(zip(*sequences, strict=False)):
        if len(set(tokens)) > 1:
            return i
    return min(map(len, sequences))
