"""A captured step beside the same step launched kernel by kernel, and both beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.device.cuda import CudaDevice
from djinnd.model.graphs import Shape, StepGraphs
from djinnd.model.loader import Weights
from djinnd.model.paged_model import PagedModel
from tests.support import reference
from tests.support.cuda import cuda_device
from tests.support.loaded import InputRow, fill, load_weights, random_prompt
from tests.support.models import reduced_model
from tests.support.paged import same_bytes

pytestmark = pytest.mark.gpu

PAGE, PAGES, WIDTH = 16, 200, 20
MAX_TOKENS, MAX_ROWS = 128, 20
FOLDER = reduced_model("llama-3.1")

Rows = list[tuple[int, int]]  # tokens that a row brings, tokens that its session then has


@dataclass
class Captured:
    device: CudaDevice
    weights: Weights
    model: PagedModel
    graphs: StepGraphs

    @torch.inference_mode()
    def compose(self, rows: list[InputRow]) -> tuple[Shape, int]:
        """Each row's last token is wanted."""
        counts = [len(tokens) for tokens, _, _ in rows]
        shape = self.graphs.fitting(sum(counts), len(rows), max(counts))
        assert shape is not None
        inputs = self.graphs.inputs(shape)
        fill(inputs, rows, PAGE)
        inputs.host["picks"][: len(rows)] = inputs.host["starts"][1 : len(rows) + 1] - 1
        inputs.pad(sum(counts), len(rows), len(rows))
        with self.device.computing():
            inputs.send()
        self.device.synchronize()
        return shape, len(rows)

    def replay(self, rows: list[InputRow]) -> Tensor:
        shape, picks = self.compose(rows)
        with self.device.computing():
            if self.graphs.wants(shape):
                self.graphs.run(shape, picks)
                self.graphs.capture(shape)
            logits = self.graphs.run(shape, picks)
        self.device.synchronize()
        assert logits is not None
        return logits.clone()

    def eager(self, rows: list[InputRow]) -> Tensor:
        """From the same inputs, with the same bounds."""
        shape, picks = self.compose(rows)
        inputs = self.graphs.inputs(shape)
        with self.device.computing():
            hidden = self.model.forward(inputs, max_query=shape.max_query, max_kv=WIDTH * PAGE, fresh=False)
            logits = self.model.logits(hidden, inputs.picks(shape.rows))
        self.device.synchronize()
        return logits[:picks].clone()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def captured(request: pytest.FixtureRequest) -> Iterator[Captured]:
    with cuda_device() as device:
        weights = load_weights(FOLDER, device, request.param)
        kv, blocks = weights.skeleton.kv_shape, weights.skeleton.num_blocks
        shape = (PAGES, blocks, 2, PAGE, kv.kv_heads, kv.head_dim)
        pool = device.allocate("pool", shape, weights.dtype, zero=True)
        model = PagedModel(weights.skeleton, weights.residency, weights.dtype, pool)
        yield Captured(device, weights, model, StepGraphs(model, device, MAX_TOKENS, MAX_ROWS, WIDTH, WIDTH * PAGE))
        weights.release(device)
        device.release("pool")


def sessions(lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    """Tokens and pages of so many sessions, the pages in no order."""
    order = (torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    held = []
    for seed, length in enumerate(lengths):
        pages = [order.pop() for _ in range(-(-length // PAGE))]
        held.append((random_prompt(length, 512, seed), pages))
    return held


def with_history(captured: Captured, rows: Rows) -> tuple[list[InputRow], list[list[int]]]:
    """Rows that bring (count) tokens to a session that then has (length), whose earlier ones are in the pages."""
    captured.model.pool.zero_()
    held = sessions([length for _, length in rows])
    for (count, length), (tokens, pages) in zip(rows, held, strict=True):
        for start in range(0, length - count, MAX_TOKENS):
            captured.eager([(tokens[start : min(start + MAX_TOKENS, length - count)], start, pages)])
    step = [
        (tokens[length - count :], length - count, pages)
        for (count, length), (tokens, pages) in zip(rows, held, strict=True)
    ]
    return step, [tokens for tokens, _ in held]


DECODES: list[Rows] = [[(1, length) for length in lengths] for lengths in ([1], [300], [17, 200, 33], range(1, 141, 7))]
CHUNKS: list[Rows] = [
    [(5, 5)],
    [(128, 128)],
    [(100, 250)],
    [(1, 90), (40, 40), (1, 7), (30, 170), (2, 2)],
    [*[(1, 9)] * 17, (9, 20)],
]


def named(rows: Rows) -> str:
    return f"{len(rows)} rows, {sum(count for count, _ in rows)} tokens"


@pytest.mark.parametrize("rows", DECODES + CHUNKS, ids=named)
def test_replay_is_the_eager_step_and_both_are_transformers(captured: Captured, rows: Rows) -> None:
    step, tokens = with_history(captured, rows)
    pool = captured.model.pool
    before = pool.clone()
    eager = captured.eager(step)
    written = pool.clone()
    pool.copy_(before)
    replayed = captured.replay(step)
    wanted = torch.stack([torch.from_numpy(reference.logits(FOLDER, own)[-1]) for own in tokens])
    if captured.weights.dtype == torch.float32:
        assert same_bytes(replayed, eager) and same_bytes(pool[1:], written[1:])
        torch.testing.assert_close(replayed.cpu(), wanted, rtol=0, atol=1e-3)
    else:
        torch.testing.assert_close(replayed, eager, rtol=2e-2, atol=2e-2)
        error = (replayed.cpu().float() - wanted).norm() / wanted.norm()
        assert error.item() < 0.05


def test_a_replay_touches_only_the_slots_of_its_tokens(captured: Captured) -> None:
    step, _ = with_history(captured, [(3, 20), (1, 40), (1, 5)])
    before = captured.model.pool.clone()
    captured.replay(step)
    changed = (captured.model.pool != before).flatten(4).any(-1).any(1).any(1)  # [pages, page_size]
    slots = {(pages[p // PAGE], p % PAGE) for tokens, start, pages in step for p in range(start, start + len(tokens))}
    touched = {(page, slot) for page, slot in changed.nonzero().tolist() if page != 0}
    assert touched == slots


def test_a_replay_leaves_nothing_for_the_next(captured: Captured) -> None:
    """Of another shape, then again of the first: the graphs share their memory."""
    step, _ = with_history(captured, [(1, 30), (1, 31), (100, 100), (1, 1)])
    one, chunk, single = step[:2], step[2:3], step[3:]
    first = captured.replay(one)
    captured.replay(chunk)
    captured.replay(single)
    assert same_bytes(captured.replay(one), first)


def test_a_batch_that_no_shape_fits_has_none(captured: Captured) -> None:
    assert captured.graphs.fitting(MAX_TOKENS + 1, 1, MAX_TOKENS + 1) is None
    assert captured.graphs.fitting(MAX_ROWS + 1, MAX_ROWS + 1, 1) is None
