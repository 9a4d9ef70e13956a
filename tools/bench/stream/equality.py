"""Compares contenders' logits: the distance from transformers', and whether streaming has changed a bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tools.bench.stream.outcome import Equality

Logits = npt.NDArray[np.float32]  # [tokens, vocab], of one prompt for all


def compare(logits: Logits, transformers: Logits | None, resident: Logits | None) -> Equality:
    found = Equality()
    if transformers is not None:
        same = logits.argmax(-1) == transformers.argmax(-1)
        found.max_difference = float(np.abs(logits - transformers).max())
        found.argmax_share = float(same.mean())
        found.last_argmax = bool(same[-1])
    if resident is not None:
        found.as_resident = np.array_equal(logits, resident)
    return found


def compare_all(logits: Mapping[str, Logits], peers: Sequence[str], served: Sequence[str]) -> dict[str, Equality]:
    """Compares by contender. The logits of the first peer that has any are transformers': all peers run its code."""
    streamed = set(served) - {"resident"}
    transformers = next((logits[name] for name in peers if name in logits), None)
    resident = logits.get("resident")
    return {name: compare(own, transformers, resident if name in streamed else None) for name, own in logits.items()}
