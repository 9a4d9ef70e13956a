from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djinn_client.errors import ProtocolError
from djinn_client.protocol import (
    HEADER,
    AddEdit,
    Forward,
    Generate,
    ImportSession,
    decode_request,
    encode,
    packed,
    request_id_of,
)
from djinn_client.protocol.fields.bounds import (
    LARGE,
    MAX_TOKENS,
    MAX_VALUES,
    PACKED_FROM,
    expect_few_values,
    pack,
    unpack,
)

token = st.integers(0, (1 << 31) - 1)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=30,
)


def payload_of(message):
    return encode(message)[HEADER.size :]


# --- large messages -------------------------------------------------------------------------------------------------


@given(values)
def test_a_message_of_few_values_passes_whatever_is_in_it(value):
    expect_few_values(msgspec.msgpack.encode(value))


@given(values, st.data())
def test_a_message_that_is_cut_short_passes(value, data):
    payload = msgspec.msgpack.encode(value)
    expect_few_values(payload[: data.draw(st.integers(0, len(payload)))])


@given(st.binary(max_size=200))
def test_noise_passes_or_is_a_protocol_error(noise):
    with suppress(ProtocolError):
        expect_few_values(noise)


@pytest.mark.parametrize(
    "extra",
    [
        [None] * MAX_VALUES,
        {str(n): n for n in range(MAX_VALUES // 2)},
        [[n] for n in range(MAX_VALUES // 2 + 1)],
        [1.5] * MAX_VALUES,
        [""] * MAX_VALUES,
        "x" * LARGE,
        b"x" * LARGE,
    ],
    ids=["list", "map", "lists", "floats", "texts", "text", "bytes"],
)
@pytest.mark.parametrize("field", ["positions", "unheard_of"])
def test_a_large_message_with_many_values_or_a_long_one_in_a_wrong_field_is_refused(extra, field):
    payload = msgspec.msgpack.encode({"type": "edit", "values": bytes(LARGE), field: extra, "id": 300})
    with pytest.raises(ProtocolError, match=r"more than 33,792 values|only text, code"):
        decode_request(payload)
    assert request_id_of(payload) == 300


def test_a_field_that_is_there_many_times_is_refused():
    pair = msgspec.msgpack.encode({"token_ids": [1] * 1000})[1:]
    count = MAX_VALUES // 1000 + 2
    payload = b"\xde" + (count + 2).to_bytes(2, "big") + b"\xa4type\xa8generate\xa2id\x07"
    payload += pair * (count - 1) + msgspec.msgpack.encode({"text": "x" * LARGE})[1:]
    with pytest.raises(ProtocolError, match="more than 33,792 values"):
        decode_request(payload)
    assert request_id_of(payload) == 7


def test_a_large_message_that_is_made_for_it_passes():
    for message in (
        AddEdit(id=1, session="s", points=["blocks.1"] * 100, values=bytes(8 << 20), positions=list(range(20_000))),
        Generate(id=1, session="s", text="😀" * (2 << 20), stop=["x"] * 16),
    ):
        assert decode_request(payload_of(message)) == message


def test_an_error_does_not_repeat_a_long_value():
    payload = msgspec.msgpack.encode({"type": "open", "id": 1, "model": "m", "priority": "p" * 60_000})
    with pytest.raises(ProtocolError) as caught:
        decode_request(payload)
    assert len(caught.value.message) < 600


# --- packed token ids -----------------------------------------------------------------------------------------------


@given(st.lists(token))
def test_packed_token_ids_unpack_to_the_same(token_ids):
    assert unpack(pack(token_ids)) == token_ids


@pytest.mark.parametrize("damaged", [b"\0\0\0\x80", b"\xff\xff\xff\xff", b"\1\0\0"])
def test_packed_ids_that_are_none(damaged):
    with pytest.raises(ProtocolError):
        unpack(damaged)
    payload = payload_of(Forward(id=1, session="s", packed_ids=damaged))
    with pytest.raises(ProtocolError):
        decode_request(payload)


def test_many_token_ids_travel_as_bytes_and_few_as_they_are():
    many, few = list(range(PACKED_FROM)), list(range(PACKED_FROM - 1))
    for message in (
        Generate(id=1, session="s", token_ids=many),
        Forward(id=1, session="s", token_ids=many),
        ImportSession(id=1, model="m", token_ids=many),
    ):
        sent = packed(message)
        assert sent.packed_ids and not sent.token_ids
        assert decode_request(payload_of(sent)) == message
        assert decode_request(payload_of(message)) == message  # as older clients send it
    short = Forward(id=1, session="s", token_ids=few)
    assert packed(short) is short


def test_invalid_token_ids_are_neither_packed_nor_unpacked():
    for wrong in (-1, 1 << 31, 1.5, "one"):
        sent = packed(Forward(id=1, session="s", token_ids=[wrong] * PACKED_FROM))
        with pytest.raises(ProtocolError):
            decode_request(payload_of(sent))


def test_tokens_as_a_list_and_as_bytes():
    with pytest.raises(ProtocolError, match="as a list and as bytes"):
        decode_request(payload_of(Generate(id=1, session="s", token_ids=[1], packed_ids=pack([2]))))


def test_more_tokens_than_a_request_may_bring():
    with pytest.raises(ProtocolError, match="packed_ids"):
        decode_request(payload_of(Generate(id=1, session="s", packed_ids=bytes(4 * MAX_TOKENS + 4))))
