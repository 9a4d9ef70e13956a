from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from djinn_client.arguments.options import (
    GenerateOptions,
    PlacingOptions,
    build,
    generate_request,
    placing_fields,
    token_ids,
)
from djinn_client.errors import InvalidRequest, TokenOutOfRange
from djinn_client.protocol import Generate, LoadModel, Sampling
from djinn_client.protocol.fields.placing import Placing


def request(prompt: Any = "hi", **options: Any) -> Generate:
    return generate_request("s-1", prompt, options, stream=False)  # type: ignore[arg-type]


def test_defaults_are_the_protocol_s() -> None:
    assert request() == Generate(id=0, session="s-1", text="hi")


def test_text_tokens_and_nothing() -> None:
    assert (request("a").text, request("a").token_ids) == ("a", None)
    assert (request([1, 2]).text, request([1, 2]).token_ids) == (None, [1, 2])
    assert (request(None).text, request(None).token_ids) == (None, None)


def test_sampling_options_go_into_sampling_and_the_rest_does_not() -> None:
    made = request(temperature=0.7, top_k=5, seed=9, max_tokens=3, stop=["a", "b"], ignore_eos=True, logprobs=2)
    assert made.sampling == Sampling(temperature=0.7, top_k=5, seed=9)
    assert (made.max_tokens, made.stop, made.ignore_eos, made.logprobs) == (3, ["a", "b"], True, 2)


def test_every_documented_option_reaches_the_request() -> None:
    made_up = {"n", "response_format", "regex", "grammar"}  # several requests; three ways to write `format`
    for name in GenerateOptions.__annotations__.keys() - made_up:
        assert hasattr(request(), name) != hasattr(Sampling(), name), name
        assert f"\n    {name} " in (GenerateOptions.__doc__ or ""), f"{name} is not documented"


def test_hints_reach_the_request() -> None:
    made = request(expected_tokens=50, deadline_s=2)
    assert (made.expected_tokens, made.deadline_s) == (50, 2.0)
    made = request(between_tokens_s=0.02, first_token_s=0)
    assert (made.between_tokens_s, made.first_token_s) == (0.02, 0.0)


def test_a_single_stop_string_is_one_string() -> None:
    assert request(stop="\n\n").stop == ["\n\n"]
    assert request(stop=("a", "b")).stop == ["a", "b"]


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"no such option: max_token; there are max_tokens, n, temperature"):
        request(max_token=3)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "warm"},
        {"max_tokens": 1.5},
        {"stop": [1]},
        {"seed": "x"},
        {"expected_tokens": 1.5},
        {"deadline_s": "soon"},
    ],
)
def test_a_wrong_type_is_an_invalid_request_that_names_it(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        request(**options)


@pytest.mark.parametrize(
    "tokens", [[1, 2], (1, 2), range(1, 3), iter([1, 2]), np.array([1, 2]), [np.int64(1), np.int32(2)]]
)
def test_token_ids_from_what_people_have(tokens: Any) -> None:
    made = token_ids(tokens)
    assert made == [1, 2]
    assert all(type(token) is int for token in made)


@pytest.mark.parametrize("tokens", [[[1, 2]], np.array([[1, 2]]), [1.0], ["1"], np.array(3), 3])
def test_values_that_are_no_token_ids_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match="one row of integers"):
        token_ids(tokens)


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 80])
def test_token_ids_beyond_any_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(TokenOutOfRange, match=f"token {token} at position 1 "):
        token_ids([0, token])


def placing(**options: Any) -> Placing | None:
    return build(LoadModel, model="m", placing=placing_fields(options)).placing  # type: ignore[arg-type]


def test_without_placing_options_the_configuration_holds() -> None:
    assert placing() is None
    assert placing(resident=None, slots=None, packing=None) is None


def test_placing_options() -> None:
    assert placing(resident=29) == Placing(resident=29)
    assert placing(resident="auto") == Placing()
    assert placing(ring_gb=4.5, packing=False) == Placing(ring_bytes=4_500_000_000, packing=False)
    assert placing(kv_dtype="fp8") == Placing(kv_dtype="fp8") and placing(kv_dtype="auto") == Placing()
    assert placing(speculation="auto") == Placing(speculation=True) and placing(speculation="off") == Placing()
    assert placing(speculation={"draft": "small"}) == Placing(speculation=True, draft="small")
    assert placing(keep_host=False, slots=None) == Placing(keep_host=False)


def test_every_placing_option_is_documented() -> None:
    for name in PlacingOptions.__annotations__:
        assert f"\n    {name} " in (PlacingOptions.__doc__ or ""), f"{name} is not documented"


@pytest.mark.parametrize(
    "options",
    [
        {"resident": "most"},
        {"resident": True},
        {"slots": 1.5},
        {"packing": "off"},
        {"speculation": "on"},
        {"speculation": {"draft": ""}},
        {"speculation": {"model": "small"}},
        {"ring_gb": float("nan")},
    ],
    ids=str,
)
def test_placing_options_of_the_wrong_type(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        placing(**options)


@pytest.mark.parametrize("name", ["residnet", "prefetch", "piece_bytes"])
def test_a_placing_option_that_does_not_exist(name: str) -> None:
    with pytest.raises(TypeError, match=f"no such option: {name}; there are resident, ring_gb"):
        placing(**{name: 1})
