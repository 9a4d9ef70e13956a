"""Decodes the blocks of GGUF's formats, on any device, with torch's own operations.

Each decoder takes uint8 [blocks, bytes of a block] and returns float32 [blocks, weights of a block]. It computes in
float32, in the order of ggml's reference code, so its results equal that code's bit for bit.

`d` and `m` are a block's scale and offset: a weight is d·q, d·q + m, or d·(q - constant). Formats with K in their name
have blocks of 256 weights in sub-blocks of 16 or 32, each of which has a scale of its own that d multiplies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from djinnd.gguf.formats import BF16, F16, F32, FORMATS

PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}  # formats that are dtypes of torch


def decode(form: int, blocks: Tensor) -> Tensor:
    """The weights in `blocks`, uint8 of whole blocks in any shape: float32, flat. `form` must be a served format."""
    if form in PLAIN:
        return blocks.view(-1).view(PLAIN[form]).float()
    return _DECODERS[form](blocks.view(-1, FORMATS[form].nbytes)).view(-1)


def _half(blocks: Tensor, byte: int) -> Tensor:
    """The 16-bit float at this byte of each block: float32 [blocks, 1]."""
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[…, n] bytes → […, 2n] numbers of four bits: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes → [blocks, 32] bits, the lowest bit of the first byte first."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).view(-1, 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return (q.float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return q.float() * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _scales_and_offsets(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight offsets, of six bits each, in twelve bytes: float32 [blocks, 8] each.

    bytes 0 to 3    low six bits: scales 0 to 3     high two bits: top of scales 4 to 7
    bytes 4 to 7    low six bits: offsets 0 to 3    high two bits: top of offsets 4 to 7
    bytes 8 to 11   low four bits: of scales 4 to 7, high four bits: of offsets 4 to 7
    """
    first, second, third = packed.split(4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales.float(), offsets.float()


def _scaled(q: Tensor, blocks: Tensor) -> Tensor:
    """Weights of Q4_K and Q5_K. `q`: [blocks, 8, 32], the numbers of each sub-block."""
    scales, offsets = _scales_and_offsets(blocks[:, 4:16])
    scales, offsets = scales * _half(blocks, 0), offsets * _half(blocks, 2)
    return (q.float() * scales.unsqueeze(-1) - offsets.unsqueeze(-1)).view(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    # 32 bytes hold two sub-blocks: one in the low halves, the next one in the high halves.
    return _scaled(_nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32), blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    # Bit s of byte i is the fifth bit of weight i of sub-block s.
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = blocks[:, 16:48].unsqueeze(1) >> places & 1
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return _scaled(low | high << 4, blocks)


def _q6_k(blocks: Tensor) -> Tensor:
    # Each half of a block has four groups of 32 weights. Its 64 bytes of low bits hold groups 0 and 1 in their low
    # halves, 2 and 3 in their high halves; its 32 bytes of high bits hold two bits of each group.
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> places & 3
    q = (low | high << 4).view(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (q * scales.unsqueeze(-1)).view(-1, 256)


_DECODERS: dict[int, Callable[[Tensor], Tensor]] = {
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
}
