from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from djinnd.model.step.shapes import Shape
from tests.support.loaded import Served, small_pages
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-2")
SHAPE = Shape(4, 4, 1)


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(FOLDER, plan=small_pages(100), max_batch_tokens=48) as served:
        yield served


class Graphs:
    """`error`: raised when a shape is compiled or captured."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.captured: list[Shape] = []
        self.is_full = False

    def compile(self) -> Iterator[None]:
        yield
        if self.error is not None:
            raise self.error

    def wants(self, shape: Shape) -> bool:
        return not self.is_full and shape not in self.captured

    def capture(self, shape: Shape) -> None:
        if self.error is not None:
            raise self.error
        self.captured.append(shape)

    def stop_capturing(self) -> None:
        self.is_full = True


ERRORS = pytest.mark.parametrize(
    "error", [RuntimeError("cannot"), torch.OutOfMemoryError("no room")], ids=["forward", "memory"]
)


def check_failed(served: Served, graphs: Graphs) -> None:
    """Without memory there are no further graphs, and after any other error none at all."""
    if isinstance(graphs.error, torch.OutOfMemoryError):
        assert graphs.is_full and served.runner.graphs.current is not None
    else:
        assert served.runner.graphs.current is None and not served.runner.graphs.are_given_up


@ERRORS
def test_a_model_serves_without_graphs_that_cannot_be_compiled(served: Served, error: Exception) -> None:
    served.runner.graphs.current = graphs = Graphs(error)  # type: ignore[assignment]
    assert len(list(served.runner.graphs.compile())) == 1, "one shape was run, and the next failed"
    check_failed(served, graphs)


@ERRORS
def test_a_failed_capture_leaves_the_placement_at_the_beginning_of_a_pass(
    served: Served, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = list[str]()
    monkeypatch.setattr(served.runner.model.placement, "restart", lambda: restarts.append("restart"))
    served.runner.graphs.current = graphs = Graphs(error)  # type: ignore[assignment]
    served.runner.graphs.capture(SHAPE)
    check_failed(served, graphs)
    assert restarts == ["restart"]


def test_a_shape_is_captured_once(served: Served) -> None:
    served.runner.graphs.current = graphs = Graphs()  # type: ignore[assignment]
    served.runner.graphs.capture(None)
    assert graphs.captured == [] and not served.runner.graphs.serve(None)
    assert not served.runner.graphs.serve(SHAPE)
    for _ in range(2):
        served.runner.graphs.capture(SHAPE)
    assert graphs.captured == [SHAPE] and served.runner.graphs.serve(SHAPE)


def test_without_a_gpu_no_step_waits_for_a_graph(served: Served) -> None:
    graphs = served.runner.graphs
    assert graphs.current is None and graphs.serve(None) and graphs.serve(SHAPE)
    assert list(graphs.compile()) == [] and not graphs.capture_next()


def test_graphs_that_are_given_up_do_not_come_back(served: Served) -> None:
    graphs = served.runner.graphs
    graphs.current = Graphs()  # type: ignore[assignment]
    graphs.give_up()
    graphs.renew()
    assert graphs.current is None and graphs.are_given_up
