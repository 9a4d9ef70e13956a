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
_QUICK = ("gemma-3", "gpt-j", "gpt-oss")
FEW_FAMILIES = long_except(_QUICK, FAMILIES)
# One family of each build: GPT-2's Conv1D, Falcon's parallel blocks, Mixtral's experts, Phi-3's joined projections. All
# model types are served by tests/families.
_BUILDS = (*_QUICK, "gpt2", "falcon-7b", "mixtral", "phi-3")
BUILDS = long_except(_QUICK, _BUILDS)
# All families, those of BUILDS first: pytest gives two tests the same fixture if its parameter has the same place.
ALL_FAMILIES = (*_BUILDS, *(family for family in FAMILIES if family not in _BUILDS))
