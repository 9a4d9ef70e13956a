"""Outputs without a model: each step picks a random token that the grammar allows."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from llguidance import LLTokenizer

from djinnd.text.grammar import compiled, open_tokenizer
from tests.support.serving import TINY

END = 0  # the end token of djinn-tiny


@cache
def tiny_tokenizer() -> LLTokenizer:
    return open_tokenizer((TINY / "tokenizer.json").read_text(), [END])


@cache
def _blank() -> frozenset[int]:
    tokenizer = tiny_tokenizer()
    return frozenset(token for token in range(tokenizer.vocab_size) if not tokenizer.decode_str([token]).strip())


def walk(grammar: str, seed: int, most: int = 400) -> str | None:
    """→ None if the output has not ended after `most` tokens. Blanks are rarer than other tokens, as in a model's
    output."""
    tokenizer, rng, blank = tiny_tokenizer(), random.Random(seed), _blank()
    matcher = compiled(grammar, tokenizer)
    tokens: list[int] = []
    while len(tokens) < most:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        may_end = matcher.is_accepting() and END in allowed
        if may_end and (allowed == [END] or rng.random() < 0.3):
            return tokenizer.decode_str(tokens)
        others = [token for token in allowed if token != END]
        said = [token for token in others if token not in blank]
        tokens.append(rng.choice(said if said and rng.random() < 0.9 else others))
        assert matcher.consume_token(tokens[-1])
    return None
