from __future__ import annotations

import torch

from djinn_client.protocol.fields.kv_layout import BlockShape
from djinnd.model.step.page_regions import kv_regions, layout_of


def test_views_of_all_regions_cover_each_element_of_the_pages_once() -> None:
    layout = layout_of(torch.float32, 16, [BlockShape(2, 8, 4), 0, None, BlockShape(1, 6, 6)], state_bytes=24)
    pool = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    regions = kv_regions(pool, layout)
    assert regions[2] is None and regions[0] is not None and regions[3] is not None
    assert [x.shape for x in regions[0]] == [(3, 16, 2, 8), (3, 16, 2, 4)]
    for x in (*regions[0], *regions[3]):
        x += 1
    numbers = pool.view(torch.float32)
    assert bool((numbers[:, : layout.state_offset // 4] == 1).all())
    assert not bool(numbers[:, layout.state_offset // 4 :].any())


def test_a_block_that_shares_kv_sees_what_the_other_block_writes() -> None:
    layout = layout_of(torch.float16, 16, [BlockShape(2, 8, 4), 0])
    (keys, values), (shared_keys, shared_values) = (
        pair for pair in kv_regions(torch.zeros(2, layout.page_bytes, dtype=torch.uint8), layout) if pair
    )
    keys[1, 3], values[1, 3] = 5, 7
    assert bool((shared_keys[1, 3] == 5).all()) and bool((shared_values[1, 3] == 7).all())
