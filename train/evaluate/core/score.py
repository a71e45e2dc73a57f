"""Asks a model the questions of CORE's tasks: what choices begin with is read once, many questions at a time.

    questions of a task -> sorted by length -> batches -> rows of a trunk and branches -> nats of each scored token

Ranks share the questions out (evaluate/scoring.py). A choice's score is the mean loss of its scored
tokens. The lowest wins, of equal ones the first. In language_modeling every scored token must be
the likeliest.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from settings.config import Config
from train.data.data_paths import data_dir
from train.data.tokenizer import Vocabulary
from train.distributed.parallel import bare, waits_in_forward
from train.distributed.world import World, from_all, together
from train.evaluate.core.bundle import Bundle, open_bundle
from train.evaluate.core.metric import Counts
from train.evaluate.core.prompts import Question, common, questions
from train.evaluate.core.tasks import LANGUAGE, CoreError, Task, chosen
from train.evaluate.scoring import add_up
from train.model import prefix_scoring
from train.model.compilation import as_written

log = logging.getLogger(__name__)


class ChoiceScore(NamedTuple):
    """How a model scores a choice.

    Attributes:
        nats: loss, summed over the scored tokens.
        tokens: that are scored.
        is_likeliest: whether each of them is the model's first choice.
    """

    nats: float
    tokens: int
    is_likeliest: bool


class Row(NamedTuple):
    """Choices that begin with the same tokens.

    Attributes:
        question: its place in a batch.
        choices: their places in the question.
        shared: tokens at their beginning that are read once.
    """

    question: int
    choices: Sequence[int]
    shared: int


def build_rows(place: int, question: Question) -> Iterator[Row]:
    """Put the choices of a question that begin with the same tokens into one row.

    Only choices from which equally much was cropped can share a row. A choice that equals an earlier
    one is in none: it scores what that one does, to the bit.
    """
    groups: dict[int, list[int]] = {}
    for number, choice in enumerate(question.choices):
        if question.choices.index(choice) == number:
            groups.setdefault(choice.cut, []).append(number)
    for numbers in groups.values():
        choices = [question.choices[number] for number in numbers]
        texts = [choice.tokens for choice in choices]
        shared = min(common(texts), *(choice.start for choice in choices))
        if shared:
            yield Row(place, numbers, shared)
            continue
        for number, choice in zip(numbers, choices, strict=True):
            yield Row(place, [number], choice.start)


@torch.no_grad()
def score_choices(
    model: nn.Module, batch: Sequence[Question], device: torch.device
) -> list[list[ChoiceScore]]:
    """Score each choice of each question.

    An empty batch is a pass through the model all the same, which other ranks may wait for.
    """
    rows = [row for place, question in enumerate(batch) for row in build_rows(place, question)]
    layout: list[prefix_scoring.Row] = []
    for place, numbers, shared in rows:
        texts = [batch[place].choices[number].tokens for number in numbers]
        layout.append((texts[0][:shared], [text[shared:] for text in texts]))
    tokens, branches = prefix_scoring.lay_out(layout or [([0], [[]])])
    nats, hits = model(tokens.to(device), branches=branches.to(device))
    sizes = [len(branch) for _, of_row in layout for branch in of_row]
    parts = zip(nats.cpu().double().split(sizes), hits.cpu().split(sizes), strict=True)
    scores = {}
    for place, numbers, _ in rows:
        for number in numbers:
            choice = batch[place].choices[number]
            count = len(choice.tokens) - choice.start
            losses, likeliest = (part[-count:] for part in next(parts))
            score = ChoiceScore(float(losses.sum()), count, bool(likeliest.all()))
            scores[place, number] = score
    return [
        [scores[place, question.choices.index(choice)] for choice in question.choices]
        for place, question in enumerate(batch)
    ]


def is_right(task: Task, question: Question, scores: Sequence[ChoiceScore]) -> bool:
    """Whether these scores of its choices answer a question."""
    if task.kind == LANGUAGE:
        return scores[0].is_likeliest
    means = [score.nats / score.tokens for score in scores]
    return means.index(min(means)) == question.gold


class Core:
    """Asks a model the tasks of a bundle. Created and called on all ranks together."""

    def __init__(self, config: Config, bundle: Bundle, vocabulary: Vocabulary, world: World):
        self.config = config
        self.bundle = bundle
        self.vocabulary = vocabulary
        self.world = world
        self.kept: dict[str, tuple[int, list[Question]]] = {}

    def __call__(
        self, model: nn.Module, progress: Callable[[str], None] = lambda what: None, **limits: Any
    ) -> Mapping[str, Counts] | None:
        """Ask all questions. All ranks call it together.

        Args:
            progress: called with a task's label, with "batch" and with "others".
            limits: interrupted and limit_s of scoring.add_up.

        Returns:
            Label -> what became of the task's questions. None if any rank was interrupted.

        Raises ScoringFailed, on all ranks.
        """
        waits = waits_in_forward(model)
        network = bare(model)
        tasks = self.bundle.tasks

        def score(batch: tuple[int, list[Question]], sums: Tensor) -> str:
            place, questions = batch
            task = tasks[place]
            askable = [question for question in questions if not question.too_long]
            right = 0
            if askable or waits:
                scores = score_choices(network, askable, self.world.device)
                for question, of_choices in zip(askable, scores, strict=True):
                    right += is_right(task, question, of_choices)
                    if not all(math.isfinite(choice.nats) for choice in of_choices):
                        return (
                            f"{task.label}: the model's losses are no finite numbers; its weights "
                            "are damaged or diverged"
                        )
            counts = Counts(
                right,
                asked=len(askable),
                cropped=sum(question.cropped for question in askable),
                too_long=len(questions) - len(askable),
                merged=sum(question.merged for question in askable),
            )
            sums.view(len(tasks), -1)[place] += sums.new_tensor(dataclasses.astuple(counts))
            return ""

        with as_written(network):  # each length would be compiled
            values = add_up(
                model,
                self.config,
                self.world,
                self.read_batches(waits, progress),
                score,
                len(tasks) * len(dataclasses.fields(Counts)),
                advice="lower EVAL_EXAMPLES",
                progress=progress,
                **limits,
            )
        if values is None:
            return None
        of_tasks = torch.tensor(values).long().view(len(tasks), -1).tolist()
        return {task.label: Counts(*of) for task, of in zip(tasks, of_tasks, strict=True)}

    def read_batches(
        self, as_many: bool, progress: Callable[[str], None]
    ) -> Iterator[tuple[int, list[Question]]]:
        """Read this rank's questions, with their task's place; of each task the longest first.

        Those that are too long come last. as_many: batches as on the other ranks, the last ones empty
        if need be.
        """
        size = self.config.micro_batch_size
        for place, task in enumerate(self.bundle.tasks):
            progress(task.label)
            most, questions = self.read_questions(task)
            count = most if as_many else len(questions)
            for first in range(0, count, size):
                yield place, questions[first : first + size]

    def read_questions(self, task: Task) -> tuple[int, list[Question]]:
        """Return the most questions that any rank has of a task, and those of this one.

        A part of a task is kept for the next time.
        """
        if task.label in self.kept:
            return self.kept[task.label]
        config = self.config
        examples = self.bundle.examples(task)
        numbers = chosen(task, len(examples), config.eval_examples)
        mine = numbers[self.world.rank :: self.world.size]
        most = math.ceil(len(numbers) / self.world.size)
        read = list(questions(task, examples, mine, self.vocabulary, config.seq_len))
        read.sort(key=lambda question: (question.too_long, -len(question)))
        if config.eval_examples:
            self.kept[task.label] = most, read
        return most, read


def open_core(c: Config, vocabulary: Vocabulary, world: World) -> Core:
    """The metric by CORE_BUNDLE and EVAL_EXAMPLES, its bundle brought and verified on every machine.

    Raises CoreError, on all ranks.
    """
    with together(CoreError):
        bundle = open_bundle(c.core_bundle, data_dir(c))
    if len(set(from_all(bundle.sha256))) > 1:
        raise CoreError(
            f"CORE_BUNDLE={c.core_bundle}: is not the same on all machines; bring one to all of them"
        )
    log.info("%s", bundle.describe())
    return Core(c, bundle, vocabulary, world)
