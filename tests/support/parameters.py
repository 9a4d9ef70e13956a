"""Parameters that are divided between `make test` and `make test-long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.support.models import FAMILIES


def long_except(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values`, marked long except those in `quick`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.long) for value in values]


# Gemma-3 has windows and RoPE by block, GPT-J has none of Llama's modules, gpt-oss has experts and attention sinks.
# Logits of all families are compared with transformers by unit/model/test_families.py in `make test`.
FEW_FAMILIES = long_except(("gemma-3", "gpt-j", "gpt-oss"), FAMILIES)
