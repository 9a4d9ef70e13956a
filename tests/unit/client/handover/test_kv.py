from __future__ import annotations

import ctypes
import fcntl
import os

import numpy as np
import pytest
import torch

from djinn_client.errors import InvalidRequest, OutOfMemory, ProtocolError
from djinn_client.handover import kv as kv_module
from djinn_client.handover.kv import KV, KvWindow, exported_kv, kv_window, window_with
from djinn_client.protocol import LoadModel, ModelInfo, ModelReply, SessionExported
from djinn_client.protocol.fields.kv_layout import BlockShape, KvLayout
from djinn_client.tensors import arrays
from djinn_client.transport.shm import new_window
from tests.support.descriptors import open_descriptors
from tests.support.scripted_daemon import Line, ScriptedDaemon

LAYOUT = KvLayout("float32", blocks=3, page_size=16, kv_heads=2, head_dim=4)
TOKENS = 37


def rows(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, 2, 4, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def window() -> KvWindow:
    return KvWindow(LAYOUT, TOKENS)


def punch_hole(fd: int) -> None:
    keep_size, punch = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, keep_size | punch, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def test_a_layout_counts_what_its_pages_take() -> None:
    assert LAYOUT.shape(TOKENS) == (3, 3, 2, 16, 2, 4)
    assert LAYOUT.nbytes(TOKENS) == 3 * LAYOUT.page_bytes == 3 * 3 * 2 * 16 * 2 * 4 * 4
    assert KvLayout("bfloat16", 3, 16, 2, 4).page_bytes * 2 == LAYOUT.page_bytes
    assert KvLayout("float8_e4m3fn", 3, 16, 2, 4).page_bytes * 4 == LAYOUT.page_bytes


def test_keys_put_for_a_block_are_in_its_pages(window: KvWindow) -> None:
    for block in range(3):
        window.put(block, rows(block), rows(10 + block))
    for block in range(3):
        assert torch.equal(window.key(block), rows(block)) and torch.equal(window.value(block), rows(10 + block))
    assert torch.equal(window.pages[2, 1, 0, 4], rows(1)[36])


UNEQUAL = KvLayout.of("float32", 16, [BlockShape(2, 4, 3), BlockShape(1, 6, 6), 0, None])


@pytest.mark.parametrize("has_torch", [True, False])
def test_blocks_that_are_not_alike_have_keys_and_values_of_their_own_shapes(
    has_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_torch:
        monkeypatch.setattr(arrays.importlib.util, "find_spec", lambda name: None)
    window = KvWindow(UNEQUAL, TOKENS)
    window.pages[:] = 0
    given = {block: [np.random.rand(TOKENS, *shape).astype("f") for shape in shapes] for block, shapes in OWN.items()}
    for block, pair in given.items():
        window.put(block, *(torch.from_numpy(x) if has_torch else x for x in pair))
    for block, (key, value) in given.items():
        assert np.array_equal(window.key(block), key) and np.array_equal(window.value(block), value)
    assert np.array_equal(window.key(2), given[0][0])
    assert window.pages.shape == (3, UNEQUAL.page_bytes // 4)
    assert int((window.pages != 0).sum()) == TOKENS * (2 * 4 + 2 * 3 + 6 + 6)
    with pytest.raises(InvalidRequest, match="block 3 has no KV"):
        window.key(3)
    with pytest.raises(InvalidRequest, match=r"values of block 0 must be \[37, 2, 3\]"):
        window.put(0, *[given[0][0]] * 2)


OWN = {0: ((2, 4), (2, 3)), 1: ((1, 6), (1, 6))}


def test_another_shape_is_refused(window: KvWindow) -> None:
    with pytest.raises(InvalidRequest, match=r"must be \[37, 2, 4\], not \[36, 2, 4\]"):
        window.put(0, rows(0)[:36], rows(0))


def test_the_pages_are_the_memory_of_the_descriptor(window: KvWindow) -> None:
    window.pages[:] = 0
    window.pages[1, 2, 1, 3] = 7.0
    there = np.frombuffer(os.pread(window.fd, LAYOUT.nbytes(TOKENS), 0), np.float32).reshape(LAYOUT.shape(TOKENS))
    assert (there != 0).sum() == 8 and (there[1, 2, 1, 3] == 7).all()


def test_the_owner_of_a_window_cannot_shrink_it_or_punch_holes(window: KvWindow) -> None:
    for act in (
        lambda: os.ftruncate(window.fd, 0),
        lambda: os.ftruncate(window.fd, 1 << 20),
        lambda: os.pwrite(window.fd, b"x", 0),
        lambda: punch_hole(window.fd),
    ):
        with pytest.raises(PermissionError):
            act()
    assert os.fstat(window.fd).st_blocks * 512 >= LAYOUT.nbytes(TOKENS)
    window.pages[0] = 1.0  # an existing mapping may still write


def test_the_descriptor_goes_with_the_window_and_the_memory_with_its_tensors() -> None:
    before = open_descriptors()
    window = KvWindow(LAYOUT, TOKENS)
    assert open_descriptors() == before + 1
    pages = window.pages
    window.close()
    window.close()
    assert open_descriptors() == before
    pages[0] = 3.0
    del window
    assert (pages[0] == 3.0).all()


def test_a_window_that_the_host_has_no_memory_for() -> None:
    before = open_descriptors()
    with pytest.raises(OutOfMemory, match=r"no memory for a window of [\d,]{20,} bytes"):
        KvWindow(KvLayout("float32", 1 << 20, 1 << 20, 1 << 10, 1 << 10), 1 << 20)
    assert open_descriptors() == before


def test_without_torch_there_are_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays.importlib.util, "find_spec", lambda name: None)
    window = KvWindow(LAYOUT, TOKENS)
    assert isinstance(window.pages, np.ndarray) and window.pages.dtype == np.float32
    window.put(1, rows(1).numpy(), rows(2).numpy())
    assert np.array_equal(window.value(1), rows(2).numpy())
    assert KvWindow(KvLayout("bfloat16", 3, 16, 2, 4), 5).pages.dtype == np.uint16
    codes = KvWindow(KvLayout("float8_e4m3fn", 3, 16, 2, 4), TOKENS)
    codes.put(1, np.full((TOKENS, 2, 4), 0x7E, np.uint8), np.full((TOKENS, 2, 4), 0xFE, np.uint8))
    assert codes.pages.dtype == np.uint8 and {*codes.key(1).flat} == {0x7E} and {*codes.value(1).flat} == {0xFE}


@pytest.mark.parametrize("tokens", [101, 10**12])
def test_a_window_is_for_no_more_tokens_than_the_model_s_context(daemon: ScriptedDaemon, tokens: int) -> None:
    address = daemon.play(loading)
    with pytest.raises(InvalidRequest, match=f"for {tokens:,} tokens; the context of m has 100") as caught:
        kv_window("m", tokens, address=address)
    assert caught.value.data == {"tokens": tokens, "max_context": 100}


def test_a_window_may_be_for_all_of_the_context(daemon: ScriptedDaemon) -> None:
    assert kv_window("m", 100, address=daemon.play(loading)).length == 100


def loading(line: Line) -> None:
    line.welcome()
    model = ModelInfo(
        name="m", path="/m", dtype="float32", blocks=3, page_size=16, kv_heads=2, head_dim=4, max_context=100
    )
    line.send(ModelReply(id=line.expect(LoadModel).id, model=model))
    line.expect_hang_up()


# --- what from_kv takes ---------------------------------------------------------------------------------------------


def test_a_window_is_taken_as_it_is(window: KvWindow) -> None:
    assert window_with("m", list(range(TOKENS)), window, None, None, None) is window
    assert window_with("m", list(range(TOKENS + 5)), window, None, None, None) is window


def test_a_window_that_was_closed_is_refused_and_its_pages_are_not(
    window: KvWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    window.put(0, rows(0), rows(1))
    window.close()
    with pytest.raises(InvalidRequest, match="the window of 37 tokens was closed"):
        window_with("m", list(range(TOKENS)), window, None, None, None)
    monkeypatch.setattr(kv_module, "kv_window", lambda model, tokens, **more: KvWindow(LAYOUT, tokens))
    assert torch.equal(window_with("m", list(range(TOKENS)), window.pages, None, None, None).key(0), rows(0))


def test_other_kv_is_copied(window: KvWindow) -> None:
    window.put(0, rows(0), rows(1))
    kv = KV(LAYOUT, TOKENS, memoryview(bytearray(LAYOUT.nbytes(TOKENS))), list(range(TOKENS)))
    kv.pages[:] = window.pages
    copy = window_with("m", list(range(TOKENS)), kv, None, None, None)
    assert copy.fd != window.fd and torch.equal(copy.key(0), rows(0))


def test_tokens_that_are_fewer_than_the_kv(window: KvWindow) -> None:
    with pytest.raises(InvalidRequest, match="KV of 37 tokens, and 36 tokens came with it"):
        window_with("m", list(range(36)), window, None, None, None)


@pytest.mark.parametrize("pages", [np.zeros((3, 3, 2, 16, 2, 4), np.float32), torch.zeros(3, 3, 2, 16, 2, 4)])
def test_plain_pages_are_copied(monkeypatch: pytest.MonkeyPatch, pages: object) -> None:
    monkeypatch.setattr(kv_module, "kv_window", lambda model, tokens, **more: KvWindow(LAYOUT, tokens))
    window = window_with("m", list(range(TOKENS)), pages, None, None, None)
    assert (window.pages == 0).all()


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        (
            torch.zeros(2, 3, 2, 16, 2, 4),
            r"must be float32 \[3, 3, 2, 16, 2, 4\] .*, not float32 \[2, 3, 2, 16, 2, 4\]",
        ),
        (torch.zeros(3, 3, 2, 16, 2, 4, dtype=torch.float16), "not float16"),
        (7, r"not int \[\]"),
    ],
)
def test_pages_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, pages: object, words: str) -> None:
    monkeypatch.setattr(kv_module, "kv_window", lambda model, tokens, **more: KvWindow(LAYOUT, tokens))
    with pytest.raises(InvalidRequest, match=words):
        window_with("m", list(range(TOKENS)), pages, None, None, None)


# --- what kv() gives ------------------------------------------------------------------------------------------------


def exported(**changes: object) -> SessionExported:
    fields = {"token_ids": list(range(40)), "fingerprint": "f", "kv": LAYOUT, "kv_tokens": TOKENS} | changes
    return SessionExported(id=1, **fields)  # type: ignore[arg-type]


def test_exported_kv_is_mapped_from_the_daemon_s_window() -> None:
    fd = new_window("kv", LAYOUT.nbytes(TOKENS))
    os.pwrite(fd, b"\x00\x00\x80\x3f" * 4, 0)
    kept, before = os.dup(fd), open_descriptors()
    kv = exported_kv(exported(), [fd])
    assert open_descriptors() == before - 1
    assert (kv.length, kv.tokens, kv.page_size) == (TOKENS, list(range(TOKENS)), 16)
    assert kv.key(0)[0, 0].tolist() == [1.0] * 4
    kv.pages[:] = 9.0
    assert os.pread(kept, 4, 0) == b"\x00\x00\x80\x3f"  # the write stays in this mapping
    os.close(kept)


def test_an_invalid_window_of_kv_is_refused_and_closed() -> None:
    for nbytes, sealed in ((LAYOUT.nbytes(TOKENS) - 1, True), (LAYOUT.nbytes(TOKENS), False)):
        fd = new_window("kv", nbytes) if sealed else os.memfd_create("kv")
        before = open_descriptors()
        with pytest.raises(ProtocolError):
            exported_kv(exported(), [fd])
        assert open_descriptors() == before - 1
    with pytest.raises(ProtocolError, match="0 file descriptors"):
        exported_kv(exported(), [])


def test_seals_are_those_that_the_daemon_asks_for(window: KvWindow) -> None:
    seals = fcntl.fcntl(window.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10
