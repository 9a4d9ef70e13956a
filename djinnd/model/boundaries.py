"""The positions at which a model may begin to compute differently.

A window, a chunk, the length of pretraining, the step of an attention temperature: whatever it is, the configuration
says it as a number of tokens. So every number of the configuration that a context can reach is one to look at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MOST = 24
_TELLING = re.compile("window|chunk|position|length|scale|floor|context|block_size")


def boundaries(config: dict[str, Any], longest: int) -> list[int]:
    """Ascending, each from 2 to `longest`, which is the last one. Those that a telling name has come before others
    where there are more than MOST."""
    found: dict[int, bool] = {}
    for name, number in _numbers(config):
        if 2 <= number < longest:
            found[number] = found.get(number, False) or bool(_TELLING.search(name))
    first = sorted(found, key=lambda number: (not found[number], -number))[: MOST - 1]
    return sorted({*first, max(2, longest)})


def _numbers(told: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in told.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
            yield name, int(value)
