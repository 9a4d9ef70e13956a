from __future__ import annotations

import msgspec
import pytest
from hypothesis import given

from djinn_client.protocol.fields.kv_layout import (
    ALIGNMENT,
    ITEM_BYTES,
    BlockShape,
    KvLayout,
    Region,
    token_bytes,
)
from tests.support.kv_layouts import LAYOUTS


def span(layout: KvLayout, region: Region) -> range:
    size = layout.page_size * region.heads * region.width * ITEM_BYTES[layout.dtype]
    return range(region.offset, region.offset + size)


@given(LAYOUTS)
def test_regions_are_aligned_and_fill_the_page_without_overlap(layout: KvLayout) -> None:
    own = [
        region
        for shape, pair in zip(layout.block_shapes, layout.regions, strict=True)
        if isinstance(shape, BlockShape) and pair is not None
        for region in pair
    ]
    at = 0
    for region in own:
        assert region.offset == at and at % ALIGNMENT == 0
        at = span(layout, region).stop
    assert at == layout.page_size * layout.token_bytes == layout.state_offset
    assert layout.token_bytes == token_bytes(layout.block_shapes, ITEM_BYTES[layout.dtype])
    assert layout.page_bytes % ALIGNMENT == 0
    assert 0 <= layout.page_bytes - layout.state_offset - layout.state_bytes < ALIGNMENT


@given(LAYOUTS)
def test_a_block_has_the_regions_of_its_shape_or_of_the_block_with_which_it_shares(layout: KvLayout) -> None:
    for shape, pair in zip(layout.block_shapes, layout.regions, strict=True):
        if isinstance(shape, int):
            assert pair == layout.regions[shape]
        elif shape is None:
            assert pair is None
        else:
            assert pair is not None
            assert [(r.heads, r.width) for r in pair] == [
                (shape.heads, shape.key_width),
                (shape.heads, shape.value_width),
            ]


@given(LAYOUTS)
def test_the_kv_of_the_first_blocks_is_before_the_first_byte_of_the_others(layout: KvLayout) -> None:
    for block in range(layout.blocks + 1):
        first = layout.first_byte(block)
        for shape, pair in zip(layout.block_shapes[block:], layout.regions[block:], strict=True):
            if isinstance(shape, BlockShape) and pair is not None:
                assert pair[0].offset >= first
        for pair in layout.regions[:block]:
            assert pair is None or span(layout, pair[1]).stop <= first


@given(LAYOUTS)
def test_a_layout_survives_the_wire(layout: KvLayout) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KvLayout) == layout


def test_equal_blocks_are_written_as_they_always_were() -> None:
    layout = KvLayout.of("bfloat16", 16, [BlockShape(2, 8, 8)] * 3)
    assert layout == KvLayout("bfloat16", 3, 16, 2, 8)
    assert msgspec.to_builtins(layout) == {
        "dtype": "bfloat16",
        "blocks": 3,
        "page_size": 16,
        "kv_heads": 2,
        "head_dim": 8,
    }
    assert layout.page_bytes == 3 * 2 * 16 * 2 * 8 * 2 and layout.shape(17) == (2, 3, 2, 16, 2, 8)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kv_heads": 0}, "must be alike"),
        ({"shapes": [[1, 8, 8], None]}, "not alike"),
        ({"kv_heads": 0, "head_dim": 0, "shapes": [[1, 8, 8]]}, "one for each block"),
        ({"kv_heads": 0, "head_dim": 0, "shapes": [1, [1, 8, 8]]}, "none before it"),
        ({"kv_heads": 0, "head_dim": 0, "shapes": [None, 0]}, "none before it"),
        ({"kv_heads": 0, "head_dim": 0, "shapes": [[1, 8, 0], None]}, ">= 1"),
        ({"blocks": 4097, "kv_heads": 0, "head_dim": 0, "shapes": [None] * 4097}, "4096"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(fields: dict[str, object], told: str) -> None:
    sent = {"dtype": "float32", "blocks": 2, "page_size": 16, "kv_heads": 2, "head_dim": 8} | fields
    with pytest.raises(msgspec.ValidationError, match=told):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=KvLayout)
