from __future__ import annotations

import numpy as np

from djinnd.engine.drafts.draft_pages import DraftPages
from djinnd.kvcache.manager import KvManager

SIZE = 16


def made(pages: int) -> tuple[KvManager, DraftPages]:
    kv = KvManager(pages + 1, SIZE, page_bytes=0, max_context=pages * SIZE)
    return kv, DraftPages(kv)


def test_tables_have_each_session_s_pages_in_the_order_of_its_tokens() -> None:
    _, pages = made(6)
    assert pages.reserve("a", 0, 3 * SIZE, keep=())
    assert pages.reserve("b", 0, 1, keep=())
    assert (pages.pages_held("a"), pages.pages_held("b")) == (3, 1)
    table = pages.page_table(["b", "a"])
    assert table.dtype == np.int32 and table.shape == (2, 3)
    assert (table[0, 1:] == 0).all() and len({*table.ravel().tolist()}) == 5


def test_the_longest_unused_session_loses_its_pages_for_another() -> None:
    _, pages = made(4)
    for name in ("a", "b", "a"):
        assert pages.reserve(name, 0, 2 * SIZE, keep=())
    assert pages.reserve("c", 0, 2 * SIZE, keep=("c",))
    assert pages.lost() == ["b"] and pages.lost() == []
    assert not pages.reserve("b", 0, 2 * SIZE, keep=("a", "b", "c"))
    assert pages.lost() == []


def test_the_draft_s_own_sessions_take_the_pages_that_they_need() -> None:
    kv, pages = made(4)
    assert pages.reserve("a", 0, 2 * SIZE, keep=()) and pages.reserve("b", 0, SIZE, keep=())
    kv.reserve("own", 1, 2 * SIZE)
    assert len(pages.lost()) == 1
    kv.reserve("own", 1, 4 * SIZE)
    assert len(pages.lost()) == 1
    kv.check_integrity()


def test_pages_that_are_lent_are_no_longer_found_by_their_prefix() -> None:
    kv, pages = made(2)
    tokens = list(range(2 * SIZE))
    kv.reserve("own", 0, 2 * SIZE)
    kv.publish("own", 0, tokens, 2 * SIZE)
    kv.drop("own")
    assert pages.reserve("a", 0, 2 * SIZE, keep=())
    assert kv.adopt("next", 0, tokens, 0, 2 * SIZE) == 0
