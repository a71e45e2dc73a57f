"""Settings as a user types them, loaded beside an empty env file, and the plan of them."""

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from plan.fleet import Fleet, fleet_of
from plan.load import with_nodes
from plan.planner import Plan, make_plan
from plan.run import Run, is_finetuning, run_of
from settings import ROOT, load_config
from settings.checks import PRETRAINING, check_batch
from settings.config import Config

NOW = datetime.datetime(2026, 11, 22, 9, 0)
XLARGE = {"PRESET": "xlarge-8xa100", "CARDS": "8xa100-80gb-sxm", "MFU": "50"}
D16 = {"PRESET": "d16-2xh100", "CARDS": "2xh100-sxm", "MFU": "43.8"}
WAN = XLARGE | {"NODES": "4", "SITES": "4"}
DILOCO = WAN | {"SYNC": "diloco", "PARALLEL": "fsdp"}

Given = dict[str, str]
Load = Callable[..., tuple[Config, Fleet]]
Planned = Callable[..., Plan]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(XLARGE, {"MFU": "40"}): the settings, the later ones winning, and the fleet."""
    (tmp_path / "empty.env").touch()

    def loaded(*typed: Given) -> tuple[Config, Fleet]:
        given: Given = {
            "ENV_FILE": str(tmp_path / "empty.env"),
            "RUNS_DIR": str(tmp_path / "runs"),
            "DATA_DIR": str(tmp_path / "data"),
        }
        for more in typed:
            given |= more
        defaults = {"MASTER_ADDR": "planned"}
        without = (check_batch,)
        if given.get("MODEL"):
            given = {"PRESET": "finetune"} | given
        if given.get("MODEL") or is_finetuning(Config().replace(preset=given["PRESET"])):
            without = (*PRETRAINING, check_batch)
        config = with_nodes(load_config(given, ROOT, defaults, without=without))
        return config, fleet_of(config, here=())

    return loaded


@pytest.fixture
def planned(load: Load) -> Planned:
    """The plan of these settings, beside no run and no data."""
    return lambda *typed: make_plan(*load(*typed), NOW, places=())


@pytest.fixture
def run(load: Load) -> Callable[..., Run]:
    return lambda *typed: run_of(*load(*typed))
