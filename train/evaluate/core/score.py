"""Asks a model the questions of CORE's tasks: what choices begin with is read once, many questions at a time.

    questions of a task -> sorted by length -> batches -> rows of a trunk and branches -> nats of each scored token

Ranks share the questions out (evaluate/scoring.py). A choice's score is the mean loss of its scored
tokens. The lowest wins, of equal ones the first. In language_modeling every scored token must be
the likeliest.
"""

import contextlib
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
from train.evaluate.core.prompts import Choice, Question, common, questions
from train.evaluate.core.tasks import LANGUAGE, CoreError, Task, chosen
from train.evaluate.scoring import add_up
from train.model.prefix_scoring import laid_out

log = logging.getLogger(__name__)

ROUND = 64  # row lengths are multiples of it, so that few shapes occur


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


class Branch(NamedTuple):
    """A choice in a row: its question's place in a batch, its own, its tokens after the trunk, how many are scored."""

    question: int
    choice: int
    tokens: Sequence[int]
    scored: int


@dataclasses.dataclass(frozen=True)
class Row:
    """A trunk, and the choices that begin with it."""

    trunk: Sequence[int]
    branches: list[Branch]

    def __len__(self) -> int:
        return len(self.trunk) + sum(len(branch.tokens) for branch in self.branches)


def build_rows(place: int, question: Question) -> Iterator[Row]:
    """Put the choices of a question that begin with the same tokens into one row.

    Only choices from which equally much was cropped can share a row. A choice that equals an earlier
    one is in none: it scores what that one does, to the bit.
    """
    groups: dict[int, list[tuple[int, Choice]]] = {}
    for number, choice in enumerate(question.choices):
        if question.choices.index(choice) == number:
            groups.setdefault(choice.cut, []).append((number, choice))
    for group in groups.values():
        texts = [choice.tokens for _, choice in group]
        shared = min(common(texts), *(choice.start for _, choice in group))
        if shared and len(group) > 1:
            yield build_row(place, group, shared)
        else:
            for number, choice in group:
                yield build_row(place, [(number, choice)], choice.start)


def build_row(place: int, group: list[tuple[int, Choice]], shared: int) -> Row:
    """Build the row of choices that have their first `shared` tokens in common."""
    branches = [
        Branch(place, number, choice.tokens[shared:], len(choice.tokens) - choice.start)
        for number, choice in group
    ]
    return Row(group[0][1].tokens[:shared], branches)


@torch.no_grad()
def score_choices(
    model: nn.Module, batch: Sequence[Question], device: torch.device
) -> list[list[ChoiceScore]]:
    """Score each choice of each question.

    An empty batch is a pass through the model all the same, which other ranks may wait for.
    """
    rows = [row for place, question in enumerate(batch) for row in build_rows(place, question)]
    longest = max(map(len, rows), default=2)
    length = math.ceil(longest / ROUND) * ROUND
    layout = [(row.trunk, [branch.tokens for branch in row.branches]) for row in rows]
    tokens, branch_ids = laid_out(layout or [([0], [[]])], length)
    nats, hits = model(tokens.to(device), branches=branch_ids.to(device))
    branches = [branch for row in rows for branch in row.branches]
    sizes = [len(branch.tokens) for branch in branches]
    losses = nats.cpu().double().split(sizes)
    likeliest = hits.cpu().split(sizes)
    found: list[dict[int, ChoiceScore]] = [{} for _ in batch]
    for branch, loss, hit in zip(branches, losses, likeliest, strict=True):
        last = slice(-branch.scored, None)
        score = ChoiceScore(float(loss[last].sum()), branch.scored, bool(hit[last].all()))
        found[branch.question][branch.choice] = score
    return [
        [scores[question.choices.index(choice)] for choice in question.choices]
        for question, scores in zip(batch, found, strict=True)
    ]


def is_right(task: Task, question: Question, scores: Sequence[ChoiceScore]) -> bool:
    """Whether these scores of its choices answer a question."""
    if task.kind == LANGUAGE:
        return scores[0].is_likeliest
    means = [score.nats / score.tokens for score in scores]
    return means.index(min(means)) == question.gold


class Batch(NamedTuple):
    """Questions of a task that are scored together.

    Attributes:
        place: of the task in the bundle.
        counts: of all of this rank's questions of the task, in its first batch; else zeros.
    """

    place: int
    task: Task
    questions: Sequence[Question]
    counts: Counts


class Core:
    """Asks a model the tasks of a bundle. Created and called on all ranks together.

    Args:
        examples: of each task at most so many; 0 for all.
        keep: hold the questions in memory for the next time.
    """

    def __init__(
        self,
        config: Config,
        bundle: Bundle,
        vocabulary: Vocabulary,
        world: World,
        examples: int,
        keep: bool = False,
    ):
        self.config = config
        self.bundle = bundle
        self.vocabulary = vocabulary
        self.world = world
        self.examples = examples
        self.keep = keep
        self.size = config.micro_batch_size
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
        network = model if waits else bare(model)
        width = len(dataclasses.fields(Counts))

        def score(batch: Batch, sums: Tensor) -> str:
            counts = dataclasses.astuple(batch.counts)
            sums[batch.place * width : (batch.place + 1) * width] += torch.tensor(
                counts, dtype=torch.float64
            ).to(sums.device)
            if not (batch.questions or waits):
                return ""
            scores = score_choices(network, batch.questions, self.world.device)
            for question, of_choices in zip(batch.questions, scores, strict=True):
                sums[batch.place * width] += is_right(batch.task, question, of_choices)
                if not all(math.isfinite(choice.nats) for choice in of_choices):
                    return (
                        f"{batch.task.label}: the model's losses are no finite numbers; its weights "
                        "are damaged or diverged"
                    )
            return ""

        # Each length would be compiled anew. Setting the stance imports the compiler.
        is_compiled = getattr(bare(model), "compiled", False)
        eager = (
            torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()
        )
        minutes = f"EVAL_MINUTES={self.config.eval_minutes:g}"
        tasks = self.bundle.tasks
        with eager:
            values = add_up(
                model,
                self.world,
                self.read_batches(waits, progress),
                score,
                len(tasks) * width,
                too_long=f"it took longer than {minutes}; lower EVAL_EXAMPLES",
                micro_batch=self.size,
                progress=progress,
                **limits,
            )
        if values is None:
            return None
        numbers = [int(value) for value in values]
        return {
            task.label: Counts(*numbers[place * width : (place + 1) * width])
            for place, task in enumerate(tasks)
        }

    def read_batches(self, as_many: bool, progress: Callable[[str], None]) -> Iterator[Batch]:
        """Read this rank's questions, of each task the longest first; at least one batch of each task.

        as_many: batches as on the other ranks, the last ones empty if need be.
        """
        for place, task in enumerate(self.bundle.tasks):
            progress(task.label)
            most, questions = self.read_questions(task)
            askable = [question for question in questions if not question.too_long]
            askable.sort(key=len, reverse=True)
            counts = Counts(
                right=0,
                asked=len(askable),
                cropped=sum(question.cropped for question in askable),
                too_long=len(questions) - len(askable),
                merged=sum(question.merged for question in askable),
            )
            passes = math.ceil((most if as_many else len(askable)) / self.size)
            for number in range(max(1, passes)):
                batch = askable[number * self.size : (number + 1) * self.size]
                yield Batch(place, task, batch, counts)
                counts = Counts()

    def read_questions(self, task: Task) -> tuple[int, list[Question]]:
        """Return the most questions that any rank has of a task, and those of this one."""
        if task.label in self.kept:
            return self.kept[task.label]
        examples = self.bundle.examples(task)
        numbers = chosen(task, len(examples), self.examples)
        mine = numbers[self.world.rank :: self.world.size]
        most = math.ceil(len(numbers) / self.world.size)
        found = most, list(questions(task, examples, mine, self.vocabulary, self.config.seq_len))
        if self.keep:
            self.kept[task.label] = found
        return found


def open_core(c: Config, vocabulary: Vocabulary, world: World, keep: bool = False) -> Core:
    """The metric by CORE_BUNDLE and EVAL_EXAMPLES, its bundle brought and verified on every machine.

    keep: hold the questions for the next time, if they are not all that there are. Raises CoreError, on all ranks.
    """
    with together(CoreError):
        bundle = open_bundle(c.core_bundle, data_dir(c))
    if len(set(from_all(bundle.sha256))) > 1:
        raise CoreError(
            f"CORE_BUNDLE={c.core_bundle}: is not the same on all machines; bring one to all of them"
        )
    log.info("%s", bundle.describe())
    return Core(c, bundle, vocabulary, world, c.eval_examples, keep and bool(c.eval_examples))
