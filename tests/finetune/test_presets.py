"""What a preset of fine-tuning says of itself at its top."""

import re

import pytest
import torch

from finetune.adapter import Adapters, is_adapter
from finetune.hf_model import on_meta
from settings import ROOT, load_preset

NAMES = sorted(
    path.stem
    for path in (ROOT / "presets").glob("*.env")
    if path.read_text().startswith("# Fine-tuning")
)


def header(name: str) -> dict[str, float]:
    """Name -> number, of the lines '#   name   number   remark'."""
    found = re.findall(
        r"^#   (\S+)\s+([0-9][0-9,.]*)",
        (ROOT / "presets" / f"{name}.env").read_text(),
        re.MULTILINE,
    )
    return {key: float(number.replace(",", "")) for key, number in found}


def test_there_are_those_that_the_documentation_names() -> None:
    assert NAMES == ["finetune", "glm-4.5-air-16xh200"]
    text = (ROOT / "docs" / "finetune.md").read_text()
    assert all(f"`{name}`" in text for name in NAMES)


def test_the_labs_values_and_their_arithmetic() -> None:
    pytest.importorskip("peft", reason="make setup-dev installs it")
    from transformers import Glm4MoeConfig

    c, said = load_preset(PRESET=NAMES[1]), header(NAMES[1])
    assert (c.epochs, c.learning_rate, c.eval_every, c.save_every) == (1, 4e-5, 100, 100)
    assert (c.keep_last, c.checkpoint_mode) == (5, "lite")
    assert c.save_minutes == 24 * 60  # longer than a hundred steps take, so that these alone save
    lm = on_meta(
        Glm4MoeConfig(attention_bias=True, head_dim=128), torch.bfloat16
    )  # else as GLM-4.5-Air
    weights = sum(weight.numel() for weight in lm.parameters())
    assert said["parameters"] == weights
    block = sum(weight.numel() for name, weight in lm.named_parameters() if ".layers.1." in name)
    assert said["weights"] == pytest.approx(2 * weights / 8 / 1e9, abs=0.06)
    assert said["block"] == pytest.approx(2 * block / 1e9, abs=0.06)
    adapters = Adapters.of(c)
    assert adapters
    adapters.join(lm)
    trained = sum(weight.numel() for name, weight in lm.named_parameters() if is_adapter(name))
    assert said["adapters"] == trained
    assert said["between"] == pytest.approx(4 * trained / 1e9, abs=0.006)
    assert said["step"] == c.batch_tokens == 16 * 4 * c.seq_len * c.micro_batch_size


def test_the_default_takes_small_steps() -> None:
    c = load_preset(PRESET="finetune")
    assert (
        c.batch_tokens == header("finetune")["step"] and c.seq_len == header("finetune")["window"]
    )
    assert not c.weight_decay and c.learning_rate < 1e-4
