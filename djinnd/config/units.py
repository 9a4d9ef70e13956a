"""Units: values whose written form differs from their value in Config, such as sizes, times, users and devices.

A type of the schema carries its `ConfigUnit`. The unit reads a value from YAML, a variable or a flag, or raises
ValueError with the fault. It also writes a value in a form that it can read. Config keeps a plain int, float or str.
"""

from __future__ import annotations

import grp
import pwd
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_args

from msgspec import Meta

from djinnd.config.principals import is_principal_name

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(\S*)\s*")
_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ALSO_READ = {unit[0]: factor for unit, factor in _SIZES.items() if factor > 1}  # as systemd reads them
_ALSO_READ |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TIMES = {"ms": 0.001, "s": 1, "min": 60, "h": 3600}
MAX_BYTES = (1 << 63) - 1  # largest number in a message
MAX_SECONDS = 1e9  # 31 years
MAX_COUNT = (1 << 31) - 1
MAX_ID = (1 << 32) - 2  # of a user or a group


class ConfigUnit(NamedTuple):
    """Converts a value of the configuration."""

    read: Callable[[Any], Any]  # from its written form; raises ValueError
    write: Callable[[Any], Any] = lambda value: value


def unit_of(type_: Any) -> ConfigUnit | None:
    """The unit that a type of the schema carries; None if it has none."""
    metas = [meta for meta in get_args(type_)[1:] if isinstance(meta, Meta)]
    return next((meta.extra["unit"] for meta in metas if meta.extra), None)


def read_size(value: Any) -> int:
    """Bytes, written as a plain number or as a number with a unit."""
    number, unit = _split(value, "size", "20GiB")
    factor = (_SIZES | _ALSO_READ).get(unit or "B")
    if factor is None:
        units = f"the units are {', '.join(_SIZES)} (1 GiB = 1G = 2^30 bytes, 1 GB = 10^9)"
        raise ValueError(f"{value!r} is not a size: {units}")
    size = number * factor
    if size > MAX_BYTES:
        raise ValueError(f"{value!r} is too large: at most {write_size(MAX_BYTES + 1)}")
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def read_auto_size(value: Any) -> int | None:
    """Bytes; None for `auto`."""
    return None if value == "auto" else read_size(value)


def write_size(size: int) -> str | int:
    """Writes a size in the largest unit that gives a whole number."""
    if not size:
        return 0
    factor, unit = max((factor, unit) for unit, factor in _SIZES.items() if size % factor == 0)
    return f"{size // factor}{unit}"


def read_seconds(value: Any) -> float:
    """Seconds, written as a plain number or as a number with a unit."""
    number, unit = _split(value, "time", "30s")
    if unit and unit not in _TIMES:
        raise ValueError(f"{value!r} is not a time: the units are {', '.join(_TIMES)}")
    if number > MAX_SECONDS or number * _TIMES[unit or "s"] > MAX_SECONDS:
        raise ValueError(f"{value!r} is too long: at most {MAX_SECONDS / 3600:.0f}h")
    return float(number * _TIMES[unit or "s"])


def write_seconds(seconds: float) -> str:
    return f"{seconds:.15g}s"


def read_count(value: Any) -> int:
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return value
    raise ValueError(f"{value!r} is not a count: write a whole number from 0 to {MAX_COUNT}, as in 8")


def read_rate(value: Any) -> float:
    if type(value) in (int, float) and 0.0 < value <= 1e12:
        return float(value)
    raise ValueError(f"{value!r} is not a rate: write a number a second of more than 0, as in 500")


def read_user(value: Any) -> int:
    """A uid, written as a number or as the name of a user of this machine."""
    if type(value) is int and 0 <= value <= MAX_ID:
        return value
    try:
        return pwd.getpwnam(value).pw_uid
    except (KeyError, TypeError):
        raise ValueError(f"there is no user {value!r} on this machine") from None


def read_principal(value: Any) -> int | str:
    """A uid for a number or for the name of a user of this machine; any other name stands for tokens."""
    try:
        return read_user(value)
    except ValueError as error:
        if isinstance(value, str) and is_principal_name(value):
            return value
        raise ValueError(f"{error}, and {value!r} is not a valid name for a token") from None


def read_group(value: Any) -> int:
    """A gid, written as a number or as the name of a group of this machine."""
    if type(value) is int and 0 <= value <= MAX_ID:
        return value
    try:
        return grp.getgrnam(value).gr_gid
    except (KeyError, TypeError):
        raise ValueError(f"there is no group {value!r} on this machine") from None


def read_device(value: Any) -> str:
    """A torch device, or `auto`. `cuda` means the first GPU."""
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", value):
        return "cuda:0" if value == "cuda" else value
    raise ValueError(f"{value!r} is not a device: write auto, cpu, cuda, or cuda:N as in cuda:0")


def read_resident(value: Any) -> int | float | None:
    """None for `auto`. A whole number counts blocks; a number with a decimal point is a share of them."""
    if value == "auto":
        return None
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return value
    if type(value) is float and 0.0 <= value <= 1.0:
        return value
    raise ValueError(
        f"{value!r} is not a number of blocks: write auto, a count as in 29, or a share from 0.0 to 1.0 as in 0.73"
    )


def read_gigabytes(value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 <= value <= 1e9:
        raise ValueError(f"{value!r} is not a number of gigabytes (10^9 bytes): write it as in 4.5")
    return float(value)


def read_auto_or_off(value: Any) -> bool:
    """True for `auto`, False for `off`, which YAML reads as false."""
    if value == "auto":
        return True
    if value is False or value == "off":
        return False
    raise ValueError(f"{value!r} is not one of auto, off")


def read_speculation(value: Any) -> bool | str:
    """True for `auto`, False for `off`, or the name of a draft: a mapping in YAML, `draft=NAME` in a text."""
    if isinstance(value, str) and value.startswith("draft="):
        value = {"draft": value.removeprefix("draft=")}
    if isinstance(value, dict):
        name = value.get("draft")
        if len(value) == 1 and isinstance(name, str) and name:
            return name
        raise ValueError(f"{value!r} names no draft: write it as in {{draft: NAME}}, with the name of a model")
    try:
        return read_auto_or_off(value)
    except ValueError as error:
        raise ValueError(f"{error}, {{draft: NAME}}") from None


def write_speculation(value: bool | str) -> str | dict[str, str]:
    if isinstance(value, str):
        return {"draft": value}
    return "auto" if value else "off"


def read_path(value: Any) -> str:
    if isinstance(value, str) and "\0" not in value:
        return value
    raise ValueError(f"{value!r} is not a path")


def _split(value: Any, kind: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(str(value)) if type(value) in (int, float, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a {kind}: write it as in {example}")
    number = match[1]
    return float(number) if "." in number else int(number), match[2]


def _limit(read: Callable[[Any], Any], write: Callable[[Any], Any] = lambda value: value) -> ConfigUnit:
    """The unit of a value that may also be `none`, which becomes None."""
    return ConfigUnit(
        lambda value: None if value == "none" else read(value),
        lambda value: "none" if value is None else write(value),
    )


Size = Annotated[int, Meta(extra={"unit": ConfigUnit(read_size, write_size)})]
AutoSize = Annotated[
    int | None,
    Meta(extra={"unit": ConfigUnit(read_auto_size, lambda size: "auto" if size is None else write_size(size))}),
]
LimitSize = Annotated[int | None, Meta(extra={"unit": _limit(read_size, write_size)})]
LimitCount = Annotated[int | None, Meta(extra={"unit": _limit(read_count)})]
LimitRate = Annotated[float | None, Meta(extra={"unit": _limit(read_rate)})]
Seconds = Annotated[float, Meta(extra={"unit": ConfigUnit(read_seconds, write_seconds)})]
User = Annotated[int, Meta(extra={"unit": ConfigUnit(read_user)})]
Principal = Annotated[int | str, Meta(extra={"unit": ConfigUnit(read_principal)})]
Group = Annotated[int, Meta(extra={"unit": ConfigUnit(read_group)})]
Device = Annotated[str, Meta(extra={"unit": ConfigUnit(read_device)})]
Resident = Annotated[
    int | float | None,
    Meta(extra={"unit": ConfigUnit(read_resident, lambda value: "auto" if value is None else value)}),
]
Gigabytes = Annotated[float, Meta(extra={"unit": ConfigUnit(read_gigabytes)})]
PathText = Annotated[str, Meta(extra={"unit": ConfigUnit(read_path)})]
AutoOrOff = Annotated[
    bool, Meta(extra={"unit": ConfigUnit(read_auto_or_off, lambda value: "auto" if value else "off")})
]
Speculation = Annotated[bool | str, Meta(extra={"unit": ConfigUnit(read_speculation, write_speculation)})]
