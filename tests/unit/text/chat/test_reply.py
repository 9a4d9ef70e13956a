from __future__ import annotations

from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage, ToolCall
from djinnd.text.chat.reply import ChatReply
from djinnd.text.replies.detection import reply_format

QWEN = reply_format("<think></think><tool_call>", {})
TOOLS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}}


def test_content_reasoning_and_calls_come_apart() -> None:
    reply = ChatReply(QWEN, "<|im_start|>assistant\n", TOOLS, [])
    answer = '<think>Paris?</think>\n\nLet me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n'
    said = "".join(map(reply.feed, answer + "</tool_call>")) + reply.finish()
    (call,) = reply.message.tool_calls
    assert said == "Let me look."
    assert reply.message == ChatMessage(said, "Paris?", [ToolCall(call.id, "weather", '{"city": "Paris"}')])


def test_deltas_add_up_to_the_message() -> None:
    reply = ChatReply(QWEN, "<think>\n", TOOLS, [])
    deltas: list[ChatDelta] = []
    for character in 'Hm.</think>a<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>':
        reply.feed(character)
        if (delta := reply.take_delta()) is not None:
            deltas.append(delta)
    reply.finish()
    calls = [call for delta in deltas for call in delta.tool_calls]
    (whole,) = reply.message.tool_calls
    assert "".join(delta.reasoning for delta in deltas) == reply.message.reasoning == "Hm."
    assert (calls[0].index, calls[0].id, calls[0].name) == (0, whole.id, "weather")
    assert "".join(call.arguments for call in calls) == whole.arguments == '{"city": "Oslo"}'
    assert not any(call.id or call.name for call in calls[1:])
    assert reply.take_delta() is None


def test_a_stop_string_ends_content_only() -> None:
    reply = ChatReply(QWEN, "", {}, ["end"])
    assert reply.feed("<think>the end</think>") == "" and not reply.is_stopped
    assert reply.feed("one e") == "one "
    assert reply.feed("nd two") == "" and reply.is_stopped
    assert reply.feed("three") == reply.finish() == ""
    assert reply.message == ChatMessage("one ", "the end")


def test_a_stop_string_that_may_not_end_is_content() -> None:
    reply = ChatReply(QWEN, "", {}, ["end"])
    assert reply.feed("the end,", may_stop=False) == "the end,"
    assert not reply.is_stopped
    assert reply.feed(" and the end") == " and the "
    assert reply.is_stopped


def test_without_parallel_tools_an_answer_ends_with_its_first_call() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    for parallel, calls in ((True, 2), (False, 1)):
        reply = ChatReply(QWEN, "", TOOLS, [], parallel=parallel)
        assert reply.feed(call) == ""
        assert reply.is_stopped is reply.may_end is not parallel
        reply.feed(call)
        reply.finish()
        assert len(reply.message.tool_calls) == calls and reply.stopped_by == ""
