"""`/v1/completions`: texts or tokens go on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from djinn_client.protocol import Generated, Usage
from djinnd.gateway.api import OPENAI, Route
from djinnd.gateway.errors import HttpError
from djinnd.gateway.generating import Output, expect_few, generate_all, stream_all
from djinnd.gateway.http_request import HttpRequest
from djinnd.gateway.openai_sampling import SamplingFields, finish_reason
from djinnd.gateway.openai_streams import failed
from djinnd.gateway.openai_usage import UsageFields, usage_of
from djinnd.gateway.replies import DONE, Reply, Stream, event, json

MAX_TOKENS = 16  # OpenAI's default

Prompt = str | list[int]


class Body(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """A whole one, and a part of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    object: str = "text_completion"
    usage: UsageFields | msgspec.UnsetType | None = msgspec.UNSET


async def complete(request: HttpRequest) -> Reply:
    body = request.body(Body)
    outputs = _outputs(body)
    if body.stream:
        return Stream(_events(request, body, outputs), failed)
    results = await generate_all(request, body.model, outputs)
    choices = [
        Choice(output.choice, result.text, finish_reason=finish_reason(result.finish_reason))
        for output, result in zip(outputs, results, strict=True)
    ]
    completion = _completion(request, body, choices)
    completion.usage = usage_of([result.usage for result in results], body.outputs)
    return json(completion)


async def _events(request: HttpRequest, body: Body, outputs: Sequence[Output]) -> AsyncGenerator[bytes]:
    usages: list[Usage] = []
    async with aclosing(stream_all(request, body.model, outputs)) as replies:
        async for index, reply in replies:
            choice = Choice(index, reply.text)
            if isinstance(reply, Generated):
                choice.finish_reason = finish_reason(reply.finish_reason)
                usages.append(reply.usage)
            yield event(_completion(request, body, [choice]))
    if body.includes_usage:
        last = _completion(request, body, [])
        last.usage = usage_of(usages, body.outputs)
        yield event(last)
    yield DONE


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """One text, one list of tokens, or a list of either. Raises HttpError."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(each, int) for each in prompt):
        return [prompt]  # type: ignore[list-item]
    if not prompt or any(isinstance(each, int) for each in prompt):
        raise HttpError(
            400, "prompt must be a text, a list of tokens, or a list of texts or of such lists", param="prompt"
        )
    return prompt  # type: ignore[return-value]


def _outputs(body: Body) -> list[Output]:
    """Raises HttpError."""
    if body.suffix:
        raise HttpError(400, "suffix is not supported: no model here fills in the middle by itself", param="suffix")
    prompts = prompts_of(body.prompt)
    expect_few(len(prompts) * body.outputs)
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < 1:
        raise HttpError(400, f"max_tokens is {max_tokens}; it must be 1 or more", param="max_tokens")
    return [
        Output(at * body.outputs + choice, at, body.generation(choice, max_tokens=max_tokens, **_given(prompt)))
        for at, prompt in enumerate(prompts)
        for choice in range(body.outputs)
    ]


def _given(prompt: Prompt) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}


def _completion(request: HttpRequest, body: Body, choices: list[Choice]) -> Completion:
    return Completion(f"cmpl-{request.id}", request.created, body.model, choices)


ROUTES = [Route(OPENAI, "POST", "/v1/completions", complete)]
