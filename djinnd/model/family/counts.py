"""Bounds the counts in a configuration, such as numbers of layers and labels.

Transformers allocates lists of that length while it reads a configuration, so the counts are checked before that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from djinn_client.errors import ModelRejected

MAX_COUNT = 1 << 16  # far above the counts of any model; the loader bounds the number of blocks further
_COUNTS = re.compile("layers?$|^num_labels$|^attention_types$")


def check_counts(told: dict[str, Any]) -> None:
    """Raises ModelRejected with the name of a field that is too large."""
    for name, value in told.items():
        largest = max(_numbers(value), default=0)
        if _COUNTS.search(name) and largest > MAX_COUNT:
            raise ModelRejected(
                f"config.json: {name[:80]} is {largest:.6g}; at most {MAX_COUNT:,} are supported", field=name[:80]
            )
        if isinstance(value, dict):
            check_counts(value)


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
