from __future__ import annotations

import os
import pwd

import pytest

from djinn_client.errors import InvalidRequest
from djinnd.config.principals import number_of
from djinnd.server.principals.names import groups_of, is_unix_name, uid_of, unix_name

UNKNOWN = 4_000_000_000


def test_users_of_this_machine() -> None:
    entry = pwd.getpwuid(os.getuid())
    assert unix_name(entry.pw_uid) == entry.pw_name and is_unix_name(entry.pw_name)
    assert uid_of(entry.pw_name) == uid_of(str(entry.pw_uid)) == entry.pw_uid
    assert entry.pw_gid in groups_of(entry.pw_uid)


def test_users_that_it_does_not_know() -> None:
    assert unix_name(UNKNOWN) == str(UNKNOWN) and groups_of(UNKNOWN) == ()
    assert uid_of(str(UNKNOWN)) == UNKNOWN
    assert not is_unix_name("nobody-of-this-name") and not is_unix_name("a\0b")


def test_a_name_is_in_no_group() -> None:
    assert groups_of(number_of("ci")) == ()


@pytest.mark.parametrize("user", ["nobody-of-this-name", "", "-1", "4294967295", "9" * 4096, "\0", "x" * 4096, "٣"])
def test_unknown_users_are_refused(user: str) -> None:
    with pytest.raises(InvalidRequest):
        uid_of(user)
