"""Plan: chooses the place of each block of a model on its device. Pure code: sizes and a budget in, places out.

    budget │ reserved │ workspace │ KV pages │ rest │ scratch │ ring: slots │ resident blocks … │

A block has one of three places:

    plain      resident on the device in the compute dtype;
    packed     resident in the lossless 12-bit code or in the checkpoint's own code, unpacked to scratch just before it
               computes, or inside the product;
    streamed   passes through the ring in each pass, packed if possible.

A plain block is the fastest, a streamed one the slowest. The plan takes the first that fits: all blocks plain; all
resident, some packed; as few streamed as possible. Streamed blocks are spread evenly over the model, so that the copy
engine works while the resident blocks between them compute.

If a streamed block has stacked experts, only its trunk (the rest of the block) passes through the ring. The experts
stay in host memory, and the experts that its router picks are fetched to scratch: see model/family/experts.py.

Scratch has room for all experts of a block, decoded, because large batches compute faster from decoded ones. If not all
blocks fit with that room, and kernels can multiply by the codes, no expert is decoded. Scratch then has room for the
codes of a streamed block's experts, and fewer blocks stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from djinn_client.errors import InvalidRequest, OutOfMemory
from djinn_client.protocol import Placing
from djinnd.device.budget import at_least, gib

SLOTS = 3  # of the ring, if memory allows
# The same with `cpu_beside_bus`. The bus has to run ahead while the device waits for the host. Computed for Llama-2-13B
# with 11 blocks streamed, 7 of their MLPs on the host, at 50 GB/s: 64.2 ms a step with 3 slots, 61.9 with 4.
BESIDE_SLOTS = 4
# With one slot, a copy waits until the block before it has been computed, which takes about a thirtieth of a copy's
# time. Up to so many streamed blocks, streaming one block fewer gains more than a second slot.
ONE_SLOT_PAYS = 32
ALIGNMENT = 256  # bytes
PAGES_SHARE = 0.5  # if the amount of KV is not configured; see plan_places


class BlockPlace(Enum):
    """The place of a block: see above."""

    PLAIN = "plain"
    PACKED = "packed"
    STREAMED = "streamed"


def are_fetched(count: int, picked: int) -> bool:
    """Returns True if a streamed block's experts are fetched on demand instead of passing through the ring. They are if
    a row picks fewer than all experts; more rows never need more bytes than the ring would carry."""
    return 0 < picked < count


@dataclass(frozen=True, slots=True)
class _FormSizes:
    """Bytes of some weights in each form."""

    plain: int
    packed: int | None  # None: no packed form

    @property
    def least(self) -> int:
        """Bytes of the smallest form."""
        return self.plain if self.packed is None else self.packed


@dataclass(frozen=True, slots=True)
class ExpertsSize(_FormSizes):
    """Bytes of a block's stacked experts."""

    count: int  # experts of the block
    picked: int  # experts that its router picks for each row; fewer than `count`
    codes_suffice: bool = False  # the block can compute from their codes alone, for any number of rows

    def share(self, rows: int) -> float:
        """Expected share of the experts that `rows` rows need, if each row picks uniformly and independently."""
        return 1 - (1 - self.picked / self.count) ** rows


@dataclass(frozen=True, slots=True)
class BlockSize(_FormSizes):
    """Bytes of a block on the device, including its stacked experts."""

    experts: ExpertsSize | None = None  # stacked experts that are fetched on demand, if any
    keeps_form: bool = False  # resident, the block stays packed even where the memory would suffice for plain

    @property
    def passing(self) -> int:
        """Bytes that pass through the ring if the block streams."""
        return self.least - (0 if self.experts is None else self.experts.least)

    def needed(self, rows: int) -> BlockSize:
        """The sizes with only the experts that `rows` rows are expected to need."""
        if self.experts is None:
            return self
        spare = 1 - self.experts.share(rows)
        packed = None if self.packed is None else self.packed - round(spare * self.experts.least)
        return BlockSize(self.plain - round(spare * self.experts.plain), packed, keeps_form=self.keeps_form)

    def fetched(self, rows: int) -> int:
        """Expected bytes of experts that are fetched on demand for `rows` rows if the block streams."""
        return 0 if self.experts is None else round(self.experts.least * self.experts.share(rows))


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The places of all blocks, and the device memory that they take."""

    sizes: tuple[BlockSize, ...]
    places: tuple[BlockPlace, ...]
    ring_bytes: int  # 0 if no block streams
    scratch_bytes: int  # 0 if every block is plain
    slots: int  # how many of the largest streamed block the ring holds
    decodes_experts: bool = True  # False: scratch has no room for decoded experts if their codes suffice

    def count(self, place: BlockPlace) -> int:
        return self.places.count(place)

    def decodes_experts_of(self, block: int) -> bool:
        """False if the block computes from the codes of its experts for any number of rows."""
        return self.decodes_experts or not _codes_suffice(self.sizes[block], self.places[block])

    @property
    def streamed(self) -> list[int]:
        return [index for index, place in enumerate(self.places) if place is BlockPlace.STREAMED]

    @property
    def streamed_bytes(self) -> int:
        """Bytes over the bus in one pass of one row; expected bytes for experts on demand."""
        return self.passing_bytes + self.fetched_bytes(1)

    @property
    def passing_bytes(self) -> int:
        """Bytes through the ring in one pass."""
        return sum(self.sizes[index].passing for index in self.streamed)

    def fetched_bytes(self, rows: int) -> int:
        """Expected bytes of experts that are fetched on demand in one pass of `rows` rows."""
        return sum(self.sizes[index].fetched(rows) for index in self.streamed)

    @property
    def notes(self) -> list[str]:
        """Remarks to show to users beside the figures."""
        stacks = [size.experts for size in map(self.sizes.__getitem__, self.streamed) if size.experts is not None]
        kinds = dict.fromkeys((stack.picked, stack.count) for stack in stacks)
        return [f"experts on demand: {picked} of {count}" for picked, count in kinds]

    @property
    def resident_bytes(self) -> int:
        return sum(_resident(size, place) for size, place in zip(self.sizes, self.places, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for all blocks, with ring and scratch."""
        return self.resident_bytes + self.ring_bytes + self.scratch_bytes


def plan_places(
    sizes: Sequence[BlockSize],
    free: int,
    placing: Placing,
    staging: int = 0,
    *,
    may_stream_more: bool = False,
    pages_share: float = PAGES_SHARE,
) -> PlacementPlan:
    """The first plan that fits `free` bytes.

    staging: extra bytes that a plain block needs while it is unpacked from its packed form in host memory.
    may_stream_more: more blocks may stream than `placing.resident` implies; it is then an upper limit.
    pages_share: if all blocks are resident and some packed, the share of the remaining memory that is left to KV
        pages; the other part makes packed blocks plain.

    Raises InvalidRequest for a placing that no device could grant, OutOfMemory with the least memory that suffices.
    """
    wanted = _wanted_streams(placing, len(sizes), may_stream_more)
    for plan in _candidates(sizes, wanted, placing, may_stream_more):
        if _peak(plan, staging) <= free:
            return _upgraded(plan, free, pages_share)
    least = min(_peak(plan, staging) for plan in _candidates(sizes, wanted, placing, may_stream_more))
    raise OutOfMemory(
        f"its blocks need at least {at_least(least)} of device memory ({_described(sizes, wanted)}), and "
        f"{gib(max(free, 0))} is free for them: raise the budget, unload a model, ask for less KV memory, or let more "
        "blocks stream",
        needed=least,
        free=free,
    )


def least_bytes(sizes: Sequence[BlockSize], placing: Placing, staging: int = 0) -> int:
    """The least device memory that the blocks need, with as many of them streamed as possible. `staging`: see
    plan_places."""
    wanted = _wanted_streams(placing, len(sizes), may_stream_more=True)
    return min(_peak(plan, staging) for plan in _candidates(sizes, wanted, placing, may_stream_more=True))


def fewest_streams(placing: Placing, blocks: int) -> int:
    """Number of blocks that stream even with an unlimited budget."""
    return min(_wanted_streams(placing, blocks, may_stream_more=True))


def _peak(plan: PlacementPlan, staging: int) -> int:
    """Bytes of device memory while the blocks are brought to their places. Scratch that is large enough serves as
    staging."""
    return plan.nbytes + (staging if BlockPlace.PLAIN in plan.places and plan.scratch_bytes < staging else 0)


def spread(count: int, among: int) -> list[int]:
    """Indices of `count` of `among` blocks, spread evenly."""
    return [(2 * k + 1) * among // (2 * count) for k in range(count)]


def _wanted_streams(placing: Placing, blocks: int, may_stream_more: bool) -> Sequence[int]:
    """Numbers of blocks that may stream, the preferred one first. Raises InvalidRequest if `resident` is impossible."""
    wish = placing.resident
    if wish is None:
        return range(blocks + 1)
    resident = round(wish * blocks) if isinstance(wish, float) else wish
    if not 0 <= resident <= blocks:
        raise InvalidRequest(f"resident is {wish}; the model has {blocks} blocks", field="resident", blocks=blocks)
    return range(blocks - resident, blocks + 1 if may_stream_more else blocks - resident + 1)


def _candidates(
    sizes: Sequence[BlockSize], wanted: Sequence[int], placing: Placing, may_stream_more: bool
) -> Iterator[PlacementPlan]:
    """Plans from the fastest to the smallest. If more blocks may stream than the user asked for, a plan whose ring is
    too small for them is left out instead of raising an error."""
    packable = any(size.packed is not None and not size.keeps_form for size in sizes)
    for streams in wanted:
        for resident in (BlockPlace.PLAIN, BlockPlace.PACKED):
            if resident is BlockPlace.PACKED and not packable:
                continue
            if resident is BlockPlace.PLAIN and packable and streams > min(wanted):
                continue  # streaming more blocks is worse than packing resident ones, so the rest stays packed
            fewest_slots = 1 if streams <= ONE_SLOT_PAYS or streams == max(wanted) else 2
            is_more = may_stream_more and streams > min(wanted)
            yield from _plans(sizes, streams, resident, placing, fewest_slots, is_more)


def _plans(
    sizes: Sequence[BlockSize],
    streams: int,
    resident: BlockPlace,
    placing: Placing,
    fewest_slots: int,
    is_more: bool,
) -> Iterator[PlacementPlan]:
    """Plans with `streams` streamed blocks and the others `resident`, from the largest ring to the smallest."""
    places = [
        BlockPlace.PLAIN if size.packed is None else BlockPlace.PACKED if size.keeps_form else resident
        for size in sizes
    ]
    for index in spread(streams, len(sizes)) if streams else []:
        places[index] = BlockPlace.STREAMED
    travelling = [aligned(sizes[index].passing) for index in range(len(sizes)) if places[index] is BlockPlace.STREAMED]
    scratch, least = (scratch_bytes(sizes, places, decodes_experts=decodes) for decodes in (True, False))
    if not travelling:
        yield PlacementPlan(tuple(sizes), tuple(places), 0, scratch, 0)
        if least < scratch:
            yield PlacementPlan(tuple(sizes), tuple(places), 0, least, 0, decodes_experts=False)
        return
    decodes = not any(map(_codes_suffice, sizes, places))
    for ring in _ring_sizes(travelling, placing, fewest_slots, is_more):
        slots = min(ring // max(travelling), len(travelling))
        yield PlacementPlan(tuple(sizes), tuple(places), ring, scratch if decodes else least, slots, decodes)


def _ring_sizes(travelling: Sequence[int], placing: Placing, fewest_slots: int, is_more: bool) -> Iterator[int]:
    """Sizes of the ring to try, in bytes: the configured size or slots, or else SLOTS and fewer."""
    largest = max(travelling)
    if placing.ring_bytes:
        if placing.ring_bytes < largest and is_more:
            return
        if placing.ring_bytes < largest:
            raise InvalidRequest(
                f"a ring of {gib(placing.ring_bytes)} is too small: the largest streamed block has {gib(largest)}",
                field="ring_gb",
                needed=largest,
            )
        yield min(placing.ring_bytes // ALIGNMENT * ALIGNMENT, sum(travelling))
        return
    most = BESIDE_SLOTS if placing.cpu_beside_bus else SLOTS
    for slots in [placing.slots] if placing.slots else range(most, fewest_slots - 1, -1):
        yield min(slots * largest, sum(travelling))


def _upgraded(plan: PlacementPlan, free: int, pages_share: float) -> PlacementPlan:
    """If all blocks are resident and some packed, makes packed blocks plain with the memory that is left beside the
    share of KV pages."""
    packed = [
        index
        for index, place in enumerate(plan.places)
        if place is BlockPlace.PACKED and not plan.sizes[index].keeps_form
    ]
    if plan.streamed or not packed:
        return plan
    gain = max(plan.sizes[index].plain - plan.sizes[index].least for index in packed)
    count = min(int((free - plan.nbytes) * (1 - pages_share)) // gain, len(packed)) if gain > 0 else 0
    places = list(plan.places)
    for k in spread(count, len(packed)) if count else []:
        places[packed[k]] = BlockPlace.PLAIN
    return replace(plan, places=tuple(places))


def scratch_bytes(sizes: Sequence[BlockSize], places: Sequence[BlockPlace], *, decodes_experts: bool = True) -> int:
    """Bytes of scratch for blocks of these sizes at these places. decodes_experts: see PlacementPlan."""
    return aligned(max(_in_scratch(*each, decodes_experts) for each in zip(sizes, places, strict=True)))


def _in_scratch(size: BlockSize, place: BlockPlace, decodes_experts: bool) -> int:
    """Bytes of scratch that the block needs while it computes."""
    if place is BlockPlace.PLAIN:
        return 0
    experts = size.experts
    if size.packed is None:
        return 0 if experts is None else experts.plain
    if experts is not None and _codes_suffice(size, place) and not decodes_experts:
        trunk = size.plain - experts.plain
        return trunk if place is BlockPlace.PACKED else aligned(trunk) + experts.least
    return size.plain


def _codes_suffice(size: BlockSize, place: BlockPlace) -> bool:
    return place is not BlockPlace.PLAIN and size.experts is not None and size.experts.codes_suffice


def _resident(size: BlockSize, place: BlockPlace) -> int:
    if place is BlockPlace.STREAMED:
        return 0
    return aligned(size.plain if place is BlockPlace.PLAIN else size.least)


def aligned(nbytes: int) -> int:
    """Rounds a block's bytes up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _described(sizes: Sequence[BlockSize], wanted: Sequence[int]) -> str:
    most = max(wanted)
    return f"{len(sizes) - most} of {len(sizes)} resident, the largest {gib(max(size.plain for size in sizes))}"
