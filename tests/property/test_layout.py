"""For any tensors of a block: each lies inside its buffer, and none overlaps another."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from djinnd.weights.layout import ALIGNMENT, Layout

PARENTS = st.sampled_from(["", "self_attn.", "mlp.", "mlp.experts.0."])
MODULES = st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "norm"])
LEAVES = st.sampled_from(["weight", "bias"])
NAMES = st.builds(lambda parent, module, leaf: f"{parent}{module}.{leaf}", PARENTS, MODULES, LEAVES)
SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
BLOCKS = st.dictionaries(NAMES, SHAPES, max_size=30)


@given(BLOCKS)
def test_tensors_do_not_overlap_and_lie_inside(shapes: dict[str, tuple[int, ...]]) -> None:
    layout = Layout(shapes.items())
    assert {name: entry.shape for name, entry in layout.entries.items()} == shapes
    entries = sorted(layout.entries.values(), key=lambda entry: entry.offset)
    ends = [0, *(entry.end for entry in entries)]
    assert all(entry.offset >= end for entry, end in zip(entries, ends, strict=False))
    assert ends[-1] <= layout.numel < ends[-1] + ALIGNMENT


@given(BLOCKS)
def test_bytes_written_to_one_view_are_in_no_other(shapes: dict[str, tuple[int, ...]]) -> None:
    layout = Layout(shapes.items())
    buffer = torch.full((layout.numel,), -1.0)
    views = layout.views(buffer)
    for number, view in enumerate(views.values()):
        view.fill_(number)
    for number, view in enumerate(views.values()):
        assert bool((view == number).all())
    for run in layout.runs:
        assert torch.equal(layout.joined(buffer, run), torch.cat([views[name] for name in run]))
