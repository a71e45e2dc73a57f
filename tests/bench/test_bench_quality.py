"""make bench-quality: what is scored, what is equal, who is said to be ahead, and a whole table with a stand-in."""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import contest, peers, quality, recipes
from settings import load_preset
from settings.config import SETTINGS, Config
from tests.conftest import TINY
from train.data import prepare
from train.data.batch import Loader
from train.evaluate.validation import Evaluator
from train.schedule import lr_at

# A checkout whose model is a table of logits by token, which learns; it prints what is no JSON, as the real one does.
STAND_IN = """
import types
import torch
GPTConfig = types.SimpleNamespace

class GPT(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        assert c.dropout == 0.0 and not c.bias
        self.table = torch.nn.Embedding(c.vocab_size, c.vocab_size)
        print("number of parameters: 0.26M")
    def configure_optimizers(self, decay, rate, betas, device):
        assert (decay, rate, betas) == (0.1, 1e-3, (0.9, 0.99))
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=betas, weight_decay=decay)
    def forward(self, x, y):
        logits = self.table(x)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("nanoGPT")
    (folder / "model.py").write_text(STAND_IN)
    return str(folder)


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The settings of a tiny run on a source of 300 kB of words, declared in DATA_DIR."""
    folder, rng = tmp_path_factory.mktemp("prose"), random.Random(3)
    words = ["".join(rng.choices("abcdefghij\u00e9", k=4)) for _ in range(300)]
    rows = [{"text": " ".join(rng.choices(words, k=1200))} for _ in range(60)]
    (folder / "words.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    (folder / "sources").mkdir()
    (folder / "sources" / "prose.toml").write_text(
        f"files = [{json.dumps(str(folder / 'words.jsonl'))}]\nvalidation_fraction = 0.2\n"
    )
    values = {name.lower(): SETTINGS[name].parse(value) for name, value in TINY.items()}
    c = Config(**values | {"data_mix": "prose:1", "data_dir": str(folder)})
    return c.derived()


@pytest.fixture(scope="module")
def corpus(prose: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The settings of that run, prepared."""
    ready = quality.settings_of_corpus(prose, tmp_path_factory.mktemp("scratch"))
    prepare.prepare(ready)
    return ready


# ---- Bits per byte


class Table:
    """A model whose logits depend on the token alone."""

    done, parameters = 0, 0

    def __init__(self, size: int):
        self.weights = torch.randn(size, size, generator=torch.Generator().manual_seed(5))

    def step(self) -> float:
        raise AssertionError("scoring trains nothing")

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weights[tokens]


def test_bits_per_byte_are_those_of_the_text_that_was_held_out(corpus: Config) -> None:
    """Beside a sum over pairs of tokens in numpy, over the bytes of the text that the tokenizer gives back."""
    text, vocabulary = contest.open_text(corpus), prepare.vocabulary(corpus)
    stream = text.stream("validation").astype(int)
    model = Table(corpus.vocab_size)
    # What is held out depends on where the corpus lies. The last window is to be a short one.
    longest = corpus.seq_len
    seq_len = next(n for n in range(longest, 1, -1) if (len(stream) - 1) % n)
    found = recipes.bits_per_byte(model, text, seq_len)
    weights = model.weights.double().numpy()
    losses = np.log(np.exp(weights).sum(axis=1))[stream[:-1]] - weights[stream[:-1], stream[1:]]
    first = vocabulary.decode([int(stream[0])]) if stream[0] != text.end_of_text else ""
    held_out = vocabulary.decode([int(t) for t in stream if t != text.end_of_text])
    size = len(held_out.encode()) - len(first.encode())
    assert (found["tokens"], found["bytes"]) == (len(stream) - 1, size)
    assert found["bpb"] == pytest.approx(losses.sum() / math.log(2) / size, rel=1e-6)


def test_both_recipes_are_scored_by_what_their_own_forward_computes(
    corpus: Config, checkout: str
) -> None:
    """The loss that each trains on, of one window of the held-out text, is what scoring finds."""
    text, length = contest.open_text(corpus), corpus.seq_len
    window = torch.from_numpy(text.stream("validation")[: length + 1].astype(np.int64))[None]

    class OneWindow(recipes.Text):
        """Only that much was held out."""

        def stream(self, split: str) -> np.ndarray:
            return super().stream(split)[: length + 1]

    one = OneWindow(text.shards, text.byte_lengths, text.end_of_text)
    theirs = recipes.NanoGPT(corpus, text, checkout)
    ours = recipes.Ours(contest.laid_out(corpus, "adamw", 10), text)
    loss = theirs.model(window[:, :-1], window[:, 1:])[1].item()
    nats, scored = ours.model(window[:, :-1], window[:, 1:])
    for recipe, mean in ((theirs, loss), (ours, (nats / scored).item())):
        found = recipes.bits_per_byte(recipe, one, length)
        assert found["tokens"] == length
        assert found["bpb"] * found["bytes"] * math.log(2) / length == pytest.approx(mean, rel=1e-5)


def test_scoring_finds_what_the_trainers_own_evaluation_finds(corpus: Config) -> None:
    """It reads the same windows, by other code, and takes the loss from inside the model."""
    text = contest.open_text(corpus)
    ours = recipes.Ours(contest.laid_out(corpus, "adamw", 10), text)
    c = dataclasses.replace(corpus, eval_tokens=10**6)
    evaluator = Evaluator(
        c, {"prose": text.shards}, text.byte_lengths, ours.world, text.end_of_text
    )
    whole = evaluator(ours.model, full=True)
    found = recipes.bits_per_byte(ours, text, corpus.seq_len)
    assert evaluator.full_is_all and whole
    assert (found["tokens"], found["bytes"]) == (whole.tokens, whole.text_bytes)
    assert found["bpb"] == pytest.approx(whole.bpb, rel=1e-6)


# ---- What is equal


def test_schedules_are_laid_out_for_the_steps_that_a_recipe_has() -> None:
    settings = {
        "PRESET": "tiny",
        "TRAIN_TOKENS": "1228800",
        "WARMUP_TOKENS": "61440",
        "BATCH_TOKENS": "1024",
        "MICRO_BATCH_SIZE": "8",
        "LEARNING_RATE": "3e-3",
        "MIN_LEARNING_RATE": "3e-4",
    }
    c = load_preset(**settings)  # a twentieth of it warms up
    laid = contest.laid_out(c, "muon", 400)
    assert (laid.last_step, laid.optimizer) == (400, "muon")
    assert lr_at(20, laid) == pytest.approx(3e-3)
    assert lr_at(10, laid) == pytest.approx(1.5e-3)
    assert lr_at(399, laid) > lr_at(400, laid) == pytest.approx(3e-4)
    wsd = contest.laid_out(load_preset(**settings, LR_SCHEDULE="wsd"), "adamw", 400)
    assert lr_at(320, wsd) == pytest.approx(3e-3)
    assert 3e-3 > lr_at(321, wsd) > lr_at(400, wsd) == pytest.approx(3e-4)
    assert contest.laid_out(dataclasses.replace(c, max_steps=7), "adamw", 400).last_step == 400


def test_nanogpts_schedule_warms_up_over_100_steps_and_ends_at_a_tenth() -> None:
    rates = [recipes.rate_of_nanogpt(done, 500) for done in range(501)]
    assert rates[0] == pytest.approx(1e-3 / 101) and rates[99] == pytest.approx(1e-3 * 100 / 101)
    assert rates[100] == max(rates) == pytest.approx(1e-3) and rates[300] == pytest.approx(5.5e-4)
    assert rates[500] == min(rates[101:]) == pytest.approx(1e-4)
    assert recipes.rate_of_nanogpt(5, 50) == pytest.approx(
        6e-3 / 101
    )  # shorter than its warm-up: never at the peak


def test_a_batch_in_parts_gives_nanogpt_the_gradient_of_a_whole_one(
    corpus: Config, checkout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, losses, gradients = contest.open_text(corpus), [], list[torch.Tensor]()
    for size in (4, 5, 16):  # of 16 windows; 5 leaves one over
        recipe = recipes.NanoGPT(dataclasses.replace(corpus, micro_batch_size=size), text, checkout)
        weight = recipe.model.table.weight
        monkeypatch.setattr(
            recipe.optimizer, "step", lambda weight=weight: gradients.append(weight.grad.clone())
        )
        losses.append(recipe.step())
    assert losses[0] == pytest.approx(losses[2], rel=1e-6) and losses[1] == pytest.approx(
        losses[2], rel=1e-6
    )
    assert gradients[2].abs().max() > 1e-4
    assert torch.allclose(gradients[0], gradients[2], atol=1e-7)
    assert torch.allclose(gradients[1], gradients[2], atol=1e-7)


@pytest.mark.parametrize(
    ("seconds", "step_s", "steps"), [(10.0, 0.1, 100), (10.0, 0.3, 33), (0.1, 0.3, 1)]
)
def test_in_equal_time_there_are_as_many_whole_steps_as_fit(
    seconds: float, step_s: float, steps: int
) -> None:
    assert contest.steps_in(seconds + 1e-9, step_s) == steps


def test_turns_share_out_the_steps_and_each_begins_in_its_turn() -> None:
    order: list[str] = []

    class Stub:
        parameters = 0

        def __init__(self, name: str):
            self.name, self.done = name, 0

        def step(self) -> float:
            order.append(self.name)
            self.done += 1
            return 0.0

        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens

    stubs = {name: Stub(name) for name in "ab"}
    seconds = contest.take_turns(stubs, {"a": 5, "b": 2}, 2)
    assert "".join(order) == "aab" + "baaa" and {
        name: len(took) for name, took in seconds.items()
    } == {"a": 2, "b": 2}
    contest.take_turns(stubs, {"a": 1, "b": 0}, 1)  # on from where they stand
    assert (stubs["a"].done, stubs["b"].done) == (6, 2)


def test_entrants_of_equal_time_have_the_steps_that_fit_into_nanogpts(
    corpus: Config, checkout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        contest,
        "step_times",
        lambda *_: {recipes.NANOGPT: 0.02, contest.ADAMW: 0.01, contest.MUON: 0.03},
    )
    c = contest.laid_out(corpus, "adamw", 9)
    found = contest.contest(c, contest.open_text(corpus), checkout, turns=3)
    assert {(e["recipe"], e["equal"]): e["steps"] for e in found["entrants"]} == {
        ("nanoGPT", "tokens"): 9,
        ("ours, AdamW", "tokens"): 9,
        ("ours, Muon", "tokens"): 9,
        ("ours, AdamW", "time"): 18,
        ("ours, Muon", "time"): 6,
    }
    assert [e["tokens"] for e in found["entrants"]] == [512 * e["steps"] for e in found["entrants"]]
    bpb = {(e["recipe"], e["equal"]): e["validation"]["bpb"] for e in found["entrants"]}
    assert bpb["ours, AdamW", "time"] < bpb["ours, AdamW", "tokens"]  # twice the steps
    assert len({e["validation"]["bytes"] for e in found["entrants"]}) == 1


def test_recipes_train_on_the_same_text_by_their_own_order_and_seed(
    corpus: Config, checkout: str
) -> None:
    text = contest.open_text(corpus)
    stream = text.stream("train").astype(np.int64)
    there = {tuple(stream[i : i + corpus.seq_len + 1]) for i in range(len(stream) - corpus.seq_len)}

    def of(seed: int) -> list[tuple[int, ...]]:
        tokens, targets = recipes.NanoGPT(
            dataclasses.replace(corpus, seed=seed), text, checkout
        ).batch()
        assert tokens.shape == targets.shape == (corpus.batch_windows, corpus.seq_len)
        return [
            (*row, target[-1])
            for row, target in zip(tokens.tolist(), targets.tolist(), strict=True)
        ]

    assert set(of(1)) <= there and of(1) == of(1) != of(2)
    ours = recipes.Ours(corpus, text)
    assert isinstance(ours.loader, Loader)
    (tokens, *_), *_ = ours.loader.batch(0).micro_batches
    assert {(*row,) for row in tokens.tolist()} <= {window[:-1] for window in there}


# ---- What is said

KEYS = ("nano", "adamw", "muon", "adamw_time", "muon_time")


def made_up(seed: int, seconds: dict[str, float], **bpb: float) -> dict[str, Any]:
    entrants = []
    for (recipe, equal), key in zip(contest.ENTRANTS, KEYS, strict=True):
        entrants.append(
            {
                "recipe": recipe,
                "equal": equal,
                "tokens": 512_000,
                "seconds": seconds.get(key, 40.0),
                "validation": {"bpb": bpb[key]},
            }
        )
    return {"seed": seed, "foreign_percent": 1.0, "entrants": entrants}


def test_the_winner_is_named_by_medians_and_beyond_the_spread_only_where_no_seed_overlaps() -> None:
    rows = [
        (2.10, 1.80, 1.78, 1.81, 1.80),
        (2.12, 1.82, 1.79, 1.83, 1.78),
        (2.08, 1.81, 1.77, 1.80, 1.79),
    ]
    held = [
        made_up(seed, {"muon_time": 42.0} if seed == 2 else {}, **dict(zip(KEYS, row, strict=True)))
        for seed, row in enumerate(rows)
    ]
    first, other = quality.verdict("prose", held)
    assert first == (
        "prose, equal wall time: ours, Muon has the lowest, 1.790 (1.780-1.800) bits per byte; 0.020 "
        "below ours, AdamW, within the spread of 3 seeds; 0.310 below nanoGPT, beyond the spread of 3 "
        "seeds."
    )
    assert "seeds" not in quality.verdict("prose", held[:1])[0]
    assert other.startswith(
        "prose, seed 2: ours, Muon had 105.0% of nanoGPT's seconds, more than 3% off"
    )
    lines = quality.rows("prose", held)
    assert [line.split(" | ")[1:3] for line in lines] == [
        [equal, recipe] for equal in ("tokens", "wall time") for recipe in contest.RECIPES
    ]
    assert lines[5] == (
        "| prose | wall time | ours, Muon | 1.790 (1.780-1.800) | 0.51 (0.51-0.51) | 40.0 (40.0-42.0) "
        "| 100.0 (100.0-105.0) | 1 |"
    )


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Settings of a tiny table in the environment, and nobody's env file."""
    (tmp_path / "env").write_text("")
    mine = {"ENV_FILE": str(tmp_path / "env"), "OMP_NUM_THREADS": "1"}
    for name, value in {**TINY, **mine}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(quality, "TOKENS_OF_A_RECIPE", 4096)
    monkeypatch.setattr(quality, "SEEDS", 2)
    monkeypatch.setattr(peers, "CHECKOUTS", tmp_path / "peers")
    return monkeypatch


def test_without_a_checkout_it_says_how_to_get_one_before_any_work(
    given: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given.setattr(prepare, "prepare", lambda *_: pytest.fail("it worked"))
    assert quality.main() == 64
    said = capsys.readouterr()
    assert said.out == "" and "peers/nanoGPT is missing; git clone https://git" in said.err
    assert "3adf61e" in said.err
    (tmp_path / "peers" / "nanoGPT").mkdir(parents=True)
    assert quality.main() == 64
    assert "is not a checkout of nanoGPT" in capsys.readouterr().err


def test_a_mixture_is_refused_before_any_work(
    given: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given.setattr(quality, "find_checkout", lambda: "somewhere")
    given.setenv("DATA_MIX", "python-stdlib:2,prose:1")
    assert quality.main() == 64
    assert "Set for example DATA_MIX=python-stdlib:1." in capsys.readouterr().err


@pytest.mark.slow
def test_a_whole_table_is_made(
    given: pytest.MonkeyPatch,
    prose: Config,
    checkout: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The processes are real ones. What was held out is the same for all, and seeds differ."""
    given.setattr(quality, "RESULTS", tmp_path)
    given.setattr(quality, "find_checkout", lambda: checkout)
    given.setenv("DATA_MIX", prose.data_mix)
    given.setenv("DATA_DIR", prose.data_dir)
    assert quality.main() == 0
    said = capfd.readouterr().out
    assert len([line for line in said.splitlines() if line.startswith("| prose | ")]) == 6
    assert "preset: tiny, 8 steps of 512 tokens" in said and "prose, equal wall time: " in said
    assert "number of parameters" not in said
    (path,) = tmp_path.glob("quality_*.json")
    held = json.loads(path.read_text())["corpora"]["prose"]
    assert [found["seed"] for found in held] == [1337, 1338]
    bpb = [
        e["validation"]["bpb"]
        for found in held
        for e in found["entrants"]
        if e["equal"] == "tokens"
    ]
    assert len(set(bpb)) == 6
    assert len({e["validation"]["bytes"] for found in held for e in found["entrants"]}) == 1
