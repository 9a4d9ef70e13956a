"""Compares a probe between replays with the same probe in an eager step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.protocol.fields.placing import Placing
from djinn_client.protocol.fields.points import Point
from djinnd.model.edit_rows import CODES, EditRows
from djinnd.model.whitebox.editing import apply
from tests.support.graphed import Graphed, Rows, graphed_model, named, with_history
from tests.support.paged import same_bytes
from tests.support.probing import Change, Looking, all_points

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[Placing(), Placing(resident=1)], ids=["resident", "streamed"])
def probed(request: pytest.FixtureRequest) -> Iterator[Graphed]:
    with graphed_model("float32", request.param) as own:
        yield own


PROBED: list[Rows] = [[(1, 33)], [(1, 17), (1, 200), (1, 33)], [(1, 90), (40, 40), (30, 70)]]


def of_blocks(graphed: Graphed) -> list[Point]:
    """Points between blocks, which replays reach, and within blocks, for which a block runs without its graph."""
    return [p for p in all_points(graphed.model.skeleton.points) if p.where in ("resid", "attn", "mlp")]


def changing(graphed: Graphed) -> Change:
    """A change that projects a vector out of the first token and adds it to the second, which may be padding."""
    width, device = graphed.model.skeleton.points.width, graphed.device.torch_device
    bank = torch.randn(1, width, generator=torch.Generator().manual_seed(0)).to(device)

    def change(value: Tensor) -> None:
        where = torch.arange(min(2, len(value)), device=device)
        ops = torch.tensor([CODES["project_out"], CODES["add"]], dtype=torch.int32, device=device)[: len(where)]
        ones = torch.ones(len(where), device=device)
        apply(value, where, EditRows(ops, ones, ones, ones, torch.zeros_like(where), bank))

    return change


@pytest.mark.parametrize("rows", PROBED, ids=named)
def test_a_probe_between_replays_sees_the_activations_of_the_eager_step(probed: Graphed, rows: Rows) -> None:
    step, _ = with_history(probed, rows)
    points = of_blocks(probed)
    unprobed = probed.replay(step)
    eagerly, between = Looking(points), Looking(points)
    eager = probed.eager(step, eagerly)
    assert same_bytes(probed.replay(step, between), eager) and same_bytes(eager, unprobed)
    assert between.order == eagerly.order == points
    tokens = sum(count for count, _ in rows)  # padding tokens follow; they read the KV of other padding
    for point in points:
        assert same_bytes(between.seen[point][0][:tokens], eagerly.seen[point][0][:tokens]), point


@pytest.mark.parametrize("rows", PROBED, ids=named)
def test_changes_between_replays_reach_later_blocks(probed: Graphed, rows: Rows) -> None:
    step, _ = with_history(probed, rows)
    unprobed, pool = probed.replay(step), probed.model.pool
    before = pool.clone()
    for point in of_blocks(probed):
        eager = probed.eager(step, Looking((), {point: changing(probed)}))
        written = pool.clone()
        pool.copy_(before)
        replayed = probed.replay(step, Looking((), {point: changing(probed)}))
        assert same_bytes(replayed, eager) and same_bytes(pool[1:], written[1:]), point
        assert not same_bytes(replayed[:1], unprobed[:1]), point
    assert same_bytes(probed.replay(step), unprobed)


def test_a_probe_sees_norm_and_logits_as_in_the_eager_step(probed: Graphed) -> None:
    step, _ = with_history(probed, [(1, 17), (1, 40)])
    points = all_points(probed.model.skeleton.points)
    eagerly, through_graphs = Looking(points), Looking(points)
    assert same_bytes(probed.replay(step, through_graphs), probed.eager(step, eagerly))
    assert through_graphs.order == eagerly.order == points
    assert all(same_bytes(through_graphs.seen[point][0], eagerly.seen[point][0]) for point in points)
