"""Validation loss and bits per byte, and sampling."""

import dataclasses
import itertools
import json
import math
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from settings.config import Config
from tests.conftest import make_data
from train.data import prepare
from train.data.manifest import DataError
from train.data.shards import ShardSet, write_shard
from train.distributed.world import World
from train.evaluate.scoring import ScoringFailed
from train.evaluate.validation import Evaluator
from train.model.generate import continue_text
from train.model.model import build

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")


@pytest.fixture
def parts(tiny: Config, data: dict[str, str]):
    c = dataclasses.replace(tiny, data_dir=data["DATA_DIR"], tokenizer=data["TOKENIZER"])
    vocabulary = prepare.vocabulary(c)
    sources = prepare.open_sources(c, vocabulary)
    return c, vocabulary, sources, Evaluator(c, sources, vocabulary.byte_lengths(), ALONE)


def test_the_full_set_scores_every_validation_token_but_the_first(parts) -> None:
    c, vocabulary, sources, evaluator = parts
    model = build(c, ALONE.device)
    result = evaluator(model, full=True)
    ids = np.fromfile(sources["python-stdlib"].folder / "validation_00000.bin", dtype="<u2")[
        128:
    ].astype(np.int64)
    nats = 0.0
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, c.seq_len):
            window = torch.from_numpy(ids[begin : begin + c.seq_len + 1])
            nats += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum").item()
    text_bytes = sum(
        len(vocabulary.tokenizer.id_to_token(int(i))) for i in ids[1:]
    )  # one character a byte
    assert evaluator.full_is_all
    assert (result.tokens, result.text_bytes) == (len(ids) - 1, text_bytes)
    assert result.loss == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert result.bpb == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)


def test_the_subset_is_fixed_and_of_the_size_asked_for(parts) -> None:
    c, vocabulary, sources, evaluator = parts
    again = Evaluator(dataclasses.replace(c, seed=9), sources, vocabulary.byte_lengths(), ALONE)
    assert evaluator.subset == again.subset and len(evaluator.subset) == c.eval_tokens // c.seq_len
    assert set(evaluator.subset) < set(evaluator.full)


def test_documents_that_share_a_window_are_scored_apart(parts) -> None:
    """A batch at a time, as the bounds that the model is given say, against each document by itself."""
    c, vocabulary, sources, _ = parts
    ids = np.fromfile(sources["python-stdlib"].folder / "validation_00000.bin", dtype="<u2")[
        128:
    ].astype(np.int64)
    often = int(np.bincount(ids).argmax())
    c = dataclasses.replace(c, doc_mask=True)
    model = build(c, ALONE.device)
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(tokens: torch.Tensor, targets: torch.Tensor, bounds: torch.Tensor) -> object:
        given.append((tokens, bounds))
        return model(tokens, targets, bounds)

    result = Evaluator(c, sources, vocabulary.byte_lengths(), ALONE, often)(watched, full=True)
    for tokens, bounds in given:
        flat = tokens.flatten().tolist()
        begins = [i for i, token in enumerate(flat) if token == often or i % c.seq_len == 0]
        assert bounds[: len(begins)].tolist() == begins and set(bounds[len(begins) :].tolist()) == {
            len(flat)
        }
    nats, inner = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, c.seq_len):
            window = ids[begin : begin + c.seq_len + 1]
            starts = [
                0,
                *(i for i in range(1, len(window) - 1) if window[i] == often),
                len(window) - 1,
            ]
            inner += len(starts) - 2
            for a, b in itertools.pairwise(starts):
                part = torch.from_numpy(window[a : b + 1])
                logits = model.lm_head(model.hidden(part[None, :-1]))[0]
                nats += F.cross_entropy(logits, part[1:], reduction="sum").item()
    assert inner > 5
    assert result.tokens == len(ids) - 1
    assert result.nats == pytest.approx(nats, rel=1e-5)


def test_each_source_is_scored_in_proportion_to_its_weight_and_not_from_its_beginning(
    parts,
) -> None:
    c, vocabulary, sources, _ = parts
    shards = sources["python-stdlib"]
    c = dataclasses.replace(c, data_mix="python-stdlib:3,fineweb-edu:1")
    assert c.mixture == {"python-stdlib": 3, "fineweb-edu": 1}
    two = Evaluator(
        c, {"python-stdlib": shards, "fineweb-edu": shards}, vocabulary.byte_lengths(), ALONE
    )
    chosen = c.eval_tokens // c.seq_len
    per_source = {name: [w for source, _, w in two.subset if source == name] for name in c.mixture}
    assert {name: len(windows) for name, windows in per_source.items()} == {
        "python-stdlib": chosen * 3 // 4,
        "fineweb-edu": chosen // 4,
    }
    assert per_source["python-stdlib"] != sorted(per_source["python-stdlib"])
    assert max(per_source["python-stdlib"]) > 2 * chosen  # of 63


def test_each_source_has_its_own_loss_and_bits_per_byte(parts, tmp_path: Path) -> None:
    """Beside an evaluation of that source alone, whatever the batches and ranks."""
    c, vocabulary, sources, _ = parts
    folder, lengths = tmp_path / "shards", vocabulary.byte_lengths()
    shutil.copytree(sources["python-stdlib"].folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    ids = np.arange(700) % 400
    manifest["seals"][0]["validation"] = vars(
        write_shard(
            folder / "validation_00000.bin", ids, 1, 3000, vocabulary.sha256, "fineweb-edu", 512
        )
    )
    (folder / "manifest.json").write_text(json.dumps(manifest))
    both = {"python-stdlib": sources["python-stdlib"], "fineweb-edu": ShardSet(folder)}
    model, c = (
        build(c, ALONE.device),
        dataclasses.replace(c, data_mix="python-stdlib:2,fineweb-edu:1"),
    )
    found = Evaluator(c, both, lengths, ALONE)(model, full=True)
    assert found is not None and list(found.by_source) == list(both)
    for name, shards in both.items():
        one = Evaluator(
            dataclasses.replace(c, data_mix=f"{name}:1"), {name: shards}, lengths, ALONE
        )
        alone = one(model, full=True)
        of = found.by_source[name]
        assert (of.tokens, of.text_bytes) == (alone.tokens, alone.text_bytes)
        assert (of.loss, of.bpb) == (
            pytest.approx(alone.loss, rel=1e-6),
            pytest.approx(alone.bpb, rel=1e-6),
        )
    assert (
        abs(found.by_source["fineweb-edu"].bpb / found.by_source["python-stdlib"].bpb - 1) > 0.001
    )
    shares = [
        Evaluator(c, both, lengths, dataclasses.replace(ALONE, rank=rank, size=3))(model, full=True)
        for rank in range(3)
    ]
    for name, of in found.by_source.items():
        assert (
            sum(share.by_source[name].tokens for share in shares if name in share.by_source)
            == of.tokens
        )
        assert sum(
            share.by_source[name].nats for share in shares if name in share.by_source
        ) == pytest.approx(of.nats)
    assert found.nats == pytest.approx(sum(of.nats for of in found.by_source.values()))


def test_the_end_of_a_run_says_whether_it_scored_all(parts) -> None:
    c, vocabulary, sources, evaluator = parts
    few = Evaluator(
        dataclasses.replace(c, eval_tokens=64), sources, vocabulary.byte_lengths(), ALONE
    )
    assert (
        len(few.full) == 40 < len(evaluator.full) and not few.full_is_all and evaluator.full_is_all
    )


def test_a_run_scores_the_shards_that_there_were_when_it_began(parts, tmp_path: Path) -> None:
    """While more are made, or its losses would not be of the same text."""
    c, vocabulary, sources, evaluator = parts
    folder, before = tmp_path / "shards", sources["python-stdlib"]
    shutil.copytree(before.folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    ids = np.arange(1500) % 512
    manifest["seals"][1]["validation"] = vars(
        write_shard(
            folder / "validation_00001.bin", ids, 1, 3000, vocabulary.sha256, "python-stdlib", 512
        )
    )
    (folder / "manifest.json").write_text(json.dumps(manifest))
    grown = {"python-stdlib": ShardSet(folder)}
    lengths = vocabulary.byte_lengths()
    then = Evaluator(c, grown, lengths, ALONE, shards={"python-stdlib": 1})
    assert (then.full, then.subset) == (evaluator.full, evaluator.subset)
    assert then.full_is_all
    assert {shard for _, shard, _ in Evaluator(c, grown, lengths, ALONE).full} == {0, 1}


def test_an_evaluation_keeps_nothing_for_backward(parts) -> None:
    c, _, _, evaluator = parts
    model = build(c, ALONE.device)
    losses = []
    model.register_forward_hook(lambda module, inputs, outputs: losses.append(outputs[0]))
    evaluator(model)
    assert losses and not any(loss.requires_grad for loss in losses)


def test_an_interrupted_evaluation_gives_no_number(parts) -> None:
    c, _, _, evaluator = parts
    assert evaluator(build(c, ALONE.device), interrupted=lambda: True) is None


# ---- What goes wrong


@pytest.mark.fault(37)
def test_what_fails_costs_the_number_and_says_why(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    c, _, _, evaluator = parts
    model, seen = build(c, ALONE.device), []
    monkeypatch.setattr(evaluator, "padded", lambda *_: 1 / 0)
    with pytest.raises(ScoringFailed, match=r"rank 0: ZeroDivisionError: division by zero"):
        evaluator(model, progress=seen.append)
    monkeypatch.undo()
    assert evaluator(model, progress=seen.append).tokens == c.eval_tokens
    batches = c.eval_tokens // c.seq_len // c.micro_batch(1)
    assert seen == ["others"] + ["batch"] * batches + ["others"]


@pytest.mark.fault(37)
@pytest.mark.parametrize("where", ["reading", "the model"])
def test_what_takes_too_long_is_given_up_wherever_it_is(
    parts, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    c, _, _, evaluator = parts
    model = build(c, ALONE.device)
    target, name = (evaluator, "padded") if where == "reading" else (evaluator, "score")
    monkeypatch.setattr(target, name, lambda *_: time.sleep(30))
    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(
        ScoringFailed, match=r"it took longer than EVAL_MINUTES=10; lower EVAL_TOKENS"
    ):
        evaluator(model, limit_s=0.3)
    assert time.monotonic() - began < 25
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (
        0.0,
        0.0,
    )


class Split(torch.nn.Module):
    """A model whose processes wait for each other in each forward pass, as FSDP2's do."""

    def __init__(self, model: torch.nn.Module, seconds: float):
        super().__init__()
        self.model = model
        self.seconds = seconds
        self.passes = 0

    def reshard(self) -> None:
        pass

    def forward(self, *inputs: torch.Tensor) -> object:
        self.passes += 1
        time.sleep(self.seconds)
        return self.model(*inputs)


def test_no_pass_through_a_split_model_is_cut_short(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for this rank's part. Reading is cut short, and time counts between passes."""
    c, _, _, evaluator = parts
    slow = Split(build(c, ALONE.device), 0.3)
    with pytest.raises(ScoringFailed, match=r"it took longer than EVAL_MINUTES=10"):
        evaluator(slow, limit_s=0.1)
    assert slow.passes == 1
    monkeypatch.setattr(evaluator, "padded", lambda *_: time.sleep(30))
    began = time.monotonic()
    with pytest.raises(ScoringFailed, match=r"it took longer than EVAL_MINUTES=10"):
        evaluator(Split(slow.model, 0.0), limit_s=0.3)
    assert time.monotonic() - began < 25
    monkeypatch.undo()
    broken = Split(slow.model, 0.0)
    monkeypatch.setattr(broken, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # in a pass: the others cannot be told
        evaluator(broken)


@pytest.mark.fault(10)
def test_damaged_validation_text_is_found_before_training(tiny: Config, tmp_path: Path) -> None:
    c = dataclasses.replace(
        tiny, data_dir=make_data(tmp_path)["DATA_DIR"], tokenizer=str(tmp_path / "tokenizer.json")
    )
    vocabulary = prepare.vocabulary(c)
    sources = prepare.open_sources(c, vocabulary)
    path = sources["python-stdlib"].folder / "validation_00000.bin"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"validation_00000.bin: damaged"):
        Evaluator(c, sources, vocabulary.byte_lengths(), ALONE)


@pytest.mark.parametrize(
    "vocab_size", [640, 513]
)  # of which 512 are the tokenizer's; 513 is padded to 640
def test_rows_without_a_token_are_never_sampled(parts, vocab_size: int) -> None:
    c, vocabulary, _, _ = parts
    wide = dataclasses.replace(c, vocab_size=vocab_size)
    model = build(wide, ALONE.device)
    with torch.no_grad():  # make the padding rows by far the likeliest
        model.lm_head.weight[512:] = 100 * model.lm_head.weight[512:].sign()
    text = continue_text(model, vocabulary, "abcd", 30, seed=3)
    assert all(i < 512 for i in vocabulary.encode(text))
