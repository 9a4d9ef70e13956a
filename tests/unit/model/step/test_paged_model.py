from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from djinn_client.protocol.fields.points import Point
from djinnd.device.cpu import CpuDevice
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from tests.support import reference
from tests.support.loaded import MEMORY, InputRow, by_block, fill, load_weights, paged_model, random_prompt
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-3.1")
PAGE = 4


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(MEMORY)
    yield device
    device.close()


@pytest.fixture(scope="module")
def model(device: CpuDevice) -> Iterator[PagedModel]:
    weights = load_weights(FOLDER, device)
    yield paged_model(weights, 20, PAGE)
    weights.release(device)


def step(model: PagedModel, device: CpuDevice, rows: list[InputRow]) -> Tensor:
    """Logits of all tokens of `rows`."""
    counts = [len(tokens) for tokens, _, _ in rows]
    inputs = StepInputs(device, sum(counts), len(rows), max(len(pages) for _, _, pages in rows))
    fill(inputs, rows, PAGE)
    inputs.host["logit_rows"][:] = range(sum(counts))
    inputs.send()
    longest = max(start + len(tokens) for tokens, start, _ in rows)
    fresh = all(start == 0 for _, start, _ in rows)
    hidden = model.forward(inputs, inputs.paged_batch(max_query=max(counts), max_kv=longest, fresh=fresh))
    return model.logits(hidden, inputs.logit_rows(sum(counts)))


def test_rows_of_all_kinds_share_a_step(model: PagedModel, device: CpuDevice) -> None:
    """The rows are a fresh prompt, a chunk with history and a single token, with shuffled pages."""
    a, b, c = (random_prompt(length, 512, seed) for length, seed in ((6, 1), (11, 2), (9, 3)))
    pages_a, pages_b, pages_c = [7, 2], [19, 4, 11], [3, 12, 1]
    step(model, device, [(b[:5], 0, pages_b), (c[:8], 0, pages_c)])
    logits = step(model, device, [(c[8:], 8, pages_c), (a, 0, pages_a), (b[5:], 5, pages_b)])
    for got, tokens, count in zip(logits.split([1, 6, 6]), (c, a, b), (1, 6, 6), strict=True):
        wanted = torch.from_numpy(reference.logits(FOLDER, tokens))[-count:]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_logits_are_those_of_the_picked_tokens(model: PagedModel, device: CpuDevice) -> None:
    prompt = random_prompt(8, 512, 4)
    whole = step(model, device, [(prompt, 0, [5, 6])])
    assert whole.shape == (8, model.vocab)
    inputs = StepInputs(device, 8, 1, 2)
    fill(inputs, [(prompt, 0, [5, 6])], PAGE)
    inputs.host["logit_rows"][:2] = (6, 1)
    inputs.send()
    hidden = model.forward(inputs, inputs.paged_batch(max_query=8, max_kv=8, fresh=True))
    torch.testing.assert_close(model.logits(hidden, inputs.logit_rows(2)), whole[[6, 1]])


class Handing:
    """A probe that keeps the hidden states at the end of one part of the blocks, and puts them at the start of the
    next."""

    def __init__(self, *points: Point, given: Tensor | None = None) -> None:
        self.first = 0
        self.points = frozenset(points)
        self.given = given
        self.seen: dict[Point, Tensor] = {}

    def at(self, point: Point, value: Tensor) -> None:
        self.seen[point] = value.clone()
        if self.given is not None:
            value.copy_(self.given)


@pytest.mark.parametrize("block", range(5))
def test_blocks_in_two_parts_give_the_same_as_in_one(model: PagedModel, device: CpuDevice, block: int) -> None:
    """Without a probe, a part begins with the output of the prologue."""
    tokens, boundary = random_prompt(7, 512, 1), Point("resid", block)
    inputs = StepInputs(device, 7, 1, 2)
    fill(inputs, [(tokens, 0, [5, 6])], PAGE)
    inputs.host["logit_rows"][:] = range(7)
    inputs.send()
    whole, first = Handing(Point("resid"), boundary), Handing(*(Point("resid", b) for b in range(5)))
    batch = inputs.paged_batch(max_query=7, max_kv=7, fresh=False)
    expected = model.forward(inputs, batch, probe=whole)
    half = model.forward(inputs, batch, probe=first, blocks=range(block))
    assert torch.equal(half, whole.seen[boundary])
    assert list(first.seen) == [Point("resid", b) for b in range(block + 1)]
    second = Handing(boundary, given=half)
    assert torch.equal(model.forward(inputs, batch, probe=second, blocks=range(block, 4)), expected)
    assert torch.equal(second.seen[boundary], whole.seen[Point("resid")])


def test_each_block_has_its_own_part_of_a_page(model: PagedModel, device: CpuDevice) -> None:
    model.pool.zero_()
    step(model, device, [(random_prompt(PAGE, 512, 5), 0, [9])])
    page = by_block(model)[9]
    assert all(bool((page[block, kind] != 0).any()) for block in range(model.num_blocks) for kind in range(2))
    assert len({page[block].numpy().tobytes() for block in range(model.num_blocks)}) == model.num_blocks
    model.pool[9] = 0
    assert not bool(model.pool.any())


def test_zero_pages_zeroes_only_its_pages(model: PagedModel) -> None:
    model.pool.fill_(1)
    model.zero_pages([3, 17])
    zeroed = [page for page in range(len(model.pool)) if not bool(model.pool[page].any())]
    assert zeroed == [3, 17]
    assert bool((model.pool[[page for page in range(20) if page not in zeroed]] == 1).all())
    model.pool.zero_()


def test_copy_page_changes_only_its_target(model: PagedModel) -> None:
    model.pool.random_(256)
    before = model.pool.clone()
    model.copy_page(17, 3)
    before[3] = before[17]
    assert torch.equal(model.pool, before)
