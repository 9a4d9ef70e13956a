from __future__ import annotations

import sys

import pytest

from tests.support.models import tiny_model
from tools.bench.peers.resume import Peer, measure, measure_inside


def test_both_ways_give_the_same_token_and_move_the_same_kv() -> None:
    (short, longer) = measure(tiny_model(), "cpu", "float32", [16, 48], rounds=2)
    assert short.same_token and longer.same_token
    assert len(short.recompute) == len(short.manual) == 2
    assert short.nbytes == 16 * 8 * 2 * 2 * 32 * 4  # tokens, blocks, keys and values, heads, their width, float32
    assert longer.nbytes == 3 * short.nbytes


def test_resuming_inside_skips_the_finished_blocks_and_gives_the_same_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = Peer(tiny_model(), "cpu", "float32")
    found = measure_inside(peer, 16, [1, 5, 8], rounds=2)
    assert all(one.same_token and len(one.recompute) == len(one.manual) == 2 for one in found)
    kv, hidden = 16 * 2 * 2 * 32 * 4, 16 * 192 * 4  # of a block
    assert [(one.blocks, one.nbytes) for one in found] == [(n, n * kv + hidden) for n in (1, 5, 8)]

    monkeypatch.setitem(sys.modules, "nnsight", None)
    peer.trace(16, found, rounds=2)
    assert all(one.nnsight == [] and one.nnsight_note == "nnsight is not installed" for one in found)
