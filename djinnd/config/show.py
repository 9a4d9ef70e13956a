"""Prints the effective configuration as YAML that djinnd can read, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from djinnd.config.sources import Effective, Key
from djinnd.config.units import ConfigUnit, unit_of

_COLUMN = 44  # at which the origins begin


def show(effective: Effective) -> str:
    return "\n".join(_lines(effective.config, (), effective.origins))


def differing(one: msgspec.Struct, other: msgspec.Struct) -> str:
    """Names the keys in which two sections of one kind differ, separated by commas."""
    return ",".join(key for key in one.__struct_fields__ if getattr(one, key) != getattr(other, key)) or "nothing"


def _lines(section: Any, key: Key, origins: dict[Key, str]) -> Iterator[str]:
    for name, value, unit in _entries(section):
        inner = (*key, name)
        head = f"{'  ' * len(key)}{_yaml(name)}:"
        if isinstance(value, (dict, msgspec.Struct)) and value != {}:
            yield head
            yield from _lines(value, inner, origins)
        else:
            written = unit.write(value) if unit else list(value) if isinstance(value, tuple) else value
            yield f"{head + ' ' + _yaml(written):<{_COLUMN}}  # {origins.get(inner, 'default')}"


def _entries(section: Any) -> list[tuple[str, Any, ConfigUnit | None]]:
    if isinstance(section, dict):
        return [(name, value, None) for name, value in section.items()]
    return [(f.name, getattr(section, f.name), unit_of(f.type)) for f in msgspec.structs.fields(section)]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("\n...\n").strip()
