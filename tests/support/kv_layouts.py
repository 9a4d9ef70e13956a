"""Hypothesis strategies: layouts of pages."""

from __future__ import annotations

from hypothesis import strategies as st

from djinn_client.protocol.fields.kv_layout import ITEM_BYTES, BlockKv, BlockShape, KvLayout

SHAPES = st.builds(BlockShape, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))


@st.composite
def block_lists(draw: st.DrawFn) -> list[BlockKv]:
    """Blocks of which some have no KV, or share that of an earlier block; the first has its own."""
    shapes: list[BlockKv] = [draw(SHAPES)]
    for _ in range(draw(st.integers(0, 6))):
        own = [index for index, shape in enumerate(shapes) if isinstance(shape, BlockShape)]
        shapes.append(draw(st.one_of(SHAPES, st.none(), st.sampled_from(own))))
    return shapes


LAYOUTS = st.builds(
    KvLayout.of, st.sampled_from(list(ITEM_BYTES)), st.sampled_from([16, 32, 256]), block_lists(), st.integers(0, 99)
)
