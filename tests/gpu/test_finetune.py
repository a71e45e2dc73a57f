"""A checkpoint of adapters on a GPU: nothing is allocated there while it is taken."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="make setup-dev installs it")

from safetensors.torch import load_file

from finetune import lite
from finetune.adapter import adapters_of, in_file
from tests.finetune.models import models, opened
from tests.finetune.test_hf_model import packed
from tests.finetune.test_lite import LITE, writer
from train.checkpoint.saver import Saver
from train.distributed.world import World
from train.optim import build_optimizer

__all__ = ["models"]  # a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def allocations() -> tuple[int, int]:
    """(how often, bytes) since the process began."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["allocated_bytes.all.allocated"]


def test_a_save_of_adapters_allocates_nothing_on_the_gpu(
    models: dict[str, Path], tmp_path: Path
) -> None:
    here = World(0, 0, 0, 1, torch.device("cuda", 0), "GPU", "here")
    c, model = opened(models["glm4_moe"], here, **LITE)
    optimizer = build_optimizer(model, c)
    model(*(values.cuda() for values in packed()))[0].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    saver = Saver(tmp_path, c, here, 10**7)
    saver.lite = writer(c, models["glm4_moe"])
    before = allocations()
    saver.start(1, model, optimizer, {})
    saver.wait()
    assert allocations() == before
    ended = saver.poll()
    assert ended and ended.problem is None
    held = load_file(tmp_path / "step_0000001" / lite.FILE)
    for name, weight in adapters_of(model).items():
        assert torch.equal(held[in_file(name)], weight.detach().cpu())
    assert allocations() == before
    copy = next(iter(adapters_of(model).values())).detach().clone()
    assert allocations()[0] == before[0] + 1 and copy.is_cuda  # it would have been seen
