"""train/run_folder.py: what is said of a run that has nothing left to do."""

import json

import pytest

from record.run_paths import RunPaths
from record.status import Status
from settings.config import Config
from tests.train.checkpoint.test_find import make
from train.checkpoint.identity import Identity
from train.checkpoint.manifest import CheckpointError
from train.run_folder import describe_end

FURTHER = "To train it further, set {}."
LONGER = (
    "The learning rate is 0, so more steps change nothing. To train longer, set RUN_NAME=x-longer "
    "TRAIN_TOKENS=19000."
)


@pytest.mark.parametrize(
    ("phase", "step", "saved", "target", "settings", "end", "advice"),
    [
        (
            "done",
            5,
            True,
            "train",
            {"max_steps": 5},
            "run x is done: 5 of 5 steps, in ",
            FURTHER.format("MAX_STEPS=10"),
        ),
        ("done", 5, False, "train", {"max_steps": 5}, "run x is done: 5 of 5 steps, in ", ""),
        ("done", 5, True, "train", {"max_steps": 6}, "", ""),
        ("crashed", 5, True, "train", {"max_steps": 5}, "", ""),
        (
            "crashed",
            5,
            True,
            "train",
            {"max_steps": 3},
            "run x is done: 5 of 3 steps",
            FURTHER.format("MAX_STEPS=10"),
        ),
        (
            "done",
            5,
            True,
            "finetune",
            {"epochs": 2, "train_tokens": 4000},
            "run x is done: 5 of 4 steps",
            FURTHER.format("EPOCHS=4"),
        ),
        # Of a schedule that ends at 0, more steps change nothing.
        ("done", 10, True, "train", {"min_learning_rate": 0.0}, "is done: 10 of 10 steps", LONGER),
        (
            "done",
            9,
            True,
            "train",
            {"min_learning_rate": 0.0, "max_steps": 9},
            "run x is done: 9 of 9 steps",
            FURTHER.format("MAX_STEPS=18"),
        ),
    ],
)
def test_a_run_with_nothing_left_says_how_to_go_on(
    tmp_path, phase, step, saved, target, settings, end, advice
):
    usual = {"run_name": "x", "batch_tokens": 1000, "train_tokens": 9_500}
    config = Config(**{**usual, **settings})
    paths = RunPaths(tmp_path)
    Status(paths.status, active=True).phase(phase, step=step)
    if saved:
        make(paths.checkpoints, step)
    said = describe_end(config.derived(), paths, target)
    first, _, rest = said.replace(f"RUNS_DIR={tmp_path.parent} ", "").partition("\n")
    assert end in first and rest == advice and bool(end) == bool(said)


def test_a_new_run_is_proposed_under_a_name_that_is_free(tmp_path):
    for name in ("x-longer", "x-longer-2"):
        (tmp_path / name).mkdir()
    paths = RunPaths(tmp_path / "x")
    paths.folder.mkdir()
    Status(paths.status, active=True).phase("done", step=10)
    config = Config(run_name="x", batch_tokens=1000, train_tokens=10_000, min_learning_rate=0.0)
    said = describe_end(config.derived(), paths, "train")
    assert f"RUNS_DIR={tmp_path} RUN_NAME=x-longer-3 TRAIN_TOKENS=20000" in said


@pytest.mark.parametrize("phase", ["done", "crashed"])
@pytest.mark.parametrize("step", [5, 40])
def test_a_checkpoint_that_does_not_verify_ends_no_run(tmp_path, phase, step):
    paths = RunPaths(tmp_path)
    Status(paths.status, active=True).phase(phase, step=5)
    make(paths.checkpoints, 3)
    (paths.checkpoints / f"step_{step:07d}").mkdir()  # without its manifest
    assert describe_end(Config(max_steps=5).derived(), paths, "train") == ""
    make(paths.checkpoints, 6)
    assert "is done: 6 of 5 steps" in describe_end(Config(max_steps=5).derived(), paths, "train")


def test_a_checkpoint_of_another_run_ends_no_run(tmp_path):
    paths = RunPaths(tmp_path)
    config = Config(max_steps=5).derived()
    mine = Identity.of({}, config, "mine")
    other = Identity.of({}, config.replace(seed=5), "other")
    mine.adopted = []
    stored = {"settings": {}, "attempts": [], "identity": mine.stored()}
    paths.config.write_text(json.dumps(stored))
    make(paths.checkpoints, 40, run=other.of_checkpoint())
    with pytest.raises(CheckpointError, match="SEED=5"):
        describe_end(config, paths, "train")
