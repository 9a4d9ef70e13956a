"""The steps of a part of a tokenizer: of its normalizer, its pre-tokenizer or its decoder."""

from __future__ import annotations

import json
from typing import Any

Step = dict[str, Any]  # as in tokenizer.json


def steps_of(component: Any) -> list[Step]:
    """The steps of a Tokenizer's component, such as its decoder. None has no steps."""
    return [] if component is None else steps_in(json.loads(component.__getstate__()))


def steps_in(part: Step | None) -> list[Step]:
    """The steps of a part as tokenizer.json has it, also those of nested sequences."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = part.get("normalizers") or part.get("pretokenizers") or part.get("decoders") or ()
    return [step for each in inner for step in steps_in(each)]
