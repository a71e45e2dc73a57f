"""Validation loss and bits per byte, and what becomes of an evaluation that fails."""

import dataclasses
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from settings.config import Config
from tests.conftest import make_data
from tests.train.making import ALONE
from train.data import prepare
from train.data.manifest import DataError, hash_content
from train.data.shards import ShardSet, write_shard
from train.data.tokenizer import Vocabulary
from train.evaluate import scoring
from train.evaluate.scoring import ScoringFailed
from train.evaluate.validation import Evaluator
from train.model.model import Transformer, build


@dataclasses.dataclass
class Parts:
    config: Config
    vocabulary: Vocabulary
    shards: ShardSet
    model: Transformer

    def evaluator(
        self,
        sources=None,
        rank=0,
        size=1,
        end_of_text=-1,
        held_out=None,
        **settings,
    ):
        return Evaluator(
            dataclasses.replace(self.config, **settings),
            sources or {"python-stdlib": self.shards},
            self.vocabulary.byte_lengths(),
            dataclasses.replace(ALONE, rank=rank, size=size),
            end_of_text,
            held_out,
        )

    def ids(self):
        """All of the validation text."""
        file = self.shards.folder / "validation_00000.bin"
        return torch.from_numpy(np.fromfile(file, "<u2", offset=256).astype(np.int64))

    def with_shard(self, folder, ids, source, seal):
        """A copy of the shards with another validation shard in this seal."""
        shutil.copytree(self.shards.folder, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        path = folder / f"validation_0000{seal}.bin"
        written = write_shard(path, ids, 1, 3000, self.vocabulary.sha256, source, 512)
        manifest["seals"][seal]["validation"] = vars(written)
        manifest["hash"] = hash_content(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return ShardSet(folder)


@pytest.fixture
def parts(tiny, data):
    c = dataclasses.replace(tiny, data_dir=data["DATA_DIR"], tokenizer=data["TOKENIZER"])
    vocabulary = prepare.vocabulary(c)
    shards = prepare.open_sources(c, vocabulary)["python-stdlib"]
    return Parts(c, vocabulary, shards, build(c, ALONE.device))


@torch.no_grad()
def nats_of(model, ids):
    """Nats of all tokens of a text but the first."""
    logits = model(ids[None, :-1])[0]
    return F.cross_entropy(logits, ids[1:], reduction="sum").item()


@pytest.mark.parametrize("doc_mask", [False, True])
def test_the_full_set_scores_every_validation_token_but_the_first(parts, doc_mask):
    """With DOC_MASK, documents that share a window are scored apart."""
    ids = parts.ids()
    often = int(ids.bincount().argmax())
    parts.model = build(dataclasses.replace(parts.config, doc_mask=doc_mask), ALONE.device)
    evaluator = parts.evaluator(doc_mask=doc_mask, end_of_text=often)
    result = evaluator(parts.model, full=True)
    nats, inner = 0.0, 0
    for begin in range(0, len(ids) - 1, parts.config.seq_len):
        window = ids[begin : begin + parts.config.seq_len + 1]
        ends = (window[1:-1] == often).nonzero()[:, 0] + 1 if doc_mask else torch.tensor([])
        inner += len(ends)
        for a, b in itertools.pairwise([0, *map(int, ends), len(window) - 1]):
            nats += nats_of(parts.model, window[a : b + 1])
    entry = parts.vocabulary.tokenizer.id_to_token
    text_bytes = sum(len(entry(int(i))) for i in ids[1:])  # one character a byte
    assert evaluator.full_is_all
    assert (inner > 5) == doc_mask
    assert (result.tokens, result.text_bytes) == (len(ids) - 1, text_bytes)
    assert result.loss == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert result.bpb == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)


def test_the_subset_is_fixed_and_of_each_source_by_its_weight(parts):
    whole = parts.evaluator()
    chosen = parts.config.eval_tokens // parts.config.seq_len
    assert whole.subset == parts.evaluator(seed=9).subset
    assert len(whole.subset) == chosen
    assert set(whole.subset) < set(whole.full)
    few = parts.evaluator(eval_tokens=64)
    assert len(few.full) == 40 < len(whole.full)
    assert not few.full_is_all

    two = parts.evaluator(
        {"python-stdlib": parts.shards, "fineweb-edu": parts.shards},
        data_mix="python-stdlib:3,fineweb-edu:1",
    )
    of_first = [number for source, _, number in two.subset if source == "python-stdlib"]
    assert (len(of_first), len(two.subset)) == (chosen * 3 // 4, chosen)
    assert of_first != sorted(of_first)  # not from its beginning
    assert max(of_first) > 2 * chosen  # of 63


def test_each_source_has_its_own_loss_and_bits_per_byte(parts, tmp_path):
    """Beside an evaluation of that source alone, whatever the batches and ranks."""
    other = parts.with_shard(tmp_path / "shards", np.arange(700) % 400, "fineweb-edu", 0)
    both = {"python-stdlib": parts.shards, "fineweb-edu": other}
    mix = "python-stdlib:2,fineweb-edu:1"
    found = parts.evaluator(both, data_mix=mix)(parts.model, full=True)
    assert found
    assert list(found.by_source) == list(both)
    shares = []
    for rank in range(3):
        share = parts.evaluator(both, rank, 3, data_mix=mix)(parts.model, full=True)
        assert share
        shares.append(share.by_source)
    for name, shards in both.items():
        alone = parts.evaluator({name: shards}, data_mix=f"{name}:1")(parts.model, full=True)
        of = found.by_source[name]
        assert alone
        assert (of.tokens, of.text_bytes) == (alone.tokens, alone.text_bytes)
        assert of.nats == pytest.approx(alone.nats, rel=1e-6)
        of_ranks = [share[name] for share in shares if name in share]
        assert sum(part.tokens for part in of_ranks) == of.tokens
        assert sum(part.nats for part in of_ranks) == pytest.approx(of.nats)
    first, second = found.by_source.values()
    assert abs(first.bpb / second.bpb - 1) > 0.001
    assert found.nats == pytest.approx(first.nats + second.nats)


def test_a_run_scores_the_shards_that_there_were_when_it_began(parts, tmp_path):
    """While more are made, or its losses would not be of the same text."""
    grown = parts.with_shard(tmp_path / "shards", np.arange(1500) % 512, "python-stdlib", 1)
    sources = {"python-stdlib": grown}
    before = parts.evaluator()
    then = parts.evaluator(sources, held_out={"python-stdlib": 1})
    assert (then.full, then.subset, then.full_is_all) == (before.full, before.subset, True)
    assert {shard for _, shard, _ in parts.evaluator(sources).full} == {0, 1}
    with pytest.raises(DataError, match="lists 2 validation shards, and this run began with 3"):
        parts.evaluator(sources, held_out={"python-stdlib": 3})


def test_an_evaluation_keeps_nothing_for_backward_and_tells_its_progress(parts):
    losses, words = [], []
    parts.model.register_forward_hook(lambda model, inputs, outputs: losses.append(outputs[0]))
    parts.evaluator()(parts.model, progress=words.append)
    assert losses
    assert not any(loss.requires_grad for loss in losses)
    assert words == ["batch"] * len(losses) + ["others"]


# ---- What goes wrong


class Split(torch.nn.Module):
    """A model whose processes wait for each other in each forward pass, as FSDP2's do."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.passes = 0
        self.before = lambda: None

    def reshard(self):
        pass

    def forward(self, *inputs):
        self.passes += 1
        self.before()
        return self.model(*inputs)


def test_an_interrupted_evaluation_gives_no_number(parts):
    assert parts.evaluator()(parts.model, interrupted=lambda: True) is None


@pytest.mark.fault(37)
@pytest.mark.parametrize(
    ("where", "is_split"), [("padded", False), ("score", False), ("padded", True)]
)
def test_what_fails_costs_the_number_wherever_it_is(parts, monkeypatch, where, is_split):
    evaluator, model = parts.evaluator(), Split(parts.model) if is_split else parts.model
    monkeypatch.setattr(evaluator, where, lambda *_: 1 / 0)
    with pytest.raises(ScoringFailed, match=r"rank 0: ZeroDivisionError: division by zero"):
        evaluator(model)
    monkeypatch.undo()
    assert evaluator(model).tokens == parts.config.eval_tokens


@pytest.mark.parametrize("is_split", [False, True])
def test_one_that_takes_too_long_ends_between_two_batches(parts, monkeypatch, is_split):
    """No pass is cut short, in which others may wait for this rank's part."""
    model = Split(parts.model)
    if not is_split:
        monkeypatch.delattr(Split, "reshard")
    clock = SimpleNamespace(monotonic=lambda: float(model.passes))
    monkeypatch.setattr(scoring, "time", clock)
    with pytest.raises(ScoringFailed, match="longer than EVAL_MINUTES=10; lower EVAL_TOKENS"):
        parts.evaluator()(model, limit_s=1.5)
    assert model.passes == 2


def test_a_failing_pass_through_a_split_model_ends_the_process(parts):
    """The others wait in it and cannot be told."""
    model = Split(parts.model)
    model.before = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        parts.evaluator()(model)


def test_a_rank_passes_through_a_split_model_for_as_long_as_others_have_more(parts, monkeypatch):
    """Its own 4 batches, and 3 of which nothing is scored."""
    expected = parts.evaluator()(parts.model)
    others = iter([True] * 7)

    def sum_with_another(values):
        if len(values) == 3:  # whether there is more, and two reasons to stop
            values[0] += next(others, False)
        return values

    monkeypatch.setattr("train.evaluate.scoring.sum_over_ranks", sum_with_another)
    model = Split(parts.model)
    assert parts.evaluator()(model) == expected
    assert model.passes == 7


@pytest.mark.fault(10)
def test_damaged_validation_text_is_found_before_training(parts, tmp_path):
    where = make_data(tmp_path)
    parts.config = parts.config.replace(data_dir=where["DATA_DIR"], tokenizer=where["TOKENIZER"])
    parts.shards = prepare.open_sources(parts.config, parts.vocabulary)["python-stdlib"]
    path = parts.shards.folder / "validation_00000.bin"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"validation_00000.bin: damaged"):
        parts.evaluator()
