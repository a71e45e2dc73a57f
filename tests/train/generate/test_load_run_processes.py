"""What several processes have written is opened by one, whole, and by several, whole or a part each."""

import json
import os
from pathlib import Path

import pytest

from settings import SettingsError
from tests.finetune.models import as_rank
from tests.processes import run_ranks
from tests.train.checkpoint.test_reshard import digests, run
from tests.train.making import ALONE
from train.distributed import world as distributed
from train.distributed.parallel import is_fsdp
from train.generate.load_run import open_trained
from train.optim import build_optimizer


def weights(opened):
    """Name -> hash of every whole weight."""
    model = opened.model.requires_grad_(True)
    found = digests(model, build_optimizer(model, opened.config))
    return {name: digest for name, digest in found.items() if not name.startswith("state.")}


def open_as_rank(rank, size, c, folder, split):
    world = as_rank(rank, size)
    opened = open_trained(c, world, split, given={"RUN_NAME"})
    found = {
        "split": is_fsdp(opened.model),
        "held": sum(
            weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel()
            for weight in opened.model.parameters()
        ),
        "weights": weights(opened),
    }
    try:
        open_trained(c.replace(step=7), world, split, given={"RUN_NAME"})
    except SettingsError as error:
        found["problem"] = str(error)
    Path(f"{folder}/opened-{rank}.json").write_text(json.dumps(found))
    distributed.broadcast_object(None)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_weights_of_two_processes_come_back_to_the_bit(
    tmp_path,
    tiny,
    free_port,
    parallel,
    data,
    monkeypatch,
):
    monkeypatch.setenv("TEST_PORT", str(free_port))
    where = {"runs_dir": str(tmp_path), "run_name": "run", "tokenizer": data["TOKENIZER"]}
    c = tiny.replace(device="cpu", parallel=parallel, **where)
    found, *_ = run(c, f"{parallel} 2", tmp_path / "written")
    (written,) = found.values()
    (tmp_path / "run").mkdir()
    (tmp_path / "written").rename(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": c.stored()}))
    whole = open_trained(c, ALONE, given={"RUN_NAME"})
    expected = weights(whole)
    assert len(expected) == len(list(whole.model.parameters()))
    assert expected.items() <= written.items()
    numbers = sum(weight.numel() for weight in whole.model.parameters())
    for split in (False, True):
        run_ranks(open_as_rank, (2, c, str(tmp_path), split), 2)
        is_split = split and parallel == "fsdp"
        for rank in range(2):
            found = json.loads((tmp_path / f"opened-{rank}.json").read_text())
            assert "STEP=7: Run run has no checkpoint of that step. There" in found.pop("problem")
            held = numbers / 2 if is_split else numbers
            assert found == {"split": is_split, "held": held, "weights": expected}
