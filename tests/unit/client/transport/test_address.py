from __future__ import annotations

import errno
import grp
import os
import socket

import pytest

from djinn_client.errors import ConnectionLost
from djinn_client.transport.address import PATH_LIMIT, candidates, finding, unreachable
from djinn_client.transport.connection import connect
from djinn_client.transport.steps import run


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_the_given_address_comes_before_all() -> None:
    assert candidates("/a", {"DJINND_ADDRESS": "/b", "XDG_RUNTIME_DIR": "/run/user/1"}) == ("/a",)


def test_the_environment_comes_before_the_usual_places() -> None:
    assert candidates(None, {"DJINND_ADDRESS": "/b", "XDG_RUNTIME_DIR": "/run/user/1"}) == ("/b",)


def test_the_default_sockets_are_the_system_s_then_the_user_s() -> None:
    assert candidates(None, {}) == ("/run/djinnd/djinnd.sock",)
    assert candidates(None, {"XDG_RUNTIME_DIR": "/run/user/1"}) == (
        "/run/djinnd/djinnd.sock",
        "/run/user/1/djinnd/djinnd.sock",
    )


def test_no_daemon_anywhere_names_every_place_and_the_remedy() -> None:
    error = unreachable([("/a", failure(errno.ENOENT)), ("/b", failure(errno.ECONNREFUSED))])
    assert error.message == (
        "no daemon at /a; no daemon listens at /b (the file is left from one that is gone): start it with `djinnd`"
    )
    assert error.data["paths"] == ["/a", "/b"]


def test_no_permission_names_the_group(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = a_socket(directory)
    group = grp.getgrall()[-1]
    stat = os.stat(path)
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result([*stat[:5], group.gr_gid, *stat[6:]]))
    error = unreachable([(path, failure(errno.EACCES))])
    assert f"no permission to use {path}: it belongs to group {group.gr_name}; `sudo usermod -aG" in error.message


def test_nobody_is_advised_to_join_the_group_of_root(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = a_socket(directory)
    stat = os.stat(path)
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result([*stat[:5], 0, *stat[6:]]))
    error = unreachable([(path, failure(errno.EACCES))])
    assert "usermod" not in error.message and "ask its administrator" in error.message


@pytest.mark.parametrize("number", [errno.EACCES, errno.ECONNREFUSED])
@pytest.mark.parametrize("path", ["/", "/etc/passwd", "/dev/null"])
def test_a_path_that_is_no_socket_is_no_question_of_groups(path: str, number: int) -> None:
    message = unreachable([(path, failure(number))]).message
    assert "usermod" not in message and message.endswith("give the path of djinnd's socket")


def test_no_permission_even_to_look_says_whom_to_ask() -> None:
    assert "ask its administrator" in unreachable([("/nowhere/at/all", failure(errno.EACCES))]).message


def test_other_errors_are_told_without_a_wrong_remedy() -> None:
    error = unreachable([("/a", failure(errno.EMFILE))])
    assert error.message == "cannot connect to /a (Too many open files)"


def test_a_path_that_is_too_long_is_said_in_figures() -> None:
    path = "/" + "d" * PATH_LIMIT
    with pytest.raises(ConnectionLost, match=f"has {PATH_LIMIT + 1} bytes, the system's limit is {PATH_LIMIT}"):
        run(connect(path))


def test_a_path_of_exactly_the_limit_is_tried() -> None:
    with pytest.raises(ConnectionLost, match="no daemon at"):
        run(connect("/" + "d" * (PATH_LIMIT - 1)))


def a_socket(directory: str) -> str:
    path = os.path.join(directory, "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    return path


def test_a_socket_without_a_listener(directory: str) -> None:
    path = a_socket(directory)
    with pytest.raises(ConnectionLost, match=r"no daemon listens at .* start it with `djinnd`"):
        run(connect(path))


def test_account_of_a_path_through_a_file() -> None:
    assert finding("/etc/passwd/s", failure(errno.ENOTDIR))[0] == "no daemon at /etc/passwd/s"
