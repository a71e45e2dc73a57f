"""How likely: questions through a model, what their choices begin with once, many of them at a time.

    questions of a task -> sorted by length -> batches -> rows of trunk and branches -> nats of each scored token

Ranks share the questions out and sum up for themselves; one all-reduce at the end. A choice's score is the mean loss
of its scored tokens, the lowest wins, of equal ones the first. In language_modeling every scored token must be the
likeliest.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from hardware.out_of_memory import is_out_of_memory
from settings.config import Config
from train.data.data_paths import data_dir
from train.data.tokenizer import Vocabulary
from train.distributed.parallel import bare, waits_in_forward
from train.distributed.world import World, from_all, sum_over_ranks, together
from train.evaluate.core.bundle import Bundle, open_bundle
from train.evaluate.core.metric import Counts
from train.evaluate.core.prompts import Choice, Question, common, questions
from train.evaluate.core.tasks import LANGUAGE, CoreError, Task, chosen
from train.model.prefix_scoring import laid_out

log = logging.getLogger(__name__)

ROUND = 64  # row lengths are multiples of it, so that few shapes occur


class CoreFailed(Exception):
    """There is no number; the message says why, the same on all ranks."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A trunk and what follows it: (question, choice) by their places in a batch, and how many tokens are scored."""

    trunk: Sequence[int]
    branches: list[Sequence[int]]
    owners: list[tuple[int, int, int]]

    def __len__(self) -> int:
        return len(self.trunk) + sum(map(len, self.branches))


def rows_of(place: int, question: Question) -> Iterator[Row]:
    """The choices of a question, those in one row that begin with the same: that were not cut, or as much.

    One that another before it equals is in none: it scores what that one does, to the bit.
    """
    groups: dict[int, list[tuple[int, Choice]]] = {}
    for i, choice in enumerate(question.choices):
        if question.choices.index(choice) == i:
            groups.setdefault(choice.cut, []).append((i, choice))
    for group in groups.values():
        shared = min(
            common([choice.tokens for _, choice in group]), *(choice.start for _, choice in group)
        )
        for part in [group] if shared else [[one] for one in group]:
            end = shared if len(part) > 1 else part[0][1].start
            yield Row(
                part[0][1].tokens[:end],
                [choice.tokens[end:] for _, choice in part],
                [(place, i, len(choice.tokens) - choice.start) for i, choice in part],
            )


@torch.no_grad()
def losses(
    model: nn.Module,
    batch: Sequence[Question],
    device: torch.device,
) -> list[list[tuple[float, int, bool]]]:
    """(nats, scored tokens, whether each was the likeliest) of each choice of each question. An empty batch is a pass
    through the model all the same, which other ranks may wait for."""
    rows = [row for place, question in enumerate(batch) for row in rows_of(place, question)]
    length = -(-max(map(len, rows), default=2) // ROUND) * ROUND
    tokens, branches = laid_out(
        [(row.trunk, row.branches) for row in rows] or [([0], [[]])], length
    )
    nats, hits = model(tokens.to(device), branches=branches.to(device))
    parts = [len(branch) for row in rows for branch in row.branches]
    found: list[dict[int, tuple[float, int, bool]]] = [{} for _ in batch]
    owners = (owner for row in rows for owner in row.owners)
    for (place, i, scored), loss, hit in zip(
        owners, nats.cpu().double().split(parts), hits.cpu().split(parts), strict=True
    ):
        found[place][i] = (float(loss[-scored:].sum()), scored, bool(hit[-scored:].all()))
    return [
        [by_choice[question.choices.index(choice)] for choice in question.choices]
        for question, by_choice in zip(batch, found, strict=True)
    ]


def is_right(task: Task, question: Question, scores: Sequence[tuple[float, int, bool]]) -> bool:
    """Whether these losses of its choices answer a question."""
    if task.kind == LANGUAGE:
        return scores[0][2]
    means = [nats / count for nats, count, _ in scores]
    return means.index(min(means)) == question.gold


class Core:
    """Asks a model the tasks of a bundle. Created and called on all ranks together.

    examples: of each task at most so many, 0 for all. keep: hold the questions in memory for the next time.
    """

    def __init__(
        self,
        c: Config,
        bundle: Bundle,
        vocabulary: Vocabulary,
        world: World,
        examples: int,
        keep: bool = False,
    ):
        self.c, self.bundle, self.vocabulary, self.world = c, bundle, vocabulary, world
        self.examples, self.keep = examples, keep
        self.size = c.micro_batch_size
        self.kept: dict[str, tuple[int, list[Question]]] = {}

    def __call__(
        self,
        model: nn.Module,
        interrupted: Callable[[], bool] = lambda: False,
        limit_s: float = math.inf,
        progress: Callable[[str], None] = lambda what: None,
    ) -> Mapping[str, Counts] | None:
        """Label -> what became of its questions; None if `interrupted` said so in between, on any rank.

        progress: called with a task's label, with "batch" at each batch, and with "others" before they are waited for.
        Raises CoreFailed, on all ranks, where one failed or needed longer than limit_s.
        """
        together = waits_in_forward(
            model
        )  # then all ranks stop behind the same task, or some would wait for ever
        network = model if together else bare(model)
        tasks, width = self.bundle.tasks, len(dataclasses.fields(Counts))
        sums = torch.zeros(len(tasks) * width + 2, dtype=torch.float64, device=self.world.device)
        deadline, problem = time.monotonic() + limit_s, ""

        def over() -> bool:
            return interrupted() or time.monotonic() > deadline

        # each length would be compiled anew; setting the stance imports the compiler
        compiled = getattr(bare(model), "compiled", False)
        try:
            with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
                for i, task in enumerate(tasks):
                    progress(task.label)
                    try:  # before others wait for this rank in a forward pass
                        most, mine = self.questions(task)
                    except Exception as error:
                        problem = self.words(error)
                    if any(from_all(over() or bool(problem))) if together else over() or problem:
                        break
                    counts, problem = self.ask(
                        task,
                        mine,
                        most if together else 0,
                        network,
                        (lambda: False) if together else over,
                        progress,
                    )
                    sums[i * width : (i + 1) * width] = torch.tensor(
                        dataclasses.astuple(counts), dtype=torch.float64
                    )
        except Exception as error:
            if together:  # in a forward pass, in which the others wait: no agreement is possible
                raise
            problem = self.words(error)
        if not problem and not interrupted() and time.monotonic() > deadline:
            problem = (
                f"it took longer than EVAL_MINUTES={self.c.eval_minutes:g}; lower EVAL_EXAMPLES"
            )
        sums[-2:] = torch.tensor([interrupted(), bool(problem)], dtype=torch.float64)
        progress("others")
        *values, stopped, failed = sum_over_ranks(sums).tolist()
        if failed:
            problems = [
                f"rank {rank}: {text}" for rank, text in enumerate(from_all(problem)) if text
            ]
            raise CoreFailed(problems[0])
        if stopped:
            return None
        return {
            task.label: Counts(*map(int, values[i * width : (i + 1) * width]))
            for i, task in enumerate(tasks)
        }

    def words(self, error: Exception) -> str:
        """What went wrong, and what to change where memory did not suffice."""
        less = (
            f"; lower MICRO_BATCH_SIZE={self.size}"
            if is_out_of_memory(error) and self.size > 1
            else ""
        )
        return f"{type(error).__name__}: {error}{less}"

    def ask(
        self,
        task: Task,
        mine: Sequence[Question],
        most: int,
        model: nn.Module,
        over: Callable[[], bool],
        progress: Callable[[str], None],
    ) -> tuple[Counts, str]:
        """What became of this rank's questions of a task, and what is wrong with that, or "".

        most: questions that any rank has, where ranks wait for each other in a forward pass: each takes as many of
        them; else 0.
        """
        askable = sorted(
            (question for question in mine if not question.too_long), key=len, reverse=True
        )
        batches = [
            askable[start : start + self.size] for start in range(0, len(askable), self.size)
        ]
        passes, right, problem = -(-most // self.size), 0, ""
        for batch in [*batches, *([[]] * (passes - len(batches)))]:
            progress("batch")
            if over():
                break
            scores = losses(model, batch, self.world.device)
            if not all(
                math.isfinite(nats) for of in scores for nats, _, _ in of
            ):  # the lowest of them is any
                problem = f"{task.label}: the model's losses are no finite numbers; its weights are damaged or diverged"
            right += sum(
                is_right(task, question, of) for question, of in zip(batch, scores, strict=True)
            )
        return Counts(
            right,
            len(askable),
            sum(question.cropped for question in askable),
            len(mine) - len(askable),
            sum(question.merged for question in askable),
        ), problem

    def questions(self, task: Task) -> tuple[int, list[Question]]:
        """(the most questions that any rank has of a task, those of this one)."""
        if task.label in self.kept:
            return self.kept[task.label]
        examples = self.bundle.examples(task)
        numbers = chosen(task, len(examples), self.examples)
        mine = numbers[self.world.rank :: self.world.size]
        found = (
            -(-len(numbers) // self.world.size),
            list(questions(task, examples, mine, self.vocabulary, self.c.seq_len)),
        )
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
    log.info("%s", bundle.words())
    return Core(c, bundle, vocabulary, world, c.eval_examples, keep and bool(c.eval_examples))
