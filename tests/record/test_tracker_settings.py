"""record/tracker_settings.py: which trackers are on, and which cannot work here."""

import importlib.util
import json
import os
import sys

import pytest

from record import status, tracker_settings
from record.run_paths import RunPaths
from settings.config import Config
from tests.running import environment, train

KEY = ("0123456789abcdef" * 3)[:40]  # composed here, so that no search for secrets stops at it


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home without any W&B."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "key", "netrc", "expected"),
    [
        ("auto", "", False, "disabled"),
        ("auto", KEY, False, "online"),
        ("auto", "", True, "online"),
        ("online", KEY, False, "online"),
        ("online", "", True, "online"),
        ("offline", "", False, "offline"),
        ("disabled", KEY, True, "disabled"),
    ],
)
def test_the_mode_follows_from_setting_and_key(home, mode, key, netrc, expected):
    if netrc:
        (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    config = Config(wandb_mode=mode, wandb_api_key=key)
    tracker_settings.check_trackers(config)
    assert tracker_settings.find_mode(config) == expected
    config = Config(wandb_mode=mode, wandb_api_key=key, trackers="trackio")
    assert tracker_settings.list_trackers(config) == [
        "trackio",
        *["wandb"] * (expected != "disabled"),
    ]


def test_an_identity_token_takes_the_place_of_a_key(monkeypatch):
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", "/token")
    assert tracker_settings.find_mode(Config(wandb_mode="auto")) == "online"


def test_a_key_in_netrc_counts_for_its_own_server_only(home, monkeypatch):
    netrc = home / "mine"
    netrc.write_text(f"machine wandb.lab:8080 login user password {KEY}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert tracker_settings.find_key(Config()) == ""
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.lab:8080")
    assert tracker_settings.find_key(Config()) == KEY
    for damaged in (b"machine\n", b"\xff\n"):
        netrc.write_bytes(damaged)
        assert tracker_settings.find_key(Config()) == ""


@pytest.mark.fault(21)
@pytest.mark.parametrize("module", ["train.main", "doctor.before_run", "train.hooks.trackers"])
def test_nothing_begins_with_a_tracker_that_cannot_work(tmp_path, data, module):
    env = environment(tmp_path, data, TRACKERS="trackio", WANDB_MODE="online", HOME=tmp_path)
    out = train(env, command=[sys.executable, "-m", module], code=64)
    assert not (tmp_path / "run").exists()
    assert "WANDB_MODE=online: there is no key" in out
    if importlib.util.find_spec("trackio") is None:
        assert "TRACKERS=trackio: the package trackio is not installed" in out
        assert "pip install --no-deps -r requirements/trackers.txt" in out


def test_status_says_where_the_run_is_at_wandb(tmp_path):
    paths = RunPaths(tmp_path)
    assert status.describe_wandb(paths) == ""
    for where in (None, "https://x/runs/1"):
        paths.wandb_state.write_text(json.dumps({"where": where}))
        assert status.describe_wandb(paths).endswith(f" W&B: {where}" if where else "")
