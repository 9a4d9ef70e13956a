from __future__ import annotations

import importlib
import sys

import pytest

from tests.fuzz.__main__ import SHARES


@pytest.mark.parametrize("name", SHARES)
def test_a_target_imports_the_parsers_that_it_names(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.{name}").TARGET
    assert target.parsers and sys.modules.keys() >= set(target.parsers)
