from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat

import pytest

from djinnd.server.system.shared_objects import own_objects


def found_in(folder):
    names = []
    for name, fd in own_objects(folder, "djinnd-"):
        assert os.get_blocking(fd) is False and os.get_inheritable(fd) is False
        os.pwrite(fd, b"x", 0)
        os.close(fd)
        names.append(name)
    return names


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.fixture
def folder(tmp_path):
    for name in ("djinnd-0-a", "djinnd-9-b", "other-c"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("djinnd-0-a"),
        lambda path: path.symlink_to(path),
        lambda path: path.mkdir(),
        a_socket,
        pytest.param(
            lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7)),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices"),
        ),
    ],
)
def test_objects_that_are_no_regular_files_are_skipped(folder, make, caplog):
    make(folder / "djinnd-5-odd")
    with caplog.at_level("INFO"):
        assert found_in(folder) == ["djinnd-0-a", "djinnd-9-b"]
    assert "objects=1" in caplog.text and "no regular file" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_never_opened(folder, caplog):
    path = folder / "djinnd-5-theirs"
    path.write_bytes(b"")
    os.chmod(path, 0o666)
    with path.open("r+b") as file:
        os.chown(path, 65534, 65534)
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # the default action is to ignore it
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with caplog.at_level("INFO"):
            assert found_in(folder) == ["djinnd-0-a", "djinnd-9-b"]
        assert fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK, "the lease must not be broken"
    assert "another user's" in caplog.text


def test_a_lease_on_an_own_file_causes_no_wait(folder):
    with (folder / "djinnd-0-a").open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert found_in(folder) == ["djinnd-9-b"]
