"""Requests of administrators about tokens."""

from __future__ import annotations

from djinn_client import protocol
from djinn_client.protocol import Done, TokenAdded, TokensListed
from djinnd.server.principals.tokens import Tokens
from djinnd.server.requests.daemon import expect_admin
from djinnd.server.wire.client import Answer, Call


class TokenRequests:
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def add(self, call: Call, request: protocol.AddToken) -> Answer:
        expect_admin(call, "add tokens")
        token, info = await self._tokens.add(request)
        return Answer(TokenAdded(id=call.id, token=token, info=info))

    async def list_tokens(self, call: Call, request: protocol.ListTokens) -> Answer:
        expect_admin(call, "list the tokens")
        return Answer(TokensListed(id=call.id, tokens=self._tokens.infos()))

    async def revoke(self, call: Call, request: protocol.RevokeToken) -> Answer:
        """The caller's own connection may be one that this ends: it is told why, and not that it is done."""
        expect_admin(call, "revoke tokens")
        await self._tokens.revoke(request.name)
        return Answer(Done(id=call.id))
