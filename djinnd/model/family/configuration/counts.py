"""Bounds the counts in a configuration, such as numbers of layers and labels.

Transformers allocates lists of that length while it reads a configuration, so the counts are checked before that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from djinn_client.errors import ModelRejected

MAX_COUNT = 1 << 16  # far above the counts of any model; the loader bounds the number of blocks further
MAX_TOWER = 1024  # layers of a tower for images or audio; a tower is built before it is removed (wrapper.py)
_COUNTS = re.compile("layers?$|^num_labels$|^attention_types$")
_TOWER_COUNTS = re.compile("layers?$|depths?$|^layers_per_block$")


def check_counts(told: dict[str, Any]) -> None:
    """Raises ModelRejected with the name of a field that is too large."""
    for name, value in told.items():
        _check(_COUNTS, MAX_COUNT, name, value)
        if isinstance(value, dict):
            check_counts(value)
            for inner, count in value.items():
                _check(_TOWER_COUNTS, MAX_TOWER, str(inner), count)


def _check(counts: re.Pattern[str], most: int, name: str, value: Any) -> None:
    largest = max(_numbers(value), default=0)
    if counts.search(name) and largest > most:
        raise ModelRejected(
            f"config.json: {name[:80]} is {largest:.6g}; at most {most:,} are supported", field=name[:80]
        )


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
