"""Checkpoints of adapters alone: what is in them, what writing them takes, and going on from one."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

pytest.importorskip("peft", reason="make setup-dev installs it")

from finetune import lite
from finetune.adapter import Adapters, adapters_of, in_file
from finetune.hf_model import configuration, on_meta
from settings.config import Config
from tests.finetune.models import as_rank, models, opened, theirs
from tests.finetune.test_hf_model import packed
from tests.finetune.test_training import LORA, chats, env_of, finetune, losses, records
from tests.processes import run_ranks
from tests.train.checkpoint.test_checkpoint import ALONE, states_of
from train.checkpoint import find
from train.checkpoint.manifest import CheckpointError
from train.checkpoint.saver import Saver
from train.distributed import world as distributed
from train.distributed.parallel import parallelize
from train.optim import Optimizer, build_optimizer

__all__ = ["chats", "models"]  # fixtures

LITE = {**LORA, "CHECKPOINT_MODE": "lite"}


def writer(c: Config, folder: Path) -> lite.Lite:
    adapters = Adapters.of(c)
    assert adapters
    return lite.of(c, adapters, on_meta(configuration(folder), torch.float32))


def scored_by_peft(folder: Path, adapter: Path) -> float:
    """nats of a row, as peft reads the adapter."""
    from peft import PeftModel

    row = packed()[0][:1, :12]
    logits = (
        PeftModel.from_pretrained(theirs(folder), str(adapter)).eval()(row).logits.log_softmax(-1)
    )
    return -logits.gather(2, torch.roll(row, -1, 1)[..., None]).sum().item()


@pytest.mark.slow
def test_a_run_saves_adapters_which_peft_reads_and_goes_on_with_them(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    env = env_of(tmp_path, models["glm4_moe"], chats, SAVE_EVERY="3", KEEP_LAST="2", **LITE)
    finetune(env | {"MAX_STEPS": "9"})
    place = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in place.iterdir()) == ["step_0000006", "step_0000009"]
    newest = place / "step_0000009"
    assert sorted(path.name for path in newest.iterdir()) == [
        "MANIFEST.json",
        lite.CONFIG,
        lite.FILE,
    ]
    held = load_file(newest / lite.FILE)
    assert all(
        name.startswith("base_model.model.model.layers.") and "default" not in name for name in held
    )
    c, model = opened(models["glm4_moe"], ALONE, **LITE)
    writer(c, models["glm4_moe"]).load(newest, model, build_optimizer(model, c), shared=True)
    row = packed()[0][:1, :12]
    mine = model(
        row,
        torch.roll(row, -1, 1),
        torch.arange(12)[None],
        torch.tensor([0, 12], dtype=torch.int32),
    )[0]
    assert mine.item() == pytest.approx(scored_by_peft(models["glm4_moe"], newest), rel=1e-5)

    said = finetune(env)
    assert (
        "step_0000009 holds adapters alone (CHECKPOINT_MODE=lite): the optimizer starts again"
        in said
    )
    assert "resumed from step_0000009 at step 9/12" in said
    (tmp_path / "whole").mkdir()
    finetune(env_of(tmp_path / "whole", models["glm4_moe"], chats, **LORA))
    went, whole = losses(tmp_path), losses(tmp_path / "whole")
    assert went[:10] == whole[:10]  # step 10 has the same adapters, and its update other moments
    assert went[10:] != whole[10:]


@pytest.mark.slow
def test_full_ones_come_in_between_and_go_on_to_the_bit(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    env = env_of(
        tmp_path,
        models["llama"],
        chats,
        SAVE_EVERY="3",
        KEEP_EVERY="4",
        KEEP_LAST="5",
        **{**LITE, "LORA_TARGETS": "attention"},
    )
    finetune(env | {"MAX_STEPS": "8"})
    place = tmp_path / "run" / "checkpoints"
    modes = {path.name[-1]: (path / lite.FILE).exists() for path in place.iterdir()}
    assert modes == {
        "3": True,
        "4": False,
        "6": True,
        "8": False,
    }  # also where none was due by SAVE_EVERY
    sizes = {
        entry["step"]: entry["bytes"]
        for entry in records(tmp_path)
        if entry["event"] == "checkpoint"
    }
    assert sizes[6] < 0.7 * sizes[4]  # moments are twice as much as the adapters
    said = finetune(env)
    assert "the optimizer starts again" not in said and "resumed from step_0000008" in said
    (tmp_path / "whole").mkdir()
    finetune(
        env_of(tmp_path / "whole", models["llama"], chats, LORA_RANK="4", LORA_TARGETS="attention")
    )
    assert losses(tmp_path) == losses(tmp_path / "whole")


def saver_of(tmp_path: Path, c: Config, folder: Path) -> Saver:
    made = Saver(tmp_path, c, ALONE, 10**7)
    made.lite = writer(c, folder)
    return made


def test_a_file_that_reads_back_otherwise_is_no_checkpoint(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, model = opened(models["llama"], ALONE, LORA_RANK=4, CHECKPOINT_MODE="lite")
    saver = saver_of(tmp_path, c, models["llama"])
    honest = lite.save_file

    def flipped(tensors, path, metadata):
        name = sorted(tensors)[3]
        honest(tensors | {name: tensors[name] + 1e-3}, path, metadata=metadata)

    monkeypatch.setattr(lite, "save_file", flipped)
    saver.start(1, model, Optimizer([]), states_of(1))
    saver.wait()
    ended = saver.poll()
    assert ended and re.search(
        r"read back, base_model\S+ is not what was written", str(ended.problem)
    )
    assert find.committed(tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LORA_TARGETS": "attention"}, "holds other adapters than LORA_TARGETS asks for"),
        ({"LORA_RANK": "8"}, r"is \(4, 32\), not \(8, 32\)"),
    ],
)
def test_adapters_of_another_shape_are_refused(
    models: dict[str, Path], tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    c, model = opened(models["llama"], ALONE, LORA_RANK=4, CHECKPOINT_MODE="lite")
    saver = saver_of(tmp_path, c, models["llama"])
    saver.start(1, model, Optimizer([]), states_of(1))
    saver.wait()
    other_c, other = opened(models["llama"], ALONE, **{"LORA_RANK": "4", **settings})
    with pytest.raises(CheckpointError, match=words):
        writer(other_c, models["llama"]).load(
            tmp_path / "step_0000001", other, build_optimizer(other, other_c), True
        )


# ---- Several processes


def save_as_rank(rank: int, size: int, folder: str, found: str, settings: dict[str, str]) -> None:
    world = as_rank(rank, size)
    c, bare = opened(Path(folder), world, **LITE, **settings)
    model = parallelize(bare, c, world)
    optimizer = build_optimizer(model, c)
    nats, scored = model(*packed())
    (nats / scored).backward()
    optimizer.step()
    optimizer.zero_grad()
    saver = Saver(Path(found) / "checkpoints", c, world, 10**7)
    saver.lite = writer(c, Path(folder))
    calls: dict[str, int] = {}
    sent = 0

    def counting(name, inside):
        def call(*args, **kwargs):
            nonlocal sent
            calls[name] = calls.get(name, 0) + 1
            if name == "gather_object":
                sent += sum(rows.nbytes for rows in args[0].values())
            return inside(*args, **kwargs)

        return call

    for name in (
        "all_reduce",
        "all_gather_into_tensor",
        "_all_gather_base",
        "all_gather",
        "reduce_scatter_tensor",
        "gather_object",
        "gather",
        "broadcast",
        "send",
        "recv",
    ):
        if name in ("gather", "all_gather", "broadcast"):
            continue  # what the others are made of
        setattr(dist, name, counting(name, getattr(dist, name)))
    saver.start(1, model, optimizer, states_of(1))
    saver.wait()
    ended = saver.poll()
    distributed.broadcast_object(None)  # some do not write
    whole = {
        in_file(name): (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()
        for name, weight in adapters_of(bare).items()
    }
    written = load_file(Path(found) / "checkpoints" / "step_0000001" / lite.FILE)
    with torch.no_grad():
        for weight in adapters_of(bare).values():
            weight.zero_()
    saver.lite.load(Path(found) / "checkpoints" / "step_0000001", model, optimizer, True)
    again = {
        in_file(name): (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()
        for name, weight in adapters_of(bare).items()
    }
    elsewhere = again
    if (
        c.parallel != "fsdp"
    ):  # as on nodes without a common disk, of which the first alone has the folder
        with torch.no_grad():
            for weight in adapters_of(bare).values():
                weight.zero_()
        seen = "step_0000001" if rank < (c.shard_ranks or 1) else "not-here"
        saver.lite.load(Path(found) / "checkpoints" / seen, model, optimizer, False)
        elsewhere = {
            in_file(name): (
                weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            ).detach()
            for name, weight in adapters_of(bare).items()
        }
    Path(f"{found}/{rank}.json").write_text(
        json.dumps(
            {
                "problem": ended.problem if ended else "none",
                "calls": calls,
                "sent": sent,
                "bytes": sum(values.nbytes for values in whole.values()),
                "base": sum(
                    weight.nbytes for weight in bare.parameters() if not weight.requires_grad
                ),
                "same": whole.keys() == written.keys()
                and all(torch.equal(v, written[n]) for n, v in whole.items()),
                "back": all(
                    torch.equal(values, whole[name])
                    for values_of in (again, elsewhere)
                    for name, values in values_of.items()
                ),
                "moments": sum(
                    len(optimizer.moments(weight)) for weight in adapters_of(bare).values()
                ),
            }
        )
    )
    distributed.broadcast_object(None)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"PARALLEL": "fsdp"}),
        (4, {"PARALLEL": "fsdp"}),
        (2, {"PARALLEL": "ddp"}),
        (4, {"PARALLEL": "hsdp", "SHARD_RANKS": "2"}),
    ],
)
def test_processes_write_one_file_and_send_their_rows_of_adapters_alone(
    models: dict[str, Path],
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    settings: dict[str, str],
) -> None:
    monkeypatch.setenv("TEST_PORT", str(free_port))
    run_ranks(save_as_rank, (size, str(models["glm4_moe"]), str(tmp_path), settings), size)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    writing = found[: int(settings.get("SHARD_RANKS", size))]
    for one in found:
        assert one["same"] and one["back"] and one["moments"] == 0
        assert one["problem"] is None or one not in writing
        assert set(one["calls"]) <= {
            "gather_object"
        }  # and none of tensors: no weight of the base is gathered
    assert sum(one["sent"] for one in writing) == found[0]["bytes"] < found[0]["base"] / 2
