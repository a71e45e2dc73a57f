"""finetune/tuning_settings.py: what is chosen for model and DATA where nothing is given, and what is never changed."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from finetune.prepare_data import prepared
from finetune.tuning_settings import (
    ENOUGH_STEPS,
    MOST_EPOCHS,
    STEPS,
    STEPS_PER_EPOCH,
    fit_to_data,
    limit_seq_len,
    shorten_windows,
)
from settings import SettingsError, load_preset
from settings.checks import find_batch_problem
from settings.config import Config
from settings.resolve import resolve
from settings.tuning_rules import FITTED, choose_batch
from tests.finetune.making import CHATML, row, their_tokenizer, write_rows

DEFAULTS = load_preset(PRESET="finetune")


def fitted_to(
    windows: int, processes: int = 1, fitted: tuple[str, ...] = FITTED, **given: int
) -> Config:
    return fit_to_data(DEFAULTS.replace(**given), fitted, windows, processes)


@pytest.mark.parametrize(
    ("windows", "batch_windows", "epochs"),
    [(10**6, 32, 1), (3200, 32, 1), (3199, 32, 2), (1024, 32, 4), (1023, 16, 2), (64, 2, 4), (32, 1, 4), (20, 1, 5), (3, 1, 5), (1, 1, 10)],
)  # fmt: skip
def test_batch_and_epochs_follow_from_the_size_of_data(
    windows: int, batch_windows: int, epochs: int
) -> None:
    found = fitted_to(windows)
    assert (found.batch_windows, found.epochs) == (batch_windows, epochs)
    steps = found.epochs * windows / found.batch_windows
    assert steps >= min(STEPS, MOST_EPOCHS * windows) and steps >= ENOUGH_STEPS


@pytest.mark.parametrize("processes", [1, 2, 3, 8, 48])
def test_all_processes_can_share_what_is_chosen(processes: int) -> None:
    for windows, micro_batch in itertools.product((1, 100, 5000, 10**6), (1, 3, 4, 6, 16)):
        found = fitted_to(windows, processes, micro_batch_size=micro_batch)
        assert find_batch_problem(found, processes) is None
        assert found.batch_windows >= processes
        assert found.batch_windows <= max(processes, DEFAULTS.batch_windows)
        if found.batch_windows > processes:
            assert windows / found.batch_windows >= STEPS_PER_EPOCH
        # None that is larger by a whole micro-batch of each would do as well.
        if micro_batch == 1:
            twice = 2 * found.batch_windows
            assert twice > DEFAULTS.batch_windows or windows / twice < STEPS_PER_EPOCH


def test_a_value_that_is_given_never_changes() -> None:
    assert fitted_to(50, fitted=()) == DEFAULTS
    only_batch = fitted_to(50, fitted=("BATCH_TOKENS",), epochs=7)
    assert only_batch.epochs == 7 and only_batch.batch_windows == 1
    only_epochs = fitted_to(50, fitted=("EPOCHS",))
    assert only_epochs.batch_tokens == 32768
    assert only_epochs.epochs == math.ceil(ENOUGH_STEPS * 32 / 50)  # as many steps as it takes


def test_windows_become_shorter_for_little_data_and_cut_nothing() -> None:
    short = np.full(54, 30)
    assert shorten_windows(DEFAULTS, FITTED, short).seq_len == 32
    assert shorten_windows(DEFAULTS, FITTED, np.append(short, 200)).seq_len == 256
    assert shorten_windows(DEFAULTS, FITTED, np.full(2000, 30)).seq_len == 1024
    for given in ("SEQ_LEN", "BATCH_TOKENS"):
        assert shorten_windows(DEFAULTS, {*FITTED} - {given}, short).seq_len == 1024


def test_the_context_of_the_model_limits_windows_that_nobody_has_given() -> None:
    found = limit_seq_len(DEFAULTS, FITTED, 100, 1)
    assert (found.seq_len, found.batch_tokens) == (100, 25600)
    assert limit_seq_len(DEFAULTS, FITTED, None, 1) == DEFAULTS
    with pytest.raises(SettingsError, match=r"SEQ_LEN=1024: MODEL=.*100 tokens .* Set SEQ_LEN=100"):
        limit_seq_len(DEFAULTS, {"BATCH_TOKENS", "EPOCHS"}, 100, 1)
    with pytest.raises(SettingsError, match=r"BATCH_TOKENS=32768: Must be a multiple of"):
        limit_seq_len(DEFAULTS, {"SEQ_LEN", "EPOCHS"}, 100, 1)  # the batch is given


@pytest.mark.parametrize(
    ("given", "batch"),
    [({}, 32768), ({"NPROC": "3"}, 24576), ({"SEQ_LEN": "1000"}, 32000), ({"SEQ_LEN": "65536"}, 65536)],
)  # fmt: skip
def test_before_data_are_read_the_batch_is_one_that_can_be(given: dict, batch: int) -> None:
    environ = {"MAKE_TARGET": "finetune", "MODEL": "m", "DATA": "d"} | given
    found = resolve(environ, defaults={"ENV_FILE": "of-nobody"})
    assert not found.problems
    assert found.config.batch_tokens == batch
    assert found.fitted == set(FITTED) - set(given)
    named = resolve(environ | {"BATCH_TOKENS": "1000"}, defaults={"ENV_FILE": "of-nobody"})
    assert "BATCH_TOKENS" not in named.fitted and named.config.batch_tokens == 1000


def test_what_a_preset_or_a_run_states_is_given(tmp_path: Path) -> None:
    environ = {"MAKE_TARGET": "finetune", "MODEL": "m", "DATA": "d", "RUNS_DIR": str(tmp_path)}
    run = tmp_path / "finetune"
    run.mkdir()
    (run / "config.json").write_text(
        '{"settings": {"PRESET": "finetune", "SEQ_LEN": 64, "BATCH_TOKENS": 128, "EPOCHS": 3, '
        '"LEARNING_RATE": 3e-5}}'
    )
    found = resolve(environ, defaults={"ENV_FILE": "of-nobody"})
    assert found.config.run_name == "finetune" and found.fitted == set()
    assert (found.config.batch_tokens, found.config.epochs) == (128, 3)
    assert resolve(environ | {"RUN_NAME": "new"}, defaults={"ENV_FILE": "of-nobody"}).fitted
    large = environ | {"RUN_NAME": "new", "PRESET": "glm-4.5-air-16xh200"}
    assert resolve(large, defaults={"ENV_FILE": "of-nobody"}).fitted == set()


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 2e-5),
        ({"LORA_RANK": "16"}, 2e-4),
        ({"LORA_RANK": "16", "LEARNING_RATE": "3e-5"}, 3e-5),
        ({"LORA_RANK": "4", "PRESET": "glm-4.5-air-16xh200"}, 4e-5),
        ({"LORA_RANK": "16", "RUN_NAME": "started"}, 2e-5),  # with that, by an earlier version
    ],
)
def test_the_rate_follows_from_lora_rank_unless_it_is_given(
    tmp_path: Path, given: dict[str, str], rate: float
) -> None:
    """Adapters learn ten times slower at the same rate (docs/finetune.md)."""
    run = tmp_path / "started"
    run.mkdir()
    settings = {"PRESET": "finetune", "LEARNING_RATE": 2e-5, "LORA_RANK": 16}
    (run / "config.json").write_text(json.dumps({"settings": settings}))
    environ = {"MODEL": "m", "DATA": "d", "RUNS_DIR": str(tmp_path), "RUN_NAME": "new"} | given
    for target in ("finetune", "finetune-node", "plan"):
        found = resolve({"MAKE_TARGET": target, **environ}, defaults={"ENV_FILE": "of-nobody"})
        config = found.config
        assert (config.learning_rate, config.stored()["LEARNING_RATE"]) == (rate, rate), target
        is_ours = found.origins["LEARNING_RATE"] == "chosen by make finetune"
        assert is_ours == (rate == 2e-4)


def test_choose_batch_grows_by_whole_micro_batches() -> None:
    config = DEFAULTS.replace(seq_len=1, micro_batch_size=3)
    assert [choose_batch(config, 2, most) for most in (0, 3, 4, 6, 11, 12, 50)] == [
        2,
        2,
        4,
        6,
        6,
        12,
        48,
    ]


def test_both_are_chosen_for_sixty_conversations_of_a_small_model(tmp_path: Path) -> None:
    """And said in a line, with the number of examples."""
    model = tmp_path / "model"
    their_tokenizer(CHATML).save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}')
    rows = [row(f"What is {number}?", "It is so.") for number in range(60)]
    data = str(write_rows(tmp_path / "chats.jsonl", rows))
    config = DEFAULTS.replace(model=str(model), data=data, data_dir=str(tmp_path / "data"))
    config = config.replace(lora_rank=8)
    found = prepared(config, model, FITTED, 1)
    chosen = found.config
    longest = int(found.examples.positions.max())
    assert longest <= chosen.seq_len < 2 * longest
    steps = found.batches(1, chosen.epochs).steps
    assert 100 <= steps <= 200 and 1 < chosen.epochs <= MOST_EPOCHS
    assert found.lines[-1] == (
        f"SEQ_LEN={chosen.seq_len}, BATCH_TOKENS={chosen.batch_tokens}, EPOCHS={chosen.epochs}, "
        "LEARNING_RATE=0.0002: chosen for MODEL, LORA_RANK=8 and 54 examples. Set them to override."
    )
    given = prepared(chosen, model, (), 1)
    assert given.config == chosen and not given.chosen
    assert given.examples.key == found.examples.key  # so a resume has the same data
