"""make export of what several processes have written, each a part: whole, and to the bit."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from export import weight_files
from settings.config import Config
from tests.export.exported import Run
from tests.train.checkpoint.test_reshard import run


def digests(folder: Path) -> dict[str, str]:
    """Our name -> hash of each weight in the files of an export."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            found |= {
                name.removeprefix("model."): hashlib.sha256(
                    file.get_tensor(name).tobytes()
                ).hexdigest()
                for name in file.keys()  # noqa: SIM118 (no dict)
            }
    return found


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        pytest.param("fsdp 2", {"parallel": "fsdp"}, id="2"),
        pytest.param("fsdp 4", {"parallel": "fsdp"}, id="4", marks=pytest.mark.slow),
        pytest.param(
            "hsdp 2 x 2", {"parallel": "hsdp", "shard_ranks": 2}, id="2 x 2", marks=pytest.mark.slow
        ),
    ],
)
def test_weights_in_parts_are_exported_whole(
    tmp_path: Path,
    tiny: Config,
    free_port: int,
    data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    settings: dict,
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
    (tmp_path / "run").mkdir()
    (tmp_path / "written").rename(tmp_path / "run" / "checkpoints")
    assert len(list((tmp_path / "run" / "checkpoints" / "step_0000001").glob("*.distcp"))) > 1
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": c.stored()}))
    made = Run(c, tmp_path / "run", {})
    monkeypatch.setattr(weight_files, "EXPORT_SHARD_GB", 0.00005)
    assert made.command(monkeypatch) == 0
    assert digests(made.export) == {
        name: digest for name, digest in written.items() if not name.startswith("state.")
    }
