"""Numbers as a reader wants them: three digits and a unit. Tokens, sizes and rates have one form everywhere."""

GIB, MIB = 2.0**30, 2.0**20
COUNTED = (("T", 1e12), ("B", 1e9), ("M", 1e6))  # as settings take them
SI = ((" E", 1e18), (" P", 1e15), (" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3))
SIZES = ((" TB", 1e12), (" GB", 1e9), (" MB", 1e6))  # decimal, as disks and networks are sold
ROUNDED = 0.9995  # of a unit: what three digits make a whole one of


def scaled(value: float, units: tuple[tuple[str, float], ...]) -> str | None:
    """Three digits, or of the largest unit all, and the largest unit of which there is one; None below all of them."""
    return next(
        (f"{number(value / power)}{unit}" for unit, power in units if value >= ROUNDED * power),
        None,
    )


def count(value: float) -> str:
    """Of tokens or parameters: '1.34B', '412M'; below a million all digits: '51,200', '64'"""
    return scaled(value, COUNTED) or f"{value:,.0f}"


def rate(tokens_per_s: float) -> str:
    """'1.2M tokens/s', '429,000 tokens/s': three digits"""
    rounded = float(f"{tokens_per_s:.3g}")
    return f"{count(rounded) if rounded >= 100 else number(rounded)} tokens/s"


def si(value: float) -> str:
    """'9.22 G', to stand before FLOP or FLOP/s"""
    return scaled(value, SI) or f"{value:.3g} "


def size(size_bytes: float) -> str:
    """'8.02 GB', decimal; '4 kB' and less where it is small."""
    return scaled(size_bytes, SIZES) or f"{size_bytes / 1e3:.3g} kB"


def number(value: float) -> str:
    """Three digits, or all before the point: '1,647', '8.77', '0.0123'"""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def money(value: float) -> str:
    """Of no currency: '4,316', '22.50', '0.003'"""
    return f"{value:.2f}" if 0.1 <= value < 99.995 else number(value)


def percent(share: float) -> str:
    """Of a share, 0 to 1: '64.2%'"""
    return f"{100 * share:.1f}%"


def hours(value: float) -> str:
    """'206 h', '4:23 h', '26 min', '2.4 min', '12 s'"""
    if value >= 99.5:
        return f"{value:,.0f} h"
    minutes = round(60 * value)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{60 * value:.2g} min" if 3600 * value >= 59.5 else seconds(3600 * value)


def seconds(value: float) -> str:
    """'64 s', '3.9 s', '3.1 ms'; from ten minutes on as hours() has it."""
    if value >= 600:
        return hours(value / 3600)
    if value >= 10:
        return f"{value:.0f} s"
    return f"{value:.2g} s" if value >= 0.00995 or value == 0 else f"{1000 * value:.2g} ms"


def binary(size_bytes: float, unit: float) -> str:
    """How many units, GIB or MIB, without its name: '48.8', '0.62', '<0.01', '0'"""
    value = size_bytes / unit
    if value >= 999.95 or value == 0:
        return f"{value:,.0f}"
    if value >= 0.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def gib(size_bytes: float) -> str:
    """'48.8', without the unit"""
    return binary(size_bytes, GIB)
