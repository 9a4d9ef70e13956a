"""Plans beside a search through all of them: a plan that fits is never refused, and no plan that fits streams fewer
blocks."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from djinn_client.errors import DjinnError, InvalidRequest, OutOfMemory
from djinn_client.protocol import Placing
from djinnd.weights.plan import (
    ALIGNMENT,
    BlockPlace,
    BlockSize,
    ExpertsSize,
    PlacementPlan,
    fewest_streams,
    least_bytes,
    plan_places,
    spread,
)

PACKED = BlockPlace.PACKED


@st.composite
def block_sizes(draw: st.DrawFn, most: int = 12) -> list[BlockSize]:
    """Blocks of one kind or a few kinds, some with experts. All of them can be packed or none, as in a store."""
    packable = draw(st.booleans())
    suffice = packable and draw(st.booleans())

    def size(trunk: int, experts: int) -> BlockSize:
        def packed(plain: int) -> int | None:
            return max(1, 3 * plain // 4) if packable else None

        if not experts:
            return BlockSize(trunk, packed(trunk))
        both = (packed(trunk) or 0) + (packed(experts) or 0) or None
        stack = ExpertsSize(experts, packed(experts), count=8, picked=2, codes_suffice=suffice)
        return BlockSize(trunk + experts, both, stack)

    kinds = draw(
        st.lists(st.tuples(st.integers(1, 1 << 14), st.just(0) | st.integers(1, 1 << 13)), min_size=1, max_size=3)
    )
    return [size(*kind) for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most))]


def in_scratch(size: BlockSize, place: BlockPlace, decodes_experts: bool = True) -> int:
    """Bytes outside of the block's own memory that it computes from."""
    if place is BlockPlace.PLAIN:
        return 0
    if size.packed and size.experts is not None and size.experts.codes_suffice and not decodes_experts:
        return size.plain - size.experts.plain + (0 if place is PACKED else size.experts.least)
    if size.packed:
        return size.plain
    return size.experts.plain if size.experts else 0


PLACINGS = st.builds(
    Placing,
    resident=st.none() | st.integers(0, 12) | st.floats(0, 1),
    ring_bytes=st.just(0),
    slots=st.integers(0, 4),
) | st.builds(Placing, resident=st.none() | st.integers(0, 12), ring_bytes=st.integers(1, 1 << 16))


def attempt(
    sizes: list[BlockSize], free: int, placing: Placing, staging: int = 0, may_stream_more: bool = False
) -> PlacementPlan | DjinnError:
    try:
        return plan_places(sizes, free, placing, staging, may_stream_more=may_stream_more)
    except (OutOfMemory, InvalidRequest) as error:
        return error


@given(block_sizes(), st.integers(-100, 1 << 18), PLACINGS)
def test_a_plan_is_sound_and_fits(sizes: list[BlockSize], free: int, placing: Placing) -> None:
    plan = attempt(sizes, free, placing)
    if isinstance(plan, DjinnError):
        return
    assert plan.nbytes <= free
    assert plan.sizes == tuple(sizes) and len(plan.places) == len(sizes)
    streamed = plan.streamed
    assert all(s.packed for s, place in zip(sizes, plan.places, strict=True) if place is BlockPlace.PACKED)
    decodes = plan.decodes_experts
    held = zip(sizes, plan.places, strict=True)
    assert plan.scratch_bytes >= max(in_scratch(size, place, decodes) for size, place in held)
    if not decodes:
        assert all(size.experts is None or size.experts.codes_suffice for size in sizes)
    whole = sum(sizes[i].least for i in streamed)
    assert plan.passing_bytes <= plan.streamed_bytes <= plan.passing_bytes + plan.fetched_bytes(10_000) == whole
    assert all(plan.fetched_bytes(rows) <= plan.fetched_bytes(rows + 1) for rows in (1, 2, 16))
    if streamed:
        largest = max(sizes[i].passing for i in streamed)
        assert plan.ring_bytes >= largest and 1 <= plan.slots <= len(streamed)
        assert plan.slots * largest <= plan.ring_bytes
        assert plan.ring_bytes % ALIGNMENT == 0
        assert streamed == spread(len(streamed), len(sizes))
        assert not placing.ring_bytes or plan.ring_bytes <= placing.ring_bytes
        assert not placing.slots or plan.slots == min(placing.slots, len(streamed)) or len({*sizes}) > 1
    else:
        assert (plan.ring_bytes, plan.slots) == (0, 0)
    if placing.resident is not None:
        wish = placing.resident
        assert len(sizes) - len(streamed) == (round(wish * len(sizes)) if isinstance(wish, float) else wish)


@given(block_sizes(), PLACINGS, st.booleans())
def test_the_figure_of_a_refusal_is_a_budget_that_does_and_a_byte_less_does_not(
    sizes: list[BlockSize], placing: Placing, more: bool
) -> None:
    staging = max((size.packed or 0 for size in sizes), default=0)
    refusal = attempt(sizes, 0, placing, staging, more)
    assume(not isinstance(refusal, InvalidRequest))
    assert isinstance(refusal, OutOfMemory)
    needed = refusal.data["needed"]
    least = least_bytes(sizes, placing, staging)
    assert needed == least if more or placing.resident is None else needed >= least
    plan = attempt(sizes, needed, placing, staging, more)
    assert isinstance(plan, PlacementPlan) and plan.nbytes <= needed
    assert isinstance(attempt(sizes, needed - 1, placing, staging, more), OutOfMemory)


@given(block_sizes(), st.integers(0, 1 << 18), PLACINGS)
def test_no_more_blocks_are_resident_than_asked_for(sizes: list[BlockSize], free: int, placing: Placing) -> None:
    strict, lax = (attempt(sizes, free, placing, 0, more) for more in (False, True))
    if isinstance(strict, PlacementPlan):
        assert lax == strict  # the wish takes precedence
    elif isinstance(lax, PlacementPlan):
        assert len(lax.streamed) > fewest_streams(placing, len(sizes))


@given(block_sizes(), st.integers(0, 1 << 18))
def test_no_block_streams_if_all_fit(sizes: list[BlockSize], free: int) -> None:
    plan = attempt(sizes, free, Placing())
    plain = sum(-(-size.plain // ALIGNMENT) * ALIGNMENT for size in sizes)
    if plain <= free:
        assert isinstance(plan, PlacementPlan) and plan.places == (BlockPlace.PLAIN,) * len(sizes)
        return
    scratch = max(-(-size.plain // ALIGNMENT) * ALIGNMENT for size in sizes)
    packed = sum(-(-size.least // ALIGNMENT) * ALIGNMENT for size in sizes) + scratch
    if all(size.packed for size in sizes) and packed <= free:
        assert isinstance(plan, PlacementPlan) and not plan.streamed


@given(block_sizes(most=9), st.integers(0, 1 << 17))
def test_no_plan_that_fits_streams_fewer(sizes: list[BlockSize], free: int) -> None:
    """Searches all counts of streamed blocks, spread as ours are, with every number of slots and either form of the
    others."""

    def aligned(nbytes: int) -> int:
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def fits(count: int, rest_packed: bool, slots: int) -> bool:
        streamed = set(spread(count, len(sizes))) if count else set()
        resident = [size for i, size in enumerate(sizes) if i not in streamed]
        passing = [aligned(sizes[i].passing) for i in streamed]
        form = [size.least if rest_packed else size.plain for size in resident]
        decoded = [in_scratch(sizes[i], BlockPlace.STREAMED) for i in streamed]
        decodes = count > 0  # blocks that stream need the scratch for experts in any case
        decoded += [in_scratch(size, PACKED, decodes) for size in resident if rest_packed and size.packed]
        ring = min(slots * max(passing), sum(passing)) if passing else 0
        return sum(map(aligned, form)) + ring + aligned(max(decoded, default=0)) <= free

    possible = [
        count
        for count in range(len(sizes) + 1)
        if any(fits(count, packed, slots) for packed in (False, True) for slots in (1, 2, 3))
    ]
    plan = attempt(sizes, free, Placing())
    if not possible:
        assert isinstance(plan, OutOfMemory)
    else:
        assert isinstance(plan, PlacementPlan) and len(plan.streamed) == min(possible)


@given(block_sizes(), st.integers(0, 1 << 18), st.integers(0, 1 << 14))
def test_more_memory_never_streams_more(sizes: list[BlockSize], free: int, more: int) -> None:
    less, larger = attempt(sizes, free, Placing()), attempt(sizes, free + more, Placing())
    if isinstance(less, PlacementPlan):
        assert isinstance(larger, PlacementPlan) and len(larger.streamed) <= len(less.streamed)


@given(st.integers(1, 200), st.data())
def test_spread_is_even_and_in_range(among: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, among))
    chosen = spread(count, among)
    assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < among and len(chosen) == count
    gaps = [b - a for a, b in zip(chosen, [*chosen[1:], chosen[0] + among], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_a_ring_for_less_than_a_block_is_refused_although_all_else_fits() -> None:
    with pytest.raises(InvalidRequest, match="too small"):
        plan_places([BlockSize(4096, None)] * 4, 1 << 20, Placing(resident=2, ring_bytes=4095))
