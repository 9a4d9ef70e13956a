from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from djinn_client.handover.packed import PackedForm, Unpackable
from djinnd.weights.layout import Layout
from djinnd.weights.plan import BlockSize, ExpertsSize
from djinnd.weights.store import PAGE, Buffer, Routing, WeightStore

SHAPES = {"a.weight": (5, 300), "b": (7,)}


def constant(value: float, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: torch.full(shape, value)


def store_of(count: int, dtype: torch.dtype = torch.bfloat16, *, packed: bool = False) -> WeightStore:
    buffers = [Buffer(f"block{i}.", Layout(SHAPES.items()), {}) for i in range(count)]
    return WeightStore(buffers, dtype, packed=packed)


def attached(store: WeightStore) -> WeightStore:
    store.attach(torch.zeros(store.nbytes, dtype=torch.uint8))
    return store


@pytest.mark.parametrize("packed", [False, True])
def test_every_buffer_starts_on_a_page_of_the_host(packed: bool) -> None:
    store = attached(store_of(3, packed=packed))
    assert all(offset % PAGE == 0 for offset in store.offsets) and store.nbytes % PAGE == 0
    pieces = store.pieces()
    assert [piece.numel() % PAGE for piece in pieces] == [0, 0, 0]
    assert torch.cat(pieces).numel() == store.nbytes
    for index, piece in enumerate(pieces):
        assert piece.data_ptr() == store.host(index).data_ptr()
        assert piece.numel() >= store.host(index).nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_plain_buffers_are_flat_in_the_store_s_dtype(dtype: torch.dtype) -> None:
    store = attached(store_of(3, dtype))
    for index, buffer in enumerate(store.buffers):
        host = store.host(index)
        assert (host.dtype, host.shape) == (dtype, (buffer.layout.numel,))
        assert store.travelling(index).data_ptr() == host.data_ptr() and len(store.travelling(index)) == len(host)
    assert not store.is_packed


def test_packed_blocks_are_bytes_and_the_rest_stays_plain() -> None:
    store = attached(store_of(3, packed=True))
    assert store.is_packed and store.forms[2] is None
    for index in range(2):
        form = store.forms[index]
        assert form is not None and form.numel == store.buffers[index].layout.numel
        assert (store.host(index).dtype, store.host(index).numel()) == (torch.uint8, form.nbytes)
    assert store.host(2).dtype == torch.bfloat16


def test_equal_blocks_share_their_form() -> None:
    store = store_of(4, packed=True)
    assert store.forms[0] is store.forms[1] is store.forms[2]


def test_small_matrices_of_a_packed_block_are_as_they_were() -> None:
    layout = Layout({"router": (2, 40), **SHAPES}.items())
    store = attached(WeightStore([Buffer(f"block{i}.", layout, {}) for i in range(2)], torch.bfloat16, packed=True))
    form = store.forms[0]
    assert isinstance(form, PackedForm) and [(unit.rows, unit.cols) for unit in form.units] == [SHAPES["a.weight"]]
    plain = torch.randn(form.numel, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    form.pack(plain, store.host(0))
    found = layout.views_of_end(form.verbatim_view(store.host(0)))
    assert list(found) == ["router", "b"]
    assert all(torch.equal(view, layout.views(plain)[name]) for name, view in found.items())


def test_all_stacks_of_experts_are_packed() -> None:
    """A fetch finds a stack by the number of its unit."""
    trunk, experts = Layout(SHAPES.items()), Layout([("experts.gate", (4, 1, 64)), ("experts.up", (4, 64, 64))])
    buffers = [Buffer("block.", trunk, {}), Buffer("block.", experts, {}, Routing(4, 1)), Buffer("", trunk, {})]
    form = WeightStore(buffers, torch.bfloat16, packed=True).forms[1]
    assert isinstance(form, PackedForm) and [unit.rows for unit in form.units] == [256, 4]


def test_unused_patches_of_a_packed_block_are_not_copied() -> None:
    store = attached(store_of(2, packed=True))
    form = store.forms[0]
    assert form is not None
    plain = torch.randn(form.numel, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    used = form.pack(plain, store.host(0))
    assert store.travelling(0).numel() == used < form.nbytes


def test_bytes_that_are_not_a_packed_block_are_refused() -> None:
    with pytest.raises(ValueError, match="not a packed block"):
        attached(store_of(2, packed=True)).travelling(0)


def test_sizes_are_those_of_the_compute_dtype() -> None:
    numel = Layout(SHAPES.items()).numel
    plain = store_of(3)
    assert [(size.plain, size.packed) for size in plain.sizes(torch.float32)] == [(4 * numel, None)] * 2
    packed = store_of(3, packed=True)
    form = packed.forms[0]
    assert form is not None
    assert [(size.plain, size.packed) for size in packed.sizes(torch.bfloat16)] == [(2 * numel, form.nbytes)] * 2


def test_a_block_of_too_many_weights_has_no_packed_form() -> None:
    """The constructor raises, and the caller decides what to do."""
    layout = Layout({"a.weight": (1 << 16, 1 << 16)}.items())
    with pytest.raises(Unpackable, match="4,294,967,296 weights"):
        WeightStore([Buffer("block", layout, {}), Buffer("", layout, {})], torch.bfloat16, packed=True)


def test_a_detached_store_has_no_pieces() -> None:
    store = attached(store_of(2))
    assert store.is_attached
    store.detach()
    assert not store.is_attached and store.pieces() == []
    with pytest.raises(AssertionError):
        store.host(0)


def test_memory_of_another_size_is_an_assertion() -> None:
    store = store_of(1)
    with pytest.raises(AssertionError):
        store.attach(torch.zeros(store.nbytes - PAGE, dtype=torch.uint8))


def test_packing_requires_bfloat16() -> None:
    with pytest.raises(AssertionError):
        store_of(2, torch.float16, packed=True)


@pytest.mark.parametrize("packed", [False, True])
def test_a_block_with_experts_has_two_buffers_and_the_size_of_both(packed: bool) -> None:
    trunk, experts = Layout(SHAPES.items()), Layout([("experts.up", (4, 8, 64)), ("experts.down", (4, 64, 8))])
    buffers = [Buffer(f"block{i}.", trunk, {}) for i in range(3)]
    buffers += [Buffer(f"block{i}.", experts, {}, Routing(4, 1)) for i in (0, 2)]
    store = attached(WeightStore([*buffers, Buffer("", trunk, {})], torch.bfloat16, packed=packed))
    assert store.num_blocks == 3 and [store.parts(i) for i in range(3)] == [[0, 3], [1], [2, 4]]
    both, alone, again = store.sizes(torch.bfloat16)
    assert both == again and alone == BlockSize(trunk.nbytes(torch.bfloat16), store.host(1).numel() if packed else None)
    assert both.experts == ExpertsSize(
        experts.nbytes(torch.bfloat16), store.host(3).numel() if packed else None, count=4, picked=1
    )
    assert both.plain == alone.plain + both.experts.plain
    assert both.passing == alone.least and both.fetched(1) == both.experts.least // 4
