"""`/v1/completions`: continues texts or tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from djinn_client.protocol import Generated, Logprobs, Usage
from djinn_client.protocol.fields.conversations import Conversation
from djinnd.gateway.calls.generating import Output, expect_few, generate_all, stream_all
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.entry.route import Route
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import DONE, Reply, Stream, event, json
from djinnd.gateway.openai.answers import Fields, finish_reason
from djinnd.gateway.openai.errors import OPENAI
from djinnd.gateway.openai.logprobs import CompletionLogprobs, TokenTexts
from djinnd.gateway.openai.prompts import Given, Prompt, for_echo, prompts_of
from djinnd.gateway.openai.sampling import SamplingFields
from djinnd.gateway.openai.usage import usage_of

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
    return json(completion | {"usage": usage_of([result.usage for result in results], body.tried)})


async def _events(
    request: HttpRequest, body: Body, prompts: Sequence[Prompt], outputs: Sequence[Output]
) -> AsyncGenerator[bytes]:
    usages: list[Usage] = []
    texts = {output.choice: TokenTexts() for output in outputs}
    to_echo = {output.choice: prompts[output.prompt].text or "" for output in outputs} if body.echo else {}
    async with aclosing(stream_all(request, body.model, outputs)) as replies:
        async for index, reply in replies:
            logprobs = texts[index].of_completion(reply) if body.logprobs is not None else None
            reason = finish_reason(reply.finish_reason) if isinstance(reply, Generated) else None
            text = to_echo.pop(index, "") + reply.text
            yield event(_completion(request, body, [_choice(index, text, logprobs, reason)]))
            if isinstance(reply, Generated):
                usages.append(reply.usage)
    if body.includes_usage:
        yield event(_completion(request, body, []) | {"usage": usage_of(usages, body.tried)})
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


async def _choices(body: Body, prompts: Sequence[Prompt], results: Sequence[Generated]) -> list[Fields]:
    """For each prompt the n best of its outputs, or all in their order if there are only n."""
    choices: list[Fields] = []
    for at, prompt in enumerate(prompts):
        tried = list(results[at * body.tried : (at + 1) * body.tried])
        if body.tried > body.outputs:
            tried.sort(key=_mean_logprob, reverse=True)
        for result in tried[: body.outputs]:
            choices.append(await _whole(body, prompt, result, len(choices)))
    return choices


async def _whole(body: Body, prompt: Prompt, result: Generated, index: int) -> Fields:
    text, logprobs = (prompt.text or "" if body.echo else "") + result.text, None
    if body.logprobs is not None:
        texts = TokenTexts()
        texts.learn(result.token_bytes)
        rows = _echoed(prompt, result) + list(zip(result.token_ids, result.logprobs, strict=True))
        logprobs = await texts.rows_in_turns(rows)
    return _choice(index, text, logprobs, finish_reason(result.finish_reason))


def _choice(index: int, text: str, logprobs: CompletionLogprobs | None, reason: str | None) -> Fields:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _echoed(prompt: Prompt, result: Generated) -> list[tuple[int, Logprobs | None]]:
    if result.prompt_logprobs is None or prompt.token_ids is None:
        return []
    return list(zip(prompt.token_ids, result.prompt_logprobs, strict=True))


def _mean_logprob(result: Generated) -> float:
    return sum(each.token for each in result.logprobs) / max(1, len(result.logprobs))


def _completion(request: HttpRequest, body: Body, choices: list[Fields]) -> Fields:
    """A whole completion, or a part of a streamed one."""
    return {
        "id": f"cmpl-{request.id}",
        "object": "text_completion",
        "created": request.created,
        "model": body.model,
        "choices": choices,
    }


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
