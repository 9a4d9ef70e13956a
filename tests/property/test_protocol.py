"""The frame decoder and the message decoders on arbitrary bytes, cut at arbitrary places."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn_client import protocol
from djinn_client.errors import FrameTooLarge, InvalidRequest, ProtocolError, VersionMismatch
from djinn_client.protocol import (
    HEADER,
    MAGIC,
    MAX_FDS,
    MAX_REQUEST,
    VERSION,
    Frame,
    FrameDecoder,
    Sampling,
    decode_reply,
    decode_request,
    encode,
    request_id_of,
)
from djinn_client.protocol.fields.kv_layout import KvLayout
from tests.support.kv_layouts import LAYOUTS

REQUESTS = get_args(protocol.union_of(*get_args(protocol.ClientMessage)))
REPLIES = get_args(protocol.union_of(protocol.ServerMessage))
LIMIT = 1000

payloads = st.binary(max_size=200)
frames = st.builds(Frame, payloads, st.integers(0, MAX_FDS))


def raw(frame: Frame) -> bytes:
    return HEADER.pack(MAGIC, VERSION, frame.fds, len(frame.payload)) + frame.payload


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in parts that begin and end at `places`."""
    marks = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(marks)]


def fed(parts: list[bytes], limit: int = LIMIT) -> tuple[list[Frame], type[Exception] | None, int]:
    """The frames decoded from the parts, the error that ended decoding, and the number of bytes left over."""
    decoder = FrameDecoder(limit)
    frames: list[Frame] = []
    try:
        for part in parts:
            frames.extend(decoder.feed(part))
    except ProtocolError as error:
        return frames, type(error), decoder.pending
    return frames, None, decoder.pending


@given(st.lists(frames, max_size=8), st.lists(st.integers(0), max_size=12))
def test_frames_are_decoded_from_any_cuts_of_the_bytes(sent: list[Frame], places: list[int]) -> None:
    assert fed(cut(b"".join(map(raw, sent)), places)) == (sent, None, 0)


@given(st.lists(frames, max_size=3), frames, st.integers(1))
def test_a_truncated_frame_is_pending_and_nothing_else(whole: list[Frame], last: Frame, missing: int) -> None:
    part = raw(last)[: -(missing % len(raw(last)) or 1)]
    assert fed([b"".join(map(raw, whole)) + part]) == (whole, None, len(part))


@given(st.binary(max_size=300), st.lists(st.integers(0), max_size=6))
def test_arbitrary_bytes_give_frames_or_a_protocol_error_and_the_cuts_do_not_matter(
    data: bytes, places: list[int]
) -> None:
    frames, error, _ = fed([data])
    assert fed(cut(data, places))[:2] == (frames, error)
    assert all(len(frame.payload) <= LIMIT and frame.fds <= MAX_FDS for frame in frames)


@given(
    st.binary(min_size=2, max_size=2) | st.just(MAGIC),
    st.integers(0, 255) | st.just(VERSION),
    st.integers(0, 255),
    st.integers(0, (1 << 32) - 1) | st.integers(0, 2 * LIMIT),
)
def test_a_header_alone_decides(magic: bytes, version: int, fds: int, length: int) -> None:
    """A frame is refused before one byte of its payload is kept."""
    _, error, _ = fed([HEADER.pack(magic, version, fds, length)])
    if magic != MAGIC:
        assert error is ProtocolError
    elif version != VERSION:
        assert error is VersionMismatch
    elif fds > MAX_FDS:
        assert error is ProtocolError
    else:
        assert error is (FrameTooLarge if length > LIMIT else None)


def test_a_frame_of_exactly_the_limit_passes() -> None:
    assert fed([raw(Frame(b"x" * LIMIT, 0))]) == ([Frame(b"x" * LIMIT, 0)], None, 0)


def only_documented_errors(decode: Any, payload: bytes) -> None:
    """Decoding gives a message or raises ProtocolError; any other exception fails the test."""
    with suppress(ProtocolError):
        assert isinstance(decode(payload), REQUESTS + REPLIES)


@given(st.binary(max_size=300))
def test_arbitrary_payloads_raise_only_documented_errors(payload: bytes) -> None:
    only_documented_errors(decode_request, payload)
    only_documented_errors(decode_reply, payload)
    assert isinstance(request_id_of(payload), int | None)


# Values of every msgpack type, under names that the messages know, so that decoding gets past the first byte.
names = sorted({name for kind in (*REQUESTS, *REPLIES) for name in kind.__struct_fields__})
tags = [kind.__struct_config__.tag for kind in (*REQUESTS, *REPLIES)]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=16))
)
values = st.recursive(
    scalars, lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), some)
)
almost_messages = st.builds(
    lambda tag, id, fields: {"type": tag, "id": id, **fields},
    st.sampled_from(tags) | st.text(max_size=8),
    st.integers(0, 9) | scalars,
    st.dictionaries(st.sampled_from(names), values, max_size=6),
)


@given(almost_messages, st.integers(0), st.integers(0, 255))
@settings(max_examples=40)  # tests/fuzz runs many more
def test_near_messages_raise_only_documented_errors(message: dict[str, Any], place: int, byte: int) -> None:
    payload = msgspec.msgpack.encode(message)
    place %= len(payload)
    for variant in (payload, payload[:place], payload[:place] + bytes([byte]) + payload[place + 1 :]):
        only_documented_errors(decode_request, variant)
        only_documented_errors(decode_reply, variant)
        assert isinstance(request_id_of(variant), int | None)


@given(almost_messages)
@settings(max_examples=40)
def test_the_id_of_a_request_that_did_not_decode_is_found(message: dict[str, Any]) -> None:
    expected = message["id"] if type(message["id"]) is int else None
    assert request_id_of(msgspec.msgpack.encode(message)) == expected


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa8generate\xa9token_ids\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa8generate\xa4junk" + b"\x81\xa1a" * 100_000,
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=["deep", "long", "long field", "deep unknown field", "wide"],
)
def test_nested_and_oversized_payloads_raise_only_documented_errors(payload: bytes) -> None:
    """A few bytes that announce much more, or nest without end, cost no more than an error."""
    only_documented_errors(decode_request, payload)
    only_documented_errors(decode_reply, payload)
    assert request_id_of(payload) is None


@cache
def built(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any valid message of the kind, without packed_ids, which come back as token_ids. Floats exclude NaN, which is
    unequal to itself."""
    fields = [field for field in msgspec.structs.fields(kind) if field.name != "packed_ids"]
    return st.builds(kind, **{field.name: strategy_for(field.type) for field in fields})


def strategy_for(type_: Any) -> st.SearchStrategy[Any]:
    info = msgspec.inspect.type_info(type_) if not isinstance(type_, msgspec.inspect.Type) else type_
    match info:
        case msgspec.inspect.IntType(ge=low, lt=high, le=highest):
            most = (1 << 64) - 1 if highest is None else highest
            return st.integers(-(1 << 63) if low is None else low, most if high is None else high - 1)
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.StrType():
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
        case msgspec.inspect.BytesType():
            return st.binary(max_size=8)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.AnyType():
            return st.none() | st.integers(0, 9)
        case msgspec.inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(strategy_for(item), max_size=3)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(strategy_for, items))
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(strategy_for(item), max_size=3).map(tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(strategy_for(key), strategy_for(value), max_size=3)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(strategy_for, types))
        case msgspec.inspect.StructType(cls=cls) if cls is KvLayout:
            return LAYOUTS
        case msgspec.inspect.StructType(cls=cls):
            return built(cls)
        case _:
            raise AssertionError(f"the protocol has learnt a new kind of field: {info}")


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=15)
def test_every_request_comes_back(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(built(kind))
    (frame,) = FrameDecoder(MAX_REQUEST).feed(encode(message))
    assert decode_request(frame.payload) == message


@pytest.mark.parametrize("kind", REPLIES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=15)
def test_every_reply_comes_back(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(built(kind))
    (frame,) = FrameDecoder(MAX_REQUEST).feed(encode(message, fds=1))
    assert (decode_reply(frame.payload), frame.fds) == (message, 1)


few_biases = st.dictionaries(st.integers(0, 99), st.floats(-101, 101), max_size=2)


@given(
    built(Sampling)
    | st.builds(Sampling, temperature=st.floats(), top_p=st.floats(), min_p=st.floats())
    | st.builds(Sampling, frequency_penalty=st.floats(-101, 101), logit_bias=few_biases, min_tokens=st.integers(-1, 9))
)
def test_sampling_is_valid_within_its_ranges_and_nowhere_else(sampling: Sampling) -> None:
    within = (
        0 <= sampling.temperature <= 100
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
        and 0.01 <= sampling.repetition_penalty <= 100
        and -100 <= sampling.presence_penalty <= 100
        and -100 <= sampling.frequency_penalty <= 100
        and all(-100 <= bias <= 100 for bias in sampling.logit_bias.values())
        and sampling.min_tokens >= 0
        and 0 <= sampling.top_k < 1 << 31
        and (sampling.seed is None or 0 <= sampling.seed < 1 << 63)
    )
    if within:
        sampling.validate()
    else:
        with pytest.raises(InvalidRequest, match=r"must be|leaves no token"):
            sampling.validate()
