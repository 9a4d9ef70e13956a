from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from djinnd.gateway.entry.peer_user import is_own, uid_of
from tests.support.other_user import NOBODY, as_user, only_root


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        made = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {request.param}")
    with made:
        yield made


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname()[:2])
    return client, listener.accept()[0]


def ends(accepted: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    return accepted.getpeername()[:2], accepted.getsockname()[:2]


def test_one_s_own_connection(listener: socket.socket) -> None:
    client, accepted = connected(listener)
    with client, accepted:
        assert uid_of(*ends(accepted)) == os.geteuid() and is_own(*ends(accepted))


@only_root
def test_another_user_s_connection(listener: socket.socket) -> None:
    with as_user():
        client, accepted = connected(listener)
    with client, accepted:
        assert uid_of(*ends(accepted)) == NOBODY and not is_own(*ends(accepted))


def test_a_connection_that_its_owner_has_closed_is_nobody_s(listener: socket.socket) -> None:
    client, accepted = connected(listener)
    with closing(accepted):
        addresses = ends(accepted)
        client.close()
        assert accepted.recv(1) == b""
        assert uid_of(*addresses) is None and not is_own(*addresses)


def test_a_connection_that_there_is_not(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    assert uid_of((host, 1), (host, port)) is None
