"""Requests of administrators about tokens."""

from __future__ import annotations

from djinn_client import protocol
from djinn_client.protocol import TokenAdded, TokensListed
from djinnd.server.principals.tokens import Tokens
from djinnd.server.requests.daemon import expect_admin
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles


class TokenRequests:
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    @handles(protocol.AddToken)
    async def add(self, call: ClientCall, request: protocol.AddToken) -> TokenAdded:
        expect_admin(call, "add tokens")
        token, info = await self._tokens.add(request)
        return TokenAdded(id=call.id, token=token, info=info)

    @handles(protocol.ListTokens)
    async def list_tokens(self, call: ClientCall, request: protocol.ListTokens) -> TokensListed:
        expect_admin(call, "list the tokens")
        return TokensListed(id=call.id, tokens=self._tokens.infos())

    @handles(protocol.RevokeToken)
    async def revoke(self, call: ClientCall, request: protocol.RevokeToken) -> None:
        """If this ends the caller's own connection, the caller gets the reason instead of the reply."""
        expect_admin(call, "revoke tokens")
        await self._tokens.revoke(request.name)
