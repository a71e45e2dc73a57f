"""plan/storage.py against checkpoints and shards that are really written, and hand-made numbers."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from hardware.gpu_specs import load_gpu_specs
from plan import storage
from plan.measured import Probe, of_card
from plan.run_so_far import begun
from settings import ROOT, load_config
from settings.config import Config
from tests.conftest import make_data
from tests.train.checkpoint.test_checkpoint import save, trained
from train.data import shards
from train.model.model import Transformer
from train.optim import build_optimizer

LAB_S = 12 * 1_336_248_320  # float32 weights and two moments of the lab's model


@pytest.fixture
def xlarge(tmp_path: Path) -> Config:
    return load_config(
        {
            "PRESET": "xlarge-8xa100",
            "ENV_FILE": "",
            "DATA_DIR": str(tmp_path / "data"),
            "RUNS_DIR": str(tmp_path / "runs"),
        }
    )


# ---- How much


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "muon"},
        {"tie_embeddings": False, "qk_norm": True},
        {"n_embd": 128, "n_layer": 4, "n_kv_head": 1},
        {"n_embd": 128, "n_layer": 4, "optimizer": "muon"},
    ],
    ids=str,
)
def test_a_checkpoint_is_as_large_as_one_that_is_written(
    tiny: Config, tmp_path: Path, changes: dict
) -> None:
    c = dataclasses.replace(tiny, mlp_dim=None, **changes).derived()
    folder, _ = save(tmp_path, 1, *trained(c, 1), {})
    written = sum(path.stat().st_size for path in folder.iterdir())
    assert storage.checkpoint_bytes(c) == pytest.approx(written, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_its_numbers_are_those_that_the_optimizer_keeps(tiny: Config, optimizer: str) -> None:
    c = dataclasses.replace(tiny, optimizer=optimizer).derived()
    model = Transformer(c)
    stepped = build_optimizer(model, c)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    stepped.step()
    kept = [
        *model.parameters(),
        *(moment for weight in model.parameters() for moment in stepped.moments(weight).values()),
    ]
    numbers = sum(t.numel() * t.element_size() for t in kept if t.ndim)
    assert storage.checkpoint_bytes(c) == numbers + storage.TENSOR_BYTES * len(kept)


def test_the_labs_checkpoints(xlarge: Config) -> None:
    assert storage.checkpoint_bytes(xlarge) == pytest.approx(LAB_S, rel=2e-4)
    assert storage.disk_of_checkpoints(xlarge) == 4 * storage.checkpoint_bytes(xlarge)
    every = dataclasses.replace(xlarge, keep_every=10_000)
    assert storage.disk_of_checkpoints(every) == (4 + 19) * storage.checkpoint_bytes(
        xlarge
    )  # of 190,735 steps
    assert storage.disk_of_checkpoints(dataclasses.replace(xlarge, save_every=0)) == 0


@pytest.mark.parametrize(
    ("settings", "step_s", "saves"),
    [
        ({}, None, 40),  # one at each step
        ({}, 0.001, 1),  # SAVE_MINUTES=15 never comes; the end is saved
        ({"save_every": 20}, 0.001, 3),
        ({"save_every": 20}, 90.0, 7),  # an hour has four times SAVE_MINUTES
        ({"save_every": 20, "keep_best": True, "eval_every": 10}, 0.001, 7),
        ({"save_every": 1}, 90.0, 40),
        ({"keep_last": 3}, None, 4),
    ],
)
def test_no_more_checkpoints_are_counted_than_a_run_writes(
    tiny: Config, settings: dict, step_s: float | None, saves: int
) -> None:
    c = dataclasses.replace(tiny, **{"keep_last": 1000} | settings)
    one = storage.checkpoint_bytes(c)
    assert c.last_step == 40 and storage.disk_of_checkpoints(c, step_s) == saves * one
    place = storage.Place(
        ("RUNS_DIR",), Path("/"), {"checkpoints": storage.disk(c)["checkpoints"]}, 0.0
    )
    assert storage.at_pace(c, place, step_s).needs == {"checkpoints": saves * one}


def test_shards_of_the_labs_mixture(xlarge: Config) -> None:
    assert storage.disk_of_shards(xlarge) == 50e9  # DATA_CACHE_GB
    downloads = 2 * 5e9 + 8 * 2_000_000  # of the third all
    assert storage.disk(xlarge) == {
        "checkpoints": storage.disk_of_checkpoints(xlarge),
        "shards": 50e9,
        "downloads": downloads,
    }
    before = dataclasses.replace(xlarge, data_stream="0")
    assert storage.disk_of_shards(before) == 2 * (65e9 + 34e9 + 0.98 * 2e6)
    assert storage.disk_of_shards(dataclasses.replace(before, vocab_size=100_000)) == 4 * (
        99e9 + 0.98 * 2e6
    )
    small = dataclasses.replace(xlarge, data_cache_gb=1.0)
    assert (
        storage.disk_of_shards(small) == 2 * 3.2e9 + 2 * 0.98 * 2e6
    )  # two groups of 8 shards of 1e8 tokens
    assert (
        storage.disk_of_shards(dataclasses.replace(xlarge, train_tokens=10**9))
        == 2 * 0.99e9 + 2 * 0.98 * 2e6
    )


def test_a_source_of_unknown_size_is_named_and_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "papers.toml").write_text(
        'files = ["papers/*.txt"]\nvalidation_fraction = 0.1\n'
    )
    c = load_config({"ENV_FILE": "", "DATA_DIR": str(tmp_path), "DATA_MIX": "papers:1"})
    assert (storage.disk_of_shards(c), storage.disk_of_downloads(c), storage.unknown(c)) == (
        0,
        0,
        ["papers"],
    )


@pytest.mark.parametrize("vocab_size", [300, 2**16, 2**16 + 1])
def test_a_token_takes_the_bytes_that_shards_give_it(xlarge: Config, vocab_size: int) -> None:
    width = shards.DTYPES[
        storage.token_bytes(dataclasses.replace(xlarge, vocab_size=vocab_size))
    ].itemsize
    assert 256**width >= vocab_size and width in (2, 4) and (width == 2) == (vocab_size <= 65_536)


# ---- Where

Usage = namedtuple("Usage", "total used free")


def test_one_file_system_is_told_once_and_holds_all(
    xlarge: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(0, 0, {tmp_path: 100 * 10**9}[path])
    )
    (place,) = storage.places(xlarge)
    assert (place.settings, place.folder) == (
        ("RUNS_DIR", "DATA_DIR"),
        tmp_path,
    )  # neither folder is there yet
    assert place.needs == storage.disk(xlarge) and place.free == 100e9
    assert place.missing == pytest.approx(4 * LAB_S + 50e9 + 10.016e9 - 100e9, rel=1e-3)


def test_two_file_systems_are_told_apart(
    xlarge: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "data"
    other.mkdir()
    real = Path.stat

    def stat(path: Path, **kwargs) -> os.stat_result:
        facts = list(real(path, **kwargs))
        facts[2] = 1 if path == other else 2  # st_dev
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(0, 0, 10**12 if path == other else 10**9)
    )
    runs, data = storage.places(xlarge)
    assert (runs.settings, set(runs.needs), runs.free) == (("RUNS_DIR",), {"checkpoints"}, 1e9)
    assert (data.settings, set(data.needs), data.free) == (
        ("DATA_DIR",),
        {"shards", "downloads"},
        1e12,
    )
    assert runs.missing == pytest.approx(4 * LAB_S - 1e9, rel=1e-3) and data.missing == 0


def test_what_is_there_already_needs_no_room(tiny: Config, tmp_path: Path) -> None:
    c = dataclasses.replace(
        tiny,
        runs_dir=str(tmp_path / "runs"),
        run_name="r",
        **{name.lower(): value for name, value in make_data(tmp_path / "data").items()},
    )
    folder, _ = save(tmp_path / "runs" / "r" / "checkpoints", 1, *trained(c, 1), {})
    written = sum(path.stat().st_size for path in folder.iterdir())
    needs = storage.places(c)[0].needs
    assert needs["checkpoints"] == storage.disk_of_checkpoints(c) - written
    assert needs["shards"] == 0  # they are whole: "all" of the source
    fresh = dataclasses.replace(c, data_dir=str(tmp_path / "elsewhere"))
    assert storage.places(fresh)[0].needs["shards"] == 2 * 3_700_000 * 0.95


# ---- How fast


def test_seconds_of_a_save(xlarge: Config) -> None:
    assert storage.save_s(xlarge, 500) == pytest.approx(LAB_S / 500e6, rel=1e-3)  # 32 s
    assert storage.wan_save_s(xlarge) is None
    c = dataclasses.replace(xlarge, nodes=4, sites=4, wan_gbit=2.0, wan_rtt_ms=40.0)
    assert storage.wan_save_s(c) == pytest.approx(storage.checkpoint_bytes(c) * 8 / 2e9 + 0.02)


def test_the_disk_s_speed_is_what_was_measured_or_assumed_and_said() -> None:
    probe = Probe("cpu", 0.0, "2.13.0", {}, disk_mb_s=800.0)
    assert storage.write_mb_s(probe) == (800, "measured by make doctor PROBE=1")
    for nothing in (None, dataclasses.replace(probe, disk_mb_s=None)):
        speed, why = storage.write_mb_s(nothing)
        assert speed == 500 and why.startswith("assumed")


# ---- Folders that nothing can be said of


@pytest.mark.parametrize("name", ["RUNS_DIR", "DATA_DIR"])
def test_a_file_where_a_folder_is_wanted_is_said_in_a_sentence(
    tiny: Config, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("")
    c = dataclasses.replace(tiny, runs_dir=str(tmp_path / "runs"), data_dir=str(tmp_path / "data"))
    assert storage.places(c)
    c = dataclasses.replace(c, **{name.lower(): str(tmp_path / "file")})
    assert begun(c) is None and of_card(c, load_gpu_specs()["t4"]) is None
    with pytest.raises(
        storage.FolderError,
        match=f"^{name}: {tmp_path}/file.* is no folder.. Choose another {name}, ",
    ):
        storage.places(c)


AS_NOBODY = """
import os, sys
from doctor import before_run
from k8s.cluster import where
from plan import __main__; from plan import run_so_far as begun; from plan import this_machine as here; from plan import measured as probe
from hardware.gpu_specs import load_gpu_specs
from settings import load_config
c = load_config()
__main__.main(), before_run.main([])   # what they import may lie where only this user may read
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert begun.begun(c) is None and probe.of_card(c, load_gpu_specs()["t4"]) is None
assert where.decide().paths.name == "tiny"
sys.stdout.write(f"{__main__.main()} {before_run.main([])}\\n")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["RUNS_DIR", "DATA_DIR"])
def test_a_folder_that_is_closed_is_said_in_a_sentence(name: str) -> None:
    """Of make plan and of what make train does first; that nothing is known of the run is no error."""
    with tempfile.TemporaryDirectory() as folder:  # closed to other users
        env = {
            "PATH": os.environ["PATH"],
            "PRESET": "tiny",
            "DEVICE": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "RUNS_DIR": "/tmp",
            "DATA_DIR": "/tmp",
            name: f"{folder}/deeper",
        }
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    first, second, *_ = done.stderr.splitlines()
    assert "Traceback" not in done.stderr and done.stdout.splitlines()[-1].endswith("78 78")
    assert (
        first.startswith(f"{name}: {folder}/deeper")
        and "cannot be read (Permission denied)" in first
    )
    assert second.startswith(
        f"FAIL  disk  {name}={folder}/deeper: nothing can be written there (Permission denied)"
    )
