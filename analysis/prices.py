"""What energy and the hours of GPUs cost, by the settings PRICE_KWH and PRICE_GPU_HOUR."""

import dataclasses

from settings import SettingsError
from settings.config import Config


@dataclasses.dataclass(frozen=True)
class Prices:
    """In one currency; None where there is none."""

    kwh: float | None
    gpu_hour: float | None

    @classmethod
    def of_settings(cls) -> "Prices":
        """PRICE_KWH and PRICE_GPU_HOUR. Raises SettingsError."""
        c = Config.load()
        return cls(c.price_kwh, c.price_gpu_hour)

    def cost(self, joules: float, gpu_s: float) -> float | None:
        amounts = ((joules / 3.6e6, self.kwh), (gpu_s / 3600, self.gpu_hour))
        parts = [amount * price for amount, price in amounts if price]
        return sum(parts) if parts else None


def prices() -> Prices:
    """Of the settings; none where these are bad, which a folder that is named need not wait for."""
    try:
        return Prices.of_settings()
    except SettingsError:
        return Prices(None, None)
