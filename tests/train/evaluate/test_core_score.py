"""How CORE scores a model: against Hugging Face's classes with the same weights, one choice at a time."""

import dataclasses
import math
from array import array
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from settings.config import Config
from tests.core_bundle import TASKS, make_folder
from tests.train.model.test_model import hugging_face
from train.data import prepare
from train.data.tokenizer import Vocabulary
from train.distributed.world import World
from train.evaluate.core.bundle import Bundle
from train.evaluate.core.metric import Counts
from train.evaluate.core.prompts import Choice, Question, questions
from train.evaluate.core.score import ChoiceScore, Core, build_rows, is_right, score_choices
from train.evaluate.core.tasks import Task
from train.evaluate.scoring import ScoringFailed
from train.model.model import Transformer, build

CPU = torch.device("cpu")
ALONE = World(0, 0, 0, 1, CPU, "CPU", "here")
Parts = tuple[Config, Transformer, Vocabulary, Bundle]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle(make_folder(tmp_path_factory.mktemp("bundle")))


@pytest.fixture
def parts(tiny: Config, data: dict[str, str], bundle: Bundle) -> Parts:
    """A model of random weights that are far from equal choices, of a context that some texts exceed."""
    c = dataclasses.replace(
        tiny,
        data_dir=data["DATA_DIR"],
        tokenizer=data["TOKENIZER"],
        n_embd=64,
        n_kv_head=1,
        seq_len=96,
        mlp_dim=None,
        batch_tokens=960,
        eval_examples=0,
    ).derived()
    model = build(c, CPU)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return c, model, prepare.vocabulary(c), bundle


def asked(parts: Parts, label: str) -> tuple[Task, list[Question]]:
    c, _, v, bundle = parts
    task = next(task for task in bundle.tasks if task.label == label)
    examples = bundle.examples(task)
    return task, list(questions(task, examples, range(len(examples)), v, c.seq_len))


@torch.no_grad()
def by_hugging_face(other: torch.nn.Module, choice: Choice) -> ChoiceScore:
    """Nats of the scored tokens of a text by itself, how many, and whether greedy decoding gives them."""
    tokens = torch.tensor(choice.tokens.tolist())
    logits = other(tokens[None]).logits[0, choice.start - 1 : -1].double()
    answer = tokens[choice.start :]
    return ChoiceScore(
        F.cross_entropy(logits, answer, reduction="sum").item(),
        len(answer),
        bool((logits.argmax(1) == answer).all()),
    )


CHOICES = {"copa": 3, "piqa": 3, "winograd": 2, "jeopardy": 1}


@pytest.mark.parametrize("label", TASKS)
def test_log_likelihoods_are_those_of_hugging_face(parts: Parts, label: str) -> None:
    c, model, _, _ = parts
    task, found = asked(parts, label)
    other = hugging_face(model, c)
    right = 0
    for batch in (found[:5], found[5:]):
        for question, ours in zip(batch, score_choices(model, batch, CPU), strict=True):
            theirs = [by_hugging_face(other, choice) for choice in question.choices]
            assert len(ours) == CHOICES[label]
            for (nats, count, likeliest), expected in zip(ours, theirs, strict=True):
                assert (
                    nats == pytest.approx(expected[0], abs=1e-4)
                    and (count, likeliest) == expected[1:]
                )
            means = [nats / count for nats, count, _ in theirs]
            right += (
                theirs[0][2] if label == "jeopardy" else means.index(min(means)) == question.gold
            )
            assert is_right(task, question, ours) == is_right(task, question, theirs)
    if label == "piqa":  # two shots: some are longer than the context
        assert 0 < sum(question.cropped for question in found) < len(found)
        assert any(len({choice.cut for choice in question.choices}) > 1 for question in found)
    assert Core(c, parts[3], parts[2], ALONE)(model)[label].right == right


def test_what_is_greedily_decoded_counts_as_right(parts: Parts) -> None:
    c, model, _, _ = parts
    other, tokens = hugging_face(model, c), [0, 5, 9]
    for _ in range(3):
        tokens.append(int(other(torch.tensor([tokens])).logits[0, -1].argmax()))
    task = Task("jeopardy", "language_modeling", "", 0, "", 0.0)
    for wrong in (0, 1, 2):  # in any of its three tokens
        changed = [*tokens[: 3 + wrong], (tokens[3 + wrong] + 1) % 500, *tokens[4 + wrong :]]
        batch = [Question(0, (Choice(ids(one), 3),), 0) for one in (tokens, changed)]
        assert [
            is_right(task, question, of)
            for question, of in zip(batch, score_choices(model, batch, CPU), strict=True)
        ] == [True, False]


def ids(tokens: list[int]) -> array:
    return array("i", tokens)


def test_what_choices_begin_with_is_read_once() -> None:
    same = Question(0, tuple(Choice(ids(one), 3) for one in ([0, 1, 2, 3], [0, 1, 2, 4, 5])), 0)
    assert list(build_rows(7, same)) == [(7, [0, 1], 3)]
    # The contexts' own ends are read in each branch, and not scored.
    schema = Question(0, (Choice(ids([0, 1, 8, 9]), 3), Choice(ids([0, 1, 7, 7, 9]), 4)), 0)
    assert list(build_rows(0, schema)) == [(0, [0, 1], 2)]
    cut = Question(0, (Choice(ids([2, 3, 4]), 2, 1), Choice(ids([3, 4, 5]), 1, 2)), 0)
    assert list(build_rows(0, cut)) == [(0, [0], 2), (0, [1], 1)]


def test_the_lowest_mean_wins_and_of_equal_ones_the_first() -> None:
    task = Task("copa", "multiple_choice", "", 0, "", 0.5)
    question = Question(0, (), 1)
    means = [ChoiceScore(2.0, 1, False), ChoiceScore(3.0, 2, False), ChoiceScore(1.6, 1, False)]
    assert is_right(task, question, means)  # 2, 1.5, 1.6
    equal = [ChoiceScore(2.0, 2, False), ChoiceScore(1.0, 1, False)]
    assert not is_right(task, question, equal)
    assert is_right(task, dataclasses.replace(question, gold=0), equal)


def test_counts_do_not_depend_on_ranks_and_batches(parts: Parts) -> None:
    c, model, v, bundle = parts
    whole = Core(c, bundle, v, ALONE)(model)
    assert [counts.asked for counts in whole.values()] == [12, 12, 12, 12]
    assert 0 < sum(counts.right for counts in whole.values()) < 48
    for size in (1, 5):
        shares = [
            Core(
                dataclasses.replace(c, micro_batch_size=size),
                bundle,
                v,
                dataclasses.replace(ALONE, rank=rank, size=3),
            )(model)
            for rank in range(3)
        ]
        summed = {
            label: [
                sum(column)
                for column in zip(
                    *(dataclasses.astuple(share[label]) for share in shares), strict=True
                )
            ]
            for label in whole
        }
        assert summed == {
            label: list(dataclasses.astuple(counts)) for label, counts in whole.items()
        }


def test_a_part_is_asked_as_it_is_in_the_whole_and_kept_for_the_next_time(parts: Parts) -> None:
    c, model, v, bundle = parts
    core = Core(c.replace(eval_examples=5), bundle, v, ALONE)
    first, (_, held) = core(model), core.kept["piqa"]
    assert [counts.asked for counts in first.values()] == [5, 5, 5, 5]
    assert core(model) == first and core.kept["piqa"][1] is held
    _, every = asked(parts, "piqa")
    assert all(question == every[question.number] for question in held)


def test_an_answer_longer_than_the_context_is_left_out_and_counted(parts: Parts) -> None:
    c, model, v, bundle = parts
    found = Core(dataclasses.replace(c, seq_len=4), bundle, v, ALONE)(model)
    assert all(counts.asked + counts.too_long == 12 for counts in found.values())
    assert 0 < found["jeopardy"].too_long < 12


def test_equal_choices_score_alike_to_the_bit_and_are_read_once(parts: Parts) -> None:
    texts = ([0, 9, 8, 7, 30], [0, 9, 8, 5], [0, 9, 8, 7, 30], [0, 9, 8, 5])
    question = Question(0, tuple(Choice(ids(one), 3) for one in texts), 0)
    assert list(build_rows(0, question)) == [(0, [0, 1], 3)]
    (scores,) = score_choices(parts[1], [question], CPU)
    assert scores[0] == scores[2] != scores[1] == scores[3]


# ---- What goes wrong


def test_losses_that_are_no_numbers_are_no_answers(parts: Parts) -> None:
    c, _, v, bundle = parts
    model = build(c, CPU)
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(
        ScoringFailed, match=r"rank 0: copa: the model's losses are no finite numbers"
    ):
        Core(c, bundle, v, ALONE)(model)


def test_too_little_memory_is_said_with_the_setting_that_needs_less(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, model, v, bundle = parts

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(ScoringFailed, match=r"no room; set MICRO_BATCH_SIZE=4"):
        Core(dataclasses.replace(c, micro_batch_size=8), bundle, v, ALONE)(model)


def test_an_interrupted_metric_is_none_and_a_late_one_says_so(parts: Parts) -> None:
    c, model, v, bundle = parts
    core = Core(c, bundle, v, ALONE)
    assert core(model, interrupted=lambda: True) is None
    with pytest.raises(
        ScoringFailed, match=r"rank 0: it took longer than EVAL_MINUTES=10; lower EVAL_EXAMPLES"
    ):
        core(model, limit_s=-1.0)
    assert core(model, limit_s=math.inf)


def test_a_bundle_that_changes_costs_the_number_and_says_why(parts: Parts, tmp_path: Path) -> None:
    c, model, v, _ = parts
    bundle = Bundle(make_folder(tmp_path))
    file = tmp_path / "eval_data" / TASKS["piqa"][0]
    file.write_bytes(file.read_bytes().replace(b"abcd", b"abce", 1))
    with pytest.raises(
        ScoringFailed, match=r"CoreError: .*piqa.jsonl has changed since it was opened; put it back"
    ):
        Core(c, bundle, v, ALONE)(model)


def test_progress_is_told_by_task_and_batch(parts: Parts) -> None:
    c, model, v, bundle = parts
    said: list[str] = []
    found = Core(dataclasses.replace(c, micro_batch_size=6), bundle, v, ALONE)(
        model, progress=said.append
    )
    assert said == [word for label in TASKS for word in (label, "batch", "batch")] + ["others"]
    assert isinstance(found["copa"], Counts)
