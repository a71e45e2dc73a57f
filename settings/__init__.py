"""Settings: every one declared once, read from five places, checked all at once."""

from settings.config import Config
from settings.declare import SettingsError
from settings.sources import ROOT

__all__ = ["ROOT", "Config", "SettingsError"]
