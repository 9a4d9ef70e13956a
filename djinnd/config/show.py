"""The effective configuration as YAML that could be given back, with where each value came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from djinnd.config.sources import Effective, Key
from djinnd.config.units import Seconds, Size

_COLUMN = 44  # of the origins


def show(effective: Effective) -> str:
    return "\n".join(_lines(effective.config, (), effective.origins))


def _lines(section: Any, key: Key, origins: dict[Key, str]) -> Iterator[str]:
    names = section if isinstance(section, dict) else section.__struct_fields__
    for name in names:
        value = section[name] if isinstance(section, dict) else getattr(section, name)
        inner = (*key, name)
        head = f"{'  ' * len(key)}{_scalar(name)}:"
        if isinstance(value, (dict, msgspec.Struct)) and value != {}:
            yield head
            yield from _lines(value, inner, origins)
        else:
            yield f"{head + ' ' + _scalar(value):<{_COLUMN}}  # {origins.get(inner, 'default')}"


def _scalar(value: Any) -> str:
    if isinstance(value, (Size, Seconds)):
        return str(value)
    plain = [int(entry) for entry in value] if isinstance(value, tuple) else value
    plain = str(plain) if isinstance(plain, str) else plain
    return yaml.safe_dump(plain, default_flow_style=True, width=1 << 20).removesuffix("\n...\n").strip()
