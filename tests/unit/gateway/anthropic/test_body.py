from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from starlette.datastructures import Headers

from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd.gateway.anthropic.body import ChatFields, MessagesBody
from djinnd.gateway.http.errors import HttpError

SHORT = {"type": "text", "text": "Be brief."}
SAY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}


def body(**fields: Any) -> MessagesBody:
    return msgspec.convert(SAY | fields, MessagesBody)


def messages(**fields: Any) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(body(**fields).chat().messages)
    return told


def arguments(**fields: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(body(**fields).chat().arguments)
    return told


@pytest.mark.parametrize(
    "system",
    ["Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]],
)
def test_the_system_s_words_come_first(system: Any):
    assert messages(system=system) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


def test_claude_code_s_checksum_is_no_part_of_the_prompt():
    """It is another one with each request."""
    line = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"
    for system in (f"{line}Be brief.", f"{line}\nBe brief.", [{"type": "text", "text": line}, SHORT]):
        assert messages(system=system)[0] == {"role": "system", "content": "Be brief."}


def test_a_turn_with_a_tool():
    turn = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Zürich"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "And tomorrow?"},
            ],
        },
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Zürich"}'}}
    assert messages(messages=turn) == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such city"},
        {"role": "user", "content": "And tomorrow?"},
    ]


def test_an_answer_that_has_begun_goes_on():
    begun = [*SAY["messages"], {"role": "assistant", "content": "Good"}]
    assert body(messages=begun).chat().continue_final
    assert not body().chat().continue_final


def test_claude_code_recognises_the_refusal_of_a_system_message():
    """It looks for "not supported", and for "role" and "system" close to each other, and then asks without."""
    with pytest.raises(HttpError) as caught:
        messages(messages=[*SAY["messages"], {"role": "system", "content": "Be brief."}])
    problem = caught.value.problem
    assert problem.status == 400
    assert "role system is not supported" in problem.message


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "at least one message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages.0.content.0: 'image'",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role tool is not supported"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "'web_search' would have to run on the server",
        ),
        ({"output_config": {"format": {"type": "xml"}}}, "must be a json_schema"),
        ({"tool_choice": {"type": "some"}}, "'some' is none of auto"),
    ],
)
def test_a_body_that_cannot_be_answered_is_refused(fields: dict[str, Any], told: str):
    with pytest.raises(HttpError, match=told) as caught:
        body(**fields).generation(Headers())
    assert caught.value.problem.status == 400


def test_tools_and_their_choice():
    tool = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}, "cache_control": None}
    choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    chat = body(tools=[tool], tool_choice=choice).chat()
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert json.loads(chat.tools) == [{"type": "function", "function": function}]
    assert chat.tool_choice == "function:look" and not chat.parallel_tools
    assert body(tools=[tool], tool_choice={"type": "any"}).chat().tool_choice == "required"
    assert body(tools=[tool]).chat().tool_choice == "auto"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "xhigh"}}, {"enable_thinking": False, "reasoning_effort": "high"}),
    ],
)
def test_thinking_becomes_an_argument_of_the_template(fields: dict[str, Any], told: dict[str, Any]):
    assert arguments(**fields) == told


def test_fields_without_effect_are_named():
    assert body(thinking={"type": "enabled", "budget_tokens": 2048}).ignored() == ["thinking.budget_tokens"]
    assert body(thinking={"type": "enabled"}).ignored() == []


def test_how_tokens_are_chosen():
    wanted = body(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END"]).generation(Headers())
    assert (wanted.max_tokens, wanted.stop) == (9, ["END"])
    assert (wanted.sampling.temperature, wanted.sampling.top_p, wanted.sampling.top_k) == (0.5, 0.9, 5)
    assert body().generation(Headers()).sampling.temperature == 1.0


def test_a_schema_for_the_output():
    schema = {"type": "object"}
    wanted = body(output_config={"format": {"type": "json_schema", "schema": schema}}).generation(Headers())
    assert wanted.format == OutputFormat("json_schema", '{"type":"object"}', strict=False)


def test_the_service_tier_is_the_conversation_s_class():
    conversation = body(service_tier="flex").generation(Headers({"x-session-id": "k"})).conversation
    assert (conversation.priority, conversation.key) == ("batch", "k")


def test_a_system_prompt_is_text():
    with pytest.raises(HttpError) as refused:
        body(system=[{"type": "text", "text": "a"}, {"type": "image"}]).chat()
    assert refused.value.problem.param == "system.1"


def test_tokens_are_counted_without_max_tokens():
    counted = msgspec.convert({"model": "m", "messages": SAY["messages"]}, ChatFields)
    assert json.loads(counted.chat().messages) == SAY["messages"]
