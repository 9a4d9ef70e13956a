"""A regular expression for many strings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_NOTHING = "(?!)"


def any_of(strings: Iterable[str]) -> str:
    """An expression that matches the longest of these strings at a place. It has a common beginning of several strings
    once: tokenizers have thousands of control strings that begin alike."""
    ends: dict[str, Any] = {}
    for string in strings:
        node = ends
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branch(ends) if ends else _NOTHING


def _branch(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        run += re.escape(character)
    branches = [re.escape(each) + _branch(rest) for each, rest in node.items() if each]
    if not branches:
        return run
    return f"{run}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
