"""Objects of the arena are charged, with their size, to the ledger of the user that brought their model."""

from __future__ import annotations

import pytest

from djinn_client.errors import QuotaExceeded
from djinnd.server.arenas.arena import Arena
from djinnd.server.arenas.charges import ArenaCharges
from djinnd.server.arenas.header import HEADER_BYTES
from djinnd.server.quotas.ledger import ARENA_BYTES, Ledger, Limit

FINGERPRINT = "ab" * 32
KEY = ("m", "weights")
NBYTES = HEADER_BYTES + 5000
LIMIT = 3 * HEADER_BYTES + 10_000


def ledger():
    return Ledger(lambda resource: Limit(f"limits.{resource.name}_per_user", "", LIMIT))


@pytest.fixture
def arena(tmp_path):
    arena = Arena(str(tmp_path))
    yield arena
    arena.close()


def test_a_charge_precedes_the_object_and_then_follows_its_size(arena):
    charges, mine = ArenaCharges(arena), ledger()
    charges.reserve(KEY, mine, NBYTES)
    assert mine.used(ARENA_BYTES) == NBYTES
    arena.grant("m", 5000, FINGERPRINT)
    charges.settle("m")
    assert mine.used(ARENA_BYTES) == arena.nbytes == NBYTES
    charges.reserve(KEY, mine, NBYTES)
    assert mine.used(ARENA_BYTES) == NBYTES, "it exists already"
    arena.remove("m")
    charges.settle("m")
    charges.settle("m")
    assert mine.used(ARENA_BYTES) == 0


def test_an_object_that_was_not_created_costs_nothing(arena):
    charges, mine = ArenaCharges(arena), ledger()
    charges.reserve(KEY, mine, NBYTES)
    charges.settle("m")
    assert mine.used(ARENA_BYTES) == 0


def test_a_refused_charge_changes_nothing_and_names_the_figures(arena):
    charges, mine, hers = ArenaCharges(arena), ledger(), ledger()
    charges.reserve(KEY, mine, NBYTES)
    arena.grant("m", 5000, FINGERPRINT)
    hers.charge(ARENA_BYTES, LIMIT)
    told = rf"{NBYTES:,} bytes of shared memory.*limits\.arena_bytes_per_user is {LIMIT:,}: unload one"
    with pytest.raises(QuotaExceeded, match=told):
        charges.reserve(KEY, mine, LIMIT + 1)
    with pytest.raises(QuotaExceeded):
        charges.reserve(KEY, hers, NBYTES)
    charges.settle("m")
    assert (mine.used(ARENA_BYTES), hers.used(ARENA_BYTES)) == (NBYTES, LIMIT)


@pytest.mark.parametrize("heir", [ledger(), None])
def test_a_model_that_becomes_another_s_is_charged_to_that_one_alone(arena, heir):
    charges, mine = ArenaCharges(arena), ledger()
    charges.reserve(KEY, mine, NBYTES)
    arena.grant("m", 5000, FINGERPRINT)
    charges.reserve(KEY, heir, NBYTES)
    charges.settle("m")
    assert mine.used(ARENA_BYTES) == 0
    assert heir is None or heir.used(ARENA_BYTES) == NBYTES


def test_objects_of_an_earlier_daemon_are_charged_beyond_the_limit(arena):
    arena.grant("m", LIMIT, FINGERPRINT)
    arena.grant("m", 7, FINGERPRINT, "pages")
    charges, mine = ArenaCharges(arena), ledger()
    charges.adopt("m", mine)
    assert mine.used(ARENA_BYTES) == arena.nbytes > LIMIT
    charges.reserve(KEY, mine, HEADER_BYTES + LIMIT)
    arena.remove("m")
    charges.settle("m")
    assert mine.used(ARENA_BYTES) == 0


def test_bytes_to_grant_is_the_size_that_the_grant_will_have(arena):
    arena.grant("m", 5000, FINGERPRINT, "pages")
    takes = {
        any_size: arena.bytes_to_grant("m", 9000, FINGERPRINT, "pages", any_size=any_size) for any_size in (True, False)
    }
    assert takes == {True: NBYTES, False: HEADER_BYTES + 9000}
    assert arena.bytes_to_grant("m", 9000, "cd" * 32, "pages", any_size=True) == HEADER_BYTES + 9000
    assert arena.bytes_to_grant("other", 1, FINGERPRINT, "weights", any_size=False) == HEADER_BYTES + 1
