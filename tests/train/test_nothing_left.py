"""train/run_folder.py: what a run that has nothing left to do advises."""

from record.run_paths import RunPaths
from record.status import Status
from settings.config import Config
from train.run_folder import describe_end


def test_a_run_that_is_done_can_be_trained_further_if_it_has_a_checkpoint(tmp_path):
    config = Config(batch_tokens=1000, train_tokens=9_500, max_steps=5).derived()
    paths = RunPaths(tmp_path)
    Status(paths.status, active=True).phase("done", step=5)
    advice = "\n".join(describe_end(config, paths, "train"))
    assert "is done" in advice and "further" not in advice
    (paths.checkpoints / "step_0000005").mkdir(parents=True)
    assert "MAX_STEPS=10\n" in "\n".join(describe_end(config, paths, "train"))
    assert describe_end(config.replace(max_steps=6), paths, "train") == []


def test_more_steps_of_a_schedule_that_ends_at_zero_are_not_proposed(tmp_path):
    config = Config.of_preset(RUN_NAME="x", DATA="novel.txt")
    paths = RunPaths(tmp_path)
    Status(paths.status, active=True).phase("done", step=977)
    (paths.checkpoints / "step_0000977").mkdir(parents=True)
    advice = "\n".join(describe_end(config, paths, "train"))
    assert "MAX_STEPS" not in advice and "the learning rate is 0" in advice
    assert "    make train RUN_NAME=x-longer TRAIN_TOKENS=8M DATA=novel.txt\n" in advice.replace(
        "train longer:  ", ""
    )
    Status(paths.status, active=True).phase("done", step=500)
    shorter = config.replace(max_steps=500)
    assert "MAX_STEPS=1000\n" in "\n".join(describe_end(shorter, paths, "train"))


def test_another_run_is_of_the_same_text_and_preset(tmp_path):
    config = Config(run_name="x", preset="gpt2-124m", data="my novel.txt", max_steps=5).derived()
    Status(RunPaths(tmp_path).status, active=True).phase("done", step=5)
    advice = describe_end(config, RunPaths(tmp_path), "train")
    command = "make train RUN_NAME=x-2 SEED=1338 PRESET=gpt2-124m DATA='my novel.txt'"
    assert f"    train another:     {command}" in advice
    advice = describe_end(config.replace(preset="tiny", data=""), RunPaths(tmp_path), "train")
    assert "    train another:     make train RUN_NAME=x-2 SEED=1338" in advice
