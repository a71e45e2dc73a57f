"""What the trainer's loop takes of DATA, and how held-out conversations are scored."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from finetune import main
from finetune.loader import Loader
from finetune.perplexity import Evaluator, Scored, perplexity
from finetune.prepare_data import Data, prepared
from finetune.tuning_settings import refuse_single_step
from settings import SettingsError, load_preset
from settings.config import Config
from tests.finetune.models import models, opened
from tests.finetune.test_training import chats
from tests.train.checkpoint.test_checkpoint import ALONE
from train.data.mixture import Gap
from train.evaluate import scoring
from train.evaluate.scoring import ScoringFailed
from train.model.loss import IGNORED

__all__ = ["chats", "models"]  # fixtures


@pytest.fixture(scope="module")
def settled(
    models: dict[str, Path], chats: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, Data]:
    c = load_preset(
        PRESET="finetune",
        DEVICE="cpu",
        MODEL=str(models["llama"]),
        DATA=str(chats),
        SEQ_LEN="64",
        BATCH_TOKENS="1024",
        MICRO_BATCH_SIZE="4",
        EPOCHS="2",
        DATA_DIR=str(tmp_path_factory.mktemp("data")),
        LORA_RANK="2",
        LORA_DROPOUT="0.5",
    )
    return c, prepared(c, models["llama"], (), 1)


def test_the_loader_gives_each_conversation_as_often_as_epochs_say(
    settled: tuple[Config, Data],
) -> None:
    c, data = settled
    loader = Loader(c, data, ALONE)
    steps = loader.batches.steps
    assert steps == math.ceil(2 * 180 / 16)
    seen = np.concatenate(
        [
            loader.endless.window(n)
            for step in range(steps)
            for n in loader.batch(step).samples
            if n < 2 * 180
        ]
    )
    assert (np.bincount(seen, minlength=180) == 2).all()
    batch = loader.batch(0)
    assert (
        sum(int((targets != IGNORED).sum()) for _, targets, *_ in batch.micro_batches)
        == batch.scored
        > 0
    )
    assert loader.blank()[0].shape == batch.micro_batches[0][0].shape == (4, 64)
    assert (loader.blank()[1] == IGNORED).all()
    assert [loader.batch(step).whole for step in range(steps + 1)] == [True] * (steps - 1) + [
        False,
        True,
    ]


def test_behind_the_last_epoch_and_what_was_passed_over_there_is_more(
    settled: tuple[Config, Data],
) -> None:
    c, data = settled
    loader = Loader(c, data, ALONE)
    last = loader.batches.steps - 1
    assert loader.batch(last + 3).scored > 0
    passed = loader.batch(last, [Gap(2, 64)])
    assert passed.scored > 0 and passed.samples == loader.batch(last + 4).samples
    assert loader.names([0])[0].startswith(str(data.examples.parts[0].files[0]))


@pytest.mark.parametrize(("asked", "ends"), [(None, 23), (5, 5), (23, 23), (100, 23)])
def test_a_run_ends_with_its_epochs(
    settled: tuple[Config, Data],
    models: dict[str, Path],
    asked: int | None,
    ends: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    c, data = settled
    with caplog.at_level("INFO"):
        asking = dataclasses.replace(data, config=c.replace(max_steps=asked))
        found = main.resolve_schedule(asking, models["llama"])
    assert found.last_step == ends and found.train_tokens == 23 * 1024
    assert [one.getMessage() for one in caplog.records] == (
        []
        if asked != 100
        else [
            "MAX_STEPS=100: EPOCHS=2 of DATA are 23 steps, and training ends there. "
            "With more EPOCHS it trains longer."
        ]
    )


def test_a_schedule_that_is_over_with_its_first_step_is_refused(
    settled: tuple[Config, Data], models: dict[str, Path]
) -> None:
    c, data = settled
    windows = data.batches(1).packing.windows
    for schedule in ("cosine", "wsd"):
        one = dataclasses.replace(c, batch_tokens=512 * 64, lr_schedule=schedule)
        with pytest.raises(
            SettingsError,
            match=r"BATCH_TOKENS=32768: EPOCHS=2 of DATA make a single step, .* nothing "
            r"would be learned\. Set a smaller BATCH_TOKENS",
        ):
            refuse_single_step(one, windows)
        refuse_single_step(dataclasses.replace(one, min_learning_rate=1e-6), windows)
        refuse_single_step(dataclasses.replace(one, epochs=3), windows)

    def resolve(config: Config) -> Config:
        return main.resolve_schedule(dataclasses.replace(data, config=config), models["llama"])

    assert resolve(one).last_step == 1
    with pytest.raises(SettingsError) as found:
        refuse_single_step(one, windows)
    enough = int(str(found.value).rpartition("EPOCHS=")[2].partition(" ")[0])
    advised = dataclasses.replace(one, epochs=enough)
    assert resolve(advised).last_step >= 10
    with pytest.raises(
        SettingsError, match=r"or give more DATA\.( \[|$)"
    ):  # no number of epochs is enough
        refuse_single_step(dataclasses.replace(one, batch_tokens=10**6 * 64), windows)
    warm = dataclasses.replace(one, warmup_tokens=one.batch_tokens)
    words = r"WARMUP_TOKENS=32768: Must be less than .* TRAIN_TOKENS follows from EPOCHS=2 of DATA"
    with pytest.raises(SettingsError, match=words):
        resolve(warm)


@pytest.mark.parametrize(
    "ours", [0.5, 0.0]
)  # with none of ours there is the model's own, by its config.json
def test_what_dropout_leaves_out_depends_on_the_step_alone(
    settled: tuple[Config, Data], ours: float
) -> None:
    c, data = settled
    loader, drawn = Loader(dataclasses.replace(c, lora_dropout=ours), data, ALONE), []
    for step in (3, 4, 3):
        loader.batch(step)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def test_each_rank_drops_out_others(settled: tuple[Config, Data]) -> None:
    c, data = settled
    drawn = []
    for rank in (0, 1):
        world = dataclasses.replace(ALONE, rank=rank, size=2)
        Loader(dataclasses.replace(c, lora_dropout=0.5), data, world).batch(3)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] != drawn[1]


def test_an_evaluation_scores_each_once_with_one_all_reduce(
    settled: tuple[Config, Data], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    c, data = settled
    _, model = opened(models["llama"], ALONE, LORA_RANK=2, LORA_DROPOUT=0.5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.5)
    sums = []
    monkeypatch.setattr(scoring, "sum_over_ranks", lambda values: sums.append(1) or values)
    evaluator = Evaluator(c, data, ALONE)
    found = evaluator(model)
    assert found and len(sums) == 1
    assert evaluator(model) == found  # nothing is left out
    assert model.training
    nats = tokens = 0.0
    model.eval()
    model.lm.set_attn_implementation("sdpa")
    for example in data.held_out.tolist():
        ids, scored = data.evaluation.example(example)
        logits = model.lm(torch.tensor(ids[None].astype(np.int64))).logits[0].log_softmax(-1)
        for at in np.flatnonzero(scored[1:]).tolist():
            nats -= logits[at, int(ids[at + 1])].item()
            tokens += 1
    assert found.tokens == tokens and found.nats == pytest.approx(nats, rel=1e-5)
    assert found.record()["val_ppl"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)


def test_an_evaluation_is_interrupted_and_given_up(
    settled: tuple[Config, Data], models: dict[str, Path]
) -> None:
    c, data = settled
    _, model = opened(models["llama"], ALONE)
    evaluator = Evaluator(c, data, ALONE)
    assert evaluator(model, interrupted=lambda: True) is None
    with pytest.raises(ScoringFailed, match="EVAL_MINUTES=10"):
        evaluator(model, limit_s=1e-6)

    class Broken(nn.Module):
        def forward(self, *_):
            raise RuntimeError("a bad block")

    with pytest.raises(ScoringFailed, match="RuntimeError: a bad block"):
        evaluator(Broken())
    assert isinstance(evaluator(model), Scored)


def test_perplexity_is_one_over_the_geometric_mean_of_the_probabilities() -> None:
    probabilities = [0.5, 0.125, 0.9, 0.01]
    nats = -sum(map(math.log, probabilities))
    assert perplexity(nats, 4) == pytest.approx(math.prod(probabilities) ** -0.25)
    assert perplexity(0.0, 3) == 1 and perplexity(1e6, 1) == math.inf
