"""One HTTP request as handlers see it: its principal, its body, and the way to the daemon."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers, QueryParams

from djinnd.gateway.daemon.pools import Pool
from djinnd.gateway.entry.metrics import Metrics
from djinnd.gateway.entry.unknown_fields import unknown_fields
from djinnd.gateway.entry.values import count_values
from djinnd.gateway.http.errors import ClientGone, HttpError

T = TypeVar("T", bound=msgspec.Struct)

_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
MAX_TOLD = 500  # characters of an error about a body
MAX_IGNORED = 64  # names of fields that are noted as ignored
VALUE_BYTES = 40  # of memory that a value of a body takes when it is decoded, beside its text
ABSENT = msgspec.Raw(b"null")  # of a field that is passed on as it is, where it is not there


class HttpRequest:
    """One request. The declared attributes are set before a handler runs."""

    pool: Pool  # connections of the request's principal
    metrics: Metrics
    hold: Callable[[int], None]  # charges bytes of memory to the principal until the request ends; raises HttpError

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.headers = Headers(scope=scope)
        self.began = time.monotonic()
        self.created = int(time.time())
        given = self.headers.get("x-request-id", "")
        self.id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        self.content = b""
        self.is_read = False  # the whole body has come
        self.held = 0  # bytes that are charged to the principal
        self.principal = "-"  # as the log calls it
        self.ignored: set[str] = set()  # fields that had no effect; the response names them
        self.notes: set[str] = set()  # of the daemon on the results; the response has those known when it begins
        self.prompt_tokens = self.generated_tokens = 0  # for the access log

    @property
    def client(self) -> str | None:
        """The peer's address; None on a Unix socket."""
        client = self.scope.get("client")
        return client[0] if client else None

    @property
    def parameters(self) -> dict[str, str]:
        """The parts of the path that the route leaves open."""
        parameters: dict[str, str] = self.scope.get("path_params", {})
        return parameters

    @property
    def query(self) -> QueryParams:
        return QueryParams(self.scope.get("query_string", b""))

    def body(self, kind: type[T]) -> T:
        """The body as a struct. Fields that the struct lacks are noted as ignored. Raises HttpError."""
        self.hold(VALUE_BYTES * count_values(self.content))
        try:
            body = msgspec.json.decode(self.content, type=kind)
            self.ignore(unknown_fields(body, _keys.decode(self.content)))
            return body
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            told = str(error)[:MAX_TOLD]
            raise HttpError(400, f"the body is not as this call wants it: {told}", param=_at(told)) from error

    def ignore(self, names: Iterable[str]) -> None:
        """Notes fields that have no effect, up to MAX_IGNORED."""
        self.ignored.update(name[:64] for name in islice(names, MAX_IGNORED - len(self.ignored)))

    async def read(self, receive: Any, limit: int) -> None:
        """Takes the body in. Raises HttpError for one of more than `limit` bytes, as soon as that is known."""
        announced = int(self.headers.get("content-length", "0"))  # the parser has refused anything but numbers
        if announced > limit or (not limit and "transfer-encoding" in self.headers):
            raise _too_large(limit)
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            if (size := size + len(part)) > limit:
                raise _too_large(limit)
            if part:
                self.hold(len(part))
                parts.append(part)
            if not message.get("more_body", False):
                break
        self.content = b"".join(parts)
        self.is_read = True


def given(raw: msgspec.Raw) -> bytes:
    """The JSON text of a field that is passed on unchanged; b"" if it is null or missing."""
    text = bytes(raw)
    return b"" if text == b"null" else text


def _too_large(limit: int) -> HttpError:
    told = f"the body is over this gateway's limit of {limit:,} bytes" if limit else "this call takes no body"
    return HttpError(413, told, code="request_too_large")


def _at(told: str) -> str | None:
    """The field that msgspec's error names."""
    found = re.search(r"at `\$\.([\w.\[\]]{1,64})", told)
    return found[1] if found else None
