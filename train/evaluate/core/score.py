"""Asks a model the questions of CORE's tasks: what choices begin with is read once, many questions at a time.

    questions of a task -> sorted by length -> batches -> rows of a trunk and branches -> nats of each scored token

Ranks share the questions out (evaluate/scoring.py). A choice's score is the mean loss of its scored
tokens. The lowest wins, of equal ones the first. In language_modeling every scored token must be
the likeliest.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from settings.config import Config
from train.data.data_paths import data_dir
from train.data.tokenizer import Vocabulary
from train.distributed.parallel import unwrap
from train.distributed.world import World, all_gather_object, raise_on_all_ranks
from train.evaluate.core.bundle import Bundle, open_bundle
from train.evaluate.core.metric import COUNTS, Result, Score
from train.evaluate.core.prompts import Choice, Question, common, questions
from train.evaluate.core.tasks import LANGUAGE, CoreError, Task, chosen
from train.evaluate.scoring import ScoringFailed, add_up
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


def group(choices: Sequence[Choice]) -> list[list[int]]:
    """Return the places of choices that begin with the same tokens, and so can share a row.

    Those from which unequally much was cropped cannot, even if their first tokens are equal by chance.
    A choice that equals an earlier one is in no group: it scores what that one does, to the bit.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for place, choice in enumerate(choices):
        if choices.index(choice) == place:
            groups.setdefault((choice.cut, choice.tokens[0]), []).append(place)
    return list(groups.values())


@torch.no_grad()
def score_choices(
    model: nn.Module, batch: Sequence[Question], device: torch.device
) -> list[list[ChoiceScore]]:
    """Score each choice of each question. What choices of a group begin with is read once.

    An empty batch is a pass through the model all the same, which other ranks may wait for.
    """
    rows: list[prefix_scoring.Row] = []
    scored: list[tuple[int, int]] = []  # of each branch: its question, and its choice there
    for number, question in enumerate(batch):
        for places in group(question.choices):
            choices = [question.choices[place] for place in places]
            texts = [choice.tokens for choice in choices]
            shared = min(common(texts), *(choice.start for choice in choices))
            rows.append((texts[0][:shared], [text[shared:] for text in texts]))
            scored += [(number, place) for place in places]
    tokens, branches = prefix_scoring.lay_out(rows or [([0], [[]])])
    nats, hits = model(tokens.to(device), branches=branches.to(device))
    sizes = [len(branch) for _, of_row in rows for branch in of_row]
    parts = zip(nats.cpu().double().split(sizes), hits.cpu().split(sizes), strict=True)
    scores = {}
    for (number, place), (losses, is_hit) in zip(scored, parts, strict=True):
        choice = batch[number].choices[place]
        count = len(choice.tokens) - choice.start
        is_likeliest = bool(is_hit[-count:].all())
        scores[number, place] = ChoiceScore(float(losses[-count:].sum()), count, is_likeliest)
    return [
        [scores[number, question.choices.index(choice)] for choice in question.choices]
        for number, question in enumerate(batch)
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
        self.kept: dict[str, list[Question]] = {}

    def __call__(
        self, model: nn.Module, progress: Callable[[str], None] = lambda what: None, **limits: Any
    ) -> Result | None:
        """Ask all questions. All ranks call it together.

        Args:
            progress: called with the number and label of a task, with "batch" and with "others".
            limits: interrupted and limit_s of scoring.add_up.

        Returns:
            None if any rank was interrupted.

        Raises ScoringFailed, on all ranks.
        """
        network = unwrap(model)
        tasks = self.bundle.tasks

        def score(batch: tuple[int, list[Question]], sums: Tensor) -> None:
            place, questions = batch
            task = tasks[place]
            askable = [question for question in questions if not question.too_long]
            scores = score_choices(network, askable, self.world.device)
            if not all(math.isfinite(choice.nats) for choices in scores for choice in choices):
                raise ScoringFailed(
                    f"{task.label}: the model's losses are no finite numbers; its weights are "
                    "damaged or diverged"
                )
            pairs = zip(askable, scores, strict=True)
            right = sum(is_right(task, question, choices) for question, choices in pairs)
            cropped = sum(question.cropped for question in askable)
            too_long = len(questions) - len(askable)
            merged = sum(question.merged for question in askable)
            counts = sums.new_tensor([right, len(askable), cropped, too_long, merged])
            sums.view(-1, COUNTS)[place] += counts  # in the order of a Score

        with as_written(network):  # each length would be compiled
            values = add_up(
                model,
                self.config,
                self.world,
                self.read_batches(progress),
                score,
                len(tasks) * COUNTS,
                advice="lower EVAL_EXAMPLES",
                empty=(0, []),
                progress=progress,
                **limits,
            )
        if values is None:
            return None
        of_tasks = torch.tensor(values).long().view(-1, COUNTS).tolist()
        scores = [Score(task, *counts) for task, counts in zip(tasks, of_tasks, strict=True)]
        return Result.of(scores, self.bundle.missing)

    def read_batches(self, progress: Callable[[str], None]) -> Iterator[tuple[int, list[Question]]]:
        """Read this rank's questions, with their task's place; of each task the longest first.

        Those that are too long come last.
        """
        size = self.config.micro_batch_size
        tasks = self.bundle.tasks
        for place, task in enumerate(tasks):
            progress(f"{place + 1}/{len(tasks)} {task.label}")
            questions = self.read_questions(task)
            for first in range(0, len(questions), size):
                yield place, questions[first : first + size]

    def read_questions(self, task: Task) -> list[Question]:
        """Return this rank's questions of a task. A part of a task is kept for the next time."""
        if task.label in self.kept:
            return self.kept[task.label]
        config = self.config
        examples = self.bundle.examples(task)
        numbers = chosen(task, len(examples), config.eval_examples)
        mine = numbers[self.world.rank :: self.world.size]
        read = list(questions(task, examples, mine, self.vocabulary, config.seq_len))
        read.sort(key=lambda question: (question.too_long, -len(question)))
        if config.eval_examples:
            self.kept[task.label] = read
        return read


def open_core(c: Config, vocabulary: Vocabulary, world: World) -> Core:
    """The metric by CORE_BUNDLE and EVAL_EXAMPLES, its bundle brought and verified on every machine.

    Raises CoreError, on all ranks.
    """
    with raise_on_all_ranks(CoreError):
        bundle = open_bundle(c.core_bundle, data_dir(c))
    if len(set(all_gather_object(bundle.sha256))) > 1:
        raise CoreError(
            f"CORE_BUNDLE={c.core_bundle}: is not the same on all machines; bring one to all of them"
        )
    log.info("%s", bundle.describe())
    return Core(c, bundle, vocabulary, world)
