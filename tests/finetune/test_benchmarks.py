"""make eval BENCHMARKS: lm-evaluation-harness on a task of a local file."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from finetune import benchmarks
from finetune.model_folder import Weights
from settings import load_preset
from tests.extra_packages import install_apart
from tests.finetune.models import models
from tests.train.checkpoint.test_checkpoint import ALONE

__all__ = ["models"]  # a fixture

TASK = """
task: local
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: gold
doc_to_choice: ["abc", "def"]
"""


@pytest.mark.slow
def test_a_task_is_asked_by_the_chat_template(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install_apart(
        "lm-eval", benchmarks.PINS, lambda place: ["--python", sys.executable, "--target", place]
    )
    monkeypatch.setattr(benchmarks, "install", lambda config: folder)
    rows = [{"question": f"Is it {i}?", "gold": i % 2} for i in range(6)]
    (tmp_path / "q.json").write_text(json.dumps(rows))
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "q.json"))
    config = load_preset(
        BENCHMARKS=str(tmp_path / "task.yaml"),
        RUNS_DIR=str(tmp_path),
        RUN_NAME="run",
        DATA_DIR=str(tmp_path / "data"),
        DEVICE="cpu",
        EVAL_EXAMPLES="4",
    )
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    weights = Weights(models["llama"])
    assert benchmarks.measure(config, dataclasses.replace(ALONE, rank=1), weights) == 0
    assert not list((tmp_path / "run").rglob("*.json"))  # one process works
    assert benchmarks.measure(config, ALONE, weights) == 0
    facts = json.loads((tmp_path / "run" / "eval" / "benchmarks_init_llama.json").read_text())
    assert facts["n-samples"]["local"] == {"original": 6, "effective": 4}
    assert 0 <= facts["results"]["local"]["acc,none"] <= 1
