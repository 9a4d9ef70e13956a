"""Sizes, counts and times as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
FACTORS = {unit: 1024**power for power, unit in enumerate(UNITS)}
FACTORS |= {unit[0]: factor for unit, factor in FACTORS.items() if factor > 1}  # 4G, as systemd reads it
FACTORS |= {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}
MOST = 2**63 - 1  # the largest number of the wire
TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def size(nbytes: int) -> str:
    """In the largest unit that leaves at least 1: `512 B`, `1.5 MiB`, `140 GiB`."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 1 if unit and value < 100 else 0
    return f"{value:.{digits}f} {UNITS[unit]}"


def exact_size(nbytes: int) -> str:
    """The size in the largest unit that divides it, as `parse_size` reads it back: `80GiB`, `1000B`."""
    unit = len(UNITS) - 1
    while nbytes % 1024**unit:
        unit -= 1
    return f"{nbytes // 1024**unit}{UNITS[unit]}"


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


def rate(per_second: float, unit: str) -> str:
    """With three digits: `55.3 GB/s`, `712 TFLOP/s`."""
    for power, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= 0.9995 * power:
            return f"{per_second / power:.3g} {name}{unit}/s"
    return f"{per_second:.3g} {unit}/s"


def interval(seconds: float) -> str:
    """A time to wait: `0.85 ms`, `125 ms`, `1.6 s`, `3m12s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 59.95 else duration(seconds)


def parse_resident(text: str) -> int | float | Literal["auto"]:
    """`auto`, a count of blocks up to MOST, or a share of them with a decimal point. Raises ValueError."""
    if text == "auto":
        return "auto"
    if re.fullmatch(r"\d{1,19}", text) and int(text) <= MOST:
        return int(text)
    if re.fullmatch(r"\d*\.\d+", text) and float(text) <= 1.0:
        return float(text)
    raise ValueError(f"{text!r} is no number of blocks; write auto, a count as 29, or a share from 0.0 to 1.0 as 0.73")


def parse_speculation(text: str) -> str | dict[str, str]:
    """`auto`, `off`, or `draft=MODEL`. Raises ValueError."""
    kind, _, name = text.partition("=")
    if kind == "draft" and name:
        return {"draft": name}
    if text in ("auto", "off"):
        return text
    raise ValueError(f"{text!r} is none of auto, off, draft=MODEL")


def parse_seconds(text: str) -> float:
    """Seconds of `250ms`, `30s`, `1.5 min`, `2h`. Raises ValueError for anything else, a number without a unit too,
    unless it is 0."""
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(TIMES)})\s*", "0s" if text.strip() == "0" else text)
    if match is None:
        raise ValueError(f"{text!r} is not a time; write a number with {', '.join(TIMES)}, as 5min")
    return float(match[1]) * TIMES[match[2]]


def parse_size(text: str) -> int:
    """Bytes of `4GiB` or `4G` (2^30 each), `4GB` (10^9), `512B`, up to MOST. Raises ValueError for anything else."""
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(FACTORS)})\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write a number with {', '.join(UNITS)}, as 4GiB; or as 4G or 4GB")
    nbytes = int(Decimal(match[1]) * FACTORS[match[2]])
    if nbytes > MOST:
        raise ValueError(f"{text!r} is too large a size; write less than {exact_size(MOST + 1)}")
    return nbytes
