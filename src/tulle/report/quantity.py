"""Numbers as a reader wants them: `1.2 MB`, `34 ms`, `12,345`, `7.1%`."""

import math
from dataclasses import dataclass

MISSING = "–"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit in which to show numbers: `shown = value * factor`, followed by `name`."""

    factor: float
    name: str


BYTE_UNITS = (Unit(1e-12, "TB"), Unit(1e-9, "GB"), Unit(1e-6, "MB"), Unit(1e-3, "kB"), Unit(1.0, "B"))
SECOND_UNITS = (Unit(1.0, "s"), Unit(1e3, "ms"), Unit(1e6, "µs"))


def unit_for(largest: float, units: tuple[Unit, ...]) -> Unit:
    """Return the unit of `units` (the largest first) in which `largest` reads as a number of at least 1.

    Example:
        >>> unit_for(0.034, SECOND_UNITS).name
        'ms'
    """
    if largest <= 0:
        return units[-1] if units is BYTE_UNITS else units[0]
    return next((unit for unit in units if largest * unit.factor >= 0.9995), units[-1])


def size(value_bytes: float) -> str:
    """Write a number of bytes with decimal units.

    Example:
        >>> size(1_234_567), size(0), size(26_214_400)
        ('1.2 MB', '0 B', '26 MB')
    """
    return _with_unit(value_bytes, BYTE_UNITS)


def duration(value_s: float) -> str:
    """Write a time, from microseconds to hours.

    Example:
        >>> duration(0.034), duration(131.2), duration(7322)
        ('34 ms', '2 min 11 s', '2 h 2 min')
    """
    if not math.isfinite(value_s) or value_s < 59.5:
        return _with_unit(value_s, SECOND_UNITS)
    minutes, seconds = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(round(value_s / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def count(value: float) -> str:
    """Write a number of things: whole, thousands apart.

    Example:
        >>> count(12345.4)
        '12,345'
    """
    return f"{value:,.0f}" if math.isfinite(value) else MISSING


def rate(value: float) -> str:
    """Write a number per second: whole from 100 on, three digits below.

    Example:
        >>> rate(6471.2), rate(3.14159)
        ('6,471', '3.14')
    """
    return count(value) if value >= 100 or not math.isfinite(value) else f"{value:.3g}"


def share(value: float) -> str:
    """Write a part of a whole in per cent.

    Example:
        >>> share(0.0712), share(0.5), share(0.0000123)
        ('7.1%', '50%', '0.0012%')
    """
    if not math.isfinite(value):
        return MISSING
    percent = 100 * value
    if percent == 0 or abs(percent) >= 9.95:
        return f"{percent:.0f}%"
    if abs(percent) < 0.000_095:
        return f"{percent:.0e}%".replace("e-0", "e-")
    return f"{percent:.1f}%" if abs(percent) >= 0.95 else f"{percent:.2g}%"


def ratio(value: float) -> str:
    """Write how many times one thing is another.

    Example:
        >>> ratio(2.7182), ratio(17.3), ratio(1.0)
        ('2.7', '17', '1.0')
    """
    if not math.isfinite(value):
        return MISSING
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:,.0f}"


def decimal(value: float) -> str:
    """Write a number that somebody logged, four digits.

    Example:
        >>> decimal(2.71828), decimal(250000.0), decimal(0.0003)
        ('2.718', '250,000', '0.0003')
    """
    if math.isnan(value):
        return MISSING
    if math.isfinite(value) and (abs(value) >= 1000 or value == round(value)):
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.3e}"
    return f"{value:.4g}"


def plural(number: int, noun: str) -> str:
    """Write a number with its noun.

    Example:
        >>> plural(1, "process"), plural(4, "process"), plural(2, "step"), plural(3, "batch")
        ('1 process', '4 processes', '2 steps', '3 batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def _with_unit(value: float, units: tuple[Unit, ...]) -> str:
    if not math.isfinite(value):
        return MISSING
    unit = unit_for(abs(value), units)
    shown = value * unit.factor
    digits = 0 if abs(shown) >= 9.95 or shown == round(shown) else 1
    return f"{shown:.{digits}f} {unit.name}"
