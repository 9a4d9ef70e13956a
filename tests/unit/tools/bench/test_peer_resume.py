from __future__ import annotations

from tests.support.models import tiny_model
from tools.bench.peer_resume import measure


def test_both_ways_give_the_same_token_and_move_the_same_kv() -> None:
    (short, longer) = measure(tiny_model(), "cpu", "float32", [16, 48], rounds=2)
    assert short.same_token and longer.same_token
    assert len(short.recompute) == len(short.manual) == 2
    assert short.nbytes == 16 * 8 * 2 * 2 * 32 * 4  # tokens, blocks, keys and values, heads, their width, float32
    assert longer.nbytes == 3 * short.nbytes
