"""Sizes, counts and times as people write and read them."""

from __future__ import annotations

import re

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: int) -> str:
    """In the largest unit that leaves at least 1: `512 B`, `1.5 MiB`, `140 GiB`."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 1 if unit and value < 100 else 0
    return f"{value:.{digits}f} {UNITS[unit]}"


def count(number: int) -> str:
    """With three digits at most: `950`, `4.1 M`, `13 G`."""
    for power, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.1f} {name}" if number < 10 * power else f"{number / power:.0f} {name}"
    return str(number)


def duration(seconds: float) -> str:
    """In the two largest units: `7s`, `3m12s`, `5h02m`, `2d05h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `1.5 MiB`, `512B`. Raises ValueError for anything else, GB among it."""
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write a number with {', '.join(UNITS)}, as 4GiB")
    return int(float(match[1]) * 1024 ** UNITS.index(match[2]))
