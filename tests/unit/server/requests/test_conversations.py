from __future__ import annotations

from djinn_client.protocol import Conversation, Failure, Generate, Generated
from tests.support.served import Served, Wire

TURN = list(range(1, 41))


def said(wire: Wire, prompt: list[int]) -> Generated | Failure:
    conversation = Conversation(model="djinn-tiny")
    reply = wire.ask(Generate(id=1, session="", conversation=conversation, token_ids=prompt, max_tokens=4))
    while not isinstance(reply, Generated | Failure):
        reply = wire.reply()
    return reply


def test_a_call_that_fails_leaves_its_conversation_to_the_next_one(storyteller: Served) -> None:
    with Wire(storyteller.address) as wire:
        first = said(wire, TURN)
        assert isinstance(first, Generated)
        transcript = [*TURN, *first.token_ids]
        assert isinstance(said(wire, [*transcript, 77, *range(50, 70)]), Failure)
        again = said(wire, [*transcript, 78, *range(50, 70)])
        assert isinstance(again, Generated) and again.session == first.session
