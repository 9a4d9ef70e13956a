"""Prompts of benches: random tokens, the same for the same seed."""

from __future__ import annotations

import random


def prompt(tokens: int, vocab: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, vocab), k=tokens)
