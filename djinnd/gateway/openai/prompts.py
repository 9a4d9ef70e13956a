"""The prompts of a completion, as texts and as tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from djinn_client.protocol import Detokenize, Detokenized, Tokenize, Tokenized
from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.http.errors import HttpError

Given = str | list[str | int | list[int]]


class Prompt(NamedTuple):
    """A text or tokens; both where an echo needs both."""

    text: str | None
    token_ids: list[int] | None

    def fields(self) -> dict[str, Any]:
        """The fields of a Generate. Tokens go first: an echo's log probabilities belong to them."""
        return {"text": self.text} if self.token_ids is None else {"token_ids": self.token_ids}


def prompts_of(given: Given, field: str = "prompt") -> list[Prompt]:
    """One text, one list of tokens, or a list of either. Raises HttpError."""
    if isinstance(given, str):
        return [Prompt(given, None)]
    numbers = [each for each in given if isinstance(each, int)]
    if numbers and len(numbers) == len(given):
        return [Prompt(None, numbers)]
    if numbers or not given:
        told = f"{field} must be a text, a list of tokens, or a list of texts or of such lists"
        raise HttpError(400, told, param=field)
    return [Prompt(each, None) if isinstance(each, str) else Prompt(None, _row(each)) for each in given]


async def for_echo(request: HttpRequest, model: str, prompts: list[Prompt], logprobs: bool) -> list[Prompt]:
    """Adds to each prompt what an echo of it needs: its text and, with log probabilities, its tokens."""
    made = []
    async with request.pool.link() as link:
        for text, tokens in prompts:
            if text is None:
                text = (await link.call(Detokenize(id=0, model=model, token_ids=tokens or []), Detokenized)).text
            if tokens is None and logprobs:
                tokens = (await link.call(Tokenize(id=0, model=model, text=text), Tokenized)).token_ids
            made.append(Prompt(text, tokens))
    return made


def _row(given: Any) -> list[int]:
    return list(given)
