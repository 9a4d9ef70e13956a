"""Compares a captured step with the same step launched kernel by kernel, and both with transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton

from djinn_client.protocol.fields.placing import Placing
from djinnd.model.kernels.attention.decode import combine_kernel, decode_kernel
from djinnd.model.kernels.attention.mixed import chunks_kernel, combine_mixed_kernel, singles_kernel
from djinnd.model.step.inputs import StepInputs
from tests.support import reference
from tests.support.graphed import (
    FOLDER,
    MAX_ROWS,
    MAX_TOKENS,
    PAGE,
    WIDTH,
    Graphed,
    Rows,
    graphed_model,
    named,
    with_history,
)
from tests.support.loaded import by_block
from tests.support.paged import same_bytes

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def graphed(request: pytest.FixtureRequest) -> Iterator[Graphed]:
    with graphed_model(request.param, Placing()) as own:
        yield own


DECODES: list[Rows] = [[(1, length) for length in lengths] for lengths in ([1], [300], [17, 200, 33], range(1, 141, 7))]
CHUNKS: list[Rows] = [
    [(5, 5)],
    [(128, 128)],
    [(100, 250)],
    [(1, 90), (40, 40), (1, 7), (30, 170), (2, 2)],
    [*[(1, 9)] * 17, (9, 20)],
]


@pytest.mark.parametrize("rows", DECODES + CHUNKS, ids=named)
def test_replay_is_the_eager_step_and_both_are_transformers(graphed: Graphed, rows: Rows) -> None:
    step, tokens = with_history(graphed, rows)
    pool = graphed.model.pool
    before = pool.clone()
    eager = graphed.eager(step)
    written = pool.clone()
    pool.copy_(before)
    replayed = graphed.replay(step)
    wanted = torch.stack([torch.from_numpy(reference.logits(FOLDER, own)[-1]) for own in tokens])
    if graphed.weights.dtype == torch.float32:
        assert same_bytes(replayed, eager) and same_bytes(pool[1:], written[1:])
        torch.testing.assert_close(replayed.cpu(), wanted, rtol=0, atol=1e-3)
    else:
        torch.testing.assert_close(replayed, eager, rtol=2e-2, atol=2e-2)
        error = (replayed.cpu().float() - wanted).norm() / wanted.norm()
        assert error.item() < 0.05


def test_inputs_of_a_new_shape_have_no_memory_that_another_stream_still_writes(graphed: Graphed) -> None:
    nbytes = StepInputs(graphed.device, 32, 20, WIDTH)._device_bytes.numel()
    graphed.device.synchronize()
    other = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
    other.fill_(255)
    del other
    inputs = StepInputs(graphed.device, 32, 20, WIDTH)
    for array in inputs.host.values():
        array[...] = 0
    inputs.host["ids"][:] = range(32)
    with graphed.device.computing():
        inputs.send()
    graphed.device.synchronize()
    assert inputs.ids[0].tolist() == [*range(32)]


def test_no_step_of_a_shape_that_is_captured_in_advance_compiles_anything(graphed: Graphed) -> None:
    compiled: list[str] = []
    kernels = [chunks_kernel, singles_kernel, combine_mixed_kernel, decode_kernel, combine_kernel]
    for kernel in kernels:
        kernel.device_caches.clear()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda **told: compiled.append(told["src"].name)
        assert len(list(graphed.graphs.compile())) > 0
        assert {kernel.__name__ for kernel in kernels} <= set(compiled)
        compiled.clear()
        for rows in DECODES + CHUNKS:
            graphed.eager(with_history(graphed, rows)[0])
    assert compiled == []


def test_a_replay_touches_only_the_slots_of_its_tokens(graphed: Graphed) -> None:
    step, _ = with_history(graphed, [(3, 20), (1, 40), (1, 5)])
    before = by_block(graphed.model).clone()
    graphed.replay(step)
    changed = (by_block(graphed.model) != before).flatten(4).any(-1).any(1).any(1)  # [pages, page_size]
    slots = {(pages[p // PAGE], p % PAGE) for tokens, start, pages in step for p in range(start, start + len(tokens))}
    touched = {(page, slot) for page, slot in changed.nonzero().tolist() if page != 0}
    assert touched == slots


def test_a_replay_leaves_nothing_for_the_next(graphed: Graphed) -> None:
    """Replays another shape, then the first again, because the graphs share their memory."""
    step, _ = with_history(graphed, [(1, 30), (1, 31), (100, 100), (1, 1)])
    one, chunk, single = step[:2], step[2:3], step[3:]
    first = graphed.replay(one)
    graphed.replay(chunk)
    graphed.replay(single)
    assert same_bytes(graphed.replay(one), first)


def test_a_batch_that_no_shape_fits_has_none(graphed: Graphed) -> None:
    assert graphed.graphs.fitting(MAX_TOKENS + 1, 1, MAX_TOKENS + 1) is None
    assert graphed.graphs.fitting(MAX_ROWS + 1, MAX_ROWS + 1, 1) is None
