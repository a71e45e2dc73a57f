"""Memory that does not suffice: said with the settings that help, before the first step, and no step is made."""

from pathlib import Path

import pytest
import torch

from finetune import main
from finetune.adapter import Adapters
from settings import SettingsError, load_preset
from tests.faults.inject import Fault, faulty
from tests.finetune.models import models
from tests.finetune.test_training import chats, env_of, finetune
from tests.train.checkpoint.test_checkpoint import ALONE

__all__ = ["chats", "models"]  # fixtures


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("tried to allocate 80.00 GiB"), MemoryError()], ids=str
)
def test_weights_that_do_not_fit(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*args: object) -> None:
        raise error

    monkeypatch.setattr(main.hf_model, "build", full)
    c = load_preset(PRESET="finetune", DEVICE="cpu", MODEL=str(models["llama"]))
    with pytest.raises(
        SettingsError, match=r"its weights, 0\.\d GiB in the files.*PARALLEL=fsdp.*LORA_RANK=16"
    ):
        main.build_model(models["llama"], c, ALONE, Adapters.of(c))
    monkeypatch.setattr(main.hf_model, "build", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # what is something else stays what it is
        main.build_model(models["llama"], c, ALONE, None)


@pytest.mark.fault(34)
def test_a_first_step_that_does_not_fit(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    env = env_of(tmp_path, models["qwen3"], chats)
    out = finetune(faulty(env, tmp_path, Fault("rehearsal", "no memory")), code=64)
    assert (
        "MICRO_BATCH_SIZE=4: a step of 4 sequences of 64 tokens does not fit into the memory of CPU"
        in out
    )
    for way in (
        "set MICRO_BATCH_SIZE=2",
        "ACTIVATION_CHECKPOINTING=selective",
        "PARALLEL=fsdp",
        "LORA_RANK=16 with DTYPE=bfloat16",
    ):
        assert way in out
    assert "Traceback" not in out and "step=1/" not in out
