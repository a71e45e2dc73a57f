"""What a preset says of itself at its top is what the code builds from it."""

import re
from pathlib import Path

import pytest
import torch

from train.config import Config
from train.flops import flops_per_token
from train.model import Transformer, matmul_weights
from train.settings import ROOT

PRESETS = sorted((ROOT / "presets").glob("*.env"))


def header(path: Path) -> dict[str, str]:
    """Name -> number, of the lines '#   name   number   remark' at the top."""
    found = re.findall(r"^#   (\S+)\s+([0-9][0-9,.e+]*)", path.read_text(), re.MULTILINE)
    return {name: number.replace(",", "") for name, number in found}


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_the_arithmetic_at_the_top_of_a_preset_is_right(path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.env").touch()
    c = Config.load({"PRESET": path.stem, "ENV_FILE": str(tmp_path / "empty.env")})
    with torch.device("meta"):
        model = Transformer(c)
    said, flops = header(path), flops_per_token(matmul_weights(model), c.n_layer, c.n_embd, c.seq_len)
    assert int(said["parameters"]) == sum(w.numel() for w in model.parameters())
    assert int(said["tokens"]) == c.train_tokens
    assert int(said["steps"]) == c.last_step
    assert int(said["FLOPs/token"]) == flops
    assert float(said["FLOPs"]) == pytest.approx(flops * c.train_tokens, rel=0.005)
    rate = re.search(r"hours +([0-9.]+) +at ([0-9]+)% MFU of .*\(([0-9.]+) TFLOP/s\)", path.read_text())
    assert rate, "a preset says its hours at a stated MFU"
    hours = flops * c.train_tokens / (float(rate[2]) / 100 * float(rate[3]) * 1e12) / 3600
    assert float(rate[1]) == pytest.approx(hours, rel=0.02)


def test_there_are_the_presets_that_the_readme_names() -> None:
    assert {"tiny", "gpt2-124m"} <= {path.stem for path in PRESETS}
