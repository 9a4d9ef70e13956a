"""The order in which a step's graphs are replayed. Plain functions stand in for the graphs and do their work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from djinn_client.protocol.fields.points import Point, Where
from djinnd.device.cpu import CpuDevice
from djinnd.model.step.graphs import StepGraphs, _Captured
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.step.shapes import Shape
from djinnd.model.whitebox.probe import Probe
from tests.support.loaded import MEMORY, fill, load_weights, paged_model, random_prompt
from tests.support.models import reduced_model
from tests.support.probing import Looking, all_points

PAGE, TOKENS, BLOCKS = 4, 7, 4
SHAPE = Shape(TOKENS, 1, TOKENS)


class Graph:
    """Stands in for a CUDA graph: a function that works on fixed tensors."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._work()


class Seen:
    """A probe that keeps the activations that it sees, and may replace them at one boundary."""

    def __init__(self, given_at: int = -1, given: Tensor | None = None) -> None:
        self.first = 0
        self.points = frozenset(Point("resid", block) for block in range(BLOCKS + 1))
        self.seen: dict[int, Tensor] = {}
        self._given = {given_at: given}

    def at(self, point: Point, value: Tensor) -> None:
        self.seen[point.block] = value.clone()
        if (given := self._given.get(point.block)) is not None:
            value.copy_(given)


@pytest.fixture(scope="module")
def model() -> Iterator[PagedModel]:
    device = CpuDevice(MEMORY)
    weights = load_weights(reduced_model("llama-2"), device)
    yield paged_model(weights, 4, PAGE)
    weights.release(device)
    device.close()


@dataclass
class Captured:
    """StepGraphs with one captured shape, and the parts of the capture."""

    step: StepGraphs
    graphs: list[Any]  # of the prologue, of each block, of the epilogue
    resid: list[Tensor]

    def run(self, logit_rows: int, probe: Probe | None = None, blocks: range | None = None) -> Tensor | None:
        return self.step.run(SHAPE, logit_rows, probe, blocks)

    @property
    def replayed(self) -> list[int]:
        """Indices of the graphs that were replayed: 0 is the prologue's, i + 1 that of block i."""
        return [index for index, graph in enumerate(self.graphs) if graph.replays]


@pytest.fixture
@torch.inference_mode()
def captured(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> Captured:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = StepGraphs(model, model.device, 16, 4, 4, 16)  # type: ignore[arg-type]
    inputs = graphs.inputs(SHAPE)
    fill(inputs, [(random_prompt(TOKENS, 512, 1), 0, [1, 2])], PAGE)
    inputs.host["logit_rows"][:] = TOKENS - 1
    inputs.send()
    model.attend(inputs.paged_batch(max_query=TOKENS, max_kv=16, fresh=False))
    prologue = model.adapter.prologue(inputs.ids, inputs.positions)
    embedded = prologue.hidden.clone()
    resid = [prologue.hidden, *(torch.full_like(embedded, float("nan")) for _ in range(BLOCKS))]
    logits = torch.empty(1, model.vocab)

    def block(index: int) -> None:
        resid[index + 1].copy_(model.run_block(index, resid[index], prologue.arguments[index]))

    def epilogue() -> None:
        logits.copy_(model.adapter.epilogue(resid[-1].index_select(1, inputs.logit_rows(1))))

    work = [lambda: resid[0].copy_(embedded), *(lambda i=i: block(i) for i in range(BLOCKS)), epilogue]
    parts: list[Any] = [Graph(each) for each in work]
    graphs._captured[SHAPE] = _Captured(parts, prologue, resid, logits)
    return Captured(graphs, parts, resid)


@pytest.mark.parametrize("cut", range(BLOCKS + 1))
@torch.inference_mode()
def test_blocks_in_two_parts_give_the_same_as_in_one(captured: Captured, cut: int) -> None:
    """The second part begins with the output of the prologue unless a probe replaces it, and never with leftovers of an
    earlier step."""
    whole = Seen()
    expected = captured.run(1, whole)
    assert expected is not None
    expected = expected.clone()
    first = Seen()
    assert captured.run(0, first, range(cut)) is None
    assert list(first.seen) == list(range(cut + 1)) and torch.equal(first.seen[cut], whole.seen[cut])
    for left in captured.resid[1:]:
        left.fill_(float("nan"))
    second = Seen(cut, first.seen[cut])
    logits = captured.run(1, second, range(cut, BLOCKS))
    assert logits is not None and torch.equal(logits, expected)
    assert list(second.seen) == list(range(cut, BLOCKS + 1)) and torch.equal(second.seen[cut], whole.seen[0])


@torch.inference_mode()
def test_a_step_without_a_probe_gives_the_same(captured: Captured) -> None:
    expected = captured.run(1, Seen())
    assert expected is not None
    expected = expected.clone()
    logits = captured.run(1)
    assert logits is not None and torch.equal(logits, expected)


@pytest.mark.parametrize("is_captured", [True, False])
@torch.inference_mode()
def test_the_last_block_s_result_is_told_before_the_epilogue_runs(captured: Captured, is_captured: bool) -> None:
    epilogue, told = captured.graphs[-1], list[Tensor]()
    if not is_captured:
        captured.step._captured.clear()

    def behind(hidden: Tensor) -> None:
        assert epilogue.replays == 0
        told.append(hidden.clone())

    captured.step.run(SHAPE, 1, behind=behind)
    (hidden,) = told
    whole = Seen()
    captured.step.run(SHAPE, 1, whole)
    assert torch.equal(hidden, whole.seen[BLOCKS])
    captured.step.run(SHAPE, 0, blocks=range(BLOCKS - 1), behind=behind)
    assert len(told) == 1, "a step that ends before has no such result"


@pytest.mark.parametrize("logit_rows", [0, 1])
@torch.inference_mode()
def test_the_first_graph_sends_the_inputs_and_an_event_is_recorded_behind_it(
    captured: Captured, logit_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, sent = captured.step.inputs(SHAPE), list[list[int]]()
    captured.graphs[0] = Graph(inputs.send_sealed)
    monkeypatch.setattr(inputs, "sent", lambda: sent.append(inputs.ids.flatten().tolist()))
    batch = inputs.paged_batch(max_query=1, max_kv=1, fresh=False)
    ids = list(range(100, 100 + TOKENS))
    inputs.host["ids"][:] = ids
    inputs.host["starts"][:] = (0, 5)
    captured.run(logit_rows)
    assert inputs.ids.tolist() == [ids]
    assert batch.worklist.tolist() == [[0, 0, 5, TOKENS]] and batch.extent.tolist() == [1, 5, 1, 0]
    assert sent == [ids]


def inside(model: PagedModel) -> list[Point]:
    return [point for point in all_points(model.skeleton.points) if point.where in ("resid", "attn", "mlp")]


def eager(model: PagedModel, captured: Captured, probe: Looking) -> Tensor:
    inputs = captured.step.inputs(SHAPE)
    batch = inputs.paged_batch(max_query=TOKENS, max_kv=16, fresh=False)
    return model.logits(model.forward(inputs, batch, probe), inputs.logit_rows(1), probe)


@torch.inference_mode()
def test_a_probe_sees_points_within_blocks_as_in_the_eager_step(model: PagedModel, captured: Captured) -> None:
    points = inside(model)
    wanted, seen = Looking(points), Looking(points)
    expected = eager(model, captured, wanted)
    another = StepInputs(model.device, 1, 1, 1).paged_batch(max_query=1, max_kv=1, fresh=True)
    model.attend(another)  # of an earlier step
    logits = captured.run(1, seen)
    assert logits is not None and torch.equal(logits, expected)
    assert seen.order == wanted.order == points and len(points) == 3 * BLOCKS + 1
    assert all(torch.equal(seen.seen[point][0], wanted.seen[point][0]) for point in points)
    assert captured.replayed == [0, BLOCKS + 1]


@pytest.mark.parametrize("where", ["resid", "attn", "mlp"])
@pytest.mark.parametrize("block", range(BLOCKS))
@torch.inference_mode()
def test_only_a_block_with_a_point_inside_runs_without_its_graph(
    model: PagedModel, captured: Captured, where: Where, block: int
) -> None:
    change = {Point(where, block): lambda value: value.mul_(-2.0)}
    expected, plain = eager(model, captured, Looking((), change)), eager(model, captured, Looking(()))
    logits = captured.run(1, Looking((), change))
    assert logits is not None and torch.equal(logits, expected) and not torch.equal(logits, plain)
    alone = set() if where == "resid" else {block + 1}
    assert captured.replayed == sorted(set(range(BLOCKS + 2)) - alone)


@torch.inference_mode()
def test_the_epilogue_runs_without_its_graph_for_points_behind_the_blocks(
    model: PagedModel, captured: Captured
) -> None:
    points, change = [Point("norm"), Point("attn", 1)], {Point("logits"): lambda value: value.mul_(-2.0)}
    wanted, seen = Looking(points, change), Looking(points, change)
    expected, plain = eager(model, captured, wanted), eager(model, captured, Looking(()))
    logits = captured.run(1, seen)
    assert logits is not None and torch.equal(logits, expected) and not torch.equal(logits, plain)
    assert seen.order == wanted.order == [Point("attn", 1), Point("norm"), Point("logits")]
    assert all(torch.equal(seen.seen[point][0], wanted.seen[point][0]) for point in seen.order)
    assert captured.replayed == sorted(set(range(BLOCKS + 1)) - {2})


class Late:
    """A probe that records when its points are read."""

    def __init__(self, point: Point, launched: Callable[[], list[int]]) -> None:
        self.first = point.block
        self.seen: list[Point] = []
        self.asked: list[list[int]] = []  # graphs that had been replayed at each read
        self._point = point
        self._launched = launched

    @property
    def points(self) -> frozenset[Point]:
        self.asked.append(self._launched())
        return frozenset({self._point})

    def at(self, point: Point, value: Tensor) -> None:
        self.seen.append(point)


@pytest.mark.parametrize("where", ["resid", "attn"])
@torch.inference_mode()
def test_points_are_read_only_after_the_blocks_below_them_are_launched(captured: Captured, where: Where) -> None:
    probe = Late(Point(where, 2), lambda: captured.replayed)
    assert captured.run(1, probe) is not None and probe.seen == [Point(where, 2)]
    assert probe.asked[0] == [0, 1, 2], "the prologue, and blocks 0 and 1"


@pytest.mark.parametrize(("max_tokens", "max_rows"), [(16, 4), (32, 64), (100, 20), (2048, 256)])
def test_every_batch_within_the_limits_has_a_shape_that_holds_it(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch, max_tokens: int, max_rows: int
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = StepGraphs(model, model.device, max_tokens, max_rows, 4, 16)  # type: ignore[arg-type]
    for rows in range(1, min(max_rows, max_tokens) + 1):
        decodes = graphs.fitting(rows, rows, 1)
        assert decodes is not None and decodes.max_query == 1 and decodes.tokens == decodes.rows >= rows
        for tokens in {rows + 1, (rows + max_tokens) // 2, max_tokens} - {rows}:
            if rows < tokens <= max_tokens:
                shape = graphs.fitting(tokens, rows, tokens - rows + 1)
                assert shape is not None and shape.tokens >= tokens and shape.rows >= rows
                assert shape.rows <= shape.tokens == shape.max_query, "no row without a token has a place in it"
    assert graphs.fitting(max_tokens + 1, 1, 2) is None and graphs.fitting(max_rows + 1, max_rows + 1, 1) is None


def test_compiling_runs_blocks_in_each_shape_and_touches_no_pages(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = StepGraphs(model, model.device, 200, 80, 4, 16)  # type: ignore[arg-type]
    ran, before = list[tuple[int, int]](), model.pool.clone()
    run_block = model.run_block

    def counted(index: int, hidden: Tensor, *more: Any) -> Tensor:
        ran.append((index, hidden.shape[1]))
        return run_block(index, hidden, *more)

    monkeypatch.setattr(model, "run_block", counted)
    pauses = [len(ran) for _ in graphs.compile()]
    decodes, chunks = {1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64}, {16, 32, 64, 96, 128, 192, 200}
    assert {size for _, size in ran} == decodes | chunks and {index for index, _ in ran} == set(range(BLOCKS))
    assert len(pauses) == len(ran) // BLOCKS and ran[-1][1] == 200, "the largest is captured first, and compiled last"
    assert torch.equal(model.pool[1:], before[1:])


def test_a_quiet_moment_captures_a_shape_that_has_run_as_a_larger_one(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = StepGraphs(model, model.device, 200, 200, 4, 16)  # type: ignore[arg-type]
    captured = list[Shape]()

    def capture(shape: Shape) -> None:
        captured.append(shape)
        graphs._captured[shape] = None  # type: ignore[assignment]

    monkeypatch.setattr(graphs, "capture", capture)
    while graphs.capture_next():
        pass
    in_advance = len(captured)
    assert graphs.fitting(70, 70, 1) == Shape(128, 128, 1)
    assert graphs.capture_next() and not graphs.capture_next()
    assert captured[in_advance:] == [Shape(96, 96, 1)] == [graphs.fitting(70, 70, 1)]
