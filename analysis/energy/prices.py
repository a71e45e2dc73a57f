"""What energy and GPU-hours cost, by the settings PRICE_KWH and PRICE_GPU_HOUR."""

from dataclasses import dataclass

from settings import SettingsError
from settings.config import Config


@dataclass(frozen=True)
class Prices:
    """Prices in one currency; None where there is none."""

    kwh: float | None = None
    gpu_hour: float | None = None

    def cost(self, joules: float, gpu_s: float) -> float | None:
        """Return the cost of this energy and of this GPU time; None without a price."""
        if not self.kwh and not self.gpu_hour:
            return None
        return joules / 3.6e6 * (self.kwh or 0) + gpu_s / 3600 * (self.gpu_hour or 0)


def read_prices() -> Prices:
    """Return the prices of the settings; none if these are invalid, which a run that is named does not need."""
    try:
        config = Config.load()
    except SettingsError:
        return Prices()
    return Prices(config.price_kwh, config.price_gpu_hour)
