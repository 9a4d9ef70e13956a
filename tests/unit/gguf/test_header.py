from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pytest

from djinnd.gguf import header as limits
from djinnd.gguf.header import BadGguf, GgufTensor, Header
from tests.support.gguf_files import gguf_bytes, numbers

TENSORS = {"token_embd.weight": numbers(1, 2, 3), "output.weight": (2, (4, 32), bytes(4 * 18))}


def parsed(data: bytes, size: int | None = None) -> Header:
    return Header(lambda offset, count: data[offset : offset + count], len(data) if size is None else size)


def test_values_arrays_and_places_are_read() -> None:
    told: Mapping[str, Any] = {"a.text": "ü", "a.number": 7, "a.float": 0.5, "a.flag": True}
    arrays: Mapping[str, Any] = {"a.words": ["", "two", "drei"], "a.ids": [3, -1], "a.scores": [0.5, -2.0]}
    data = gguf_bytes({**told, **arrays}, TENSORS)
    header = parsed(data)
    assert header.metadata == told
    assert header.strings("a.words") == ["", "two", "drei"] and header.count("a.words") == 3
    assert header.numbers("a.ids") == [3, -1] and header.numbers("a.scores") == [0.5, -2.0]
    assert header.strings("none") is header.numbers("none") is header.count("none") is None
    first, second = header.tensors["token_embd.weight"], header.tensors["output.weight"]
    assert data[first.start :][: first.nbytes] == TENSORS["token_embd.weight"][2]
    assert second == GgufTensor((4, 32), 2, len(data) - 72, 72)


def test_an_array_of_the_other_kind_is_an_error() -> None:
    header = parsed(gguf_bytes({"words": ["a"], "ids": [1]}))
    with pytest.raises(BadGguf, match="ids is an array of numbers"):
        header.strings("ids")
    with pytest.raises(BadGguf, match="words is an array of strings"):
        header.numbers("words")


def test_a_file_that_is_cut_anywhere_is_refused() -> None:
    data = gguf_bytes({"a.words": ["one", "two"], "a.text": "x"}, TENSORS)
    for length in range(len(data)):
        with pytest.raises(BadGguf):
            parsed(data[:length])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf_bytes({}, version=1), "its version is 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1,152,921,504,606,846,976 tensors; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "values of metadata; at most"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50), "bytes in key; at most 256"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 13) + bytes(8), "unknown type 13"),
        (gguf_bytes({"a": 1, "b": 1}).replace(b"\1\0\0\0\0\0\0\0b", b"\1\0\0\0\0\0\0\0a"), "have a twice"),
        (gguf_bytes({"general.alignment": 0}), "general.alignment is 0"),
        (gguf_bytes({"t": "\xff"}).replace(b"\xc3\xbf", b"\xff\xff"), "no UTF-8"),
        (gguf_bytes({}, {"w": (2, (4, 33), bytes(72))}), "no whole blocks of Q4_0"),
        (gguf_bytes({}, {"w": (0, (1, 1, 1, 1, 1), bytes(4))}), "5 dimensions of tensor w"),
        (gguf_bytes({}, {"w": (0, (1 << 62, 1 << 62), bytes(4))}), "but the file has"),
    ],
)
def test_a_damaged_or_hostile_header_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadGguf, match=why):
        parsed(data)


def test_tensors_do_not_overlap() -> None:
    data = gguf_bytes({}, {"v": numbers(1), "w": numbers(2)})
    place = data.index(struct.pack("<IQ", 0, 32))
    with pytest.raises(BadGguf, match="overlaps"):
        parsed(data[:place] + struct.pack("<IQ", 0, 0) + data[place + 12 :])


def test_an_endless_header_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HEADER", 1 << 16)
    monkeypatch.setattr(limits, "_PIECE", 1 << 12)
    asked = []
    words = b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 20)

    def read(offset: int, count: int) -> bytes:
        asked.append(count)
        return (words + bytes(count))[:count] if offset == 0 else bytes(count)

    with pytest.raises(BadGguf, match="its header has more than"):
        Header(read, 1 << 40)
    assert sum(asked) <= (1 << 16) + (1 << 12)


def test_a_tensor_of_an_unknown_format_has_no_size() -> None:
    assert parsed(gguf_bytes({}, {"w": (99, (4, 4), b"")})).tensors["w"].nbytes == 0
