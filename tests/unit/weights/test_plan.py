from __future__ import annotations

import pytest

from djinn_client.errors import InvalidRequest, OutOfMemory
from djinn_client.protocol import Placing
from djinnd.weights.plan import (
    BlockPlace,
    BlockSize,
    ExpertsSize,
    PlacementPlan,
    are_fetched,
    least_bytes,
    plan_places,
    spread,
)

PLAIN, PACKED, STREAMED = BlockPlace.PLAIN, BlockPlace.PACKED, BlockPlace.STREAMED
BLOCK = BlockSize(1024, 768)  # 4 : 3, the ratio of the packed code
FLOAT = BlockSize(1024, None)  # a block that cannot be packed


def places(size: BlockSize, blocks: int, free: int, **wishes: object) -> PlacementPlan:
    return plan_places([size] * blocks, free, Placing(**wishes))  # type: ignore[arg-type]


# --- regimes --------------------------------------------------------------------------------------------------------


def test_if_all_blocks_fit_all_are_plain() -> None:
    plan = places(BLOCK, 8, 8 * 1024)
    assert plan.places == (PLAIN,) * 8
    assert (plan.nbytes, plan.ring_bytes, plan.scratch_bytes, plan.slots, plan.streamed_bytes) == (8192, 0, 0, 0, 0)


def test_with_a_byte_less_blocks_are_packed_with_scratch_for_the_largest() -> None:
    plan = places(BLOCK, 8, 8 * 1024 - 1)
    assert plan.streamed == [] and plan.scratch_bytes == 1024 and plan.ring_bytes == 0
    assert plan.count(PACKED) == 8 - plan.count(PLAIN) > 0


def test_half_of_the_remaining_memory_makes_packed_blocks_plain() -> None:
    plan = places(BLOCK, 8, 8 * 768 + 1024 + 1023)
    assert [index for index, place in enumerate(plan.places) if place is PLAIN] == [4]
    assert places(BLOCK, 8, 8 * 768 + 1024 + 511).count(PACKED) == 8


def test_all_remaining_memory_makes_blocks_plain_if_pages_need_none() -> None:
    plan = plan_places([BLOCK] * 8, 8 * 768 + 1024 + 1023, Placing(), pages_share=0.0)
    assert plan.count(PLAIN) == 3 and plan.nbytes <= 8 * 768 + 1024 + 1023
    plan = plan_places([BLOCK] * 8, 8 * 1024 + 1024, Placing(), staging=1025, pages_share=0.0)
    assert plan.count(PLAIN) == 8, "the scratch that one packed block would need serves as staging"


def test_as_few_blocks_as_possible_stream_and_they_stream_packed() -> None:
    free = 8 * 768 + 1024 - 1  # one byte less than for all of them, packed
    plan = places(BLOCK, 8, free)
    assert (
        plan.count(STREAMED) == 2 and plan.count(PACKED) == 6
    )  # a slot takes the memory of a block: streaming one block gains nothing
    assert (plan.slots, plan.ring_bytes, plan.streamed_bytes) == (1, 768, 2 * 768)
    assert plan.nbytes <= free


def test_blocks_that_cannot_be_packed_stream_plain_and_need_no_scratch() -> None:
    plan = places(FLOAT, 8, 6 * 1024)
    assert (plan.count(PLAIN), plan.count(STREAMED)) == (5, 3)
    assert (plan.ring_bytes, plan.slots, plan.scratch_bytes) == (1024, 1, 0)


def test_packing_off_is_the_plan_of_blocks_without_a_packed_form() -> None:
    assert set(places(FLOAT, 8, 7 * 1024).places) == {PLAIN, STREAMED}


def test_streamed_blocks_are_spread_so_that_resident_ones_lie_between_them() -> None:
    assert places(FLOAT, 40, 100_000, resident=29).streamed == spread(11, 40)
    for count in range(1, 41):
        gaps = [
            b - a for a, b in zip(spread(count, 40), [*spread(count, 40)[1:], spread(count, 40)[0] + 40], strict=True)
        ]
        assert max(gaps) - min(gaps) <= 1 and min(gaps) >= 1


# --- requested placings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wish", "resident"), [(0, 0), (3, 3), (8, 8), (0.0, 0), (0.73, 6), (0.5, 4), (1.0, 8)])
def test_the_requested_number_of_blocks_is_resident(wish: float, resident: int) -> None:
    plan = places(BLOCK, 8, 1 << 20, resident=wish)
    assert plan.count(STREAMED) == 8 - resident
    assert plan.count(PLAIN) == resident  # there is room
    assert plan.scratch_bytes == (0 if resident == 8 else 1024)


def test_the_requested_resident_blocks_are_packed_if_they_do_not_fit_plain() -> None:
    free = 4 * 768 + 1024 + 2 * 768
    plan = places(BLOCK, 8, free, resident=4)
    assert (plan.count(PACKED), plan.count(STREAMED), plan.slots) == (4, 4, 2)


@pytest.mark.parametrize("wish", [9, -1, 1.2, -0.1])
def test_more_resident_blocks_than_the_model_has_are_refused(wish: float) -> None:
    with pytest.raises(InvalidRequest, match=r"the model has 8 blocks") as told:
        places(BLOCK, 8, 1 << 20, resident=wish)
    assert told.value.data["field"] == "resident"


def test_more_resident_blocks_than_fit_is_refused_with_the_figure() -> None:
    needed = 7 * 768 + 768 + 1024
    assert places(BLOCK, 8, needed, resident=7).count(STREAMED) == 1
    with pytest.raises(OutOfMemory, match="7 of 8 resident") as told:
        places(BLOCK, 8, needed - 1, resident=7)
    assert told.value.data["needed"] == needed


def test_the_ring_has_three_slots_or_two_or_one_by_memory() -> None:
    base = 1024  # scratch
    assert [places(BLOCK, 8, base + n * 768, resident=0).slots for n in (5, 3, 2, 1)] == [3, 3, 2, 1]


def test_beside_the_host_the_ring_has_a_slot_more() -> None:
    found = [places(BLOCK, 8, 1024 + n * 768, resident=0, cpu_beside_bus=True).slots for n in (9, 4, 3, 1)]
    assert found == [4, 4, 3, 1]


@pytest.mark.parametrize("slots", [1, 2, 5, 8, 100])
def test_the_ring_has_the_requested_slots(slots: int) -> None:
    plan = places(FLOAT, 8, 1 << 20, resident=0, slots=slots)
    assert plan.slots == min(slots, 8) and plan.ring_bytes == min(slots, 8) * 1024


def test_requested_slots_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OutOfMemory) as told:
        places(FLOAT, 8, 2 * 1024, resident=0, slots=3)
    assert told.value.data["needed"] == 3 * 1024


def test_a_ring_requested_in_bytes_is_aligned_and_no_larger_than_all_streamed_blocks() -> None:
    plan = places(FLOAT, 8, 1 << 20, resident=0, ring_bytes=2600)
    assert (plan.ring_bytes, plan.slots) == (2560, 2)
    assert places(FLOAT, 8, 1 << 20, resident=5, ring_bytes=1 << 19).ring_bytes == 3 * 1024


def test_a_ring_that_is_too_small_for_the_largest_block_is_refused_with_the_figure() -> None:
    with pytest.raises(InvalidRequest, match=r"a ring of .* is too small: the largest streamed block has") as told:
        places(FLOAT, 8, 1 << 20, resident=0, ring_bytes=1023)
    assert told.value.data == {"field": "ring_gb", "needed": 1024}
    assert places(FLOAT, 8, 1 << 20, resident=0, ring_bytes=1024).slots == 1


def test_a_ring_may_be_configured_without_streamed_blocks() -> None:
    assert places(FLOAT, 8, 1 << 20, ring_bytes=1).ring_bytes == 0


# --- refusals -------------------------------------------------------------------------------------------------------


def test_the_least_is_one_slot_and_scratch_and_a_byte_less_is_refused() -> None:
    assert least_bytes([BLOCK] * 8, Placing()) == 768 + 1024
    plan = places(BLOCK, 8, 768 + 1024)
    assert (plan.count(STREAMED), plan.slots) == (8, 1)
    with pytest.raises(OutOfMemory, match=r"need at least .* \(0 of 8 resident, the largest") as told:
        places(BLOCK, 8, 768 + 1023)
    assert told.value.data == {"needed": 768 + 1024, "free": 768 + 1023}


def test_staging_memory_counts() -> None:
    """A block needs memory for both forms while it is unpacked to its plain place."""
    with pytest.raises(OutOfMemory) as told:
        plan_places([BLOCK], 1024 + 767, Placing(), staging=768)
    assert told.value.data["needed"] == 1024 + 768
    assert plan_places([BLOCK], 1024 + 768, Placing(), staging=768).places == (PLAIN,)


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    plan = plan_places([BlockSize(1000, None), BlockSize(300, None)], 1536, Placing())
    assert plan.nbytes == 1024 + 512
    with pytest.raises(OutOfMemory):
        plan_places([BlockSize(1000, None), BlockSize(300, None)], 1023, Placing(resident=0))


# --- experts on demand ----------------------------------------------------------------------------------------------

MIXED = BlockSize(5120, 3840, ExpertsSize(4096, 3072, count=8, picked=2))  # a trunk of 1024, or 768
MIXED_FLOAT = BlockSize(5120, None, ExpertsSize(4096, None, count=8, picked=2))


def test_experts_are_fetched_if_a_row_picks_fewer_than_all() -> None:
    assert [are_fetched(8, picked) for picked in (1, 7, 8)] == [True, True, False]


def test_only_the_trunk_of_a_streamed_block_passes_through_the_ring() -> None:
    plan = places(MIXED, 4, 1 << 20, resident=1)
    assert (plan.ring_bytes, plan.slots, plan.scratch_bytes) == (3 * 768, 3, 5120)
    assert (plan.passing_bytes, plan.fetched_bytes(1), plan.streamed_bytes) == (3 * 768, 3 * 768, 6 * 768)
    assert plan.resident_bytes == 5120 and plan.nbytes == 5120 + 3 * 768 + 5120


def test_plain_experts_need_scratch_only_if_they_stream() -> None:
    plan = places(MIXED_FLOAT, 4, 1 << 20, resident=1)
    assert (plan.ring_bytes, plan.scratch_bytes, plan.streamed_bytes) == (3 * 1024, 4096, 3 * (1024 + 1024))
    assert places(MIXED_FLOAT, 4, 1 << 20).scratch_bytes == 0


def test_experts_are_not_decoded_if_their_codes_suffice_and_scratch_for_them_does_not_fit() -> None:
    experts = ExpertsSize(4096, 3072, count=8, picked=2, codes_suffice=True)
    size = BlockSize(5120, 3840, experts, keeps_form=True)
    roomy = places(size, 8, 8 * 3840 + 5120)
    assert (roomy.count(PACKED), roomy.scratch_bytes, roomy.decodes_experts) == (8, 5120, True)
    tight = places(size, 8, 8 * 3840 + 5119)
    assert (tight.count(PACKED), tight.scratch_bytes, tight.decodes_experts) == (8, 1024, False)
    assert places(size, 8, 8 * 3840 + 1024) == tight
    streaming = places(size, 8, 8 * 3840 + 1023)
    assert len(streaming.streamed) == 2, "with one, a block's 768 bytes in the ring and its codes are a byte too much"
    assert (streaming.scratch_bytes, streaming.decodes_experts) == (1024 + 3072, False)


def test_resident_blocks_include_their_experts() -> None:
    assert places(MIXED, 4, 4 * 5120).places == (PLAIN,) * 4
    plan = places(MIXED, 8, 8 * 3840 + 5120)
    assert (plan.count(PACKED), plan.scratch_bytes, plan.streamed_bytes) == (8, 5120, 0)


def test_more_rows_need_more_experts_up_to_all_of_them() -> None:
    fetched = [MIXED.fetched(rows) for rows in (1, 2, 16, 10_000)]
    assert fetched == [768, 1344, 3041, 3072]
    assert BLOCK.fetched(16) == 0 and BLOCK.passing == BLOCK.least


def test_needed_sizes_count_only_picked_experts() -> None:
    assert MIXED.needed(1) == BlockSize(1024 + 1024, 768 + 768)
    assert MIXED_FLOAT.needed(10_000) == BlockSize(5120, None)
    assert BLOCK.needed(1) is BLOCK


def test_a_ring_need_not_hold_experts() -> None:
    assert places(MIXED, 4, 1 << 20, resident=0, ring_bytes=768).slots == 1
    with pytest.raises(InvalidRequest):
        places(MIXED, 4, 1 << 20, resident=0, ring_bytes=767)


def test_the_notes_of_a_plan_name_experts_on_demand() -> None:
    assert places(MIXED, 4, 1 << 20, resident=1).notes == ["experts on demand: 2 of 8"]
    assert places(MIXED, 4, 1 << 20).notes == places(FLOAT, 4, 1 << 20, resident=0).notes == []
    sizes = [MIXED, BLOCK, BlockSize(5120, 3840, ExpertsSize(4096, 3072, count=4, picked=1))]
    told = plan_places(sizes, 1 << 20, Placing(resident=0)).notes
    assert told == ["experts on demand: 2 of 8", "experts on demand: 1 of 4"]
