"""Packed weights: bf16 in 12 bits each, bit for bit, and the buffer that holds a block of them.

bf16 spends 8 bits on an exponent that carries about 2.6 (DFloat11, arXiv 2504.11651): nearly all weights of a matrix
lie within 16 neighbouring exponents. So a weight is its sign and mantissa in one byte, and half a byte that says where
in its unit's window [base, base + 16) the exponent is: code = exponent - base. The few that are outside have code 0 and
are put right from a list of patches. A window, and not a table of the commonest exponents, because decoding is then
arithmetic on whole registers.

A plain block is a flat buffer of bf16: the large matrices as units, then all else (small matrices, norms, biases). A
unit is what one matrix product reads: q, k and v joined, or a single matrix, or stacked experts. The packed block, each
part 256-byte aligned:

    ┌──────┬──────────┬───────────────┬─────────┬─────────┬─────────┐
    │ head │ verbatim │ sign+mantissa │ nibbles │ stripes │ patches │
    └──────┴──────────┴───────────────┴─────────┴─────────┴─────────┘
    head      int32 [64]: magic, version, patches, units, and from 16 on the base of each unit
    verbatim  bf16: what is behind the units
    sign+mantissa   a byte a weight, in the plain block's order: sign << 7 | mantissa
    nibbles   of each GROUP of 128 weights, byte j has the code of weight j in its low half and of j + 64 in its high
    stripes   int32: for each STRIPE of 8 rows of each unit, the first patch in or after it; at the end, patches
    patches   (uint32 index of the weight in the block, uint16 its bits, uint16 zero), by index; room for `capacity`

The patches come last, so that only a prefix of the buffer has to travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128  # weights
STRIPE = 8  # rows
CODES = 16  # exponents in a window
BASES = range(1, 255 - CODES + 1)  # windows hold normal numbers only
MAX_UNITS = 48

MAGIC, VERSION = 0x706A6A64, 1  # "djjp"
HEAD = 64  # int32
FIRST_BASE = 16
ALIGNMENT = 256  # bytes
PATCH = 8  # bytes
# Weights that are worked on at once: bounds what packing needs beside the two buffers. A device wants long launches, a
# CPU temporaries that its allocator hands out again instead of mapping them anew.
PIECE, CPU_PIECE = 1 << 24, 1 << 22
SAMPLED_GROUPS = (1 << 13) - 1  # of a large unit; odd, so that they do not all lie in the same columns


class Unpackable(Exception):
    """The code would not save anything here: too many weights lie outside of their unit's window."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A matrix [rows, cols] in a plain block. Stacked experts [E, o, i] are E * o rows of i columns."""

    offset: int  # elements
    rows: int
    cols: int

    @property
    def weights(self) -> int:
        return self.rows * self.cols

    @property
    def numel(self) -> int:
        """The elements, with those that pad the matrix to whole groups. The values of the padding are not kept."""
        return _round_up(self.weights, GROUP)

    @property
    def stripes(self) -> int:
        return -(-self.rows // STRIPE)


class PackedForm:
    """Where things are in the packed form of a plain block of `numel` elements that begins with `units`.

    Raises Unpackable for a block whose weights 32 bits cannot number.
    """

    def __init__(self, units: Sequence[Unit], numel: int) -> None:
        self.units = tuple(units)
        self.numel = numel
        self.matrices = sum(unit.numel for unit in units)
        ends = itertools.accumulate(unit.numel for unit in units)
        assert 0 < len(units) <= MAX_UNITS and self.matrices <= numel, (len(units), self.matrices, numel)
        assert all(unit.weights > 0 and unit.offset + unit.numel == end for unit, end in zip(units, ends, strict=True))
        if self.matrices >= 1 << 32:
            raise Unpackable(f"a block of {self.matrices:,} weights; a patch can name one of the first {1 << 32:,}")

        self.capacity = _round_up(-(-self.matrices // 1024), ALIGNMENT // PATCH)
        self.stripes = sum(unit.stripes for unit in units) + 1
        self.verbatim_at = HEAD * 4
        self.sm_at = _round_up(self.verbatim_at + 2 * (numel - self.matrices), ALIGNMENT)
        self.nibbles_at = _round_up(self.sm_at + self.matrices, ALIGNMENT)
        self.stripes_at = _round_up(self.nibbles_at + self.matrices // 2, ALIGNMENT)
        self.patches_at = _round_up(self.stripes_at + 4 * self.stripes, ALIGNMENT)
        self.nbytes = self.patches_at + PATCH * self.capacity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedForm) and (self.units, self.numel) == (other.units, other.numel)

    def __hash__(self) -> int:
        return hash((self.units, self.numel))

    def pack(self, plain: Tensor, out: Tensor) -> int:
        """Writes the packed form of plain (bf16 [numel]) to out (uint8 [nbytes], same device). → the bytes used of it.

        Waits for the device. Raises Unpackable, with `out` half written, if there are more patches than room.
        """
        assert plain.dtype == torch.bfloat16 and plain.numel() == self.numel and plain.is_contiguous()
        assert out.dtype == torch.uint8 and out.numel() == self.nbytes and out.device == plain.device
        bits = plain.view(torch.int16)
        bases = self._bases(bits)
        sm, nibbles = self.sm_view(out), self.nibbles_view(out)
        counts = [0] * len(self.units)
        found: list[Tensor] = []
        for number, start, stop in self._pieces(out.device):
            unit, base = self.units[number], bases[number]
            weights = min(stop, unit.offset + unit.weights) - start
            bad = _pack_piece(bits[start:stop], weights, base, sm[start:stop], nibbles[start // 2 : stop // 2])
            exceptions = bad.nonzero().squeeze(1)
            counts[number] += exceptions.numel()
            if sum(counts) <= self.capacity:
                found.append(exceptions.add_(start))
        if sum(counts) > self.capacity:
            raise Unpackable(self._why_not(counts))

        index = torch.cat(found)
        self.stripes_view(out).copy_(torch.searchsorted(index, self._stripe_starts(plain.device)))
        patches = self.patches_view(out)[: len(index)]
        patches[:, 0] = index  # an index of 32 bits wraps to a negative number, which has the same bits
        patches[:, 1] = bits[index].to(torch.int32).bitwise_and_(0xFFFF)
        self.verbatim_view(out).copy_(plain[self.matrices :])
        head = [MAGIC, VERSION, len(index), len(self.units), *[0] * (FIRST_BASE - 4), *bases]
        head += [0] * (HEAD - len(head))
        self.head_view(out).copy_(torch.tensor(head, dtype=torch.int32))
        return self._close_gaps(out, len(index))

    def used(self, packed: Tensor) -> int:
        """→ the bytes of a packed block in host memory that have to travel.

        Raises ValueError where its head is not that of a block of this form: it may come from a client. The rest
        of the block cannot do harm: readers of the patches check where they point.
        """
        assert packed.device.type == "cpu"
        if packed.numel() < HEAD * 4:
            raise ValueError(f"a packed block has at least its head of {HEAD * 4} bytes, not {packed.numel():,}")
        head = self.head_view(packed).tolist()
        magic, version, patches, units = head[:4]
        if (magic, version) != (MAGIC, VERSION):
            raise ValueError(f"not a packed block of version {VERSION}: it begins with {magic:#x}, version {version}")
        if units != len(self.units):
            raise ValueError(f"a packed block of {units} units where the model has {len(self.units)}")
        if not 0 <= patches <= self.capacity:
            raise ValueError(f"a packed block with {patches:,} patches; its form has room for {self.capacity:,}")
        if any(base not in BASES for base in head[FIRST_BASE : FIRST_BASE + units]):
            raise ValueError("a packed block whose windows hold other than normal numbers")
        if packed.numel() < (used := self._used(patches)):
            raise ValueError(
                f"a packed block of {packed.numel():,} bytes; with its {patches:,} patches it has {used:,}"
            )
        return used

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Writes the plain block (bf16 [numel]) that was packed (uint8 [nbytes], same device): the reference."""
        assert packed.numel() == self.nbytes and out.numel() == self.numel and out.dtype == torch.bfloat16
        head, sm, nibbles = self.head_view(packed), self.sm_view(packed), self.nibbles_view(packed)
        bits = out.view(torch.int16)
        for number, start, stop in self._pieces(out.device):
            _unpack_piece(sm[start:stop], nibbles[start // 2 : stop // 2], head[FIRST_BASE + number], bits[start:stop])
        count, patches = head[2], self.patches_view(packed)
        index = patches[:, 0].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        real = (torch.arange(self.capacity, device=packed.device) < count) & (index < self.matrices)
        bits[index[real]] = patches[real, 1].to(torch.int16)
        out[self.matrices :] = self.verbatim_view(packed)

    def unpack_rows(self, packed: Tensor, number: int, first: int, rows: int, out: Tensor) -> None:
        """Writes rows [first, first + rows) of unit `number`, which are whole groups, to out (bf16 [rows * cols], same
        device). Waits for the device. Nothing in the buffer makes it read or write anything else."""
        unit = self.units[number]
        begin, end = unit.offset + first * unit.cols, unit.offset + (first + rows) * unit.cols
        assert first >= 0 and first + rows <= unit.rows and begin % GROUP == 0 and end % GROUP == 0
        assert packed.numel() == self.nbytes and out.numel() == end - begin and out.dtype == torch.bfloat16
        head, sm, nibbles = self.head_view(packed), self.sm_view(packed), self.nibbles_view(packed)
        bits = out.view(torch.int16)
        for start in range(begin, end, CPU_PIECE):
            stop = min(start + CPU_PIECE, end)
            to = bits[start - begin : stop - begin]
            _unpack_piece(sm[start:stop], nibbles[start // 2 : stop // 2], head[FIRST_BASE + number], to)
        stripes = self.stripes_view(packed)[self.first_stripe(number) :]
        limits = (head[2], stripes[first // STRIPE], stripes[-(-(first + rows) // STRIPE)])
        count, lowest, highest = (min(max(int(n), 0), self.capacity) for n in limits)
        patches = self.patches_view(packed)[lowest : min(highest, count)]
        index = patches[:, 0].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        real = (index >= begin) & (index < end)
        bits[index[real] - begin] = patches[real, 1].to(torch.int16)

    def head_view(self, packed: Tensor) -> Tensor:
        """int32 [64]. Like all views: of the same memory."""
        return packed[: HEAD * 4].view(torch.int32)

    def verbatim_view(self, packed: Tensor) -> Tensor:
        """bf16 [numel - matrices]."""
        return packed[self.verbatim_at :][: 2 * (self.numel - self.matrices)].view(torch.bfloat16)

    def sm_view(self, packed: Tensor) -> Tensor:
        """uint8 [matrices]."""
        return packed[self.sm_at :][: self.matrices]

    def nibbles_view(self, packed: Tensor) -> Tensor:
        """uint8 [matrices / 2]."""
        return packed[self.nibbles_at :][: self.matrices // 2]

    def stripes_view(self, packed: Tensor) -> Tensor:
        """int32 [stripes]."""
        return packed[self.stripes_at :][: 4 * self.stripes].view(torch.int32)

    def patches_view(self, packed: Tensor) -> Tensor:
        """int32 [capacity, 2]: the index, then the bits."""
        return packed[self.patches_at :][: PATCH * self.capacity].view(torch.int32).view(-1, 2)

    def first_stripe(self, number: int) -> int:
        """Where the stripes of a unit begin."""
        return sum(unit.stripes for unit in self.units[:number])

    def _pieces(self, device: torch.device) -> Iterator[tuple[int, int, int]]:
        """→ (unit, first element, end) of pieces that are small enough to work on."""
        piece = CPU_PIECE if device.type == "cpu" else PIECE
        for number, unit in enumerate(self.units):
            end = unit.offset + unit.numel
            for start in range(unit.offset, end, piece):
                yield number, start, min(start + piece, end)

    def _bases(self, bits: Tensor) -> list[int]:
        """→ for each unit where the window begins that holds most of its weights, or most of a sample of them."""
        counts = torch.stack([_exponents(bits[unit.offset :][: unit.weights]) for unit in self.units]).cpu()
        below = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
        inside = below[:, CODES:] - below[:, :-CODES]
        bases: list[int] = (inside[:, BASES.start : BASES.stop].argmax(1) + BASES.start).tolist()
        return bases

    def _why_not(self, counts: list[int]) -> str:
        rates = [100_000 * count / unit.weights for count, unit in zip(counts, self.units, strict=True)]
        worst = max(range(len(rates)), key=rates.__getitem__)
        unit = self.units[worst]
        return (
            f"{sum(counts):,} of {self.matrices:,} weights lie outside of their unit's {CODES} exponents, and there is "
            f"room for {self.capacity:,}; worst is unit {worst} [{unit.rows:,}, {unit.cols:,}] with "
            f"{rates[worst]:,.0f} in 100,000"
        )

    def _stripe_starts(self, device: torch.device) -> Tensor:
        starts = [range(u.offset, u.offset + u.weights, STRIPE * u.cols) for u in self.units]
        return torch.tensor([*itertools.chain(*starts), self.matrices], device=device)

    def _used(self, patches: int) -> int:
        return _round_up(self.patches_at + PATCH * patches, ALIGNMENT)

    def _close_gaps(self, out: Tensor, patches: int) -> int:
        """Zeroes what aligns the parts, so that equal blocks have equal bytes and nothing older is handed on."""
        used = self._used(patches)
        gaps = [
            (self.verbatim_at + 2 * (self.numel - self.matrices), self.sm_at),
            (self.sm_at + self.matrices, self.nibbles_at),
            (self.nibbles_at + self.matrices // 2, self.stripes_at),
            (self.stripes_at + 4 * self.stripes, self.patches_at),
            (self.patches_at + PATCH * patches, used),
        ]
        for start, stop in gaps:
            out[start:stop] = 0
        return used


def _exponents(bits: Tensor) -> Tensor:
    """→ int64 [256]: how often each exponent occurs in bits (int16), or in a sample of evenly spaced groups."""
    groups = len(bits) // GROUP
    if groups > SAMPLED_GROUPS:
        at = torch.arange(SAMPLED_GROUPS, device=bits.device) * groups // SAMPLED_GROUPS
        bits = bits[: groups * GROUP].view(groups, GROUP)[at].view(-1)
    return torch.bincount(bits.bitwise_right_shift(7).to(torch.uint8), minlength=256)


def _pack_piece(bits: Tensor, weights: int, base: int, sm: Tensor, nibbles: Tensor) -> Tensor:
    """Writes sm (uint8 [n]) and nibbles (uint8 [n / 2]) of bits (int16 [n]), of which the first `weights` are real.

    → bool [n]: which are outside of the window.
    """
    rest = bits & -0x7F81  # 0x807F: sign and mantissa
    rest |= rest >> 8  # brings the sign to bit 7; casting drops the higher bits
    rest[weights:] = 0
    sm.copy_(rest)

    code = bits.bitwise_right_shift(7).to(torch.uint8)  # the exponent: casting drops the sign
    code[weights:] = base
    code -= base  # modulo 256: a code below the window becomes one above it
    outside = code >= CODES
    code.masked_fill_(outside, 0)
    pairs = code.view(-1, 2, GROUP // 2)
    torch.bitwise_or(pairs[:, 0], pairs[:, 1] << 4, out=nibbles.view(-1, GROUP // 2))
    return outside


def _unpack_piece(sm: Tensor, nibbles: Tensor, base: Tensor, bits: Tensor) -> None:
    """Writes bits (int16 [n]) of sm (uint8 [n]) and nibbles (uint8 [n / 2]), without patches."""
    pairs = nibbles.view(-1, GROUP // 2)
    exponent = torch.stack((pairs & 15, pairs >> 4), 1).view(-1).to(torch.int16)
    exponent += base.to(torch.int16)
    rest = sm.to(torch.int16)
    rest = rest.bitwise_and(0x80).bitwise_left_shift_(8).bitwise_or_(rest.bitwise_and_(0x7F))
    torch.bitwise_or(rest, exponent.bitwise_left_shift_(7), out=bits)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
