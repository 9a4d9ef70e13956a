"""How transformers' models are given the KV of earlier tokens: as `past_key_values`, or from 5.24 on as `cache`."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument of the model's forward."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}
