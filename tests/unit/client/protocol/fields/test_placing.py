from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import LoadModel, decode_request, encode
from djinn_client.protocol.fields.placing import LEAST_PIECE, MAX_SLOTS, ModelPlan, Placing, ring_bytes


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"resident": 0},
        {"resident": 40},
        {"resident": 0.0},
        {"resident": 1.0},
        {"ring_bytes": 20_000_000_000},
        {"slots": 1},
        {"slots": MAX_SLOTS, "piece_bytes": LEAST_PIECE},
    ],
    ids=str,
)
def test_valid_placings_pass(fields: dict[str, Any]) -> None:
    Placing(**fields).validate()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"resident": -1}, "resident is -1"),
        ({"resident": 1 << 40}, "from 0 to 65,536"),
        ({"resident": 1.5}, "a share of the blocks must be from 0.0 to 1.0"),
        ({"resident": -0.1}, "resident is -0.1"),
        ({"resident": math.nan}, "resident is nan"),
        ({"resident": math.inf}, "resident is inf"),
        ({"ring_bytes": -1}, "ring_bytes is -1"),
        ({"slots": -1}, "slots is -1"),
        ({"slots": MAX_SLOTS + 1}, "from 0 to 1,024"),
        ({"piece_bytes": -1}, "piece_bytes is -1"),
        ({"piece_bytes": 1}, "at least 65,536"),
        ({"slots": 3, "ring_bytes": 1 << 30}, "give one of them"),
    ],
    ids=str,
)
def test_invalid_placings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Placing(**fields).validate()


@pytest.mark.parametrize("resident", [None, 0, 1, 29, 0.0, 1.0, 0.73])
def test_a_count_stays_a_count_and_a_share_a_share_on_the_wire(resident: int | float | None) -> None:
    sent = LoadModel(id=1, model="m", placing=Placing(resident=resident, packing=False))
    got = decode_request(encode(sent)[8:])
    assert got == sent
    assert isinstance(got, LoadModel) and got.placing is not None
    assert type(got.placing.resident) is type(resident)


def test_gigabytes_are_decimal() -> None:
    assert ring_bytes(20) == 20_000_000_000
    assert ring_bytes(0.5) == 500_000_000
    for wrong in (-1, math.nan, math.inf, 1e30, "4", None, True):
        with pytest.raises(InvalidRequest, match="ring_gb is"):
            ring_bytes(wrong)  # type: ignore[arg-type]


def test_a_plan_on_the_wire() -> None:
    plan = msgspec.convert(dict.fromkeys(required(ModelPlan), 1) | {"model": "m"} | TEXTS, ModelPlan)
    plan.step_s = {1: 0.125, 16: 0.126}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=ModelPlan) == plan


TEXTS = {"family": "llama", "dtype": "bfloat16"}


def required(struct: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(struct) if field.required]
