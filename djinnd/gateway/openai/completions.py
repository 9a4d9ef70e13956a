"""`/v1/completions`: continues texts or tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from djinn_client.protocol import Generated, Logprobs, Usage
from djinn_client.protocol.fields.conversations import Conversation
from djinnd.gateway.calls.generating import Output, expect_few, generate_all, stream_all
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import DONE, Reply, Stream, event, json
from djinnd.gateway.openai.answers import finish_reason
from djinnd.gateway.openai.errors import OPENAI
from djinnd.gateway.openai.logprobs import CompletionLogprobs, TokenTexts
from djinnd.gateway.openai.prompts import Given, Prompt, for_echo, prompts_of
from djinnd.gateway.openai.sampling import SamplingFields
from djinnd.gateway.openai.usage import UsageFields, usage_of

MAX_TOKENS = 16  # OpenAI's default


class Body(SamplingFields, kw_only=True):
    prompt: Given
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def tried(self) -> int:
        """How many outputs are generated for each prompt; the answer has the n best."""
        return max(self.outputs, self.best_of or 0)

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


class Choice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """A whole one, and a part of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    object: str = "text_completion"
    usage: UsageFields | msgspec.UnsetType = msgspec.UNSET


async def complete(request: HttpRequest) -> Reply:
    body = request.body(Body)
    request.ignore(body.ignored())
    _expect_supported(body)
    prompts = prompts_of(body.prompt)
    expect_few(len(prompts) * body.tried)
    if body.echo:
        prompts = await for_echo(request, body.model, prompts, body.echoes_logprobs)
    outputs = _outputs(body, prompts, _conversation(request, body, prompts))
    if body.stream:
        return Stream(_events(request, body, prompts, outputs))
    results = await generate_all(request, body.model, outputs)
    completion = _completion(request, body, await _choices(body, prompts, results))
    completion.usage = usage_of([result.usage for result in results], body.tried)
    return json(completion)


async def _events(
    request: HttpRequest, body: Body, prompts: Sequence[Prompt], outputs: Sequence[Output]
) -> AsyncGenerator[bytes]:
    usages: list[Usage] = []
    texts = {output.choice: TokenTexts() for output in outputs}
    to_echo = {output.choice: prompts[output.prompt].text or "" for output in outputs} if body.echo else {}
    async with aclosing(stream_all(request, body.model, outputs)) as replies:
        async for index, reply in replies:
            choice = Choice(index=index, text=to_echo.pop(index, "") + reply.text)
            if body.logprobs is not None:
                choice.logprobs = texts[index].of_completion(reply)
            if isinstance(reply, Generated):
                choice.finish_reason = finish_reason(reply.finish_reason)
                usages.append(reply.usage)
            yield event(_completion(request, body, [choice]))
    if body.includes_usage:
        last = _completion(request, body, [])
        last.usage = usage_of(usages, body.tried)
        yield event(last)
    yield DONE


def _conversation(request: HttpRequest, body: Body, prompts: Sequence[Prompt]) -> Conversation | None:
    """A single prompt may be a transcript that goes on. None: the outputs have sessions that are closed after them.
    Raises HttpError."""
    conversation = body.conversation(request.headers)
    is_one = len(prompts) * body.tried == 1 and not body.echoes_logprobs
    return conversation if is_one else None


def _outputs(body: Body, prompts: Sequence[Prompt], conversation: Conversation | None) -> list[Output]:
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    logprobs = 0 if body.logprobs is None and body.tried > body.outputs else body.logprobs  # to find the best by
    return [
        Output(
            at * body.tried + choice,
            at,
            body.generation(
                choice,
                conversation=conversation,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=body.logprobs if body.echoes_logprobs else None,
                token_bytes=body.logprobs is not None,
                **prompt.fields(),
            ),
        )
        for at, prompt in enumerate(prompts)
        for choice in range(body.tried)
    ]


async def _choices(body: Body, prompts: Sequence[Prompt], results: Sequence[Generated]) -> list[Choice]:
    """For each prompt the n best of its outputs, or all in their order if there are only n."""
    choices: list[Choice] = []
    for at, prompt in enumerate(prompts):
        tried = list(results[at * body.tried : (at + 1) * body.tried])
        if body.tried > body.outputs:
            tried.sort(key=_mean_logprob, reverse=True)
        for result in tried[: body.outputs]:
            choices.append(await _choice(body, prompt, result, len(choices)))
    return choices


async def _choice(body: Body, prompt: Prompt, result: Generated, index: int) -> Choice:
    choice = Choice(index=index, text=result.text, finish_reason=finish_reason(result.finish_reason))
    if body.echo:
        choice.text = (prompt.text or "") + choice.text
    if body.logprobs is not None:
        texts = TokenTexts()
        texts.learn(result.token_bytes)
        rows = _echoed(prompt, result) + list(zip(result.token_ids, result.logprobs, strict=True))
        choice.logprobs = await texts.rows_in_turns(rows)
    return choice


def _echoed(prompt: Prompt, result: Generated) -> list[tuple[int, Logprobs | None]]:
    if result.prompt_logprobs is None or prompt.token_ids is None:
        return []
    return list(zip(prompt.token_ids, result.prompt_logprobs, strict=True))


def _mean_logprob(result: Generated) -> float:
    return sum(each.token for each in result.logprobs) / max(1, len(result.logprobs))


def _completion(request: HttpRequest, body: Body, choices: list[Choice]) -> Completion:
    return Completion(f"cmpl-{request.id}", request.created, body.model, choices)


def _expect_supported(body: Body) -> None:
    """Raises HttpError."""
    if body.suffix:
        raise HttpError(400, "suffix is not supported: no model here fills in the middle by itself", param="suffix")
    least = 0 if body.echo else 1
    if body.max_tokens is not None and body.max_tokens < least:
        raise HttpError(400, f"max_tokens is {body.max_tokens}; it must be {least} or more", param="max_tokens")
    if body.best_of is not None and body.best_of < body.outputs:
        raise HttpError(400, f"best_of is {body.best_of}, fewer than n", param="best_of")
    if body.stream and body.tried > body.outputs:
        raise HttpError(
            400, "the best of several cannot be streamed: they are compared when all are whole", param="best_of"
        )
    if body.stream and body.echoes_logprobs:
        told = "log probabilities of the prompt come with the end of the call: leave out stream, echo or logprobs"
        raise HttpError(400, told, param="logprobs")


ROUTES = [Route(OPENAI, "POST", "/v1/completions", complete)]
