"""All valid tokens, and the names of revoked ones. Pure: no I/O, no clock.

A token is 256 random bits. The book has only its SHA-256, with which no reader of the book can connect. Tokens are
looked up by that hash, so the time of a lookup depends only on the hash of the guess, which the caller knows.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from hashlib import sha256

import msgspec

from djinn_client.errors import InvalidRequest, NotFound, QuotaExceeded
from djinn_client.protocol.fields.scheduling import Class
from djinnd.config.principals import MAX_PRINCIPAL_NAME, is_principal_name, number_of

PREFIX = "djn_"
_BYTES = 32
MAX_RETIRED = 4096  # names without a token that are remembered, the latest


class AccessToken(msgspec.Struct, frozen=True):
    """A token without its secret. Times are seconds since 1970. `highest_class`: the highest scheduling class that its
    connections may use; None: the highest of its principal."""

    name: str
    digest: bytes
    user: int | None  # the Unix user that it stands for; None: it stands for its own name
    highest_class: Class | None
    created: float
    expires: float | None
    used: float | None = None

    @property
    def principal(self) -> int:
        return number_of(self.name) if self.user is None else self.user

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


class TokenFileContent(msgspec.Struct, frozen=True):
    """The content of the file. `retired`: names without a token, the latest last. They may still have sessions."""

    tokens: list[AccessToken] = []
    retired: list[str] = []


class TokenBook:
    """The tokens, by their names and by their hashes."""

    def __init__(self, content: TokenFileContent) -> None:
        self._tokens = {token.name: token for token in content.tokens}
        self._by_digest = {token.digest: token.name for token in content.tokens}
        self._retired = dict.fromkeys(content.retired)
        self._names = {number_of(name): name for name in (*self._retired, *self._tokens)}

    def __iter__(self) -> Iterator[AccessToken]:
        return iter(list(self._tokens.values()))

    def __len__(self) -> int:
        return len(self._tokens)

    def content(self, *more: AccessToken) -> TokenFileContent:
        """The content of the file, with these further tokens."""
        return TokenFileContent(
            [*self, *more], [name for name in self._retired if name not in {token.name for token in more}]
        )

    def name_of(self, principal: int) -> str | None:
        """The name of a principal that is no Unix user."""
        return self._names.get(principal)

    def get(self, name: str) -> AccessToken | None:
        return self._tokens.get(name)

    def find(self, secret: str, now: float) -> AccessToken | None:
        """Finds a valid token; None if there is none, or it has expired."""
        name = self._by_digest.get(_digest(secret))
        token = None if name is None else self._tokens[name]
        return None if token is None or token.is_expired(now) else token

    def expect_new(self, name: str, most: int) -> None:
        """Checks that a token of this name can be added; `most` tokens may exist. Raises InvalidRequest,
        QuotaExceeded."""
        if not is_principal_name(name):
            told = f"{name[:MAX_PRINCIPAL_NAME]!r} is no name: write a letter, and then letters, digits and ._@-"
            raise InvalidRequest(f"{told}, {MAX_PRINCIPAL_NAME} characters at most", field="name")
        if name in self._tokens:
            raise InvalidRequest(f"there is a token {name}: revoke it first, or choose another name", field="name")
        if (other := self._names.get(number_of(name), name)) != name:
            raise InvalidRequest(f"{name} has the same number as {other}: choose another name", field="name")
        if len(self) >= most:
            raise QuotaExceeded(
                f"there are {len(self):,} tokens, and limits.tokens is {most:,}: revoke some",
                quota="tokens",
                rule="",
                limit=most,
                used=len(self),
            )

    def add(self, token: AccessToken) -> None:
        """Adds a token, whose name must be new."""
        assert token.name not in self._tokens
        self._tokens[token.name] = token
        self._by_digest[token.digest] = token.name
        self._retired.pop(token.name, None)
        self._names[number_of(token.name)] = token.name

    def used(self, token: AccessToken, now: float) -> None:
        """Notes that a connection has begun with the token."""
        self._tokens[token.name] = msgspec.structs.replace(self._tokens[token.name], used=now)

    def revoke(self, name: str) -> AccessToken:
        """Removes the token of this name. Raises NotFound."""
        token = self._tokens.pop(name, None)
        if token is None:
            told = f"there is no token {name[:MAX_PRINCIPAL_NAME]!r}: `djinnctl token list` has their names"
            raise NotFound(told, token=name[:MAX_PRINCIPAL_NAME])
        del self._by_digest[token.digest]
        self._retired[name] = None
        while len(self._retired) > MAX_RETIRED:
            oldest = next(iter(self._retired))
            del self._retired[oldest], self._names[number_of(oldest)]
        return token


def new_token(
    name: str, user: int | None, highest: Class | None, now: float, expires: float | None
) -> tuple[AccessToken, str]:
    """Makes a token and its secret, which is stored nowhere."""
    secret = PREFIX + secrets.token_urlsafe(_BYTES)
    return AccessToken(name, _digest(secret), user, highest, now, expires), secret


def _digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()
