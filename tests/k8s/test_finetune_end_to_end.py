"""A fine-tuning in a cluster, from make finetune-k8s to the end, by the real kubectl; pods are processes here."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.inject import Fault, faulty
from tests.finetune.models import models
from tests.finetune.test_training import SMALL, chats, env_of, finetune, losses
from tests.k8s.test_end_to_end import VOLUME, Lab
from tests.k8s.test_end_to_end import pytestmark as pytestmark

__all__ = ["chats", "models"]  # fixtures

OF_PRETRAINING = (
    "VOCAB_SIZE",
    "N_LAYER",
    "N_HEAD",
    "N_EMBD",
    "TRAIN_TOKENS",
    "EVAL_TOKENS",
    "SAMPLE_TOKENS",
    "TOKENIZER",
    "PRESET",
    "NODES",
)
HALF_WAY = 8  # the step behind which the pods stop


@pytest.fixture
def lab(
    tmp_path: Path, data: dict[str, str], models: dict[str, Path], chats: Path
) -> Iterator[Lab]:
    """With a model and conversations on the volume."""
    made = Lab(tmp_path, Path(data["DATA_DIR"]))
    shutil.copytree(models["llama"], made.kubelet.claim(VOLUME) / "models" / "small")
    shutil.copy(chats, made.kubelet.claim(VOLUME))
    made.env = (
        {name: value for name, value in made.env.items() if name not in OF_PRETRAINING}
        | SMALL
        | {
            "NODES": "2",
            "MODEL": "/volume/models/small",
            "DATA": "/volume/chats.jsonl",
            "LORA_RANK": "4",
            "EPOCHS": "2",
            "SAVE_EVERY": "5",
            "TRAIN_TIMEOUT_S": "800",
        }
    )
    yield made
    made.cluster.close()


def test_pods_fine_tune_as_one_process_does_and_the_same_targets_look_after_them(
    lab: Lab, tmp_path: Path, models: dict[str, Path], chats: Path
) -> None:
    # Full checkpoints, since one that holds adapters alone starts the optimizer anew.
    lab.kubelet.extra |= faulty({}, tmp_path, Fault("numbers", "until told", n=HALF_WAY - 1))
    said = lab.make("finetune-k8s", "tuned")
    assert "2 pods of 1 process on CPU" in said and "make finetune-k8s then goes on" in said
    lab.until(lambda: len(list(tmp_path.glob(".fault_0_rank_*"))) == 2, "both pods are half-way")
    assert "finetune-k8s goes on from there" in lab.make("stop", "tuned")
    assert lab.cluster.objects("Job") == []
    lab.make("finetune-k8s", "tuned")
    lab.until(lambda: "Complete" in lab.conditions("tuned"), "the run is done")
    assert "done" in lab.make("status", "tuned") and "loss=" in lab.make(
        "logs", "tuned", ONLY="metrics"
    )
    lab.make("fetch-run", "tuned")
    brought = lab.folder / "runs" / "tuned"
    assert [r["step"] for r in lab.events("tuned", "resume")] == [HALF_WAY]
    assert list(brought.glob("checkpoints/step_*")) and (brought / "metrics.jsonl").is_file()
    (tmp_path / "alone").mkdir()
    finetune(
        env_of(
            tmp_path / "alone", models["llama"], chats, PRESET="finetune", LORA_RANK="4", EPOCHS="2"
        )
    )
    found = {entry["step"]: entry["loss"] for entry in lab.events("tuned", "step")}
    assert list(found.values()) == pytest.approx(losses(tmp_path / "alone"), rel=2e-5)


def test_a_model_that_is_not_on_the_volume_ends_the_job_with_its_name(lab: Lab) -> None:
    lab.make("finetune-k8s", "absent", MODEL="/volume/models/gone")
    lab.until(lambda: "Failed" in lab.conditions("absent"), "the Job has failed")
    assert any(
        re.search(r"MODEL=\S*/models/gone: There is no such run", path.read_text())
        for path in lab.cluster.log_files.values()
    )
