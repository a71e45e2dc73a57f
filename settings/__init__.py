"""Settings: every one declared once, read from several places, checked all at once."""

from settings.config import ROOT, Config
from settings.declare import ExpectedError, SettingsError
from settings.resolve import explain_error, load_config, load_preset

__all__ = [
    "ROOT",
    "Config",
    "ExpectedError",
    "SettingsError",
    "explain_error",
    "load_config",
    "load_preset",
]
