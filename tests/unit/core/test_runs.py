from __future__ import annotations

import random

from djinnd.core.runs import RUN, hash_of, hashes_of


def test_one_by_one_and_all_at_once_are_the_same() -> None:
    chance = random.Random(3)
    tokens = [chance.randrange(1 << 20) for _ in range(50)]
    assert hashes_of(tokens, RUN, 50).tolist() == [hash_of(tokens, end) for end in range(RUN, 51)]
    assert hashes_of(tokens, 20, 30).tolist() == [hash_of(tokens, end) for end in range(20, 31)]


def test_the_low_bits_depend_on_each_token_and_on_the_order() -> None:
    runs = [[a, b, c] for a in range(8) for b in range(8) for c in range(8)]
    assert len({hash_of(run, RUN) & (1 << 17) - 1 for run in runs}) > 500


def test_the_largest_tokens_do_not_overflow() -> None:
    tokens = [(1 << 20) - 1] * 5
    assert hashes_of(tokens, RUN, 5).tolist() == [hash_of(tokens, RUN)] * 3
