"""A program without sessions: each of its calls sends the whole transcript."""

from __future__ import annotations

from typing import Self, TypeVar

from djinn_client.arguments.options import build
from djinn_client.protocol import Conversation, Generate, Generated, Reply, Request, Sampling
from djinn_client.transport.connection import Connection, connect
from djinn_client.transport.exchange import Delivery
from djinn_client.transport.steps import run
from tests.conftest import MODEL

R = TypeVar("R", bound=Reply)


class Program:
    """The program, on one connection. `transcript`: the tokens so far."""

    def __init__(self, address: str) -> None:
        self.connection: Connection = run(connect(address))
        self.transcript: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    def ask(self, request: Request, expected: type[R]) -> R:
        answer: Delivery[R] = run(self.connection.call(request, expected))
        return answer.message

    def say(self, tokens: list[int], max_tokens: int = 8, **conversation: object) -> Generated:
        """One turn, with these new tokens."""
        self.transcript += tokens
        reply = self.generate(self.transcript, max_tokens, **conversation)
        self.transcript += reply.token_ids
        return reply

    def generate(self, prompt: list[int] | str, max_tokens: int = 8, **conversation: object) -> Generated:
        fields = {"text": prompt} if isinstance(prompt, str) else {"token_ids": list(prompt)}
        request = build(
            Generate,
            conversation=Conversation(**({"model": MODEL} | conversation)),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0),
            **fields,
        )
        return self.ask(request, Generated)
