"""The daemon's claim to the path of its socket: one daemon for each path, and no file is left behind.

A lock on `<path>.lock`, which contains the owner's pid, decides who owns the path. The kernel drops the lock when the
process ends, in whatever way. The lock file that then remains is replaced by the next daemon. A program that listens at
the path without the lock (another program, a daemon started by systemd) is respected too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from djinnd.server.handover.succession import Inherited
from djinnd.server.system.peers import Peer

PATH_LIMIT = 107  # bytes of sun_path without the closing zero
BACKLOG = 512
_HANDED_OVER = ["djinnd-listener", "djinnd-lock"]  # names of the descriptors that a predecessor hands over


class StartError(Exception):
    """The daemon cannot start; the text says why, and the remedy."""


def listen(path: str, given: Sequence[Inherited]) -> tuple[SocketPath | None, socket.socket]:
    """Returns the claim to the path, or None if systemd owns it, and the listening socket. `given`: the descriptors of
    a predecessor or of systemd. Raises StartError."""
    if [name for name, _ in given] == _HANDED_OVER:
        claim = SocketPath.of_predecessor(*(fd for _, fd in given))
        if claim.path != Path(path):  # the configuration has changed
            claim.release()
            claim = SocketPath(path)
        return claim, claim.listener
    if given:
        return None, _listener_of_systemd(given)
    claim = SocketPath(path)
    return claim, claim.listener


def _listener_of_systemd(given: Sequence[Inherited]) -> socket.socket:
    if len(given) != 1:
        raise StartError(f"systemd passed {len(given)} sockets; djinnd.socket must have exactly one ListenStream=")
    listener = socket.socket(fileno=given[0].fd)
    if listener.family != socket.AF_UNIX or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise StartError("systemd passed something else than a listening Unix stream socket: see djinnd.socket")
    return listener


class SocketPath:
    """Owns the path, its lock file and the listening socket."""

    def __init__(self, path: str, setting: str = "--socket") -> None:
        """`setting`: the setting to change if the path cannot be had, for errors. Raises StartError."""
        self._setting = setting
        if len(os.fsencode(path)) > PATH_LIMIT:
            raise StartError(f"the socket's path is longer than {PATH_LIMIT} bytes, the system's limit: {path}")
        self.path = Path(path)
        self._lock_path = Path(f"{path}.lock")
        try:
            self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._lock_fd = self._lock()
        except OSError as error:
            raise StartError(f"no socket at {path}: {error}; choose another place with {self._setting}") from error
        try:
            self._replace_stale()
            self.listener = self._listen()
        except BaseException:
            self._unlock()
            raise

    @classmethod
    def of_predecessor(cls, listener_fd: int, lock_fd: int) -> SocketPath:
        """Takes over the descriptors of `hand_over`: the claim has never been given up."""
        claim = cls.__new__(cls)
        claim.listener = socket.socket(fileno=listener_fd)
        claim.path = Path(claim.listener.getsockname())
        claim._lock_path = Path(f"{claim.path}.lock")
        claim._lock_fd = lock_fd
        return claim

    def hand_over(self) -> list[Inherited]:
        """The descriptors for the successor. This object must not be used after that."""
        return [
            Inherited(name, fd) for name, fd in zip(_HANDED_OVER, (self.listener.detach(), self._lock_fd), strict=True)
        ]

    def release(self) -> None:
        self.listener.close()
        with suppress(FileNotFoundError):
            self.path.unlink()
        self._unlock()

    def _lock(self) -> int:
        """Locks the lock file. An owner that ends may remove the file meanwhile, so it is checked that the locked file
        is still at the path."""
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(fd, 20).decode(errors="replace").strip()
                os.close(fd)
                raise StartError(
                    f"a daemon runs at {self.path} already (pid {owner}): stop it, or use {self._setting}"
                ) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._lock_path)):
                    os.truncate(fd, 0)
                    os.write(fd, f"{os.getpid()}\n".encode())
                    return fd
            os.close(fd)

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _replace_stale(self) -> None:
        """Removes a socket file at which no program listens."""
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise StartError(f"{self.path} exists and is no socket: remove it, or use {self._setting}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(str(self.path))
            if code in (0, errno.EAGAIN):
                owner = f" (pid {Peer.of(probe).pid})" if code == 0 else ""
                raise StartError(f"something listens at {self.path} already{owner}: stop it, or use {self._setting}")
        self.path.unlink()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        umask = os.umask(0o117)  # the file gets its mode when it is created
        try:
            listener.bind(str(self.path))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise StartError(f"no socket at {self.path}: {error}; choose another place with {self._setting}") from error
        finally:
            os.umask(umask)
        return listener
