"""What a checkpoint of adapters takes: no memory on the device, no collective, and a part of what a full one does."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("peft", reason="make setup-dev installs it")

from finetune import lite
from finetune.adapter import adapters_of, in_file
from finetune.weights import put
from tests.finetune.models import models, opened, theirs
from tests.finetune.test_hf_model import packed
from tests.finetune.test_lite import LITE, writer
from tests.train.checkpoint.test_checkpoint import ALONE, states_of
from train.checkpoint.saver import Saver
from train.distributed.world import World
from train.optim import Optimizer, build_optimizer

__all__ = ["models"]  # a fixture


class Made(TorchDispatchMode):
    """Bytes of new memory by device, and collectives, of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.by_device: dict[str, int] = {}
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            id_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        }
        if "c10d" in func.namespace:
            self.collectives.append(str(func))
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and id_of(value) not in known:
                known.add(id_of(value))
                kind = value.device.type
                self.by_device[kind] = (
                    self.by_device.get(kind, 0) + value.untyped_storage().nbytes()
                )
        return result


def id_of(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def test_a_save_of_adapters_makes_no_memory_on_the_device(models: dict[str, Path]) -> None:
    c, model = opened(models["glm4_moe"], ALONE, **LITE)
    made, control = Made(), Made()
    with FakeTensorMode():  # a GPU that need not be there
        for name, weight in list(model.named_parameters()):
            put(
                model,
                name,
                nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="cuda"), False),
            )
        adapters = adapters_of(model)
        size = sum(weight.numel() * 4 for weight in adapters.values())
        saver = writer(c, models["glm4_moe"])
        with made:
            copied = saver.copied(model)
        with control:
            for weight in adapters.values():
                weight.float().mul(1.0)
    assert made.by_device == {"cpu": size} and not made.collectives
    assert {rows.device.type for rows, _ in copied.values()} == {"cpu"}
    assert control.by_device == {"cuda": size}  # it sees what is made there


# ---- As one of many processes, of which the others need not be there


@pytest.fixture
def one_of_many(request: pytest.FixtureRequest) -> Iterator[World]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank, size = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield World(rank, rank, 0, size, torch.device("cpu"), "CPU", "here", size)
    dist.destroy_process_group()


# torch remembers by the size of a mesh which part is whose, so each rank here has a size of its own
@pytest.mark.parametrize("one_of_many", [(0, 16), (5, 15), (11, 14)], ids=str, indirect=True)
def test_of_more_processes_than_rows_each_loads_and_saves_what_it_has(
    models: dict[str, Path],
    one_of_many: World,
) -> None:
    c, model = opened(
        models["glm4_moe"], one_of_many, PARALLEL="fsdp", **LITE
    )  # 8 experts, adapters of rank 4
    reference, rank, size = (
        dict(theirs(models["glm4_moe"]).named_parameters()),
        one_of_many.rank,
        one_of_many.size,
    )
    _, whole = opened(models["glm4_moe"], ALONE, **LITE)
    begun = {in_file(name): weight.detach() for name, weight in adapters_of(whole).items()}

    def rows(values: torch.Tensor) -> torch.Tensor:
        parts = values.chunk(size)
        return parts[rank] if rank < len(parts) else values[:0]

    for name, weight in model.named_parameters():
        if ".lora_" not in name:
            wanted = reference[name.removeprefix("lm.").replace("base_layer.", "")]
            assert torch.equal(weight.to_local(), rows(wanted)), name
    made = Made()
    with made:
        copied = writer(c, models["glm4_moe"]).copied(model)
    assert copied.keys() == begun.keys() and not made.collectives
    for name, (held, shape) in copied.items():
        assert shape == begun[name].shape and torch.equal(held, rows(begun[name])), name
    assert any(not len(held) for held, _ in copied.values()) == (rank >= 4)
    assert made.by_device.get("cpu", 0) == sum(held.nbytes for held, _ in copied.values())


# ---- Beside a full one


def saved_bytes(folder: Path, model_folder: Path, **settings: Any) -> int:
    """Of one checkpoint behind a step."""
    c, model = opened(model_folder, ALONE, **settings)
    optimizer = build_optimizer(model, c)
    model(*packed())[0].backward()
    optimizer.step()
    saver = Saver(folder, c, ALONE, 10**7)
    if settings.get("CHECKPOINT_MODE"):
        saver.lite = writer(c, model_folder)
    saver.start(1, model, optimizer, states_of(1))
    saver.wait()
    ended = saver.poll()
    assert ended and ended.problem is None
    return ended.size


def test_it_holds_the_adapters_and_a_few_words(models: dict[str, Path], tmp_path: Path) -> None:
    _, model = opened(models["glm4_moe"], ALONE, **LITE)
    adapters = adapters_of(model)
    numbers = sum(weight.nbytes for weight in adapters.values())
    base = sum(weight.nbytes for weight in model.parameters()) - numbers
    light = saved_bytes(tmp_path / "lite", models["glm4_moe"], **LITE)
    beside_moments = saved_bytes(
        tmp_path / "lora", models["glm4_moe"], **LITE | {"CHECKPOINT_MODE": "full"}
    )
    everything = saved_bytes(tmp_path / "all", models["glm4_moe"])
    assert numbers < light < numbers + 256 * len(adapters) + 4096
    assert beside_moments > 3 * numbers and everything > 3 * base > 3 * light
    held = load_file(tmp_path / "lite" / "step_0000001" / lite.FILE)
    assert {name: values.shape for name, values in held.items()} == {
        in_file(name): weight.shape for name, weight in adapters.items()
    }


# ---- What is damaged


def damaged(folder: Path, **changes: Any) -> None:
    from safetensors.torch import save_file

    held = load_file(folder / lite.FILE)
    name = sorted(held)[2]
    for kind, value in changes.items():
        if kind == "rows":  # of one process
            held = {
                key: values[: math.ceil(len(values) / value)].contiguous()
                for key, values in held.items()
            }
        elif kind == "number":
            held[name] = held[name].clone()
            held[name].view(-1)[3] = value
        elif kind == "dtype":
            held[name] = held[name].to(value)
        elif kind == "prefix":
            held = {key.replace("base_model.model.", value): values for key, values in held.items()}
    save_file(held, folder / lite.FILE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 4}, r"is \(1, 32\), not \(4, 32\)"),
        ({"rows": 2}, r"is \(2, 32\), not \(4, 32\)"),
        ({"number": math.nan}, r"base_model\S+ holds numbers that are not finite"),
        ({"number": -math.inf}, r"base_model\S+ holds numbers that are not finite"),
        ({"prefix": ""}, "holds other adapters than LORA_TARGETS asks for"),
        ({"dtype": torch.float64}, "has the type torch.float64, not float32 or bfloat16"),
        ({"dtype": torch.complex64}, "has the type torch.complex64, not float32 or bfloat16"),
    ],
    ids=["a-quarter", "a-half", "nan", "inf", "names", "double", "complex"],
)
def test_an_adapter_that_is_damaged_is_refused(
    models: dict[str, Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    from train.checkpoint.manifest import CheckpointError

    c, model = opened(models["llama"], ALONE, LORA_RANK=4, CHECKPOINT_MODE="lite")
    saver = Saver(tmp_path, c, ALONE, 10**7)
    saver.lite = writer(c, models["llama"])
    saver.start(1, model, Optimizer([]), states_of(1))
    saver.wait()
    folder = tmp_path / "step_0000001"
    before = {name: weight.clone() for name, weight in adapters_of(model).items()}
    damaged(folder, **change)
    with pytest.raises(CheckpointError, match=words):
        saver.lite.load(folder, model, build_optimizer(model, c), True)
    if "number" in change:
        assert all(torch.equal(weight, before[name]) for name, weight in adapters_of(model).items())


def test_what_is_not_finite_is_not_written(models: dict[str, Path], tmp_path: Path) -> None:
    c, model = opened(models["llama"], ALONE, LORA_RANK=4, CHECKPOINT_MODE="lite")
    saver = Saver(tmp_path, c, ALONE, 10**7)
    saver.lite = writer(c, models["llama"])
    with torch.no_grad():
        list(adapters_of(model).values())[1][0, 0] = math.nan
    saver.start(1, model, Optimizer([]), states_of(1))
    saver.wait()
    ended = saver.poll()
    assert ended and "holds numbers that are not finite" in str(ended.problem)
    assert list(tmp_path.iterdir()) == []


def test_those_of_adapters_do_not_push_the_full_ones_out(
    models: dict[str, Path], tmp_path: Path
) -> None:
    c, model = opened(
        models["llama"], ALONE, LORA_RANK=2, CHECKPOINT_MODE="lite", KEEP_EVERY=3, KEEP_LAST=2
    )
    saver = Saver(tmp_path, c, ALONE, 10**7)
    saver.lite = writer(c, models["llama"])
    for step in range(1, 9):
        saver.start(step, model, build_optimizer(model, c), states_of(step))
        saver.wait()
        ended = saver.poll()
        assert ended and ended.problem is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_000000{step}" for step in (3, 6, 7, 8)
    ]
    assert [(tmp_path / f"step_000000{step}" / lite.FILE).exists() for step in (3, 6, 7, 8)] == [
        False,
        False,
        True,
        True,
    ]
