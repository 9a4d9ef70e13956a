"""Random numbers that depend only on (seed, position, vocabulary index).

The generator is counter-based, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It has no
state, so neither the batch nor the division into steps changes a session's numbers. The hash is SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of Vigna's splitmix64.c), in which
the n-th number of a stream is a function of n:

    output(state, n) = mix(state + n * GOLDEN)        n = 1, 2, ...
    stream           = output(seed, 1)                one a session, kept while its request runs
    key              = output(stream, position + 1)   one a row and step; few, so computed on the host
    bits             = output(key, index + 1)         [rows, vocab], on the device

The integers have 64 bits and wrap around. torch's int64 gives the same bits on every device, except that `>>` is
arithmetic and has to be masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64, and so are the multipliers
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)


def vocabulary_counters(vocab: int, device: torch.device) -> Tensor:
    """int64 [vocab]: the part of the state that depends on the vocabulary index. Computed once for all calls of
    `gumbel`."""
    return torch.arange(1, vocab + 1, device=device).mul_(GOLDEN)


def noise_streams(seeds: Tensor) -> Tensor:
    """Seeds, int64 [rows] → streams, int64 [rows]."""
    return _mix(seeds + GOLDEN)


def noise_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """Streams, and positions in the sessions, int64 [rows] each → keys, int64 [rows]."""
    return _mix(streams + (positions + 1) * GOLDEN)


def random_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """Keys, int64 [rows], and `vocabulary_counters` → int64 [rows, vocab], uniform over all 64 bits."""
    return _mix(keys[:, None] + counters)


def gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [rows, vocab], always finite.

    The winners of an argmax come from u close to 1, where float32 has steps of 2^-24. That is too coarse for a
    vocabulary of 2^17, so the noise is float64.
    """
    bits = random_bits(keys, counters) >> 12  # from -2^51 to 2^51 - 1
    u = bits.double().add_(2.0**51 + 0.5).mul_(2.0**-52)  # exact, and strictly between 0 and 1
    return u.log_().neg_().log_().neg_()


def _mix(z: Tensor) -> Tensor:
    """Applies SplitMix64's finaliser (Stafford's Mix13) in place."""
    z ^= _shift_right(z, 30)
    z *= _MULTIPLIER_1
    z ^= _shift_right(z, 27)
    z *= _MULTIPLIER_2
    z ^= _shift_right(z, 31)
    return z


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's `>>` on int64 is arithmetic."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
