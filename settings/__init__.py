"""Settings: every one declared once, read from several places, checked all at once."""

from settings.config import ROOT, Config
from settings.declare import ExpectedError, SettingsError

__all__ = ["ROOT", "Config", "ExpectedError", "SettingsError"]
