"""Unix users by number and by name, as this machine knows them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection
from functools import lru_cache

from djinn_client.errors import InvalidRequest
from djinnd.config.principals import FIRST_NAMED, is_unix_user

_OVERFLOWING = FIRST_NAMED - 1  # (uid_t)-1, which belongs to no user


@lru_cache(4096)
def unix_name(uid: int) -> str:
    """The user's name, or its number if this machine does not know the user. A look-up may ask a directory on the
    network, so results are cached; `unix_name.cache_clear` drops them."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(user: str) -> int:
    """Looks up a Unix user by name or number. May take as long as a directory on the network. Raises
    InvalidRequest."""
    if user.isascii() and user.isdigit():
        if int(user[:11]) >= _OVERFLOWING:
            raise InvalidRequest(f"{user[:64]} is no number of a Unix user", field="user")
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise InvalidRequest(f"there is no Unix user {user[:64]!r} on the daemon's machine", field="user") from None


def is_unix_name(name: str) -> bool:
    """Checks whether a Unix user has this name. May take as long as a directory on the network."""
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True


def groups_of(user: int) -> Collection[int]:
    """All groups of a principal. Empty if the principal is a name, or a Unix user that this machine does not know."""
    if not is_unix_user(user):
        return ()
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return ()
    return os.getgrouplist(entry.pw_name, entry.pw_gid)
