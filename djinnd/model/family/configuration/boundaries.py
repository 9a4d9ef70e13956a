"""Boundaries: positions at which a model may begin to compute differently.

A boundary can be a window, a chunk, the length of pretraining or the step of an attention temperature. Each of them is
a number of tokens in the configuration. So every number of the configuration that a context can reach is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MOST = 24
_TELLING = re.compile("window|chunk|position|length|scale|floor|context|block_size")


def boundaries(config: dict[str, Any], longest: int) -> list[int]:
    """Up to MOST positions to check, ascending, from 2 to `longest`, which is always the last. If there are more
    candidates, numbers with a name like `window` or `position` are preferred, then larger ones."""
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
