from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from djinnd.weights.safetensors_header import (
    MAX_DIMENSIONS,
    MAX_ENTRY,
    MAX_HEADER,
    PREFIX,
    BadHeader,
    HeaderEntry,
    header_bytes,
    parse_header,
)

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
DATA = 32  # bytes of both tensors


def parsed(entries: Any, data: int = DATA) -> dict[str, HeaderEntry]:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return parse_header(header, PREFIX + len(header) + data)


def test_headers_that_safetensors_writes_are_parsed() -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "s": np.array(3, np.float16), "e": np.ones((0, 4))}
    file = save(tensors, {"format": "pt"})
    size = header_bytes(file, len(file))
    found = parse_header(file[PREFIX : PREFIX + size], len(file))
    assert {name: stored.shape for name, stored in found.items()} == {"a": (2, 3), "s": (), "e": (0, 4)}
    for name, stored in found.items():
        assert file[stored.start : stored.start + stored.nbytes] == tensors[name].tobytes()


@pytest.mark.parametrize("name", ["F8_E4M3", "F4", "F6_E2M3", "BOOL"])
def test_dtypes_that_djinnd_does_not_read_are_parsed(name: str) -> None:
    nbytes = {"F4": 4, "F6_E2M3": 6}.get(name, 8)
    entry = {"dtype": name, "shape": [8], "data_offsets": [0, nbytes]}
    assert parsed({"a": entry}, nbytes)["a"][0] == name


def test_an_unknown_dtype_is_passed_on() -> None:
    assert parsed({"a": A | {"dtype": "F3"}, "b": B})["a"].dtype == "F3"


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b'{"a": ', "not a JSON object"),
        (b"[" * 200_000, "not a JSON object"),
        (b'{"a":' * 200_000, "not a JSON object"),
        (b'{"\xff": 1}', "not a JSON object"),
        ({"a": 1}, "entry of tensor a"),
        ({"a": {"dtype": "F32", "shape": [6]}}, "data_offsets"),
        ({"a": A | {"shape": [-1, 6]}, "b": B}, "entry of tensor a"),
        ({"a": A | {"shape": [2.5]}, "b": B}, "entry of tensor a"),
        ({"a": A | {"shape": [2**70]}, "b": B}, "tensor a"),
        ({"a": A | {"data_offsets": [-8, 16]}, "b": B}, "entry of tensor a"),
        ({"a": A | {"data_offsets": [0, 24, 48]}, "b": B}, "entry of tensor a"),
        ({"a": A | {"data_offsets": [24, 0]}, "b": B}, "cannot have -24 bytes"),
        ({"a": A | {"shape": [7]}, "b": B}, r"tensor a of F32 \[7\] cannot have 24 bytes"),
        ({"a": A | {"shape": [2**40, 2**40]}, "b": B}, "cannot have 24 bytes"),
        ({"a": A | {"shape": [1] * MAX_DIMENSIONS + [6]}, "b": B}, "has 17 dimensions"),
        ({"a": A | {"note": "x" * MAX_ENTRY}, "b": B}, "entry of tensor a has"),
        ({"a": A}, "it has .* bytes, but its header describes"),
        ({"a": A, "b": B | {"data_offsets": [32, 40]}}, "tensor b comes after bytes of no tensor"),
        ({"a": A, "b": B | {"data_offsets": [20, 28]}}, "tensor b overlaps another"),
        ({"a": A, "b": B, "c": B}, "tensor [bc] overlaps another"),
        ({"b": B}, "tensor b comes after bytes of no tensor"),
    ],
)
def test_an_incomplete_file_is_refused_with_the_reason(entries: Any, reason: str) -> None:
    with pytest.raises(BadHeader, match=reason):
        parsed(entries)


def test_a_name_that_occurs_twice_is_refused() -> None:
    text = f'{{"a": {json.dumps(A)}, "a": {json.dumps(B)}}}'
    with pytest.raises(BadHeader, match="tensor a comes after bytes of no tensor"):
        parsed(text.encode())


def test_any_metadata_is_ignored() -> None:
    assert set(parsed({"__metadata__": {"format": "pt", "deep": [[["{"]]]}, "a": A, "b": B})) == {"a", "b"}


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djinnd.weights.safetensors_header.MAX_TENSORS", 1)
    with pytest.raises(BadHeader, match="it has 2 tensors; at most 1 are read"):
        parsed({"a": A, "b": B})


@pytest.mark.parametrize("prefix", [b"", b"\x01" * 7, struct.pack("<Q", 100), struct.pack("<Q", 2**64 - 1)])
def test_a_header_length_beyond_the_file_is_refused(prefix: bytes) -> None:
    with pytest.raises(BadHeader, match=r"it has only \d bytes|would have .* bytes, but the file has 107"):
        header_bytes(prefix, 107)


def test_a_huge_header_is_refused() -> None:
    with pytest.raises(BadHeader, match="at most 33,554,432 are read"):
        header_bytes(struct.pack("<Q", MAX_HEADER + 1), 1 << 40)


def check(data: bytes, file_bytes: int) -> None:
    """Asserts that the header is refused, or that every tensor is inside of the file."""
    try:
        found = parse_header(data, file_bytes)
    except BadHeader:
        return
    assert sum(stored.nbytes for stored in found.values()) == file_bytes - PREFIX - len(data)
    assert all(PREFIX + len(data) <= s.start <= s.start + s.nbytes <= file_bytes for s in found.values())


_scalars = st.one_of(st.integers(-(2**66), 2**66), st.none(), st.booleans(), st.text(max_size=5), st.floats())
_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "I8", "F4", "?"]), _scalars),
        "shape": st.one_of(st.lists(st.integers(0, 4), max_size=3), st.lists(_scalars, max_size=3), _scalars),
        "data_offsets": st.one_of(st.tuples(st.integers(0, 64), st.integers(0, 64)), st.lists(_scalars), _scalars),
    },
)


@given(st.dictionaries(st.text(max_size=4), st.one_of(_entries, _scalars), max_size=4), st.integers(0, 64))
def test_any_json_is_refused_or_has_tensors_inside_of_the_file(entries: dict[str, Any], data: int) -> None:
    header = json.dumps(entries).encode()
    check(header, PREFIX + len(header) + data)


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_any_bytes_are_refused_or_have_tensors_inside_of_the_file(data: bytes, file_bytes: int) -> None:
    check(data, file_bytes)


@given(st.data())
def test_a_damaged_header_is_refused_or_has_tensors_inside_of_the_file(data: st.DataObject) -> None:
    header = bytearray(json.dumps({"a": A, "b": B}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(header), PREFIX + len(header) + DATA)
