"""Principals: each owns sessions, quotas and shares, and is known by a number.

    below 2^32          a Unix user: its uid
    2^32 and more       the name of a token that stands for no Unix user

The second kind of number is computed from the name alone. So a name has the same number after a restart, after its
token was revoked and added again, and after the file with the tokens was lost. It is below 2^53, so that every reader
of JSON keeps it."""

from __future__ import annotations

import re
from hashlib import sha256

FIRST_NAMED = 1 << 32
MAX_PRINCIPAL_NAME = 64  # characters
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._@-]*")
_NUMBER_BYTES = 6


def is_unix_user(principal: int) -> bool:
    """Whether the number is a uid. Only such a number may be given to the operating system."""
    return principal < FIRST_NAMED


def is_principal_name(name: str) -> bool:
    """A name is a letter and then letters, digits and ._@-, so that it is no number and logs can show it as it is."""
    return len(name) <= MAX_PRINCIPAL_NAME and _NAME.fullmatch(name) is not None


def number_of(name: str) -> int:
    """The principal of a token with this name and without a Unix user. Among 10^6 names two have the same number with a
    probability of 1 in 500; the second of them is refused when its token is added."""
    digest = sha256(b"djinnd principal " + name.encode()).digest()
    return FIRST_NAMED + int.from_bytes(digest[:_NUMBER_BYTES], "big")
