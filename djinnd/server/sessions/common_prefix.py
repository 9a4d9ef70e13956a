"""The length of the prefix that a session's tokens and a prompt share."""

from __future__ import annotations

from collections.abc import Sequence

_STEP = 256  # tokens that are compared at once


def common_prefix(have: Sequence[int], wanted: Sequence[int]) -> int:
    """The number of tokens at the beginning that both have, less than the length of `wanted`: its last token is always
    computed, because the next token is sampled from its logits."""
    end = min(len(have), len(wanted) - 1)
    at = 0
    while at < end and have[at : min(at + _STEP, end)] == wanted[at : min(at + _STEP, end)]:
        at = min(at + _STEP, end)
    while at < end and have[at] == wanted[at]:
        at += 1
    return at
