"""Settings as a user types them, loaded beside an empty env file, and the cards that they name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from plan.fleet import Fleet, fleet_of
from settings import load_config
from settings.config import Config

XLARGE = {"PRESET": "xlarge-8xa100", "CARDS": "8xa100-80gb-sxm", "MFU": "50"}
D16 = {"PRESET": "d16-2xh100", "CARDS": "2xh100-sxm", "MFU": "43.8"}
WAN = XLARGE | {"NODES": "4", "SITES": "4"}

Given = dict[str, str]
Load = Callable[..., tuple[Config, Fleet]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(XLARGE, {"MFU": "40"}): the settings, the later ones winning, and the fleet."""
    (tmp_path / "empty.env").touch()

    def loaded(*typed: Given) -> tuple[Config, Fleet]:
        given: Given = {"ENV_FILE": str(tmp_path / "empty.env"), "MASTER_ADDR": "planned"}
        for more in typed:
            given |= more
        c = load_config(given)
        return c, fleet_of(c, here=())

    return loaded
