from __future__ import annotations

import dataclasses

import pytest

from djinn_client.protocol.fields.kv_layout import BlockShape
from djinnd.engine.memory.memory import (
    HostRoom,
    ModelShape,
    TierPages,
    kv_floor,
    plan_kv,
    tier_pages,
    workspace_bytes,
)
from djinnd.engine.tuning import FULL_SESSIONS, LOGIT_ROWS, MIN_TOKENS
from djinnd.kvcache.manager import page_size_for
from djinnd.kvcache.tuning import MAX_SLOTS
from djinnd.model.states.workspace import StateWorkspace
from djinnd.model.tuning import EXPANDED_BYTES, PARTIAL_BYTES

# Llama-3-8B in bf16: 128 KiB of KV a token, so a page has 32 tokens and 4 MiB.
SHAPE = ModelShape(
    num_blocks=32,
    kv=(BlockShape(8, 128, 128),) * 32,
    width=4096,
    widest=28672,
    vocab=128256,
    itemsize=2,
    max_positions=8192,
)
TOKEN = 32 * 2 * 8 * 128 * 2
PAGE = 4 << 20
GIB = 1 << 30


def test_a_token_s_kv_covers_all_blocks() -> None:
    assert SHAPE.token_bytes == TOKEN == 128 << 10
    assert page_size_for(TOKEN) == 32


def test_kv_in_fp8_takes_a_byte_a_number_and_activations_what_they_took() -> None:
    fp8 = dataclasses.replace(SHAPE, has_fp8_kv=True)
    assert fp8.token_bytes == TOKEN // 2 and fp8.page_size == 64 and fp8.page_bytes == PAGE
    assert workspace_bytes(fp8, 2048) == workspace_bytes(SHAPE, 2048)
    plans = [plan_kv(shape, 100 * GIB, 10 * GIB, wanted=10 * GIB, max_context=0) for shape in (SHAPE, fp8)]
    assert [plan.num_pages * plan.page_size for plan in plans] == [10 * GIB // TOKEN, 20 * GIB // TOKEN]


def test_a_configured_number_of_bytes_decides_the_pages() -> None:
    plan = plan_kv(SHAPE, free=100 * GIB, floor=10 * GIB, wanted=10 * GIB, max_context=0)
    assert (plan.page_size, plan.page_bytes) == (32, PAGE)
    assert plan.num_pages == 10 * GIB // PAGE
    assert plan.max_context == 8192


def test_more_bytes_than_are_free_are_left_for_the_budget_to_refuse() -> None:
    assert plan_kv(SHAPE, GIB, 10 * GIB, wanted=10 * GIB, max_context=0).num_pages * PAGE == 10 * GIB


def test_automatic_kv_takes_half_so_that_another_model_has_room() -> None:
    plan = plan_kv(SHAPE, free=20 * GIB, floor=GIB, wanted=0, max_context=0)
    assert plan.num_pages == 10 * GIB // PAGE


def test_memory_set_aside_from_the_weights_goes_to_pages() -> None:
    plan = plan_kv(SHAPE, free=GIB, floor=GIB, wanted=0, max_context=0)
    assert plan.num_pages == GIB // PAGE


def test_automatic_kv_takes_no_more_than_many_full_sessions_could_use() -> None:
    plan = plan_kv(SHAPE, free=1000 * GIB, floor=900 * GIB, wanted=0, max_context=1024)
    assert plan.num_pages == FULL_SESSIONS * 1024 // 32 + 1
    assert plan.max_context == 1024


@pytest.mark.parametrize("wanted", [0, 1])
def test_at_least_a_short_session_fits(wanted: int) -> None:
    plan = plan_kv(SHAPE, free=1, floor=1, wanted=wanted, max_context=0)
    assert plan.num_pages == MIN_TOKENS // 32 + 1
    assert plan.max_context == MIN_TOKENS


def test_the_context_is_the_least_of_model_configuration_and_pool() -> None:
    assert plan_kv(SHAPE, 100 * GIB, 50 * GIB, 50 * GIB, max_context=0).max_context == 8192
    assert plan_kv(SHAPE, 100 * GIB, 50 * GIB, 50 * GIB, max_context=100_000).max_context == 8192
    assert plan_kv(SHAPE, 100 * GIB, 50 * GIB, 50 * GIB, max_context=1000).max_context == 1000
    assert plan_kv(SHAPE, 100 * GIB, 33 * PAGE, 33 * PAGE, max_context=0).max_context == 32 * 32


def test_a_model_of_short_contexts_needs_only_pages_for_those() -> None:
    short = dataclasses.replace(SHAPE, max_positions=64)
    assert plan_kv(short, free=1, floor=1, wanted=0, max_context=0).num_pages == 2 + 1
    assert kv_floor(short, wanted=0, budget=1) == 3 * PAGE


def test_pages_before_weights_are_the_configured_ones_or_a_small_share() -> None:
    assert kv_floor(SHAPE, wanted=3 * GIB, budget=24 * GIB) == 3 * GIB
    assert kv_floor(SHAPE, wanted=0, budget=32 * GIB) == GIB
    assert kv_floor(SHAPE, wanted=1, budget=32 * GIB) == (MIN_TOKENS // 32 + 1) * PAGE


@pytest.mark.parametrize("wanted", [0, 1, 300 * PAGE + 7])
def test_pages_set_aside_before_the_weights_are_enough_for_the_plan(wanted: int) -> None:
    """If only the floor is left, the pages still fit, so the plan can be reserved."""
    for budget in (GIB, 10 * GIB, 300 * GIB):
        floor = kv_floor(SHAPE, wanted, budget)
        plan = plan_kv(SHAPE, floor, floor, wanted, max_context=0)
        assert plan.num_pages * plan.page_bytes <= floor


def test_the_workspace_has_room_for_the_widest_activations_and_all_logits() -> None:
    workspace = workspace_bytes(SHAPE, 2048)
    assert workspace >= 2048 * SHAPE.widest * 2 + LOGIT_ROWS * SHAPE.vocab * 4
    assert workspace_bytes(SHAPE, 4096) > workspace


@pytest.mark.parametrize("positions", [8192, 1 << 20])
def test_the_workspace_has_room_for_what_is_made_of_latents(positions: int) -> None:
    plain = dataclasses.replace(SHAPE, max_positions=positions)
    more = workspace_bytes(dataclasses.replace(plain, expanded_width=320), 2048) - workspace_bytes(plain, 2048)
    assert more == PARTIAL_BYTES + 2 * max(EXPANDED_BYTES, positions * 320 * 2)


def test_the_workspace_has_room_for_a_part_of_a_row_or_for_all_rows_of_one_token() -> None:
    without = dataclasses.replace(SHAPE, state_bytes=1 << 20)
    assert without.page_size == 32
    for states, wanted in (
        (StateWorkspace(part_bytes=(9 << 20, 10 << 20, 11 << 20)), 9 << 20),
        (StateWorkspace(row_bytes=800), 800 * 256),
    ):
        shape = dataclasses.replace(without, states=states)
        assert workspace_bytes(shape, 2048) - workspace_bytes(without, 2048) == wanted * 9 // 8


WEIGHTS = 16 * GIB
ROOM = HostRoom(memory=400 * GIB, shared=200 * GIB, disk=1000 * GIB)


def test_automatic_tiers_are_multiples_of_the_pool() -> None:
    assert tier_pages(PAGE, 10 * GIB, WEIGHTS, None, None, ROOM) == TierPages(20 * GIB // PAGE, 40 * GIB // PAGE)


def test_a_small_model_takes_little_host_memory_by_itself() -> None:
    assert tier_pages(PAGE, 10 * GIB, GIB // 4, None, 0, ROOM) == TierPages(GIB // PAGE, 0)
    assert tier_pages(PAGE, 10 * GIB, GIB // 4, 30 * GIB, 0, ROOM) == TierPages(30 * GIB // PAGE, 0)


@pytest.mark.parametrize(
    ("room", "host", "disk"),
    [
        ({"memory": 12 * GIB}, 3 * GIB, 40 * GIB),
        ({"shared": 12 * GIB}, 3 * GIB, 40 * GIB),
        ({"disk": 50 * GIB}, 20 * GIB, 5 * GIB),
        ({"disk": 0}, 20 * GIB, 0),
        ({"shared": 4 * PAGE - 1}, 0, 40 * GIB),
    ],
)
def test_automatic_tiers_leave_most_of_the_free_memory(room: dict[str, int], host: int, disk: int) -> None:
    wide = dataclasses.replace(ROOM, **room)
    assert tier_pages(PAGE, 10 * GIB, WEIGHTS, None, None, wide) == TierPages(host // PAGE, disk // PAGE)


def test_configured_tiers_have_the_configured_size() -> None:
    little = HostRoom(0, 0, 12 * PAGE + 100)
    assert tier_pages(PAGE, 10 * GIB, WEIGHTS, 7 * PAGE, 9 * PAGE + 5, little) == TierPages(7, 9)
    assert tier_pages(PAGE, 10 * GIB, WEIGHTS, 0, 0, ROOM) == TierPages(0, 0)
    assert tier_pages(PAGE, 10 * GIB, WEIGHTS, PAGE - 1, None, ROOM) == TierPages(0, 40 * GIB // PAGE)


def test_tiers_are_limited_by_the_free_disk_and_by_their_tables() -> None:
    assert tier_pages(PAGE, 10 * GIB, WEIGHTS, 0, 2048 * GIB, ROOM) == TierPages(0, 750 * GIB // PAGE)
    assert tier_pages(PAGE, 10 * GIB, WEIGHTS, 0, 2048 * GIB, HostRoom(0, 0, 0)) == TierPages(0, 0)
    assert tier_pages(4096, GIB, WEIGHTS, 4096 * (MAX_SLOTS + 1), 1 << 60, ROOM) == TierPages(MAX_SLOTS, MAX_SLOTS)


def test_unaligned_pages_take_more_room_than_their_bytes() -> None:
    assert tier_pages(5000, 0, WEIGHTS, 8192 * 10, 8192 * 3, ROOM) == TierPages(10, 3)
