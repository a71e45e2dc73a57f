"""How CORE scores a model: against Hugging Face's classes with the same weights, one choice at a time."""

import dataclasses
import math
from array import array

import pytest
import torch
import torch.nn.functional as F

from settings.config import Config
from tests.core_bundle import TASKS, make_folder
from tests.train.making import ALONE
from tests.train.model.test_model import hugging_face
from train.data import prepare
from train.data.tokenizer import Vocabulary
from train.evaluate.core.bundle import Bundle
from train.evaluate.core.metric import Score
from train.evaluate.core.prompts import Choice, Question, questions
from train.evaluate.core.score import ChoiceScore, Core, group, is_right, score_choices
from train.evaluate.core.tasks import Task
from train.evaluate.scoring import ScoringFailed
from train.model.model import Transformer, build

CPU = torch.device("cpu")
Parts = tuple[Config, Transformer, Vocabulary, Bundle]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return Bundle(make_folder(tmp_path_factory.mktemp("bundle")))


@pytest.fixture
def parts(tiny, data, bundle):
    """A model of random weights that are far from equal choices, of a context that some texts exceed."""
    shape = {"n_embd": 64, "n_kv_head": 1, "seq_len": 96, "mlp_dim": None, "batch_tokens": 960}
    where = {"data_dir": data["DATA_DIR"], "tokenizer": data["TOKENIZER"]}
    c = dataclasses.replace(tiny, **shape, **where, eval_examples=0).derived()
    model = build(c, CPU)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return c, model, prepare.vocabulary(c), bundle


def core(parts, rank=0, size=1, **settings):
    c, _, v, bundle = parts
    world = dataclasses.replace(ALONE, rank=rank, size=size)
    return Core(dataclasses.replace(c, **settings), bundle, v, world)


def asked(parts, label):
    c, _, v, bundle = parts
    task = next(task for task in bundle.tasks if task.label == label)
    examples = bundle.examples(task)
    return task, list(questions(task, examples, range(len(examples)), v, c.seq_len))


def question(*texts, start=3, gold=0):
    return Question(0, tuple(Choice(array("i", text), start) for text in texts), gold)


@torch.no_grad()
def by_hugging_face(other, choice):
    """Nats of the scored tokens of a text by itself, how many, and whether greedy decoding gives them."""
    tokens = torch.tensor(choice.tokens.tolist())
    logits = other(tokens[None]).logits[0, choice.start - 1 : -1].double()
    answer = tokens[choice.start :]
    nats = F.cross_entropy(logits, answer, reduction="sum").item()
    return ChoiceScore(nats, len(answer), bool((logits.argmax(1) == answer).all()))


@pytest.mark.parametrize("label", TASKS)
def test_log_likelihoods_are_those_of_hugging_face(parts, label):
    c, model, _, _ = parts
    _, found = asked(parts, label)
    other = hugging_face(model, c)
    right = 0
    for batch in (found[:5], found[5:]):
        for one, ours in zip(batch, score_choices(model, batch, CPU), strict=True):
            theirs = [by_hugging_face(other, choice) for choice in one.choices]
            assert len(ours) == {"winograd": 2, "jeopardy": 1}.get(label, 3)
            for (nats, *others), (expected, *wanted) in zip(ours, theirs, strict=True):
                assert nats == pytest.approx(expected, abs=1e-4)
                assert others == wanted
            means = [nats / count for nats, count, _ in theirs]
            is_lowest = means.index(min(means)) == one.gold
            right += theirs[0].is_likeliest if label == "jeopardy" else is_lowest
    if label == "piqa":  # two shots: some are longer than the context
        assert 0 < sum(one.cropped for one in found) < len(found)
        assert any(len({choice.cut for choice in one.choices}) > 1 for one in found)
    assert core(parts)(model).scores[label].right == right


def test_what_is_greedily_decoded_counts_as_right(parts):
    c, model, _, _ = parts
    other, tokens = hugging_face(model, c), [0, 5, 9]
    for _ in range(3):
        tokens.append(int(other(torch.tensor([tokens])).logits[0, -1].argmax()))
    texts = [tokens]
    for wrong in (3, 4, 5):
        texts.append([*tokens[:wrong], (tokens[wrong] + 1) % 500, *tokens[wrong + 1 :]])
    scores = score_choices(model, [question(text) for text in texts], CPU)
    task = Task("jeopardy", "language_modeling", "", 0, "", 0.0)
    assert [is_right(task, question(), of) for of in scores] == [True, False, False, False]


def test_what_choices_begin_with_is_read_once(parts, monkeypatch):
    model, read = parts[1], []
    forward = model.forward

    def watched(tokens, **more):
        read.append(int(tokens.count_nonzero()))
        return forward(tokens, **more)

    monkeypatch.setattr(model, "forward", watched)
    long, short = [1, 9, 8, 7, 30], [1, 9, 8, 5]
    ((first, second, *again),) = score_choices(model, [question(long, short, long, short)], CPU)
    assert again == [first, second]  # to the bit
    assert first != second
    # The contexts' own ends are read in each branch, and not scored.
    schema = (Choice(array("i", [1, 2, 8, 9]), 3), Choice(array("i", [1, 2, 7, 7, 9]), 4))
    cropped = (Choice(array("i", [3, 3, 4]), 2, 1), Choice(array("i", [3, 4, 5]), 1, 2))
    score_choices(model, [Question(0, schema, 0)], CPU)
    assert group(cropped) == [[0], [1]]
    assert read == [3 + 2 + 1, 2 + 2 + 3]


def test_the_lowest_mean_wins_and_of_equal_ones_the_first():
    task = Task("copa", "multiple_choice", "", 0, "", 0.5)
    means = [ChoiceScore(2.0, 1, False), ChoiceScore(3.0, 2, False), ChoiceScore(1.6, 1, False)]
    equal = [ChoiceScore(2.0, 2, False), ChoiceScore(1.0, 1, False)]
    for scores, winner in ((means, 1), (equal, 0)):
        for gold in (0, 1):
            assert is_right(task, question(gold=gold), scores) == (gold == winner)


def test_counts_do_not_depend_on_ranks_and_batches(parts):
    model = parts[1]
    whole = core(parts)(model).scores
    assert [score.asked for score in whole.values()] == [12, 12, 12, 12]
    assert 0 < sum(score.right for score in whole.values()) < 48
    for size in (1, 5):
        shares = [core(parts, rank, 3, micro_batch_size=size)(model) for rank in range(3)]
        for label, score in whole.items():
            counts = [dataclasses.astuple(share.scores[label])[1:] for share in shares]
            assert Score(score.task, *map(sum, zip(*counts, strict=True))) == score


def test_a_part_is_asked_as_it_is_in_the_whole_and_kept_for_the_next_time(parts):
    model, words = parts[1], []
    some = core(parts, eval_examples=5, micro_batch_size=3)
    first = some(model, progress=words.append)
    labels = [f"{number}/4 {label}" for number, label in enumerate(TASKS, 1)]
    assert words == [word for label in labels for word in (label, "batch", "batch")] + ["others"]
    held = some.kept["piqa"]
    assert [score.asked for score in first.scores.values()] == [5, 5, 5, 5]
    assert some(model) == first
    assert some.kept["piqa"] is held
    _, every = asked(parts, "piqa")
    assert all(one == every[one.number] for one in held)


def test_an_answer_longer_than_the_context_is_left_out_and_counted(parts):
    found = core(parts, seq_len=4)(parts[1]).scores
    assert all(score.asked + score.too_long == 12 for score in found.values())
    assert 0 < found["jeopardy"].too_long < 12


def test_what_goes_wrong_costs_the_number_and_says_why(parts, monkeypatch):
    model = parts[1]
    with pytest.raises(ScoringFailed, match="EVAL_MINUTES=10; lower EVAL_EXAMPLES"):
        core(parts)(model, limit_s=-1.0)
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(ScoringFailed, match=r"rank 0: copa: the model's losses are no finite"):
        core(parts)(model)

    def full(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(ScoringFailed, match=r"no room; set MICRO_BATCH_SIZE=4"):
        core(parts, micro_batch_size=8)(model)
