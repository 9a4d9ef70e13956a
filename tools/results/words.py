"""Numbers as they stand in docs/results.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def ms(seconds: float) -> str:
    """Three figures: "7.62 ms", "22.9 ms", "1,574 ms"."""
    value = seconds * 1e3
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def middle(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


def gb_a_second(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def sentences(parts: Iterable[str]) -> str:
    """Each part is a sentence of its own, on a line of its own in the table's cell."""
    return "<br>".join(part for part in parts if part)
