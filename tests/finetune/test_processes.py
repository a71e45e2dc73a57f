"""Several processes: more than there are experts, bfloat16 as large models take it, and what each holds at most."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft", reason="make setup-dev installs it")

from finetune import lite
from finetune.adapter import adapters_of
from hardware.out_of_memory import is_out_of_memory
from tests.finetune.models import as_rank, models, opened, whole, write_model
from tests.finetune.test_hf_model import packed
from tests.finetune.test_lite import LITE, writer
from tests.processes import run_ranks
from tests.train.checkpoint.test_checkpoint import ALONE, states_of
from train.checkpoint.saver import Saver
from train.distributed import world as distributed
from train.distributed.world import World
from train.optim import build_optimizer

__all__ = ["models"]  # a fixture
STEPS = 5


def trained(folder: Path, place: Path, world: World, settings: dict[str, str]) -> dict:
    """Losses of a few steps; what a lite checkpoint behind them holds; types of weights and gradients."""
    c, model = opened(
        folder, world, **LITE | {"LORA_RANK": "2", "LEARNING_RATE": "3e-3", **settings}
    )
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=3e-3
    )
    losses = []
    for _ in range(STEPS):
        nats, scored = model(*packed())  # the same on all: the average is that of one
        (nats / scored).backward()
        types = {str(weight.grad.dtype) for weight in model.parameters() if weight.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nats.item())
    saver = Saver(place / "checkpoints", c, world, 10**7)
    saver.lite = writer(c, folder)
    saver.start(1, model, optimizer, states_of(1))
    saver.wait()
    ended = saver.poll()
    distributed.broadcast_object(None)
    before = whole(model)
    with torch.no_grad():
        for weight in adapters_of(model).values():
            weight.zero_()
    saver.lite.load(place / "checkpoints" / "step_0000001", model, build_optimizer(model, c), True)
    return {
        "losses": losses,
        "problem": ended.problem if ended else None,
        "gradients": sorted(types),
        "back": all(torch.equal(value, before[name]) for name, value in whole(model).items()),
        "trained": sorted(
            {str(weight.dtype) for weight in model.parameters() if weight.requires_grad}
        ),
        "frozen": sorted(
            {str(weight.dtype) for weight in model.parameters() if not weight.requires_grad}
        ),
    }


def train_as_rank(rank: int, size: int, folder: str, place: str, settings: dict[str, str]) -> None:
    found = trained(Path(folder), Path(place), as_rank(rank, size), settings)
    Path(f"{place}/{rank}.json").write_text(json.dumps(found))
    distributed.broadcast_object(None)
    os._exit(0)


def compared(
    folder: Path, place: Path, size: int, settings: dict[str, str], near: float
) -> list[dict]:
    """What each of several processes found, which must be what one alone does."""
    alone = trained(
        folder,
        place / "alone",
        ALONE,
        {
            name: value
            for name, value in settings.items()
            if name not in ("PARALLEL", "SHARD_RANKS")
        },
    )
    assert (
        alone["losses"][-1] < alone["losses"][0] - 1 and alone["problem"] is None and alone["back"]
    )
    (place / "many").mkdir()
    run_ranks(train_as_rank, (size, str(folder), str(place / "many"), settings), size)
    found = [json.loads((place / "many" / f"{rank}.json").read_text()) for rank in range(size)]
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], rel=near)
        assert one["problem"] is None and one["back"]
    one, many = (
        load_file(place / which / "checkpoints" / "step_0000001" / lite.FILE)
        for which in ("alone", "many")
    )
    assert one.keys() == many.keys()
    assert all(torch.allclose(values, many[name], atol=20 * near) for name, values in one.items())
    return found


@pytest.mark.slow
def test_more_processes_than_experts_and_than_rows_of_an_adapter(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PORT", str(free_port))
    folder = write_model("glm4_moe", tmp_path / "model", n_routed_experts=3, num_experts_per_tok=1)
    compared(folder, tmp_path, 4, {"PARALLEL": "fsdp"}, near=1e-5)


@pytest.mark.slow
def test_as_the_preset_has_it_frozen_weights_are_bfloat16_and_trained_ones_float32(
    models: dict[str, Path], tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PORT", str(free_port))
    settings = {
        "PARALLEL": "hsdp",
        "SHARD_RANKS": "2",
        "DTYPE": "bfloat16",
        "ACTIVATION_CHECKPOINTING": "full",
    }
    for found in compared(models["glm4_moe"], tmp_path, 4, settings, near=0.02):
        assert found["frozen"] == ["torch.bfloat16"]
        assert found["trained"] == found["gradients"] == ["torch.float32"]


# ---- What a process holds at most


def load_within(
    rank: int,
    size: int,
    small: str,
    large: str,
    place: str,
    share: float,
    settings: dict[str, str],
) -> None:
    """Load a model where the system gives no more memory than a share of it, beside what is held already. The files
    are mapped, which counts as if they were held."""
    world = as_rank(rank, size) if size > 1 else ALONE
    opened(Path(small), world, **settings)  # with all that is imported and started
    status = Path("/proc/self/status").read_text().splitlines()
    held = 1024 * int(next(line.split()[1] for line in status if line.startswith("VmData:")))
    size_of = sum(path.stat().st_size for path in Path(large).glob("*.safetensors"))
    resource.setrlimit(
        resource.RLIMIT_DATA, (held + int((1 + share) * size_of), resource.RLIM_INFINITY)
    )
    try:
        _, model = opened(Path(large), world, **settings)
        here = sum(getattr(weight, "_local_tensor", weight).nbytes for weight in model.parameters())
        found = f"{here / size_of:.3f}"
    except Exception as error:
        found = "no memory" if is_out_of_memory(error) else repr(error)
    Path(f"{place}/{rank}").write_text(found)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system does not say what is held"
)
@pytest.mark.parametrize(("size", "share", "held"), [(1, 1.5, 1.0), (1, 0.9, 0.0), (2, 1.0, 0.5)])
def test_no_process_holds_the_model_twice(
    models: dict[str, Path],
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    share: float,
    held: float,
) -> None:
    monkeypatch.setenv("TEST_PORT", str(free_port))
    large = write_model(
        "glm4_moe",
        tmp_path / "model",
        hidden_size=256,
        moe_intermediate_size=256,
        vocab_size=400,
        num_hidden_layers=9,
        n_routed_experts=32,
        head_dim=64,
    )
    run_ranks(
        load_within,
        (size, str(models["glm4_moe"]), str(large), str(tmp_path), share, {"PARALLEL": "fsdp"}),
        size,
    )
    for rank in range(size):
        found = (tmp_path / str(rank)).read_text()
        if held:
            assert float(found) == pytest.approx(held, abs=0.02)
        else:  # less than the model does not suffice: what is held counts
            assert found == "no memory"
