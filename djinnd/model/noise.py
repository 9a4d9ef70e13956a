"""Random numbers that belong to (seed, position, vocabulary index) and to nothing else.

A counter-based generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): no
state, so neither the batch nor the cut into steps can shift a session's numbers. The hash is SplitMix64 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of Vigna's splitmix64.c), where the
n-th number of a stream is a function of n:

    output(state, n) = mix(state + n * GOLDEN)        n = 1, 2, ...
    stream           = output(seed, 1)                a session's, kept while its request runs
    key              = output(stream, position + 1)   a row's, a step; small: worked out on the host
    bits             = output(key, index + 1)         [rows, vocab], on the device

The integers are 64-bit and wrap; torch's int64 gives the same bits on every device, only `>>` has to be masked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def vocabulary_counters(vocab: int, device: torch.device) -> Tensor:
    """int64 [vocab]: the part of the state that an index adds. Computed once, given to every `gumbel`."""
    return torch.arange(1, vocab + 1, device=device).mul_(GOLDEN)


def noise_streams(seeds: Tensor) -> Tensor:
    """int64 [rows] -> int64 [rows]."""
    return _mix(seeds + GOLDEN)


def noise_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """int64 [rows], and [rows] of positions in the session -> int64 [rows]."""
    return _mix(streams + (positions + 1) * GOLDEN)


def random_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """int64 [rows, vocab], uniform over all 64 bits."""
    return _mix(keys[:, None] + counters)


def gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    """float64 [rows, vocab] of the standard Gumbel distribution, always finite.

    In float64 because the winners of an argmax come from u close to 1, where float32 has only steps of 2^-24: too
    coarse for a vocabulary of 2^17.
    """
    bits = random_bits(keys, counters) >> 12  # from -2^51 to 2^51 - 1
    u = bits.double().add_(2.0**51 + 0.5).mul_(2.0**-52)  # exact, and strictly between 0 and 1
    return u.log_().neg_().log_().neg_()


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser (Stafford's Mix13), in place."""
    z ^= _shift_right(z, 30)
    z *= _MULTIPLIER_1
    z ^= _shift_right(z, 27)
    z *= _MULTIPLIER_2
    z ^= _shift_right(z, 31)
    return z


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """The logical shift, which torch's int64 does not have."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)
