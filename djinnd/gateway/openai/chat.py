"""`/v1/chat/completions`: messages in, the assistant's answer out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from djinn_client.protocol import Generate, Generated, Usage
from djinn_client.protocol.fields.chat import FUNCTION, ChatInput, ChatMessage
from djinn_client.protocol.fields.conversations import Conversation
from djinnd.gateway.calls.generating import Output, expect_few, generate_all, stream_all
from djinnd.gateway.entry.request import ABSENT, HttpRequest, given
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import DONE, Reply, Stream, event, json
from djinnd.gateway.openai.answers import Fields, answer_of, deltas_of, finish_reason
from djinnd.gateway.openai.errors import OPENAI
from djinnd.gateway.openai.logprobs import ChatLogprobs, TokenTexts
from djinnd.gateway.openai.sampling import SamplingFields
from djinnd.gateway.openai.usage import usage_of


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    """{"type": "function", "function": {"name": …}}"""

    function: NamedFunction


class Body(SamplingFields, kw_only=True):
    messages: msgspec.Raw
    tools: msgspec.Raw = ABSENT
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's: arguments of the template
    continue_final_message: bool | None = None  # vLLM's
    add_generation_prompt: bool | None = None  # vLLM's: false only with continue_final_message
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    modalities: list[str] | None = None
    web_search_options: msgspec.Raw = ABSENT


async def chat(request: HttpRequest) -> Reply:
    body = request.body(Body)
    request.ignore(body.ignored())
    _expect_supported(body)
    outputs = _outputs(body, body.conversation(request.headers))
    if body.stream:
        return Stream(_events(request, body, outputs))
    results = await generate_all(request, body.model, outputs)
    choices = [_choice(output.choice, result, body) for output, result in zip(outputs, results, strict=True)]
    usage = usage_of([result.usage for result in results], body.outputs)
    return json(_chat(request, body, "chat.completion", choices) | {"usage": usage})


async def _events(request: HttpRequest, body: Body, outputs: Sequence[Output]) -> AsyncGenerator[bytes]:
    usages: list[Usage] = []
    texts = {output.choice: TokenTexts() for output in outputs}
    begun: set[int] = set()

    def chunk(choice: int, delta: Fields, logprobs: ChatLogprobs | None = None, reason: str | None = None) -> bytes:
        choices = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        return event(_chat(request, body, "chat.completion.chunk", choices))

    async with aclosing(stream_all(request, body.model, outputs)) as replies:
        async for choice, reply in replies:
            if choice not in begun:
                begun.add(choice)
                yield chunk(choice, {"role": "assistant", "content": ""})
            logprobs = texts[choice].of_chat(reply) if body.logprobs else None
            for delta in deltas_of(reply):
                yield chunk(choice, delta, logprobs)
                logprobs = None  # they are of the whole piece
            if isinstance(reply, Generated):
                usages.append(reply.usage)
                yield chunk(choice, {}, logprobs, _reason(reply))
    if body.includes_usage:
        end = _chat(request, body, "chat.completion.chunk", [])
        yield event(end | {"usage": usage_of(usages, body.outputs)})
    yield DONE


def _chat(request: HttpRequest, body: Body, kind: str, choices: list[Fields]) -> Fields:
    """A whole answer, or a part of a streamed one."""
    return {
        "id": f"chatcmpl-{request.id}",
        "object": kind,
        "created": request.created,
        "model": body.model,
        "choices": choices,
    }


def _choice(index: int, result: Generated, body: Body) -> Fields:
    logprobs = TokenTexts().of_chat(result) if body.logprobs else None
    answer = answer_of(result.message or ChatMessage(result.text))
    return {"index": index, "message": answer, "logprobs": logprobs, "finish_reason": _reason(result)}


def _reason(reply: Generated) -> str:
    """An answer that ends inside a call has the reason "length": the call's arguments are no JSON."""
    reason = finish_reason(reply.finish_reason)
    has_calls = reply.message is not None and bool(reply.message.tool_calls)
    return "tool_calls" if has_calls and reason == "stop" else reason


def _outputs(body: Body, conversation: Conversation) -> list[Output]:
    """The first of several outputs belongs to the conversation, and the others have sessions of their own. Raises
    HttpError."""
    expect_few(body.outputs)
    chat = chat_input(body)
    places = [conversation, *[None] * (body.outputs - 1)]
    return [Output(choice, 0, _wanted(body, chat, choice, place)) for choice, place in enumerate(places)]


def _wanted(body: Body, chat: ChatInput, choice: int, conversation: Conversation | None) -> Generate:
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most is not None and most < 1:
        raise HttpError(400, f"max_tokens is {most}; it must be 1 or more", param="max_tokens")
    return body.generation(
        choice,
        chat=chat,
        conversation=conversation,
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        token_bytes=bool(body.logprobs),
    )


def chat_input(body: Body) -> ChatInput:
    """Copies the messages out of the body: once, however many outputs there are."""
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments["reasoning_effort"] = body.reasoning_effort
    return ChatInput(
        messages=bytes(body.messages),
        tools=given(body.tools),
        arguments=msgspec.json.encode(arguments) if arguments else b"",
        continue_final=bool(body.continue_final_message),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tools=_may_be_several(body),
    )


def _may_be_several(body: Body) -> bool:
    """A forced function is called once, as in OpenAI's API, unless the body says otherwise."""
    is_named = isinstance(body.tool_choice, NamedTool)
    return not is_named if body.parallel_tool_calls is None else body.parallel_tool_calls


def _tool_choice(choice: str | NamedTool | None) -> str:
    """Raises HttpError."""
    if isinstance(choice, NamedTool):
        return FUNCTION + choice.function.name
    if choice not in (None, "auto", "none", "required"):
        told = "tool_choice must be auto, none, required, or {type: function, function: {name: …}}"
        raise HttpError(400, told, param="tool_choice")
    return choice or "auto"


def _expect_supported(body: Body) -> None:
    """Raises HttpError for fields without which the answer would be another one."""
    for name in ("functions", "function_call"):
        if given(getattr(body, name)):
            raise HttpError(400, f"{name} is OpenAI's old form: use tools and tool_choice", param=name)
    if given(body.audio) or set(body.modalities or ()) - {"text"}:
        raise HttpError(400, "answers are text only", param="audio" if given(body.audio) else "modalities")
    if given(body.web_search_options):
        raise HttpError(400, "nothing here searches the web", param="web_search_options")
    if body.add_generation_prompt is False and not body.continue_final_message:
        told = "without a generation prompt the answer needs continue_final_message"
        raise HttpError(400, told, param="add_generation_prompt")
    if body.top_logprobs is not None and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", param="top_logprobs")


ROUTES = [Route(OPENAI, "POST", "/v1/chat/completions", chat)]
