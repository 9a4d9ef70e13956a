from __future__ import annotations

import pytest

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.prefixes import Key, PrefixIndex, PublicPrefixes, chain, root

ALICE, BOB = 1000, 1001
PAGE = 4
SYSTEM = list(range(100, 112))  # three pages
SALT = b"salt"


def keys(public: PublicPrefixes, tenant: int, tokens: list[int], salt: bytes = b"") -> list[Key]:
    """The keys of the full pages of a new session."""
    found: list[Key] = []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        parent = found[-1] if found else None
        found.append(public.next_key(root(tenant, salt), parent, tokens[start : start + PAGE]))
    return found


def common(one: list[Key], other: list[Key]) -> int:
    """How many first pages two sessions share. Checks that they share none behind the first that differs."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    shared = equal.index(False) if False in equal else len(equal)
    assert not any(equal[shared:])
    return shared


def test_a_key_depends_on_the_tenant_and_all_tokens_before() -> None:
    keys = {
        chain(root(ALICE), [1, 2]),
        chain(root(BOB), [1, 2]),
        chain(root(ALICE), [2, 1]),
        chain(root(ALICE), [1, 2, 3]),
        chain(chain(root(ALICE), [1]), [2]),
        chain(chain(root(ALICE), [3, 4]), [1, 2]),
        root(ALICE),
        root(BOB),
        chain(root(ALICE, b"salt"), [1, 2]),
        chain(root(ALICE, b"pepper"), [1, 2]),
    }
    assert len(keys) == 10
    assert root(ALICE, b"") == root(ALICE)
    assert chain(root(ALICE), [1, 2]) == chain(root(ALICE), (1, 2)) in keys


def test_the_first_of_two_equal_pages_is_found_until_it_is_forgotten() -> None:
    prefixes = PrefixIndex()
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
    prefixes = PrefixIndex()
    keys = [chain(root(ALICE), [token]) for token in range(3)]
    for page, key in enumerate(keys, 1):
        prefixes.add(key, page)
    prefixes.move({1: 1, 3: 2})
    assert [prefixes.find(key) for key in keys] == [1, None, 2]
    prefixes.check_integrity()


# --- public prefixes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("marked", "pages"), [(3, 0), (4, 1), (7, 1), (8, 2), (12, 3)])
def test_tenants_share_the_full_pages_of_a_public_prefix_and_none_behind(marked: int, pages: int) -> None:
    public, tokens = PublicPrefixes(), SYSTEM + [1] * 8
    public.mark(SYSTEM[:marked], PAGE)
    alice, bob = keys(public, ALICE, tokens), keys(public, BOB, tokens)
    assert common(alice, bob) == pages
    assert common(alice, keys(public, ALICE, tokens)) == 5
    assert [key in public for key in alice] == [True] * pages + [False] * (5 - pages)


def test_a_session_that_leaves_the_prefix_in_the_middle_of_a_page_has_that_page_to_itself() -> None:
    public = PublicPrefixes()
    public.mark(SYSTEM, PAGE)
    left = [*SYSTEM[:6], 0, 0, *SYSTEM[8:]]
    assert common(keys(public, ALICE, SYSTEM), keys(public, BOB, left)) == 1
    assert common(keys(public, ALICE, left), keys(public, BOB, left)) == 1
    assert common(keys(public, ALICE, left), keys(public, ALICE, left)) == 3


def test_a_page_that_is_filled_in_part_is_never_public() -> None:
    public = PublicPrefixes()
    public.mark(SYSTEM, PAGE)
    parent = keys(public, ALICE, SYSTEM[:8])[-1]
    (alice,) = public.next_keys(root(ALICE), [parent], SYSTEM[8:10])
    (bob,) = public.next_keys(root(BOB), [parent], SYSTEM[8:10])
    assert alice != bob and alice not in public


def test_imported_kv_is_never_public() -> None:
    public = PublicPrefixes()
    before = keys(public, ALICE, SYSTEM, SALT)
    public.mark(SYSTEM, PAGE)
    salted = keys(public, ALICE, SYSTEM, SALT)
    assert salted == before and common(salted, keys(public, ALICE, SYSTEM)) == 0
    assert not any(key in public for key in salted)
    assert public.next_keys(root(ALICE, SALT), [], SYSTEM[:PAGE]) == before[:1]


def test_the_longer_of_two_nested_prefixes_applies_in_any_order() -> None:
    for marks in ([8, 12], [12, 8]):
        public = PublicPrefixes()
        for length in marks:
            public.mark(SYSTEM[:length], PAGE)
        assert common(keys(public, ALICE, SYSTEM + [1] * 4), keys(public, BOB, SYSTEM + [1] * 4)) == 3


def test_two_public_prefixes_may_have_the_same_beginning() -> None:
    public, other = PublicPrefixes(), SYSTEM[:4] + [7] * 8
    public.mark(SYSTEM, PAGE)
    public.mark(other, PAGE)
    assert common(keys(public, ALICE, SYSTEM), keys(public, BOB, other)) == 1
    assert common(keys(public, ALICE, other), keys(public, BOB, other)) == 3


def test_pages_are_found_by_every_key_they_had_as_prefixes_were_marked() -> None:
    public, origin, tokens = PublicPrefixes(), root(ALICE), SYSTEM + [1] * 4
    histories = [keys(public, ALICE, tokens)]
    for marked in (8, 12):
        public.mark(SYSTEM[:marked], PAGE)
        histories.append(keys(public, ALICE, tokens))
    never, short, long = histories
    found: list[Key] = []
    for page in range(4):
        found = public.next_keys(origin, found, tokens[page * PAGE : (page + 1) * PAGE])
        assert len(set(found)) == len(found) and found[0] == long[page]
        assert set(found) == {never[page], short[page], long[page]}
    assert public.last_keys(origin, long[2], SYSTEM, PAGE) == [long[2], short[2], never[2]]
    assert public.last_keys(origin, short[2], SYSTEM, PAGE) == [short[2]], "what stands behind it is known by that"
    assert public.last_keys(origin, None, [], PAGE) == []


def fill(kv: KvManager, session: str, tenant: int, tokens: list[int], salt: bytes = b"") -> int:
    """Gives the session the KV of its tokens, as a prompt does. Returns how many tokens were found computed."""
    found = kv.adopt(session, tenant, tokens, 0, len(tokens), salt)
    kv.reserve(session, tenant, len(tokens))
    kv.publish(session, tenant, tokens, len(tokens), salt)
    kv.check_integrity()
    return found


def test_in_a_pool_tenants_find_each_other_s_public_pages_only() -> None:
    kv, tokens = KvManager(40, PAGE, 1, 64), SYSTEM + [1] * 8
    kv.public.mark(SYSTEM, PAGE)
    assert fill(kv, "a", ALICE, tokens) == 0
    assert fill(kv, "b", BOB, tokens) == 12
    assert kv.pages_of("a")[:3] == kv.pages_of("b")[:3] and not {*kv.pages_of("a")[3:]} & {*kv.pages_of("b")[3:]}
    assert fill(kv, "salted", ALICE, tokens, SALT) == 0
    for session in ("a", "b"):
        kv.drop(session)
    assert fill(kv, "c", BOB, tokens) == 20, "public pages and its own ones, which no session holds"
    assert fill(kv, "d", ALICE, [*SYSTEM[:6], *tokens]) == 4


def test_in_a_pool_a_marking_changes_nothing_for_pages_that_are_there() -> None:
    kv = KvManager(40, PAGE, 1, 64)
    fill(kv, "a", ALICE, SYSTEM)
    pages = kv.pages_of("a")
    kv.public.mark(SYSTEM, PAGE)
    assert fill(kv, "b", BOB, SYSTEM) == 0 and not {*kv.pages_of("b")} & {*pages}
    assert fill(kv, "bob's", BOB, SYSTEM) == 12
    assert kv.keys_of("a", root(ALICE), SYSTEM, 12) == keys(PublicPrefixes(), ALICE, SYSTEM)
    kv.drop("b"), kv.drop("bob's")
    assert fill(kv, "c", ALICE, SYSTEM) == 12 and kv.pages_of("c") != pages, "public ones before those of one tenant"


def test_in_a_pool_a_tenant_finds_the_pages_that_it_had_before_a_marking() -> None:
    kv, tokens = KvManager(40, PAGE, 1, 64), SYSTEM + [1] * 4
    fill(kv, "a", ALICE, tokens)
    pages = kv.pages_of("a")
    kv.drop("a")
    kv.public.mark(SYSTEM, PAGE)
    assert fill(kv, "a", ALICE, tokens) == 16 and kv.pages_of("a") == pages
    assert fill(kv, "b", BOB, SYSTEM) == 0
    kv.drop("a")
    assert fill(kv, "a", ALICE, tokens) == 16, "public pages, and behind them its own of before"
    assert kv.pages_of("a") == kv.pages_of("b") + pages[3:]
    assert fill(kv, "a2", ALICE, [*tokens, *tokens]) == 16
    assert kv.trim("a", 12) == 12 and fill(kv, "a3", ALICE, tokens) == 16


def test_keys_of_edited_positions_differ_from_those_of_any_tokens() -> None:
    """Names are hashed at their full width of 64 bits. A page of names has another key than a page of twice as many
    tokens."""
    parent, name = root(0), -(1 << 62) - 12345
    assert chain(parent, [1, name]) == chain(parent, [1, name])
    assert len({chain(parent, [1, name]), chain(parent, [1, name - 1]), chain(parent, [name, 1])}) == 3
    low, high = name & 0xFFFFFFFF, name >> 32
    assert high < 0 and chain(parent, [low - (1 << 32) if low >> 31 else low, 0]) != chain(parent, [name])
