from __future__ import annotations

from djinnd.kvcache.prefixes import Prefixes, chain, root

ALICE, BOB = 1000, 1001


def test_a_key_says_whose_it_is_and_all_that_stands_before() -> None:
    keys = {
        chain(root(ALICE), [1, 2]),
        chain(root(BOB), [1, 2]),
        chain(root(ALICE), [2, 1]),
        chain(root(ALICE), [1, 2, 3]),
        chain(chain(root(ALICE), [1]), [2]),
        chain(chain(root(ALICE), [3, 4]), [1, 2]),
        root(ALICE),
        root(BOB),
    }
    assert len(keys) == 8
    assert chain(root(ALICE), [1, 2]) == chain(root(ALICE), (1, 2)) in keys


def test_the_first_of_two_equal_pages_is_found_until_it_is_forgotten() -> None:
    prefixes = Prefixes()
    key, other = chain(root(ALICE), [1]), chain(root(ALICE), [2])
    prefixes.add(key, 5)
    prefixes.add(key, 6)
    prefixes.add(other, 7)
    assert (prefixes.find(key), 5 in prefixes, 6 in prefixes) == (5, True, False)
    prefixes.forget([5, 6])
    assert (prefixes.find(key), prefixes.find(other)) == (None, 7)
    prefixes.add(key, 6)
    assert prefixes.find(key) == 6
    prefixes.check_integrity()


def test_pages_that_a_pool_of_another_size_does_not_have_are_forgotten() -> None:
    prefixes = Prefixes()
    keys = [chain(root(ALICE), [token]) for token in range(3)]
    for page, key in enumerate(keys, 1):
        prefixes.add(key, page)
    prefixes.move({1: 1, 3: 2})
    assert [prefixes.find(key) for key in keys] == [1, None, 2]
    prefixes.check_integrity()
