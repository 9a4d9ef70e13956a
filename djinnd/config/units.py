"""Values that are written otherwise than they are kept: sizes, times, users, devices.

Each has `parse`, which takes what YAML, a variable or a flag gave and raises ValueError with what is wrong, and `str`,
which writes the value so that `parse` reads it back.
"""

from __future__ import annotations

import pwd
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(\S*)\s*")


class Size(int):
    """Bytes: a plain count, or a number with a unit."""

    UNITS: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    )

    @classmethod
    def parse(cls, value: Any) -> Self:
        number, unit = _split(value, "size", "20GiB")
        if unit and unit not in cls.UNITS:
            raise ValueError(f"{value!r} is no size: the units are {', '.join(cls.UNITS)} (1 GiB = 2^30 bytes)")
        size = number * cls.UNITS[unit or "B"]
        if size != int(size):
            raise ValueError(f"{value!r} is no whole number of bytes")
        return cls(size)

    def __str__(self) -> str:
        largest = max((unit, name) for name, unit in self.UNITS.items() if self % unit == 0)[1]
        return f"{self // self.UNITS[largest]}{largest}" if self else "0"


class Seconds(float):
    """A plain number is seconds; or a number with a unit."""

    UNITS: ClassVar[Mapping[str, float]] = MappingProxyType({"ms": 0.001, "s": 1, "min": 60, "h": 3600})

    @classmethod
    def parse(cls, value: Any) -> Self:
        number, unit = _split(value, "time", "30s")
        if unit and unit not in cls.UNITS:
            raise ValueError(f"{value!r} is no time: the units are {', '.join(cls.UNITS)}")
        return cls(number * cls.UNITS[unit or "s"])

    def __str__(self) -> str:
        return f"{float(self):.15g}s"


class User(int):
    """A uid, written as the number or as a name that this machine knows."""

    @classmethod
    def parse(cls, value: Any) -> Self:
        if type(value) is int and value >= 0:
            return cls(value)
        try:
            return cls(pwd.getpwnam(value).pw_uid)
        except (KeyError, TypeError):
            raise ValueError(f"there is no user {value!r} on this machine") from None


class Device(str):
    __slots__ = ()

    @classmethod
    def parse(cls, value: Any) -> Self:
        if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda:[0-9]+", value):
            return cls(value)
        raise ValueError(f"{value!r} is no device: auto, cpu, or cuda:N as in cuda:0")


def _split(value: Any, kind: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(str(value)) if type(value) in (int, float, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no {kind}: write it as in {example}")
    number = match[1]
    return float(number) if "." in number else int(number), match[2]
