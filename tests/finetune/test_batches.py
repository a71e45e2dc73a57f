"""finetune/batches.py: windows hold whole examples apart from each other, steps are shared out and counted."""

import numpy as np
import pytest
import torch

from finetune.batches import Batches, MicroBatch, Step
from finetune.examples import Examples, examples_of
from tests.finetune.making import CHATML, chat_template, row, write_rows
from train.data.mixture import Gap
from train.model.attention import document_mask
from train.model.loss import IGNORED, summed_loss

T = 64


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    folder = tmp_path_factory.mktemp("chats")
    rows = [
        row(
            f"q{i}" * (i % 5 + 1),
            f"a{i}." * (i % 3 + 1),
            *(["more?", "no" * (i % 4 + 1)] if i % 2 else []),
        )
        for i in range(60)
    ]
    return examples_of(
        str(write_rows(folder / "x.jsonl", rows)), chat_template(CHATML), T, folder / "data"
    )


def batches(
    examples: Examples, epochs: int | None = None, batch: int = 8, micro: int = 2, seed: int = 1
) -> Batches:
    return Batches(examples, np.arange(2, len(examples)), T, batch, micro, seed, epochs)


def examples_in(micro: MicroBatch) -> list[tuple[list[int], list[bool]]]:
    """(ids, scored) of each example of a micro-batch, by its bounds; blank ones left out."""
    found = []
    tokens, targets, positions = (values.ravel() for values in micro[:3])
    for begin, end in zip(micro.bounds[:-1].tolist(), micro.bounds[1:].tolist(), strict=True):
        assert positions[begin:end].tolist() == list(range(end - begin))
        scored = targets[begin:end] != IGNORED
        if scored.any():
            ids = [*tokens[begin:end].tolist(), int(targets[end - 1])]
            assert np.array_equal(targets[begin:end][scored], np.array(ids[1:])[scored])
            found.append((ids, [False, *scored.tolist()]))
    return found


def as_pairs(examples: Examples, numbers: range) -> list[tuple[list[int], list[bool]]]:
    return [tuple(values.tolist() for values in examples.example(i)) for i in numbers]


def test_an_epoch_holds_each_chosen_example_once_and_whole(examples: Examples) -> None:
    made = batches(examples, epochs=1)
    found = [
        one
        for step in range(made.steps)
        for micro in made.step(step).micro_batches
        for one in examples_in(micro)
    ]
    assert sorted(found) == sorted(as_pairs(examples, range(2, 60)))
    assert made.steps == -(-made.packing.windows // 8)
    assert (
        0.8 < made.filled == sum(len(ids) - 1 for ids, _ in found) / (made.packing.windows * T) <= 1
    )


def test_after_the_last_epoch_windows_are_blank(examples: Examples) -> None:
    made = batches(examples, epochs=2)
    found = [
        one
        for step in range(made.steps + 2)
        for micro in made.step(step).micro_batches
        for one in examples_in(micro)
    ]
    assert sorted(found) == sorted(2 * as_pairs(examples, range(2, 60)))
    blank = made.step(made.steps + 1)
    assert blank.scored == 0 and (blank.micro_batches[0].targets == IGNORED).all()
    endless = batches(examples)
    assert endless.step(made.steps + 1).scored > 0
    with pytest.raises(ValueError, match="no last step"):
        _ = endless.steps


def test_bounds_cover_every_position_in_order(examples: Examples) -> None:
    for micro in batches(examples, epochs=1).step(0).micro_batches:
        assert micro.tokens.shape == micro.targets.shape == micro.positions.shape == (2, T)
        bounds = micro.bounds
        assert (
            bounds[0] == 0 and bounds[-1] == 2 * T and (np.diff(bounds) >= 0).all() and T in bounds
        )
        assert (len(bounds) - 1).bit_count() == 1 and len(bounds) > 64


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_a_step_and_know_its_scored_tokens(examples: Examples, ranks: int) -> None:
    made, one = batches(examples, epochs=3), batches(examples, epochs=3, micro=8)
    for step in range(made.steps):
        parts = [made.step(step, rank, ranks) for rank in range(ranks)]
        targets = np.concatenate([micro.targets for part in parts for micro in part.micro_batches])
        assert {part.scored for part in parts} == {int((targets != IGNORED).sum())}
        (whole,) = one.step(step).micro_batches
        assert np.array_equal(targets, whole.targets)
        assert [len(part.windows) for part in parts] == [8 // ranks] * ranks


def test_what_does_not_divide_is_refused(examples: Examples) -> None:
    with pytest.raises(
        ValueError, match="8 windows a step do not divide over 1 replicas of 3 ranks"
    ):
        batches(examples).step(0, 0, 3)


def contents(step: Step) -> bytes:
    return b"".join(micro.tokens.tobytes() for micro in step.micro_batches)


def test_a_step_is_a_function_of_seed_and_number(examples: Examples) -> None:
    steps = [contents(batches(examples).step(i)) for i in range(30)]
    again = batches(examples)
    assert [contents(again.step(i)) for i in reversed(range(30))] == steps[::-1]
    assert len(set(steps)) == 30 and contents(batches(examples, seed=2).step(0)) not in steps
    assert contents(again.step(3, gaps=[Gap(2, 16)])) == steps[5]


# ---- In a model of transformers'


def test_packed_examples_are_scored_as_each_by_itself(examples: Examples) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = (
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=T,
            )
        )
        .double()
        .eval()
    )
    (micro,) = batches(examples, micro=8).step(1).micro_batches
    tokens, targets, positions, bounds = map(torch.from_numpy, micro)
    with torch.no_grad():
        hidden = model.model(
            tokens, attention_mask=document_mask(bounds, *tokens.shape), position_ids=positions
        )[0]
        nats, scored = summed_loss(hidden.flatten(0, 1), model.lm_head.weight, targets.flatten())
        alone = torch.zeros(())
        for ids, is_scored in examples_in(micro):
            logits = model(torch.tensor([ids])).logits[0, :-1]
            picked = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            alone = alone - picked[torch.tensor(is_scored[1:])].sum()
        together = model.model(
            tokens,
            position_ids=positions,
            attention_mask=torch.ones(len(tokens), 1, T, T, dtype=torch.bool).tril(),
        )[0]
        mixed, _ = summed_loss(together.flatten(0, 1), model.lm_head.weight, targets.flatten())
    assert scored == sum(sum(marks) for _, marks in examples_in(micro)) > 50
    assert nats.item() == pytest.approx(alone.item(), rel=1e-6)
    assert mixed.item() != pytest.approx(
        alone.item(), rel=1e-5
    )  # examples that see each other would show
