"""What several processes have written is opened by one, whole, and by several, whole or a part each."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import pytest

from settings import SettingsError
from settings.config import Config
from tests.processes import run_ranks
from tests.train.checkpoint.test_checkpoint import ALONE
from tests.train.checkpoint.test_reshard import run
from train.distributed import world as distributed
from train.distributed.parallel import waits_in_forward
from train.generate.load_run import open_trained


def digests(model) -> dict[str, str]:
    whole = {
        f"{name}": w.full_tensor() if hasattr(w, "full_tensor") else w
        for name, w in model.named_parameters()
    }
    return {
        name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
        for name, value in whole.items()
    }


def open_as_rank(rank: int, size: int, c: Config, folder: str, split: bool) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.environ["TEST_PORT"],
    )
    world = distributed.join(c, trains=False)
    opened = open_trained(c, world, split, given={"RUN_NAME"})
    held = sum(
        w.to_local().numel() if hasattr(w, "to_local") else w.numel()
        for w in opened.model.parameters()
    )
    found = {
        "split": waits_in_forward(opened.model),
        "held": held,
        "digests": digests(opened.model),
    }
    try:
        open_trained(dataclasses.replace(c, step=7), world, split, given={"RUN_NAME"})
    except SettingsError as error:
        found["problem"] = str(error)
    Path(f"{folder}/opened-{rank}.json").write_text(json.dumps(found))
    distributed.from_first(None)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "settings"), [("ddp 2", {}), ("fsdp 2", {"parallel": "fsdp"})], ids=["ddp", "fsdp"]
)
def test_weights_of_two_processes_come_back_to_the_bit(
    tmp_path: Path,
    tiny: Config,
    free_port: int,
    mode: str,
    settings: dict,
    data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_PORT", str(free_port))
    c = dataclasses.replace(
        tiny,
        device="cpu",
        runs_dir=str(tmp_path),
        run_name="run",
        tokenizer=data["TOKENIZER"],
        **settings,
    )
    ((written,), *_) = (found.values() for found in run(c, mode, tmp_path / "written"))
    weights = {name: digest for name, digest in written.items() if not name.startswith("state.")}
    (tmp_path / "run").mkdir()
    (tmp_path / "written").rename(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": c.stored()}))
    whole = open_trained(c, ALONE, given={"RUN_NAME"}).model
    assert digests(whole) == weights
    for split in (False, True):
        run_ranks(open_as_rank, (2, c, str(tmp_path), split), 2)
        all_numbers = sum(weight.numel() for weight in whole.parameters())
        for rank in range(2):
            found = json.loads((tmp_path / f"opened-{rank}.json").read_text())
            assert found["digests"] == weights
            assert found["split"] == (split and mode == "fsdp 2")
            assert found["held"] == (all_numbers / 2 if found["split"] else all_numbers)
            assert (
                "STEP=7: Run run has no checkpoint of that step. There are: 1" in found["problem"]
            )
