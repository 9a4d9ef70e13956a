from __future__ import annotations

import math

import pytest
import torch

from djinnd.model.sampling.noise import gumbel, noise_keys, noise_streams, random_bits, vocabulary_counters
from tests.support import sampling as plain

CPU = torch.device("cpu")


def unsigned(bits: torch.Tensor) -> list[int]:
    return [value % (1 << 64) for value in bits.flatten().tolist()]


def test_a_stream_equals_splitmix64():
    """Compares with the numbers that Vigna's splitmix64.c prints for the seed 1234567."""
    bits = random_bits(torch.tensor([1234567]), vocabulary_counters(5, CPU))
    assert unsigned(bits) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("seed", [0, 1, 12345678901234567, (1 << 63) - 1])
@pytest.mark.parametrize("position", [0, 1, 131071])
def test_keys_equal_those_of_python_integers(seed: int, position: int):
    keys = noise_keys(noise_streams(torch.tensor([seed])), torch.tensor([position]))
    assert unsigned(keys) == [plain.splitmix64(plain.splitmix64(seed, 1), position + 1)]


def test_gumbel_equals_that_of_python_floats():
    noise = gumbel(noise_keys(noise_streams(torch.tensor([7, 8])), torch.tensor([3, 0])), vocabulary_counters(100, CPU))
    wanted = [[plain.gumbel(seed, position, index) for index in range(100)] for seed, position in ((7, 3), (8, 0))]
    torch.testing.assert_close(noise, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_gumbel_has_the_moments_of_its_distribution():
    keys = noise_keys(noise_streams(torch.arange(100)), torch.arange(100) * 17)
    noise = gumbel(keys, vocabulary_counters(10_000, CPU))
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)


def test_every_bit_is_set_half_of_the_time():
    bits = random_bits(
        noise_keys(noise_streams(torch.arange(64)), torch.zeros(64, dtype=torch.int64)), vocabulary_counters(4096, CPU)
    )
    for bit in range(64):
        assert ((bits >> bit) & 1).double().mean().item() == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize("neighbours", [([5, 6], [9, 9]), ([5, 5], [9, 10])], ids=["seeds", "positions"])
def test_neighbours_are_uncorrelated(neighbours: tuple[list[int], list[int]]):
    seeds, positions = neighbours
    noise = gumbel(
        noise_keys(noise_streams(torch.tensor(seeds)), torch.tensor(positions)), vocabulary_counters(100_000, CPU)
    )
    assert torch.corrcoef(noise)[0, 1].abs().item() < 0.015
    assert torch.corrcoef(torch.stack([noise[0, 1:], noise[1, :-1]]))[0, 1].abs().item() < 0.015


def test_a_row_does_not_depend_on_its_neighbours():
    counters = vocabulary_counters(1001, CPU)
    keys = noise_keys(noise_streams(torch.arange(9)), torch.arange(9))
    together = gumbel(keys, counters)
    for row in range(9):
        assert torch.equal(gumbel(keys[row : row + 1], counters)[0], together[row])
