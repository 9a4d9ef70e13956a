"""Streamed and packed blocks, compared with the same blocks resident and plain, and with transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from djinn_client.protocol import Placing
from djinnd.core.session import Session
from djinnd.weights.plan import BlockPlace
from tests.support import reference
from tests.support.checkpoints import altered, cast
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.support.parameters import FEW_FAMILIES, long_except
from tests.support.placed import plan_of

VOCAB = 512
PLACINGS = {"1 of 4, two slots": Placing(resident=1, slots=2), "none, one slot": Placing(resident=0, slots=1)}


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_streamed_blocks_give_the_tokens_of_transformers(family: str) -> None:
    """Sessions with prompts of different lengths join at different steps and leave at their end."""
    folder, chance = reduced_model(family), random.Random(family)
    lengths = [1, 70, chance.randint(2, 40), chance.randint(2, 40)]
    prompts = [random_prompt(length, VOCAB, seed) for seed, length in enumerate(lengths)]
    wishes = [10, 4, 7, 8]
    for name, placing in PLACINGS.items():
        with Served(folder, plan=small_pages(60), placing=placing, max_batch_tokens=48) as served:
            places = served.runner.places
            assert (4 - len(places.streamed), places.slots) == (placing.resident, placing.slots)
            sessions: list[Session] = []
            for prompt, wish in zip(prompts, wishes, strict=True):
                sessions.append(served.open())
                served.submit(sessions[-1], prompt, max_tokens=wish)
                served.step()
                served.runner.model.placement.check_integrity()
            served.run()
            for session, prompt, wish in zip(sessions, prompts, wishes, strict=True):
                told = session.tokens[len(prompt) :]
                assert told == reference.greedy(folder, prompt, wish, told), name


EXACT = {
    "packed, all resident": (Placing(), (BlockPlace.PACKED,) * 4),
    "packed, two stream": (Placing(resident=2), (BlockPlace.PLAIN, BlockPlace.STREAMED) * 2),
    "packed, all stream": (Placing(resident=0), (BlockPlace.STREAMED,) * 4),
    "packed, all stream in one slot, in pieces": (Placing(resident=0, slots=1, piece_bytes=1 << 16), None),
    "packed, all stream without prefetch": (Placing(resident=0, prefetch=False), None),
    "plain, two stream": (Placing(resident=2, packing=False), (BlockPlace.PLAIN, BlockPlace.STREAMED) * 2),
}


@pytest.fixture(scope="module", params=long_except(("mixtral",), ("llama-2", "gpt2", "mixtral", "qwen2")))
def sixteen_bit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16") / "m"
    return altered(folder, request.param, lambda tensors: cast(tensors, torch.bfloat16))


def told(
    folder: Path, placing: Placing, *, pack_all: bool = False
) -> tuple[Tensor, list[list[int]], tuple[BlockPlace, ...]]:
    """Logits of a prompt, the tokens of three sessions, and the places of the blocks."""
    with Served(folder, dtype="bfloat16", plan=small_pages(60), placing=placing) as served:
        if pack_all:
            served.runner.move(plan_of(served.runner.weights, (BlockPlace.PACKED,) * 4), served.runner.plan.num_pages)
        reader = served.open()
        forward = served.submit(reader, random_prompt(50, VOCAB, 9))
        served.run()
        logits = served.logits_of(forward)
        sessions = [served.open() for _ in range(3)]
        for seed, session in enumerate(sessions):
            served.submit(session, random_prompt(9 + 20 * seed, VOCAB, seed), max_tokens=8)
        served.run()
        return logits, [session.tokens for session in sessions], served.runner.places.places


def test_every_placement_gives_the_same_bits_in_bfloat16(sixteen_bit: Path) -> None:
    logits, tokens, places = told(sixteen_bit, Placing(packing=False))
    assert places == (BlockPlace.PLAIN,) * 4
    for name, (placing, where) in EXACT.items():
        got = told(sixteen_bit, placing, pack_all="all resident" in name)
        assert where is None or got[2] == where, name
        assert torch.equal(got[0], logits), name
        assert got[1] == tokens, name
